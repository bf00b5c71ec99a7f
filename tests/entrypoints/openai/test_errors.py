"""Whatever a client sends, it is answered in OpenAI's shape, with the parameter named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.asking import Got
from tests.inner_server import InnerServer
from vllm_omni.entrypoints.openai.errors import APIError, from_validation_errors, to_api_error
from vllm_omni.errors import (
    DeadlineExceededError,
    EngineDeadError,
    InvalidParameterError,
    ModalityNotSupportedError,
    StageExecutionError,
)

IMAGES = "/v1/images/generations"
ROUTES = (IMAGES, "/v1/images/jobs")
SMALL: dict[str, Any] = {"prompt": "a cat", "size": "64x64", "num_inference_steps": 1}


@pytest.fixture(scope="module")
def strict(inner: InnerServer) -> Iterator[httpx.Client]:
    """A server with limits that every test can reach."""
    with (
        inner.serve(
            max_prompt_chars=100,
            max_n=3,
            max_pixels=128 * 128,
            max_cost=4 * 128 * 128,
            max_body_bytes=500_000,
            max_tokens=20,
        ) as served,
        httpx.Client(base_url=served.url, timeout=60) as client,
    ):
        yield client


def send(client: httpx.Client, content: bytes | str, path: str = IMAGES, **headers: str) -> Got:
    """A body, byte by byte as it is; if it is refused, in the shape of an error."""
    headers = {"content-type": "application/json"} | headers
    response = client.post(path, content=content, headers=headers)
    got = Got(response.status_code, dict(response.headers), response.content)
    assert len(got.headers["x-request-id"]) == 32
    if got.status >= 400:
        assert got.error["message"] and len(got.body) < 2000
    return got


def send_json(client: httpx.Client, path: str = IMAGES, **body: Any) -> Got:
    return send(client, json.dumps(body), path)


# --- bodies that are no JSON, or no object ---


@pytest.mark.parametrize("path", [*ROUTES, "/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b" ",
        b"{",
        b'{"prompt": "x"',
        b'{"prompt": "x"} {}',
        b"{'prompt': 'x'}",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b"\x00",
        b"null",
        b"1",
        b'"prompt"',
        b"[]",
        b"[" * 200_000 + b"]" * 200_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"prompt": "x", "n": ' + b"1" * 5000 + b"}",
        b'{"prompt": "x", "size": ' + b"9" * 4299 + b"}",
    ],
    ids=lambda content: repr(content[:20]),
)
def test_no_object(strict: httpx.Client, content: bytes, path: str) -> None:
    assert send(strict, content, path).status == 400


@pytest.mark.parametrize("depth", [200, 400, 800, 900, 950, 990])
@pytest.mark.parametrize("name", ["cache", "lora", "unknown", "prompt", "size"])
def test_deep_values(strict: httpx.Client, name: str, depth: int) -> None:
    """Python can read some that it cannot show."""
    content = b'{"prompt": "x", "%s": ' % name.encode() + b"[" * depth + b"]" * depth + b"}"
    got = send(strict, content)
    assert got.status == 400


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "text/json", "x", ""]
)
def test_wrong_content_type(strict: httpx.Client, path: str, content_type: str) -> None:
    got = send(strict, json.dumps(SMALL), path, **{"content-type": content_type})
    assert got.status == 400 and got.error["code"] == "invalid_json"
    assert "Content-Type: application/json" in got.error["message"]


def test_last_of_two_equal_names_counts(strict: httpx.Client) -> None:
    """As for every reader of JSON in Python."""
    assert send(strict, b'{"prompt": "x", "n": 1, "n": "x"}').error["param"] == "n"


def test_hundred_thousand_parameters(strict: httpx.Client) -> None:
    got = send(strict, json.dumps({f"p{i}": 0 for i in range(30_000)}))
    assert got.status == 400 and "at most 100 parameters" in got.error["message"]
    assert strict.get("/health/live").elapsed.total_seconds() < 5


# --- values ---


NAN, INF = float("nan"), float("inf")
BAD_VALUES: dict[str, list[Any]] = {
    "prompt": ["", None, 1, ["x"], {}, "x" * 101, "\ud800", "a\udfffb"],
    "n": [0, -1, 4, 1.5, "1", True, 10**30, [1], NAN],
    "size": [
        *("0x0", "-1x64", "1x1", "7x13", "1000000000x1", "99999x16", "axb", "64", "64x"),
        *("64x64x64", "64 x 64", "64X64", " 64x64", "144x128", "\u0663\u0662x32", 64, [64, 64]),
    ],
    "num_inference_steps": [0, -1, 10**9, 2.5, "2", INF],
    "true_cfg_scale": [-1, 101, "x", NAN, -INF],
    "seed": [-1, 2**64, 1.5, "1", True, 10**4000],
    "timeout": [0, -1, "x", NAN, INF, 10**400],
    "quality": ["best", 1, {}],
    "output_format": ["gif", "../../etc/passwd", 1],
    "output_compression": [-1, 101, 50.5, 50],
    "response_format": ["json", 1],
    "background": ["transparent", "red"],
    "output_mode": ["latents", "x", 1],
    "negative_prompt": ["x" * 101, 1, "\udc00"],
    "user": ["x" * 300_000, 1, "\ud800"],
    "priority": [2**31, 1.5, "high"],
    "rewrite_prompt": ["yes", 1],
    "cache": [True, {"a": NAN}, "\ud800"],
    "lora": ["/etc/passwd", ["\ud800"]],
}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_value_is_named(strict: httpx.Client, path: str, name: str) -> None:
    for value in BAD_VALUES[name]:
        got = send_json(strict, path, **SMALL | {name: value})
        assert (got.status, got.error["param"]) == (400, name), value
        assert got.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("name", ["steps", "Prompt", "", "x" * 5000, "\ud800", "a.b", "0x7f3a5c00"])
def test_unknown_parameter_is_named(strict: httpx.Client, path: str, name: str) -> None:
    response = strict.post(
        path, content=json.dumps(SMALL | {name: 1}), headers={"content-type": "application/json"}
    )
    error = response.json()["error"]
    assert response.status_code == 400 and len(response.content) < 1000
    if name.isascii() and 0 < len(name) < 200:
        assert (error["param"], error["code"]) == (name, "unknown_parameter")


@pytest.mark.parametrize("name", ["query", "body", "path", "header"])
def test_parameter_that_is_called_like_a_place(strict: httpx.Client, name: str) -> None:
    assert send(strict, json.dumps(SMALL | {name: 1})).error["param"] == name


def test_missing_parameter(strict: httpx.Client) -> None:
    error = send_json(strict).error
    assert (error["param"], error["code"]) == ("prompt", "missing_parameter")


@pytest.mark.parametrize("model", ["gpt-image-1", "", "x" * 300_000, "../tiny", "\x00"])
@pytest.mark.parametrize("path", ROUTES)
def test_unknown_model(strict: httpx.Client, path: str, model: str) -> None:
    got = send_json(strict, path, **SMALL | {"model": model})
    assert (got.status, got.error["param"]) == (404, "model")
    assert got.error["code"] == "model_not_found"


CHAT = "/v1/chat/completions"
USER: dict[str, Any] = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": {}},
        {"messages": [{}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "nobody", "content": "hi"}]},
        {"messages": [{"role": "user", "content": 1}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [USER], "max_tokens": -1},
        {"messages": [USER], "max_tokens": 21},
        {"messages": [USER], "max_tokens": 10**400},
        {"messages": [USER], "temperature": float("nan")},
        {"messages": [USER], "n": 10**6},
        {"messages": [USER], "model": "gpt-5"},
        {"messages": [USER], "model": "\ud800"},
        {"messages": [USER], "modalities": ["smell"]},
        {"messages": [USER], "modalities": ["text", "image"], "size": "axb"},
        {"messages": [USER], "stop": ["\ud800"]},
        {"messages": [USER], "\ud800": 1},
        {"messages": [USER], "logit_bias": {"x": 1}},
        {"messages": [USER], "response_format": {"type": "json_schema"}},
        {"messages": [USER], "tools": [{"type": "function"}]},
        {"messages": [USER], "user": "x" * 300_000},
        {"messages": [USER] * 10_000},
    ],
    ids=lambda body: repr(body)[:60],
)
def test_chats(strict: httpx.Client, body: dict[str, Any]) -> None:
    assert send(strict, json.dumps({"max_tokens": 1} | body), CHAT).status in (400, 404)


# --- limits of this server ---


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": "x" * 101}, "prompt", "101 characters: at most 100"),
        ({"negative_prompt": "x" * 101}, "negative_prompt", "101 characters: at most 100"),
        ({"n": 4}, "n", "at most 3"),
        ({"size": "large"}, "size", "size='large' is not allowed: WIDTHxHEIGHT in pixels, such as"),
        ({"size": "144x128"}, "size", "18432 pixels: at most 16384"),
        ({"size": "128x128", "num_inference_steps": 5}, "size", "81920 (pixels x steps x n"),
        ({"size": "128x128", "num_inference_steps": 2, "n": 3}, "size", "more than 65536"),
        (
            {"size": "128x128", "num_inference_steps": 3, "negative_prompt": "y"},
            "size",
            "twice with guidance",
        ),
    ],
)
def test_limits(
    strict: httpx.Client, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    got = send_json(strict, path, **SMALL | body)
    assert (got.status, got.error["param"]) == (400, param)
    assert message in got.error["message"]


def test_just_within_the_limits(strict: httpx.Client) -> None:
    body: dict[str, Any] = {
        "prompt": "x" * 100,
        "size": "128x128",
        "num_inference_steps": 1,
        "n": 3,
    }
    assert len(json.loads(send_json(strict, **body).body)["data"]) == 3


def test_body_too_large(strict: httpx.Client) -> None:
    got = send(strict, b" " * 500_001)
    assert got.status == 413 and "at most 500000 bytes" in got.error["message"]

    def chunks() -> Iterator[bytes]:
        for _ in range(6):
            yield b" " * 100_000

    response = strict.post(IMAGES, content=chunks())
    assert response.status_code == 413


def test_time_is_over(strict: httpx.Client) -> None:
    got = send_json(strict, **SMALL | {"timeout": 1e-9})
    assert (got.status, got.error["param"]) == (504, "timeout")
    assert got.error["type"] == "timeout_error"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"--x\r\n",
        b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na\r\n--x--\r\n',
        b'--x\r\nContent-Disposition: form-data; name="prompt"; filename="a"\r\n\r\na\r\n--x--\r\n',
        b"--x\r\nContent-Disposition: nonsense\r\n\r\na\r\n--x--\r\n",
        b"\xff" * 1000,
    ],
)
@pytest.mark.parametrize("boundary", ["; boundary=x", "", "; boundary=" + "y" * 1000])
def test_forms(strict: httpx.Client, content: bytes, boundary: str) -> None:
    content_type = f"multipart/form-data{boundary}"
    got = send(strict, content, "/v1/images/edits", **{"content-type": content_type})
    assert got.status == 400


def test_form_with_thousands_of_fields(strict: httpx.Client) -> None:
    field = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n'
    content_type = "multipart/form-data; boundary=x"
    got = send(
        strict, field * 2000 + b"--x--\r\n", "/v1/images/edits", **{"content-type": content_type}
    )
    assert got.status == 400


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/nothing",
        "/v1/models/..%2f..%2fetc%2fpasswd",
        "/v1/images/files/../../etc/passwd",
        "/v1/images/files/..%2f..%2fetc%2fpasswd",
        "/v1/images/files/x.png",
        "/v1/images/files/%00",
        "/v1/images/jobs/nothing",
        "/v1/images/jobs/%ff%fe",
        "/v1/requests/nothing/timeline",
        "/nowhere",
        "/v1",
        "/%e2%80%a8",
    ],
)
def test_nothing_there(strict: httpx.Client, path: str) -> None:
    response = strict.get(path)
    error = Got(response.status_code, body=response.content).error
    assert response.status_code == 404 and error["type"] == "not_found_error"


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=101", "limit=x", "limit=1e1", "order=up", "after=no", "limit=%ff"]
)
def test_bad_query(strict: httpx.Client, query: str) -> None:
    response = strict.get(f"/v1/images/jobs?{query}")
    error = Got(response.status_code, body=response.content).error
    assert response.status_code == 400 and error["param"] == query.partition("=")[0]


def test_still_draws(strict: httpx.Client) -> None:
    """After all of that."""
    assert send_json(strict, **SMALL).status == 200
    assert strict.get("/health").status_code == 200


# --- our errors as answers ---


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (InvalidParameterError("seed", -1, "0 or more"), 400, "seed"),
        (ModalityNotSupportedError("no sound"), 400, None),
        (DeadlineExceededError("in stage 1"), 504, "timeout"),
        (StageExecutionError("at 0x7f00aabbccdd in /root/x.py"), 500, None),
        (EngineDeadError("the process of stage 1 has ended"), 503, None),
        (RuntimeError("/root/x.py"), 500, None),
        (APIError(418, "tea"), 418, None),
    ],
)
def test_own_errors(error: Exception, status: int, param: str | None) -> None:
    answer = to_api_error(error)
    assert (answer.status, answer.param) == (status, param)
    assert Got(status, body=bytes(answer.to_response().body)).error["param"] == param
    assert ("retry-after" in answer.to_response().headers) == (status == 503)


def test_first_finding_is_told() -> None:
    findings: list[dict[str, Any]] = [
        {"type": "int_type", "loc": ("body", "n"), "msg": "Input should be an integer", "input": 1},
        {"type": "missing", "loc": ("body", "prompt"), "msg": "Field required", "input": {}},
    ]
    error = from_validation_errors(findings)
    assert error.message == "n=1 is not allowed: Input should be an integer"
    assert from_validation_errors(findings[1:]).message == "missing parameter: prompt"


def test_objects_are_not_shown() -> None:
    finding = {"type": "string_type", "loc": ("body", "x"), "msg": "a string", "input": object()}
    assert from_validation_errors([finding]).message == "x is not allowed: a string"
