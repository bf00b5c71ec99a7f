"""A small server that speaks OpenAI's images API and nothing more, and misbehaves when told to."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

PLAIN_PARAMETERS = {"prompt", "model", "size", "n", "response_format", "stream", "partial_images"}
KEY = "a secret of the test"


class PlainServer:
    """What it does with a prompt is in the prompt: "429", "500", "cut", "slow", … or a picture.

    Args:
        seconds_per_megapixel: how long a picture takes; pictures do not wait for each other.
        slots: how many are drawn at once; the others wait.
        key: without it in the Authorization header, the answer is 401.
    """

    def __init__(
        self, seconds_per_megapixel: float = 0.0, slots: int = 1000, key: str | None = None
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.url = ""
        self._seconds_per_megapixel = seconds_per_megapixel
        self._slots = asyncio.Semaphore(slots)
        self._key = key
        self.app = FastAPI()
        self.app.get("/v1/models")(self.list_models)
        self.app.post("/v1/images/generations", response_model=None)(self.generate)

    async def list_models(self, request: Request) -> Response:
        if self._is_refused(request):
            return error(401, "wrong key")
        return JSONResponse({"object": "list", "data": [{"id": "plain", "object": "model"}]})

    async def generate(self, request: Request) -> Response:
        if self._is_refused(request):
            return error(401, "wrong key")
        body: dict[str, Any] = await request.json()
        self.bodies.append(body)
        if unknown := body.keys() - PLAIN_PARAMETERS:
            return error(400, f"unknown parameter: {sorted(unknown)[0]}")
        if "429" in body["prompt"]:
            return error(429, "queue full")
        if "500" in body["prompt"]:
            return Response("not JSON", 500)
        if "cut" in body["prompt"]:
            return StreamingResponse(self._cut(), headers={"content-length": "1000"})
        if "garbage" in body["prompt"]:
            return Response("<html>", 200)
        if body.get("stream"):
            return StreamingResponse(self._events(body), media_type="text/event-stream")
        await (asyncio.sleep(30) if "slow" in body["prompt"] else self._draw(body))
        num_images = body["n"] - ("too few" in body["prompt"])
        return JSONResponse({"created": 1, "data": [{"b64_json": "AAAA"}] * num_images})

    def _is_refused(self, request: Request) -> bool:
        return self._key is not None and request.headers.get("authorization") != (
            f"Bearer {self._key}"
        )

    async def _draw(self, body: dict[str, Any]) -> None:
        width, height = map(int, body["size"].split("x"))
        async with self._slots:
            await asyncio.sleep(self._seconds_per_megapixel * width * height / 1e6)

    async def _cut(self) -> AsyncIterator[bytes]:
        yield b'{"created": 1, '
        raise asyncio.CancelledError  # uvicorn closes the connection without an answer

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        for index in range(body.get("partial_images", 0)):
            await self._draw(body)
            yield to_event({"type": "image_generation.partial_image", "partial_image_index": index})
        if "error" in body["prompt"]:
            yield to_event({"error": {"message": "the model broke", "type": "server_error"}})
            return
        await self._draw(body)
        # A line separator that JSON need not escape, and a picture larger than one chunk.
        text = {"revised_prompt": "a\u2028b", "b64_json": "A" * 300_000}
        yield to_event({"type": "image_generation.completed", **text})
        yield "data: [DONE]\n\n"


def error(status: int, message: str) -> Response:
    """OpenAI's error object."""
    content = {"error": {"message": message, "type": "x", "param": None, "code": None}}
    return JSONResponse(content, status)


def to_event(data: dict[str, Any]) -> str:
    """As it crosses the wire."""
    return f"event: {data.get('type', 'error')}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"


@contextmanager
def serving(server: PlainServer) -> Iterator[PlainServer]:
    """A real server on a free port, in a thread; sets its `url`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(server.app, log_level="critical", lifespan="off")
        uvicorn_server = uvicorn.Server(config)
        thread = threading.Thread(target=uvicorn_server.run, args=([listener],))
        thread.start()
        while not uvicorn_server.started:
            time.sleep(0.01)
        try:
            yield server
        finally:
            uvicorn_server.should_exit = True
            uvicorn_server.force_exit = True  # nobody waits for the slow ones
            thread.join()
