"""Requests that no well-behaved client sends: straight into an ASGI app, or down a socket."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

TIMEOUT = 60.0  # seconds, of anything that should answer

# What no answer may hold: memory addresses, tracebacks, paths of this machine.
LEAKS = re.compile(r"0x[0-9a-f]{6,}|Traceback|File \"|\.py\b|/(home|root|tmp|work|usr|opt)/|/dev/")


@dataclass
class Got:
    """An answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object; nothing else is in the body, and nothing leaks."""
        content = json.loads(self.body)
        assert set(content) == {"error"}
        error: dict[str, Any] = content["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and error["message"]
        assert not LEAKS.search(self.body.decode()), self.body
        return error


def ask(
    app: ASGIApp,
    method: str = "GET",
    path: str = "/",
    headers: Iterable[tuple[str, str]] = (("host", "localhost"),),
    chunks: Sequence[bytes] = (b"",),
    pause: float = 0.0,
) -> Got:
    """One request, exactly as it is written.

    Args:
        pause: seconds before the last chunk of the body.
    """
    return asyncio.run(ask_async(app, method, path, headers, chunks, pause))


async def ask_async(
    app: ASGIApp,
    method: str,
    path: str,
    headers: Iterable[tuple[str, str]],
    chunks: Sequence[bytes],
    pause: float,
) -> Got:
    got = Got()
    left = list(chunks)
    never = asyncio.Event()

    async def receive() -> Message:
        if not left:
            await never.wait()
        if len(left) == 1:
            await asyncio.sleep(pause)
        chunk = left.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(left)}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            got.status = message["status"]
            got.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
        got.body += message.get("body", b"")

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1234),
        "method": method,
        "root_path": "",
        "path": path,
        "raw_path": path.encode("utf-8", "surrogatepass"),
        "query_string": b"",
        "headers": [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in headers],
    }
    await app(scope, receive, send)
    return got


def open_connection(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)


def make_head(method: str, path: str, *lines: str) -> bytes:
    """The head of a request, to the last byte; a Host line comes by itself."""
    head = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *lines, "", ""]
    return "\r\n".join(head).encode("latin-1")


def talk(port: int, *pieces: bytes) -> Got:
    """Send bytes, and read the one answer that comes."""
    with open_connection(port) as connection:
        for piece in pieces:
            try:
                connection.sendall(piece)
            except (BrokenPipeError, ConnectionResetError):
                break  # it has heard enough
        return read_answer(connection, has_body=not pieces[0].startswith(b"HEAD "))


def read_answer(connection: socket.socket, has_body: bool = True) -> Got:
    """One answer that says how long it is."""
    with connection.makefile("rb") as stream:
        status = int(stream.readline().split()[1])
        headers = {}
        while line := stream.readline().strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        length = int(headers.get("content-length", 0)) if has_body else 0
        return Got(status, headers, stream.read(length))
