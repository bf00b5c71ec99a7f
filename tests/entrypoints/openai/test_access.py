"""The door: keys, hosts, origins, sizes, in front of an app of a few routes."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from tests.asking import Got, ask, ask_async
from vllm_omni.entrypoints.openai import errors
from vllm_omni.entrypoints.openai.access import OPEN_PATHS, AccessMiddleware
from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.errors import ConfigError

KEYS = ("first-key", "second-key")
LOCAL = ("host", "localhost:8000")
JSON = ("content-type", "application/json")
SMALL_BODY = 200  # bytes


class Body(BaseModel):
    prompt: str


def create_door(**settings: Any) -> AccessMiddleware:
    """A door with nothing much behind it."""
    api = FastAPI()
    errors.install(api)

    @api.get("/health/live")
    @api.get("/health/ready")
    @api.get("/health")
    @api.get("/v1/models")
    async def tell() -> dict[str, str]:
        return {"told": "yes"}

    @api.post("/v1/images/generations")
    @api.post("/v1/chat/completions")
    async def echo(body: Body) -> dict[str, int]:
        return {"length": len(body.prompt)}

    @api.get("/crash")
    async def crash() -> None:
        raise RuntimeError("at 0x7f0000000000 in /root/secret.py")

    @api.post("/slow")
    async def wait() -> None:
        await asyncio.sleep(60)

    @api.post("/slow-events")
    async def stream() -> StreamingResponse:
        async def events() -> AsyncGenerator[str, None]:
            yield "event: first\ndata: {}\n\n"
            await asyncio.sleep(60)

        return StreamingResponse(events(), media_type="text/event-stream")

    return AccessMiddleware(api, ServerConfig(**settings))


def bearer(key: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {key}")


def basic(user: str, password: str) -> tuple[str, str]:
    encoded = base64.b64encode(f"{user}:{password}".encode()).decode()
    return ("authorization", f"Basic {encoded}")


# --- keys ---


@pytest.mark.parametrize("key", KEYS)
def test_each_key_lets_in(key: str) -> None:
    door = create_door(api_keys=KEYS)
    assert ask(door, path="/v1/models", headers=[LOCAL, bearer(key)]).status == 200
    assert ask(door, path="/v1/models", headers=[LOCAL, basic("anybody", key)]).status == 200
    scheme = ("authorization", f"bEaReR {key}")
    assert ask(door, path="/v1/models", headers=[LOCAL, scheme]).status == 200


@pytest.mark.parametrize(
    "authorization",
    [
        (),
        (bearer(""),),
        (bearer("first-ke"),),
        (bearer("first-keyy"),),
        (bearer("FIRST-KEY"),),
        (bearer("first-key second-key"),),
        (bearer("first-key,second-key"),),
        (bearer("\xff\xfe"),),
        (("authorization", "first-key"),),
        (("authorization", "Digest first-key"),),
        (("authorization", "Basic first-key"),),
        (("authorization", "Basic /////w=="),),
        (basic("first-key", ""),),
        (basic("first-key", "wrong"),),
        (("x-api-key", "first-key"),),
        (("cookie", "first-key"),),
    ],
)
def test_anything_else_does_not(authorization: tuple[tuple[str, str], ...]) -> None:
    got = ask(create_door(api_keys=KEYS), path="/v1/models", headers=[LOCAL, *authorization])
    assert (got.status, got.error["code"]) == (401, "invalid_api_key")
    assert got.headers["www-authenticate"].startswith("Basic ")
    assert len(got.headers["x-request-id"]) == 32
    assert "first-key" not in got.body.decode()


def test_keys_of_the_wrong_kind_are_refused_and_not_shown() -> None:
    for key in ("with a space", "with-\xfcmlaut", "new\nline-key"):
        with pytest.raises(ConfigError) as caught:
            ServerConfig(api_keys=(key, "good-enough"))
        assert key not in str(caught.value)
    with pytest.raises(ConfigError, match="characters of ASCII, without spaces"):
        ServerConfig(api_keys=("",))
    assert "first-key" not in repr(ServerConfig(api_keys=KEYS))


@pytest.mark.parametrize("path", OPEN_PATHS)
def test_probes_need_no_key(path: str) -> None:
    assert ask(create_door(api_keys=KEYS), path=path, headers=[LOCAL]).status == 200


TRICKS = [
    "//v1/models",
    "/health/../v1/models",
    "/health/live/../../v1/models",
    "/health/live/",
    "/health/",
    "/health",
    "/health/live\x00",
    "/health/live?",
    "/HEALTH/LIVE",
    "/health\\live",
    "/v1/models/../../health/live",
    "http://localhost/health/live",
    "*",
    "",
    "/nowhere",
    "/\udcff",
]


@pytest.mark.parametrize("path", TRICKS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "TRACE", "CONNECT", "FOO"])
def test_no_way_around(path: str, method: str) -> None:
    got = ask(create_door(api_keys=KEYS), method, path, [("host", "x/health/live")])
    assert got.status == 400  # that is no host
    got = ask(create_door(api_keys=KEYS), method, path, [("host", "health.live")])
    assert got.status == 401


def test_no_web_socket() -> None:
    sent = []

    async def connect() -> None:
        async def receive() -> Any:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await create_door()({"type": "websocket", "path": "/health/live"}, receive, send)

    asyncio.run(connect())
    assert sent == [{"type": "websocket.close", "code": 1008}]


# --- hosts and origins ---


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000"]
)
def test_local_names(host: str) -> None:
    assert ask(create_door(), path="/v1/models", headers=[("host", host)]).status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("0.0.0.0:8000", 403),
        ("[::]", 403),
        ("", 403),
        ("evil@localhost", 400),
        ("localhost#evil", 400),
        ("localhost:port", 400),
        ("[", 400),
        ("local host", 400),
    ],
)
def test_other_names_are_refused_where_there_is_no_key(host: str, status: int) -> None:
    """A page can give its own name the address 127.0.0.1, and is then no stranger to a browser."""
    got = ask(create_door(), path="/v1/models", headers=[("host", host)])
    assert got.status == status
    assert got.error["code"] == ("host_not_allowed" if status == 403 else None)


def test_hosts_that_are_allowed() -> None:
    door = create_door(allowed_hosts=["Studio.example"])
    assert ask(door, path="/v1/models", headers=[("host", "studio.example:80")]).status == 200
    assert ask(door, path="/v1/models", headers=[("host", "other.example")]).status == 403
    # Reachable by others, and told so: any name, unless some were given.
    door = create_door(host="0.0.0.0", allow_no_key=True)
    assert ask(door, path="/v1/models", headers=[("host", "any.example")]).status == 200
    door = create_door(host="0.0.0.0", allow_no_key=True, allowed_hosts=["studio.example"])
    assert ask(door, path="/v1/models", headers=[("host", "any.example")]).status == 403
    # On loopback that setting opens nothing.
    door = create_door(allow_no_key=True)
    assert ask(door, path="/v1/models", headers=[("host", "any.example")]).status == 403


CROSS_SITE = ("origin", "https://evil.example")


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost", "http://"])
@pytest.mark.parametrize("content_type", ["text/plain", "application/json"])
def test_pages_of_other_sites(origin: str, content_type: str) -> None:
    """A browser sends a POST of text to anybody, without asking."""
    headers = [LOCAL, ("origin", origin), ("content-type", content_type)]
    got = ask(create_door(), "POST", "/v1/images/generations", headers, [b'{"prompt": "x"}'])
    assert (got.status, got.error["code"]) == (403, "origin_not_allowed")
    assert "access-control-allow-origin" not in got.headers


def test_own_pages() -> None:
    own = ("origin", f"http://{LOCAL[1]}")
    assert ask(create_door(), path="/v1/models", headers=[LOCAL, own]).status == 200


def test_a_browser_that_knows_the_password_does_not_help_other_pages() -> None:
    """It sends Basic authentication along with whatever a page asks for; never a Bearer token."""
    door = create_door(api_keys=KEYS)
    got = ask(door, path="/v1/models", headers=[LOCAL, basic("", KEYS[0]), CROSS_SITE])
    assert (got.status, got.error["code"]) == (403, "origin_not_allowed")
    headers = [LOCAL, bearer(KEYS[0]), CROSS_SITE]
    assert ask(door, path="/v1/models", headers=headers).status == 200


def preflight(door: AccessMiddleware, origin: str) -> Got:
    headers = [
        LOCAL,
        ("origin", origin),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization, content-type, x-stainless-os"),
    ]
    return ask(door, "OPTIONS", "/v1/images/generations", headers)


PAGE = "https://page.example"


@pytest.mark.parametrize("keys", [(), KEYS])
def test_no_page_may_call_unless_it_is_named(keys: tuple[str, ...]) -> None:
    refused = 401 if keys else 403
    assert preflight(create_door(api_keys=keys), PAGE).status == refused
    door = create_door(api_keys=keys, allowed_origins=[PAGE])
    for origin in ("https://evil.example", PAGE + ".evil.example", PAGE + ":444", "null", "*"):
        got = preflight(door, origin)
        assert got.status == refused
        assert not [name for name in got.headers if name.startswith("access-control")]
    got = preflight(door, PAGE)
    assert got.status == 204 and got.body == b""
    assert got.headers["access-control-allow-origin"] == PAGE
    assert got.headers["access-control-allow-methods"] == "GET, POST, DELETE"
    assert "x-stainless-os" in got.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in got.headers
    assert got.headers["vary"] == "Origin"


def test_page_that_is_named_reads_answers_and_errors() -> None:
    door = create_door(api_keys=KEYS, allowed_origins=[PAGE])
    for key, status in ((KEYS[0], 200), ("wrong-key", 401)):
        got = ask(door, path="/v1/models", headers=[LOCAL, ("origin", PAGE), bearer(key)])
        assert got.status == status
        assert got.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in got.headers["access-control-expose-headers"]
    got = ask(door, path="/v1/models", headers=[LOCAL, bearer(KEYS[0])])
    assert "access-control-allow-origin" not in got.headers and got.headers["vary"] == "Origin"


@pytest.mark.parametrize("origin", ["*", "https://*.example", "page.example", "https://a/b", ""])
def test_origins_are_exact(origin: str) -> None:
    with pytest.raises(ConfigError, match="no wildcard"):
        ServerConfig(allowed_origins=[origin])


# --- sizes and times ---


def post(door: AccessMiddleware, *chunks: bytes, pause: float = 0.0, path: str = "") -> Got:
    path = path or "/v1/images/generations"
    return ask(door, "POST", path, [LOCAL, JSON], chunks, pause)


def test_headers_too_large() -> None:
    door = create_door(max_header_bytes=1000)
    assert ask(door, path="/v1/models", headers=[LOCAL, ("x", "a" * 900)]).status == 200
    got = ask(door, path="/v1/models", headers=[LOCAL, ("x", "a" * 1000)])
    assert got.status == 431 and "at most 1000" in got.error["message"]
    many = [(f"x{i}", "") for i in range(500)]
    assert ask(door, path="/v1/models", headers=[LOCAL, *many]).status == 431


@pytest.mark.parametrize("length", ["201", "9" * 20, "9" * 5000])
def test_body_that_says_it_is_too_large(length: str) -> None:
    headers = [LOCAL, JSON, ("content-length", length)]
    got = ask(create_door(max_body_bytes=SMALL_BODY), "POST", "/v1/images/generations", headers)
    assert got.status == (413 if len(length) <= 20 else 400)
    assert got.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("length", ["-1", "1e3", "0x10", "", "1, 1", "\xb2"])
def test_length_that_is_no_number(length: str) -> None:
    headers = [LOCAL, JSON, ("content-length", length)]
    got = ask(create_door(), "POST", "/v1/images/generations", headers)
    assert got.status == 400 and got.error["message"] == "Content-Length is not a number"


def test_body_that_grows_too_large() -> None:
    door = create_door(max_body_bytes=SMALL_BODY)
    body = b'{"prompt": "' + b"x" * (SMALL_BODY - 14) + b'"}'
    assert len(body) == SMALL_BODY
    assert post(door, body[:50], body[50:]).status == 200
    got = post(door, body[:50], b" ", body[50:])
    assert got.status == 413 and f"at most {SMALL_BODY} bytes" in got.error["message"]


def test_only_chats_may_be_large() -> None:
    """They hold pictures; whatever else is long is parsed for long."""
    door = create_door()
    body = b'{"prompt": "' + b"x" * 2**20 + b'"}'
    assert post(door, body).status == 413
    assert post(door, body, path="/v1/chat/completions").status == 200
    assert post(door, b"x" * (16 * 2**20 + 1), path="/v1/chat/completions").status == 413


def test_body_that_does_not_come() -> None:
    door = create_door(receive_timeout=0.2)
    start = time.monotonic()
    got = post(door, b'{"prompt": ', b'"x"}', pause=60)
    assert got.status == 408 and "within 0.2 seconds" in got.error["message"]
    assert got.headers["connection"] == "close" and time.monotonic() - start < 30


# --- everything else ---


def test_own_id_for_every_answer() -> None:
    """The client's own is for the log: nobody can choose an id that is in use."""
    headers = [LOCAL, ("x-request-id", "mine")]
    ids = {ask(create_door(), path="/v1/models", headers=headers).headers["x-request-id"]}
    ids.add(ask(create_door(), path="/nowhere", headers=headers).headers["x-request-id"])
    assert len(ids) == 2 and "mine" not in ids


def test_head_is_answered_like_get() -> None:
    got = ask(create_door(), "HEAD", "/v1/models")
    assert got.status == 200 and got.headers["content-type"] == "application/json"


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "FOO"])
def test_unknown_method(method: str) -> None:
    got = ask(create_door(), method, "/v1/models")
    assert got.status == 405 and got.headers["allow"] == "GET, HEAD"
    assert got.error["message"] == f"{method} is not allowed here: GET, HEAD"


def test_unknown_route() -> None:
    got = ask(create_door(), "POST", "/nowhere/" + "x" * 5000)
    assert got.status == 404 and got.error["type"] == "not_found_error"
    assert got.error["message"].startswith("no such route: POST /nowhere/xxx")
    assert len(got.body) < 500


def test_what_nobody_expected_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    got = ask(create_door(), path="/crash")
    assert got.status == 500
    assert got.error["message"] == "internal error" and got.error["type"] == "server_error"
    assert "RuntimeError" in caplog.text  # but it is in the log


def test_observer_sees_few_routes() -> None:
    seen = []
    door = create_door()
    door.observe = lambda method, route, status, seconds: seen.append((method, route, status))
    for method, path in (("GET", "/v1/models"), ("GET", "/no/1"), ("FOO", "/no/2"), ("HEAD", "/")):
        ask(door, method, path)
    assert seen == [
        ("GET", "/v1/models", 200),
        ("GET", "other", 404),
        ("FOO", "other", 404),
        ("HEAD", "other", 404),
    ]


def test_shutting_down() -> None:
    """What is new is refused, what is under way is told so: by its status, or in its events."""
    door = create_door()

    async def end() -> list[Got]:
        headers = [LOCAL]
        under_way = [
            asyncio.create_task(ask_async(door, "POST", path, headers, [b""], 0.0))
            for path in ("/slow", "/slow-events")
        ]
        for _ in range(1000):  # as many turns as they need to begin
            await asyncio.sleep(0)
        assert door.num_working == 2
        door.is_closing = True
        new = await ask_async(door, "POST", "/slow", headers, [b""], 0.0)
        probe = await ask_async(door, "GET", "/v1/models", headers, [b""], 0.0)
        assert probe.status == 200 and door.num_working == 2
        door.answer_all()
        return [new, *await asyncio.gather(*under_way)]

    new, plain, events = asyncio.run(end())
    for got in (new, plain):
        assert got.status == 503 and int(got.headers["retry-after"]) > 0
        assert got.error["code"] == "shutting_down"
    assert events.status == 200
    first, last = events.body.decode().strip().split("\n\n")
    assert first.startswith("event: first")
    assert last.startswith('event: error\ndata: {"error":{"message":"the server is shutting down"')
    assert door.num_working == 0
