"""Text over HTTP: what is refused, who leaves, who waits, and engines that are not there."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.asking import ask
from tests.chatting import DRAW, ENDLESS, PICTURE, SAID, chat, say
from tests.drawing import MakeCheckpoint
from tests.inner_server import InnerServer, Served
from tests.serving import ServerProcess
from vllm_omni.config import DiTConfig, StageConfig
from vllm_omni.engine.async_llm import OmniAsyncLLM
from vllm_omni.entrypoints.openai.app import OmniApp
from vllm_omni.entrypoints.openai.config import ServerConfig

# --- what is refused ---

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    # (fields, the parameter at fault, a part of the message)
    ({"foo": 1}, "foo", "unknown parameter"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "unknown parameter"),
    ({"chat_template_kwargs": {}}, "chat_template_kwargs", "unknown parameter"),
    ({"mm_processor_kwargs": {}}, "mm_processor_kwargs", "unknown parameter"),
    ({"request_id": "mine"}, "request_id", "unknown parameter"),
    ({"cache_salt": "x"}, "cache_salt", "unknown parameter"),
    ({"kv_transfer_params": {}}, "kv_transfer_params", "unknown parameter"),
    ({"documents": []}, "documents", "unknown parameter"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": say("x") * 600}, "messages", "at most 512"),
    ({"messages": [{"role": "user"}]}, "messages.0", "content is missing"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content", "at least 1"),
    ({"messages": [{"role": "root", "content": "x"}]}, "messages.0.role", "should be"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0", "tool_call_id"),
    ({"messages": say([{"type": "text"}])}, "messages.0.content.0", "needs text"),
    ({"messages": say([{"type": "input_audio"}])}, "messages.0.content.0.type", "should be"),
    ({"messages": say("x" * 20_000)}, "messages", "20000 characters: at most 16384"),
    ({"messages": say("x " * 5000)}, "messages", "maximum context length"),
    ({"messages": say("x \ud800")}, "messages.0.content.0.text", "valid string"),
    ({"max_tokens": 5000}, "max_tokens", "at most 4096"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": True}, "max_tokens", "valid integer"),
    ({"max_tokens": "3"}, "max_tokens", "valid integer"),
    ({"max_completion_tokens": 5000}, "max_completion_tokens", "at most 4096"),
    ({"n": 11}, "n", "at most 10"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"temperature": 3}, "temperature", "less than or equal to 2"),
    ({"temperature": float("nan")}, "temperature", "finite number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"seed": 2**63}, "seed", "less than or equal to"),
    ({"seed": 10**400}, "seed", "less than or equal to"),
    ({"stop": ["a"] * 5}, "stop", "at most 4"),
    ({"stop": ""}, "stop.0", "at least 1"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1", "less than or equal to 100"),
    ({"logit_bias": {"999999": 1}}, "logit_bias", "out-of-vocab"),
    ({"logprobs": 5}, "logprobs", "valid boolean"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
    ({"min_tokens": 9000}, "min_tokens", "at most 4096"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ({"tools": []}, "tools", "at least 1"),
    ({"tools": [DRAW, DRAW]}, "tools", "the same name"),
    ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
    ({"tools": [DRAW], "tool_choice": "maybe"}, "tool_choice", "none, auto, required"),
    (
        {"tools": [DRAW], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
        "no tool has the name",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools.0.function.name",
        "match",
    ),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format",
        "belongs to type json_schema",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "one of choice, regex and json"),
    ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "unknown parameter"),
    ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", "pattern"),
    (
        {"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "exclude each other",
    ),
    ({"modalities": ["image"]}, "modalities", "/v1/images/generations"),
    ({"modalities": ["text", "audio"]}, "modalities", "audio is not supported"),
    ({"modalities": []}, "modalities", "at least 1"),
    ({"size": "256x256"}, "size", "about a picture"),
    ({"negative_prompt": "x", "priority": 3}, "negative_prompt", "about a picture"),
    ({**PICTURE, "size": "24x16"}, "size", "multiple of 16"),
    ({**PICTURE, "num_inference_steps": 1000, "size": "512x512"}, "size", "costs"),
    ({**PICTURE, "size": "8192x8192"}, "size", "67108864 pixels"),
    ({**PICTURE, "output_format": "gif"}, "output_format", "should be"),
    ({**PICTURE, "n": 2}, "n", "cannot be used where a picture"),
    ({**PICTURE, "tools": [DRAW]}, "tools", "cannot be used where a picture"),
    ({**PICTURE, "logprobs": True}, "logprobs", "cannot be used where a picture"),
]


@pytest.mark.parametrize(
    ("fields", "param", "message"), REFUSED, ids=[f"{p}: {m}" for _, p, m in REFUSED]
)
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_what_is_refused(
    server: ServerProcess, fields: dict[str, Any], param: str, message: str, is_streamed: bool
) -> None:
    if param == "stream_options" and is_streamed:
        return
    body = json.dumps({"messages": SAID, "stream": is_streamed, **fields})
    headers = {"Content-Type": "application/json"}
    url = f"{server.url}/v1/chat/completions"
    answer = httpx.post(url, content=body, headers=headers, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param
    assert message in error["message"]


def test_errors_have_the_client_s_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=say("x"))
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as bad:
        chat(client, say("x"), foo=1)
    assert (bad.value.param, bad.value.code) == ("foo", "unknown_parameter")
    with pytest.raises(openai.BadRequestError, match="unknown parameter"):
        client.chat.completions.create(
            model="demo", messages=say("x"), stream=True, extra_body={"foo": 1}
        )
    with pytest.raises(openai.InternalServerError) as late:
        chat(client, say("x"), timeout=0.0001)
    assert (late.value.status_code, late.value.param) == (504, "timeout")


def test_time_that_is_over_in_a_stream(inner_client: openai.OpenAI) -> None:
    body = {**ENDLESS, "timeout": 1.0}
    with pytest.raises(openai.APIError, match="time is over"):
        for _ in inner_client.chat.completions.create(
            model="tiny", stream=True, extra_body=body, messages=say("x")
        ):
            pass


# --- who leaves, who waits ---


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_idle(inner: InnerServer, served: Served) -> bool:
    """Whether nothing is left of any request, in the server or in vLLM."""
    text, images = served.app.text, served.app.images
    llm: Any = inner.llm.clients[0]
    return inner.look(
        lambda: (
            not text.admission.tickets
            and not images.admission.tickets
            and not llm.llm.output_processor.request_states
            and not inner.llm.coordinator._walks
        )
    )


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", ENDLESS),
        ("chat/completions", {**ENDLESS, "n": 3}),
        (
            "chat/completions",
            {
                "messages": SAID,
                "modalities": ["text", "image"],
                "size": "512x512",
                "num_inference_steps": 400,
            },
        ),
        ("completions", {"prompt": ["a", "b"], "max_tokens": 900, "ignore_eos": True}),
    ],
    ids=["chat", "three answers", "picture", "completions"],
)
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_nothing_is_left_of_a_client_that_leaves(
    inner: InnerServer, served: Served, path: str, fields: dict[str, Any], is_streamed: bool
) -> None:
    url, body = f"{served.url}/v1/{path}", {**fields, "stream": is_streamed}
    for _ in range(3):
        if is_streamed:
            with httpx.stream("POST", url, json=body, timeout=60) as answer:
                assert answer.status_code == 200
                lines = answer.iter_lines()  # kept: it closes the connection when it is gone
                next(lines)
                assert not is_idle(inner, served)
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url, json=body, timeout=httpx.Timeout(60, read=0.5))
        wait_until(lambda: is_idle(inner, served))


def test_a_full_queue(inner: InnerServer) -> None:
    with inner.serve(max_num_queued=1) as served:
        url = f"{served.url}/v1/chat/completions"
        with httpx.stream("POST", url, json={**ENDLESS, "stream": True}, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            for is_streamed in (False, True):
                late = httpx.post(url, json={**ENDLESS, "stream": is_streamed}, timeout=60)
                assert late.status_code == 429
                assert late.json()["error"]["code"] == "queue_full"
                assert int(late.headers["Retry-After"]) >= 1
        wait_until(lambda: is_idle(inner, served))


def test_a_slow_reader_holds_no_place(inner: InnerServer) -> None:
    with inner.serve(max_num_queued=1) as served:
        url = f"{served.url}/v1/chat/completions"
        with httpx.stream("POST", url, json={**ENDLESS, "stream": True}, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            wait_until(lambda: is_idle(inner, served))  # all is written, though not read
            other = httpx.post(url, json={"messages": SAID, "max_tokens": 1}, timeout=60)
            assert other.status_code == 200
            assert [line for line in lines if line][-1] == "data: [DONE]"


# --- servers that cannot ---


def test_a_server_without_a_model_that_writes(checkpoint: MakeCheckpoint) -> None:
    stage = StageConfig(
        stage_id=0,
        engine_type="diffusion",
        model_path=str(checkpoint(0)),
        dit_config=DiTConfig(device="cpu"),
    )
    llm = OmniAsyncLLM.from_vllm_config(stage_configs=[stage])
    app = OmniApp(ServerConfig(), llm, "tiny")
    bodies = {"chat/completions": {"messages": SAID}, "completions": {"prompt": "x"}}
    headers = [("host", "localhost"), ("content-type", "application/json")]
    try:
        for path, body in bodies.items():
            chunks = [json.dumps(body).encode()]
            answer = ask(app.door, "POST", f"/v1/{path}", headers, chunks)
            assert answer.status == 400
            assert answer.error["message"] == "this server has no model that writes text"
    finally:
        app.shutdown()
        llm.shutdown()


def test_an_engine_that_dies_goes_on_once_restarted_and_ends_once_given_up(
    checkpoint: MakeCheckpoint,
) -> None:
    inner = InnerServer(checkpoint(0), vllm_config={"max_model_len": 1024}, max_restarts=1)
    try:
        with inner.serve() as served:
            url = f"{served.url}/v1"
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                events = client.chat.completions.create(
                    model="tiny", stream=True, extra_body=ENDLESS, messages=say("x")
                )
                next(iter(events))
                first = inner.llm.clients[0].health
                assert first.pid is not None
                os.kill(first.pid, signal.SIGKILL)
                for _ in events:
                    if inner.llm.clients[0].health.num_restarts:
                        break
                again = inner.llm.clients[0].health
                assert again.pid is not None and again.pid != first.pid
                next(iter(events))
                os.kill(again.pid, signal.SIGKILL)
                with pytest.raises(openai.APIError, match="the engine is not available"):
                    for _ in events:
                        pass
                for is_streamed in (False, True):
                    with pytest.raises(openai.InternalServerError) as caught:
                        client.chat.completions.create(
                            model="tiny", messages=say("x"), stream=is_streamed
                        )
                    assert caught.value.status_code == 503
                    assert caught.value.response.headers["Retry-After"]
                with pytest.raises(openai.InternalServerError, match="the engine is not available"):
                    client.completions.create(model="tiny", prompt="x")
    finally:
        inner.shutdown()
