"""The whole app behind its door, over sockets: whatever bytes come, and however slowly."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from socket import AF_INET, SO_RCVBUF, SO_SNDBUF, SOCK_STREAM, SOL_SOCKET, create_server, socket

import httpx
import pytest
import uvicorn
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.asking import make_head, open_connection, read_answer, talk
from tests.inner_server import InnerServer, Served
from vllm_omni.entrypoints.openai.access import OPEN_PATHS
from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.entrypoints.openai.connection import Connection

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
    start = time.monotonic()
    with open_connection(guarded.port) as connection:
        connection.sendall(begun)
        assert connection.recv(1) == b""
        assert 1 < time.monotonic() - start < 30


def test_body_that_comes_byte_by_byte(guarded: Served) -> None:
    with open_connection(guarded.port) as connection:
        connection.sendall(large_post("Content-Length: 1000"))
        start = time.monotonic()
        for _ in range(5):  # for much less time than there is: then it is no longer listened to
            connection.sendall(b" ")
            time.sleep(0.1)
        got = read_answer(connection)
        assert got.status == 408 and 1 < time.monotonic() - start < 30
        assert connection.recv(1) == b""


def test_rest_of_a_body_that_was_refused_is_not_read_for_ever(guarded: Served) -> None:
    with open_connection(guarded.port) as connection:
        connection.sendall(large_post("Content-Length: 9000000"))
        assert read_answer(connection).status == 413
        start = time.monotonic()
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while time.monotonic() - start < 30:
                connection.sendall(b"x")
                time.sleep(0.1)
        assert 1 < time.monotonic() - start < 30


def test_idle_connection_is_kept(guarded: Served) -> None:
    """Nothing was begun: that is what keep-alive is for."""
    with open_connection(guarded.port) as connection:
        for pause in (0, 2.5):
            time.sleep(pause)
            connection.sendall(make_head("GET", "/health/live"))
            assert read_answer(connection).status == 200


# --- slow readers, of an app that only sends ---

LARGE = 2**19  # bytes
SEND_TIMEOUT = 2.0  # seconds; a busy machine has pauses, too
SO_SNDBUF_BYTES = 2**14


@contextmanager
def run_app(
    app: ASGIApp, config: ServerConfig, send_buffer: int
) -> Iterator[tuple[uvicorn.Server, int]]:
    """An app behind our connections, in a thread; its server and its port."""
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=partial(Connection, config),  # type: ignore[arg-type]
            loop="asyncio",  # as `vllm-omni serve`
            log_config=None,
            lifespan="off",
        )
    )
    with create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(SOL_SOCKET, SO_SNDBUF, send_buffer)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield server, listener.getsockname()[1]
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


class LargeAnswers:
    """Sends all it has to whoever asks; knows how many it is still busy with."""

    def __init__(self) -> None:
        self.num_waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_waiting += 1
        headers = [(b"content-length", str(2 * LARGE).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x" * LARGE, "more_body": True})
        await send({"type": "http.response.body", "body": b"x" * LARGE})
        self.num_waiting -= 1


@pytest.fixture(scope="module")
def large() -> Iterator[tuple[LargeAnswers, int]]:
    """An app and its port; clients must read 64 kB within `SEND_TIMEOUT`."""
    app = LargeAnswers()
    # The system takes little off its hands.
    with run_app(app, ServerConfig(send_timeout=SEND_TIMEOUT), SO_SNDBUF_BYTES) as (_, port):
        yield app, port


def send_from_afar(port: int, request: bytes) -> socket:
    """A client whose own system takes in little ahead of it."""
    connection = socket(AF_INET, SOCK_STREAM)
    connection.setsockopt(SOL_SOCKET, SO_RCVBUF, 2**14)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", port))
    connection.sendall(request)
    return connection


def read(connection: socket, num_bytes: int, pause: float) -> Iterator[int]:
    """How many bytes have come, after each read, until all are there or the connection is cut."""
    num_read = 0
    with suppress(ConnectionResetError):
        while num_read <= 2 * LARGE and (data := connection.recv(num_bytes)):  # and the head
            num_read += len(data)
            yield num_read
            time.sleep(pause)


@pytest.mark.parametrize(("num_bytes", "pause"), [(1, 0.5), (1000, 0.1)], ids=["2 B/s", "10 kB/s"])
def test_who_hardly_reads_is_cut_off(
    large: tuple[LargeAnswers, int], num_bytes: int, pause: float
) -> None:
    app, port = large
    with send_from_afar(port, make_head("GET", "/")) as connection:
        wait_until(lambda: app.num_waiting == 1)
        for _ in read(connection, num_bytes, pause):
            if app.num_waiting == 0:  # it does not hold up whoever was sending
                break
        assert app.num_waiting == 0
        assert max(read(connection, 2**16, 0), default=0) < LARGE


def test_who_reads_slowly_gets_everything(large: tuple[LargeAnswers, int]) -> None:
    app, port = large
    start = time.monotonic()
    with send_from_afar(port, make_head("GET", "/")) as connection:
        assert max(read(connection, 2**13, 0.03)) > 2 * LARGE
    assert app.num_waiting == 0 and time.monotonic() - start > SEND_TIMEOUT


class SmallAnswers:
    """Answers with a little: at once, when it is told to, or so that nobody is served meanwhile."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.num_waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_waiting += 1
        while scope["path"] == "/later" and not self.may_answer.is_set():
            await asyncio.sleep(0.01)
        if scope["path"] == "/alone":
            self.may_answer.wait(30)
        self.num_waiting -= 1
        body = b"x" * int(scope["query_string"] or 1)
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
def few() -> Iterator[tuple[SmallAnswers, uvicorn.Server, int]]:
    """An app to which four connections may be open, its server and its port."""
    app = SmallAnswers()
    config = ServerConfig(max_connections=4, send_timeout=0.5)
    with run_app(app, config, send_buffer=2**12) as (server, port):
        yield app, server, port
        app.may_answer.set()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_connections_are_bounded(few: tuple[SmallAnswers, uvicorn.Server, int]) -> None:
    """Who waits for an answer keeps its connection; one more is told, and all is well after."""
    app, server, port = few
    with ExitStack() as stack:
        working = [stack.enter_context(open_connection(port)) for _ in range(4)]
        for connection in working:
            connection.sendall(make_head("GET", "/later"))
        wait_until(lambda: app.num_waiting == 4)
        for _ in range(3):
            got = talk(port, make_head("GET", "/"))
            assert (got.status, got.error["code"]) == (503, "too_many_connections")
            assert int(got.headers["retry-after"]) > 0
        app.may_answer.set()
        assert [read_answer(connection).status for connection in working] == [200] * 4
        assert talk(port, make_head("GET", "/")).status == 200  # they are idle: one gives way
    wait_until(lambda: not server.server_state.connections)


def test_idle_connections_give_way(few: tuple[SmallAnswers, uvicorn.Server, int]) -> None:
    """However many are opened and left lying, who asks is answered."""
    app, server, port = few
    with ExitStack() as stack:
        first = stack.enter_context(open_connection(port))
        first.sendall(make_head("GET", "/alone"))
        wait_until(lambda: app.num_waiting == 1)
        idle = [stack.enter_context(open_connection(port)) for _ in range(50)]  # all come at once
        for connection in idle[:40]:
            connection.sendall(b"GET / HT")
        app.may_answer.set()
        assert read_answer(first).status == 200
        for _ in range(5):
            assert talk(port, make_head("GET", "/")).status == 200
        assert len(server.server_state.connections) <= 4
        assert idle[40].recv(1) == b""  # it never said anything


def test_who_does_not_read_the_last_of_it_is_cut_off(
    few: tuple[SmallAnswers, uvicorn.Server, int],
) -> None:
    """However little it is: it would keep its connection for ever."""
    _, server, port = few
    with send_from_afar(port, make_head("GET", "/?60000")):
        wait_until(lambda: any(one.has_unsent for one in get_connections(server)))
        wait_until(lambda: not server.server_state.connections)


def get_connections(server: uvicorn.Server) -> list[Connection]:
    return [one for one in list(server.server_state.connections) if isinstance(one, Connection)]


# --- slow readers of pictures ---

STREAM = {
    "prompt": "a cat",
    "size": "256x256",
    "num_inference_steps": 4,
    "stream": True,
    "partial_images": 3,
}
PICTURE = {"prompt": "a dog", "size": "128x128", "num_inference_steps": 2}


def ask_from_afar(stack: ExitStack, served: Served) -> None:
    """Somebody who asks for pictures, and does not read them."""
    body = json.dumps(STREAM).encode()
    request = large_post(f"Content-Length: {len(body)}") + body
    stack.enter_context(send_from_afar(served.port, request))


def count_work(inner: InnerServer, served: Served) -> tuple[int, int]:
    """Requests that are not answered to the end, and those that have a place in the queue."""
    app = served.app
    return inner.look(lambda: (app.door.num_working, len(app.images.admission.tickets)))


def test_others_do_not_wait_for_a_slow_reader(inner: InnerServer) -> None:
    with inner.serve(api_keys=KEYS) as served, ExitStack() as stack:
        for _ in range(3):
            ask_from_afar(stack, served)
        wait_until(lambda: count_work(inner, served)[0] == 3)
        headers = {"authorization": f"Bearer {KEYS[0]}"}
        url = f"{served.url}/v1/images/generations"
        response = httpx.post(url, json=PICTURE, headers=headers, timeout=60)
        assert response.status_code == 200, response.text
        # They are drawn one by one: those before it are done, and nobody has read them yet.
        assert count_work(inner, served) == (3, 0)


def test_slow_reader_of_pictures_is_cut_off(inner: InnerServer, guarded: Served) -> None:
    with ExitStack() as stack:
        ask_from_afar(stack, guarded)
        wait_until(lambda: count_work(inner, guarded)[0] == 1)
        wait_until(lambda: count_work(inner, guarded) == (0, 0))
