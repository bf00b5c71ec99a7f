"""What the server says about its model, and how busy it is."""

from __future__ import annotations

import time
from typing import Any

import httpx
import openai
import pytest

from tests.serving import ServerProcess
from vllm_omni.params import MAX_SIDE


def test_the_model_is_listed_with_what_it_can_do(client: openai.OpenAI) -> None:
    [model] = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("demo", "model", "vllm-omni")
    assert time.time() - 3600 < model.created <= time.time()
    told: dict[str, Any] = model.model_dump()["capabilities"]
    assert told == {
        "input_modalities": ["text", "image"],
        "output_modalities": ["text", "image"],
        "default_size": "256x256",
        "default_steps": 20,
        "size_multiple": 16,
        "max_side": MAX_SIDE,
        "max_pixels": 16 * 256 * 256,
        "max_cost": 100 * 256 * 256 * 20,
        "max_n": 10,
        "can_edit": False,
    }


def test_one_model(client: openai.OpenAI) -> None:
    [model] = client.models.list()
    assert client.models.retrieve("demo") == model


@pytest.mark.parametrize("name", ["gpt-image-1", "demo2", "org/model", "../demo"])
def test_no_other_model(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError, match="no such model") as caught:
        client.models.retrieve(name)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_its_limits_are_those_it_tells(client: openai.OpenAI) -> None:
    """One more of anything is refused."""
    told: dict[str, Any] = client.models.retrieve("demo").model_dump()["capabilities"]
    side = round(told["max_pixels"] ** 0.5)
    steps = told["max_cost"] // told["max_pixels"]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"size": f"{side + 16}x{side}", "extra_body": {"num_inference_steps": 1}}, "size"),
        ({"size": f"{side}x{side}", "extra_body": {"num_inference_steps": steps + 1}}, "size"),
        ({"size": "16x16", "n": told["max_n"] + 1}, "n"),
    ]
    for parameters, param in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            client.images.generate(prompt="a", **parameters)
        assert caught.value.param == param


def test_the_queue_of_a_server_that_has_nothing_to_do(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    client.images.generate(prompt="a", size="64x64", extra_body={"num_inference_steps": 2})
    queue = httpx.get(f"{server.url}/v1/queue").json()
    speed = queue.pop("pixel_steps_per_second")
    assert speed is None or 100 < speed < 1e10
    assert queue == {
        "running": 0,
        "waiting": 0,
        "max_num_queued": 256,
        "estimated_wait_seconds": 0.0,
    }
