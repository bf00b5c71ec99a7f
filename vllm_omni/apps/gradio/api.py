"""The server's HTTP API, as the page calls it."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

_CONNECT_TIMEOUT = 10.0  # seconds; an answer may take as long as the server's queue is
_STEP_COMMENT = re.compile(r": step (\d+) of (\d+)")

Message = dict[str, Any]


class ApiError(Exception):
    """What the server refused or failed at, in its own words."""


@dataclass(frozen=True)
class Step:
    """How far a picture is; servers that say so do it between the events."""

    step: int
    num_steps: int


@dataclass(frozen=True)
class ModelInfo:
    """What the page needs to know of the model that is served."""

    id: str
    output_modalities: tuple[str, ...] = ("text", "image")
    default_size: tuple[int, int] = (1024, 1024)  # width, height
    default_steps: int = 50
    size_multiple: int = 16
    max_n: int = 1

    @classmethod
    def from_json(cls, model: Mapping[str, Any]) -> ModelInfo:
        """From an entry of /v1/models; of a server that is not ours only the id is known."""
        known = {k: v for k, v in model.get("capabilities", {}).items() if v is not None}
        if "default_size" in known:
            width, height = known["default_size"].split("x")
            known["default_size"] = (int(width), int(height))
        if "output_modalities" in known:
            known["output_modalities"] = tuple(known["output_modalities"])
        fields = cls.__dataclass_fields__
        return cls(id=model["id"], **{k: v for k, v in known.items() if k in fields})


def make_client() -> httpx.AsyncClient:
    """For all visitors: how many requests may be under way is for the server to say."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(_CONNECT_TIMEOUT, read=None),
        limits=httpx.Limits(max_connections=None),
        trust_env=False,  # a proxy for the outside world is of no use on this machine
    )


@dataclass(frozen=True)
class Api:
    """The API, called for one visitor.

    Args:
        authorization: the header with which the visitor's browser came in, with their key.
    """

    client: httpx.AsyncClient
    url: str
    authorization: str | None = None

    async def get_model(self) -> ModelInfo:
        """The model that is served."""
        return ModelInfo.from_json((await self._get("/v1/models"))["data"][0])

    async def get_queue(self) -> Message:
        """How busy the server is."""
        return await self._get("/v1/queue")

    async def stream(self, path: str, body: Message) -> AsyncGenerator[Message | Step, None]:
        """What the server sends on the way; closing it, or cancelling, ends the request there."""
        request = self.client.stream("POST", self.url + path, json=body, headers=self._headers)
        try:
            async with request as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    raise _make_error(response)
                async for line in _lines(response):
                    if comment := _STEP_COMMENT.match(line):
                        yield Step(int(comment[1]), int(comment[2]))
                    elif line.startswith("data: ") and line != "data: [DONE]":
                        message = json.loads(line.removeprefix("data: "))
                        if "error" in message:
                            raise ApiError(message["error"]["message"])
                        yield message
        except httpx.TransportError as error:
            raise _unreachable(error) from error

    async def _get(self, path: str) -> Message:
        try:
            response = await self.client.get(self.url + path, headers=self._headers)
        except httpx.TransportError as error:
            raise _unreachable(error) from error
        if response.status_code != httpx.codes.OK:
            raise _make_error(response)
        answer: Message = response.json()
        return answer

    @property
    def _headers(self) -> dict[str, str]:
        return {} if self.authorization is None else {"Authorization": self.authorization}


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Lines of a stream. httpx's own also end at characters that JSON may hold, as U+2028."""
    rest = bytearray()
    async for chunk in response.aiter_bytes():
        rest += chunk
        if b"\n" in chunk:
            *lines, last = rest.split(b"\n")
            rest = bytearray(last)
            for line in lines:
                yield line.decode().removesuffix("\r")


def _make_error(response: httpx.Response) -> ApiError:
    try:
        return ApiError(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ApiError(f"the server answered with status {response.status_code}")


def _unreachable(error: httpx.TransportError) -> ApiError:
    return ApiError(f"the server does not answer ({type(error).__name__})")
