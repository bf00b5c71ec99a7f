"""The whole app behind its door, over sockets: whatever bytes come, and however slowly."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from fastapi.routing import APIRoute

from tests.asking import make_head, open_connection, read_answer, talk
from tests.inner_server import InnerServer, Served
from vllm_omni.entrypoints.openai.access import OPEN_PATHS

KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def guarded(inner: InnerServer) -> Iterator[Served]:
    """All routes there are, behind keys."""
    with inner.serve(
        api_keys=KEYS,
        max_header_bytes=4096,
        max_body_bytes=100_000,
        receive_timeout=2,
        send_timeout=1,
    ) as served:
        yield served


def fill_in(path: str) -> str:
    return path.replace("{model_id:path}", "tiny").replace("{", "").replace("}", "")


def test_every_route_needs_a_key(guarded: Served) -> None:
    routes = [route for route in guarded.app.api.routes if isinstance(route, APIRoute)]
    asked = {(m, fill_in(route.path)) for route in routes for m in (*route.methods, "HEAD")}
    assert ("POST", "/v1/images/generations") in asked and ("GET", "/v1/models") in asked
    others = [getattr(route, "path", "/") for route in guarded.app.api.routes]
    assert "/openapi.json" in others
    asked |= {(method, path) for path in others for method in ("GET", "POST", "OPTIONS")}
    asked |= {("GET", path) for path in ("/ui/", "/ui/config", "/ui/gradio_api/info", "/docs")}
    for method, path in sorted(asked):
        got = talk(guarded.port, make_head(method, path))
        if path in OPEN_PATHS:
            is_told = method in ("GET", "HEAD")  # "starting" is 503
            assert got.status in ((200, 503) if is_told else (405,)), path
        else:
            assert got.status == 401, path


def test_no_upgrade_without_a_key(guarded: Served) -> None:
    lines = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
    assert talk(guarded.port, make_head("GET", "/ui/queue/join", *lines, key)).status == 401
    allowed = f"Authorization: Bearer {KEYS[0]}"
    assert talk(guarded.port, make_head("GET", "/v1/queue", *lines, key, allowed)).status == 200


@pytest.mark.parametrize(
    "head",
    [
        make_head("GET", "/health/live", "X: " + "a" * 5_000_000),
        make_head("GET", "/health/live", *(f"X{i}: a" for i in range(100_000))),
        make_head("GET", "/" + "a" * 100_000),
        make_head("GET", "/health/live", "X: " + "a" * 5000),
    ],
    ids=["one of 5 MB", "a hundred thousand", "the path", "a little over"],
)
def test_headers_without_end(guarded: Served, head: bytes) -> None:
    got = talk(guarded.port, head)
    assert got.status == 431 and got.error["type"] == "invalid_request_error"
    assert len(got.headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no Host
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n X: folded\r\nbroken\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n",
        make_head(
            "POST",
            "/v1/images/generations",
            f"Authorization: Bearer {KEYS[0]}",
            "Content-Type: application/json",
            "Transfer-Encoding: chunked",
        )
        + b"zzz\r\n",
    ],
)
def test_what_is_no_http(guarded: Served, sent: bytes) -> None:
    got = talk(guarded.port, sent)
    assert got.status in (400, 501) and got.error["message"] == "this is not valid HTTP"
    assert talk(guarded.port, make_head("GET", "/health/live")).status == 200


def large_post(*lines: str) -> bytes:
    return make_head(
        "POST",
        "/v1/images/generations",
        f"Authorization: Bearer {KEYS[0]}",
        "Content-Type: application/json",
        *lines,
    )


def test_large_body_gets_its_answer_while_it_is_sent(guarded: Served) -> None:
    got = talk(guarded.port, large_post("Content-Length: 9000000"), b"x" * 9_000_000)
    assert got.status == 413 and "at most 100000 bytes" in got.error["message"]
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    got = talk(guarded.port, large_post("Transfer-Encoding: chunked"), *[chunk] * 20)
    assert got.status == 413 and "at most 100000 bytes" in got.error["message"]


def test_large_body_that_waits_to_be_asked_is_not_sent(guarded: Served) -> None:
    head = large_post("Content-Length: 9000000", "Expect: 100-continue")
    assert talk(guarded.port, head).status == 413


@pytest.mark.parametrize(
    "begun", [b"", b"GET / HT", make_head("GET", "/")[:-2]], ids=["nothing", "line", "head"]
)
def test_request_that_never_comes(guarded: Served, begun: bytes) -> None:
    with open_connection(guarded.port) as connection:
        connection.sendall(begun)
        start = time.monotonic()
        assert connection.recv(1) == b""
        assert 1 < time.monotonic() - start < 10


def test_body_that_comes_byte_by_byte(guarded: Served) -> None:
    with open_connection(guarded.port) as connection:
        connection.sendall(large_post("Content-Length: 1000"))
        start = time.monotonic()
        for _ in range(15):
            connection.sendall(b" ")
            time.sleep(0.1)
        got = read_answer(connection)
        assert got.status == 408 and 1 < time.monotonic() - start < 10
        assert connection.recv(1) == b""


def test_rest_of_a_body_that_was_refused_is_not_read_for_ever(guarded: Served) -> None:
    with open_connection(guarded.port) as connection:
        connection.sendall(large_post("Content-Length: 9000000"))
        assert read_answer(connection).status == 413
        start = time.monotonic()
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while time.monotonic() - start < 20:
                connection.sendall(b"x")
                time.sleep(0.1)
        assert 1 < time.monotonic() - start < 10


def test_idle_connection_is_kept(guarded: Served) -> None:
    """Nothing was begun: that is what keep-alive is for."""
    with open_connection(guarded.port) as connection:
        for _ in range(2):
            connection.sendall(make_head("GET", "/health/live"))
            assert read_answer(connection).status == 200
            time.sleep(2.5)
