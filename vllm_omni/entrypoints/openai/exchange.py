"""One request and its answer, as they pass the door: what may come in, and what went out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from vllm_omni.entrypoints.openai.errors import APIError
from vllm_omni.entrypoints.openai.protocol import ErrorResponse

access_logger = logging.getLogger("vllm_omni.access")

MAX_LOGGED = 128  # characters of anything that a client chose
# Of JSON, however large the pictures in it are: it is read in the event loop, and a million empty
# lists take a second of everybody's time. Commas in texts count, too.
MAX_VALUES = 2**16
_SEPARATORS = (b",", b"[", b"{")
_EVENT_STREAM = "text/event-stream"


class Answer:
    """Passes an answer on, and remembers what it was."""

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self._send = send
        self._headers = headers  # of every answer
        self._is_event_stream = False
        self.status = 0  # 0: not begun
        self.is_complete = False
        self.num_bytes = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            self._is_event_stream = headers.get("content-type", "").startswith(_EVENT_STREAM)
            for name, value in self._headers.items():
                headers.append(name, value)
        self.num_bytes += len(message.get("body", b""))
        await self._send(message)
        if message["type"] == "http.response.body":
            self.is_complete = not message.get("more_body", False)

    async def end_with(self, error: APIError, scope: Scope, receive: Receive) -> None:
        """Answer with an error, or say it at the end of the events that are out."""
        if not self.status:
            await error.to_response()(scope, receive, self)
        elif self._is_event_stream and not self.is_complete:
            event = f"event: error\ndata: {ErrorResponse(error=error.info).model_dump_json()}\n\n"
            await self({"type": "http.response.body", "body": event.encode()})


def limit_body(
    receive: Receive, answer: Answer, headers: Headers, max_bytes: int, timeout: float
) -> Receive:
    """A body must end within so many bytes, values and seconds.

    Raises `HTTPException`, which is what FastAPI lets through while it reads a body.
    """
    num_bytes, num_values, is_read = 0, 0, False
    is_form = headers.get("content-type", "").lower().startswith("multipart/")
    deadline = asyncio.get_running_loop().time() + timeout

    def refuse(status: int, message: str) -> Message:
        if answer.status:  # nothing can be said any more
            return {"type": "http.disconnect"}
        raise HTTPException(status, message, {"Connection": "close"} if status == 408 else None)

    async def limited() -> Message:
        nonlocal num_bytes, num_values, is_read
        if is_read:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            return refuse(408, f"the body did not arrive within {timeout:g} seconds")
        body = message.get("body", b"")
        num_bytes += len(body)
        is_read = not message.get("more_body", False)
        if num_bytes > max_bytes:
            return refuse(413, say_too_large(max_bytes))
        if not is_form:
            num_values += sum(map(body.count, _SEPARATORS))
            if num_values > MAX_VALUES:
                return refuse(400, f"the body has more than {MAX_VALUES} values")
        return message

    return limited


def say_too_large(max_bytes: int) -> str:
    return f"the body is too large: at most {max_bytes} bytes"


def log_access(
    what: str, status: int, client: tuple[str, int] | None, request_id: str, **fields: object
) -> None:
    """The line in the access log."""
    # A proxy on this machine may say whose request it is: that, too, can be any text.
    address = client[0][:MAX_LOGGED] if client else "-"
    more = {"request_id": request_id, "client": address, **fields}
    access_logger.info("%s %d", what, status, extra={"fields": more})
