"""A small client of OpenAI's images API, which says what went wrong instead of raising.

It sends prompt, size, n and what the user adds, reads every byte of the answer, and does not decode
pictures: the client may share its cores with the server.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx
import msgspec

from vllm_omni.benchmark.workload import PictureRequest

_MAX_MESSAGE = 200  # characters of a server's message


@dataclass(frozen=True)
class Failure:
    """Why a request has no picture."""

    kind: str  # what failures are counted by: "HTTP 429", "connection cut", "timed out", …
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind


@dataclass(frozen=True)
class Answer:
    """What a server made of one request."""

    num_images: int = 0
    first_preview: float | None = None  # time.perf_counter() at the first one
    failure: Failure | None = None


class RequestFailed(Exception):
    """Ends one request, or the question for the model."""

    def __init__(self, kind: str, message: str = "") -> None:
        self.failure = Failure(kind, " ".join(message.split())[:_MAX_MESSAGE])
        super().__init__(str(self.failure))


class _Picture(msgspec.Struct):
    b64_json: str | None = None
    url: str | None = None


class _Pictures(msgspec.Struct):
    data: list[_Picture]


class _Event(msgspec.Struct):
    type: str = ""
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class ImagesClient:
    """Draws pictures with one server. Use as an async context manager.

    Args:
        url: the server's, with or without /v1.
        body: further parameters, the same for every request.
        timeout: seconds for one request, all of it.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        body: Mapping[str, Any] | None = None,
        timeout: float = 600.0,
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.body = {"n": 1, **(body or {})}
        self._timeout = timeout
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # As many connections as there are requests: the server queues, not this pool.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(headers=headers, limits=limits, timeout=None)

    async def __aenter__(self) -> ImagesClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def find_model(self) -> str | None:
        """The first model that the server lists; None where it has no such list.

        Raises:
            RequestFailed: the server cannot be reached or refuses the key.
        """
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._http.get(f"{self._url}/models")
        except (httpx.HTTPError, TimeoutError) as error:
            raise _translate(error) from error
        if response.status_code in (401, 403):
            raise _refusal(response)
        try:
            models = msgspec.json.decode(response.content, type=_Models).data
        except msgspec.MsgspecError:
            return None
        return models[0].id if models else None

    def make_body(self, request: PictureRequest) -> dict[str, Any]:
        """What is sent for a request."""
        body = {"prompt": request.prompt, "size": request.picture.size, **self.body}
        if request.picture.num_steps is not None:
            body["num_inference_steps"] = request.picture.num_steps
        return body

    async def draw(self, request: PictureRequest) -> Answer:
        """Send a request and read its answer to the end."""
        body = self.make_body(request)
        is_stream = bool(body.get("stream"))
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._http.stream("POST", f"{self._url}/images/generations", json=body) as response,
            ):
                if response.status_code != 200:
                    await response.aread()
                    raise _refusal(response)
                answer = await (_read_events(response) if is_stream else _read_answer(response))
            if answer.num_images != body["n"]:
                raise RequestFailed(
                    "bad answer", f"{answer.num_images} pictures instead of {body['n']}"
                )
            return answer
        except RequestFailed as error:
            return Answer(failure=error.failure)
        except (httpx.HTTPError, TimeoutError) as error:
            return Answer(failure=_translate(error).failure)


async def _read_answer(response: httpx.Response) -> Answer:
    content = await response.aread()
    try:
        pictures = msgspec.json.decode(content, type=_Pictures).data
    except msgspec.MsgspecError as error:
        raise RequestFailed("bad answer", str(error)) from error
    return Answer(sum(1 for picture in pictures if picture.b64_json or picture.url))


async def _read_events(response: httpx.Response) -> Answer:
    num_images, first_preview = 0, None
    async for data in _event_data(response):
        if data == b"[DONE]":
            break
        try:
            event = msgspec.json.decode(data, type=_Event)
        except msgspec.MsgspecError as error:
            raise RequestFailed("bad answer", str(error)) from error
        if event.error is not None:
            raise RequestFailed("error in stream", _message_of({"error": event.error}))
        if event.type.endswith(".partial_image") and first_preview is None:
            first_preview = time.perf_counter()
        num_images += event.type.endswith(".completed")
    return Answer(num_images, first_preview)


async def _event_data(response: httpx.Response) -> AsyncIterator[bytes]:
    """The `data` of each server-sent event; each is one line.

    By bytes, because httpx splits lines at characters that JSON may contain.
    """
    pending = bytearray()
    async for chunk in response.aiter_bytes():
        # Only what is new is searched: a picture is one line of very many chunks.
        start = len(pending)
        pending += chunk
        while (end := pending.find(b"\n", start)) >= 0:
            line = bytes(pending[:end])
            del pending[: end + 1]
            start = 0
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if pending.startswith(b"data:"):
        yield bytes(pending[5:]).strip()


def _refusal(response: httpx.Response) -> RequestFailed:
    try:
        message = _message_of(msgspec.json.decode(response.content))
    except msgspec.MsgspecError:
        message = response.text
    return RequestFailed(f"HTTP {response.status_code}", message)


def _message_of(body: Any) -> str:
    """OpenAI's error message, or whatever else there is."""
    match body:
        case {"error": {"message": str(message)}}:
            return message
        case _:
            return str(body)


def _translate(error: httpx.HTTPError | TimeoutError) -> RequestFailed:
    match error:
        case TimeoutError():
            return RequestFailed("timed out")
        case httpx.ConnectError():
            return RequestFailed("no connection", _cause(error))
        case httpx.ReadError() | httpx.WriteError() | httpx.RemoteProtocolError():
            return RequestFailed("connection cut", str(error))
        case _:
            return RequestFailed(type(error).__name__, str(error))


def _cause(error: BaseException) -> str:
    """The operating system's reason, which httpx buries below a general one."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (ssl.SSLError, socket.gaierror)):
            return str(seen.strerror or seen)
        if isinstance(seen, OSError) and seen.errno:
            return os.strerror(seen.errno)  # asyncio's own text does not say why
        if isinstance(seen, BaseExceptionGroup):
            return _cause(seen.exceptions[0])
        seen = seen.__cause__ or seen.__context__
    return str(error)
