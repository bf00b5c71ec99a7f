"""Pictures that form before the client's eyes: OpenAI's events, to the letter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.inner_server import InnerServer, Served
from tests.pictures import draw, get_difference, open_picture, read_pixels
from tests.serving import ServerProcess
from vllm_omni.entrypoints.openai.image_params import get_preview_period
from vllm_omni.entrypoints.openai.protocol import CompletedEvent, PartialImageEvent

CIRCLE = "a large red circle in the center on a white background"
SMALL: dict[str, Any] = {"size": "64x64", "num_inference_steps": 6, "seed": 5}
PARTIAL, COMPLETED = "image_generation.partial_image", "image_generation.completed"

Event = PartialImageEvent | CompletedEvent


def stream(
    client: openai.OpenAI, partial_images: int, prompt: str = CIRCLE, **parameters: Any
) -> list[Event]:
    """All events, as OpenAI's client gives them, in our own types."""
    body = {name: value for name, value in parameters.items() if name != "size"}
    events = client.images.generate(
        prompt=prompt,
        size=parameters["size"],
        stream=True,
        partial_images=partial_images,
        extra_body=body,
    )
    with events:
        kinds: dict[str, type[Event]] = {PARTIAL: PartialImageEvent, COMPLETED: CompletedEvent}
        return [kinds[event.type].model_validate(event.model_dump()) for event in events]


def read_events(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """(name, data) of server-sent events; each has one line of data, and an empty line ends it."""
    name = ""
    for line in lines:
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            assert next(lines) == ""
            yield name, value
            name = ""
        else:
            assert field == "" and not name  # a comment, or the end of one


# --- what comes ---


@pytest.mark.parametrize("num", [0, 1, 2, 3])
def test_previews_then_the_picture(client: openai.OpenAI, num: int) -> None:
    events = stream(client, num, **SMALL)
    assert [event.type for event in events] == [PARTIAL] * num + [COMPLETED]
    previews = [event for event in events if isinstance(event, PartialImageEvent)]
    assert [preview.partial_image_index for preview in previews] == list(range(num))
    for event in events:
        assert (event.size, event.quality, event.output_format) == ("64x64", "medium", "png")
        assert (event.background, event.image_index) == ("opaque", 0)
        assert open_picture(event.b64_json).size == (64, 64)
    last = events[-1]
    assert isinstance(last, CompletedEvent)
    whole = draw(client, CIRCLE, **SMALL)
    assert (last.seed, last.usage) == (5, whole.usage)
    assert last.metrics.num_steps == 6
    assert get_difference(read_pixels(last.b64_json), read_pixels(whole.data[0].b64_json)) == 0


def test_previews_come_closer_and_closer(client: openai.OpenAI) -> None:
    events = stream(client, 3, size="256x256", num_inference_steps=8, seed=1, true_cfg_scale=3.0)
    final = read_pixels(events[-1].b64_json)
    distances = [np.abs(read_pixels(event.b64_json) - final).mean() for event in events[:-1]]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] < 10  # of 255: from the first one on it is this picture, at half its size


def test_two_pictures(client: openai.OpenAI) -> None:
    events = stream(client, 2, **SMALL, n=2)
    for index in (0, 1):
        mine = [event for event in events if event.image_index == index]
        assert [event.type for event in mine] == [PARTIAL, PARTIAL, COMPLETED]
        assert [e.partial_image_index for e in mine if isinstance(e, PartialImageEvent)] == [0, 1]
        last = mine[-1]
        assert isinstance(last, CompletedEvent) and last.seed == 5 + index
        alone = draw(client, CIRCLE, **SMALL | {"seed": last.seed})
        difference = get_difference(read_pixels(last.b64_json), read_pixels(alone.data[0].b64_json))
        assert difference <= 1


def test_a_rewritten_prompt_is_told(client: openai.OpenAI) -> None:
    [last] = stream(client, 0, "star", **SMALL, rewrite_prompt=True)
    assert isinstance(last, CompletedEvent)
    assert last.revised_prompt is not None and "star" in last.revised_prompt


def test_urls_are_for_the_pictures_not_for_previews(client: openai.OpenAI) -> None:
    partial, last = stream(client, 1, **SMALL, response_format="url", output_format="jpeg")
    assert open_picture(partial.b64_json).format == "JPEG"
    assert isinstance(last, CompletedEvent) and last.b64_json is None
    assert open_picture(httpx.get(last.url or "").content).format == "JPEG"


def test_the_lines_of_a_stream(server: ServerProcess) -> None:
    body = {"prompt": CIRCLE, "stream": True, "partial_images": 1, **SMALL}
    url = f"{server.url}/v1/images/generations"
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        lines = list(response.iter_lines())
    steps = [line for line in lines if line.startswith(":")]
    assert steps == [f": step {step} of 6" for step in range(1, 6)]
    events = list(read_events(iter(lines)))
    assert [name for name, _ in events] == [PARTIAL, COMPLETED]
    assert [json.loads(data)["type"] for _, data in events] == [PARTIAL, COMPLETED]
    assert "url" not in json.loads(events[1][1])


def test_as_many_previews_as_can_be() -> None:
    for num_steps in range(2, 60):
        for num_previews in range(1, 4):
            period = get_preview_period(num_steps, num_previews)
            steps = list(range(period, num_steps, period))[:num_previews]
            assert len(steps) == min(num_previews, num_steps - 1)
    assert [get_preview_period(20, number) for number in (1, 2, 3)] == [10, 7, 5]


# --- what goes wrong ---


def test_what_can_be_refused_is_refused_before_the_stream(server: ServerProcess) -> None:
    body = {"prompt": CIRCLE, "stream": True, "size": "65x64"}
    response = httpx.post(f"{server.url}/v1/images/generations", json=body)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["param"] == "size"


def test_previews_need_a_stream(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="needs stream=true") as caught:
        client.images.generate(prompt=CIRCLE, partial_images=1)
    assert caught.value.param == "partial_images"


def test_an_error_on_the_way_is_the_last_event(
    inner: InnerServer, served: Served, inner_client: openai.OpenAI
) -> None:
    body = {"num_inference_steps": 1000, "seed": 1}
    events = inner_client.images.generate(
        prompt="a", size="128x128", stream=True, partial_images=3, extra_body=body
    )
    with events, pytest.raises(openai.APIError, match="the engine is not available") as caught:
        for event in events:
            assert event.type == PARTIAL
            [request_id] = inner.look(lambda: list(inner.llm.coordinator._walks))
            inner.call(inner.llm.abort(request_id))
    assert caught.value.code == "engine_unavailable"
    assert inner.look(lambda: len(served.app.images.admission.tickets)) == 0


def test_the_lines_of_an_error(inner: InnerServer, served: Served) -> None:
    body = {
        "prompt": "a",
        "size": "256x256",
        "stream": True,
        "num_inference_steps": 1000,
        "timeout": 3.0,
    }
    url = f"{served.url}/v1/images/generations"
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        assert response.status_code == 200  # the first step was taken before the time was over
        events = list(read_events(response.iter_lines()))
    assert [name for name, _ in events] == ["error"]
    error = json.loads(events[0][1])["error"]
    assert (error["type"], error["param"]) == ("timeout_error", "timeout")
    assert set(error) == {"message", "type", "param", "code"}
