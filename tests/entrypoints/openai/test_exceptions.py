"""What goes wrong raises the exception of OpenAI's client that a program expects."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest

from tests.inner_server import InnerServer, Served

LONG: dict[str, Any] = {"prompt": "a", "size": "256x256"}
LONG_STEPS = {"num_inference_steps": 1000}


@pytest.mark.parametrize(
    ("parameters", "param", "code"),
    [
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": "x" * 16_385}, "prompt", "prompt_too_long"),
        ({"size": "65x64"}, "size", "invalid_value"),
        ({"size": "large"}, "size", "invalid_value"),
        ({"size": "8192x8192"}, "size", "size_limit_exceeded"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": "2"}, "n", "invalid_value"),
        ({"quality": "ultra"}, "quality", "invalid_value"),
        ({"style": "vivid"}, "style", "unknown_parameter"),
        ({"background": "transparent"}, "background", "invalid_value"),
        ({"output_format": "gif"}, "output_format", "invalid_value"),
        ({"output_compression": 50}, "output_compression", "invalid_value"),
        ({"extra_body": {"steps": 3}}, "steps", "unknown_parameter"),
        ({"extra_body": {"steps": None}}, "steps", "unknown_parameter"),
        ({"extra_body": {"num_inference_steps": 0}}, "num_inference_steps", "invalid_value"),
        ({"n": 3, "extra_body": {"num_inference_steps": 1000}}, "size", "cost_limit_exceeded"),
        ({"extra_body": {"true_cfg_scale": 101}}, "true_cfg_scale", "invalid_value"),
        ({"extra_body": {"seed": -1}}, "seed", "invalid_value"),
        ({"extra_body": {"seed": True}}, "seed", "invalid_value"),
        ({"extra_body": {"timeout": 0}}, "timeout", "invalid_value"),
        ({"extra_body": {"lora": "a"}}, "lora", "invalid_value"),
        ({"extra_body": {"cache": {}}}, "cache", "invalid_value"),
        ({"extra_body": {"output_mode": "latents"}}, "output_mode", "invalid_value"),
        (
            {"output_format": "jpeg", "extra_body": {"output_mode": "pixels_and_mask"}},
            "output_format",
            "invalid_value",
        ),
    ],
)
def test_bad_request(
    client: openai.OpenAI, parameters: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(**{"prompt": "a"} | parameters)
    error = caught.value
    assert (error.status_code, error.type) == (400, "invalid_request_error")
    assert (error.param, error.code) == (param, code)
    assert error.request_id is not None and len(error.request_id) == 32


def test_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.images.generate(prompt="a", model="gpt-image-2")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError) as caught:
        client.get("/images/jobs/job_none", cast_to=object)
    assert caught.value.param == "job_id"


def test_authentication(inner: InnerServer) -> None:
    with inner.serve(api_keys=["a-key-of-mine"]) as served:
        url = f"{served.url}/v1"
        with openai.OpenAI(base_url=url, api_key="another-key", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                client.models.list()
            assert caught.value.code == "invalid_api_key"
        with openai.OpenAI(base_url=url, api_key="a-key-of-mine", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_full_queue(inner: InnerServer) -> None:
    with (
        inner.serve(max_num_queued=1) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        client.post("/images/jobs", cast_to=object, body=LONG | LONG_STEPS)
        with pytest.raises(openai.RateLimitError, match="the queue is full") as caught:
            client.images.generate(**LONG)
        assert caught.value.code == "queue_full"
        assert 1 <= int(caught.value.response.headers["Retry-After"]) <= 600


def test_the_time_that_a_request_allowed(inner_client: openai.OpenAI) -> None:
    body = LONG_STEPS | {"timeout": 0.5}
    with pytest.raises(openai.InternalServerError, match="time is over") as caught:
        inner_client.images.generate(**LONG, extra_body=body)
    assert (caught.value.status_code, caught.value.param) == (504, "timeout")


def test_a_client_that_does_not_wait_leaves_nothing(
    inner: InnerServer, served: Served, inner_client: openai.OpenAI
) -> None:
    with pytest.raises(openai.APITimeoutError):
        inner_client.images.generate(**LONG, extra_body=LONG_STEPS, timeout=0.5)
    deadline = time.monotonic() + 30
    while True:
        [stats] = inner.call(inner.llm.collective_rpc(1, "get_stats"))
        tickets = inner.look(lambda: len(served.app.images.admission.tickets))
        if (stats["num_requests"], tickets) == (0, 0):
            break
        assert time.monotonic() < deadline, (stats, tickets)
        time.sleep(0.02)
