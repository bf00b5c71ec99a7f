"""`EventStream`: server-sent events, of which none are made for a client that has left."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from vllm_omni.entrypoints.openai.disconnect import run_until_disconnect
from vllm_omni.entrypoints.openai.errors import to_api_error
from vllm_omni.entrypoints.openai.protocol import ErrorResponse

EVENT_STREAM = "text/event-stream"
DONE = "[DONE]"  # the last event of a chat


class EventStream(StreamingResponse):
    """An answer of events; what goes wrong on the way is the last of them.

    Args:
        first: the first event, already made.
        events: those that follow; closed when the answer is out, or the client has left.
        error_event: the name of an event that tells an error; None: it has none.
    """

    media_type = EVENT_STREAM

    def __init__(
        self, first: str, events: AsyncGenerator[str, None], error_event: str | None
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self._events = events
        self._body = _tell_errors(first, events, error_event)
        super().__init__(self._body, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette would leave generators that are not at their end to the garbage collector.
        async with aclosing(self._events), aclosing(self._body):
            await super().__call__(scope, receive, send)


def describe_events(*models: type[BaseModel], last: str | None = None) -> dict[str, Any]:
    """Of a response in the OpenAPI document: events of these models, or an error.

    Args:
        last: data of the event that ends the stream, if one does.
    """
    kinds = [*(model.__name__ for model in models), ErrorResponse.__name__]
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [{"$ref": f"#/components/schemas/{kind}"} for kind in kinds]},
    }
    item = {
        "type": "object",
        "properties": {
            "event": {"type": "string"},
            "data": data if last is None else {"anyOf": [{"const": last}, data]},
        },
        "required": ["data"],
    }
    return {"content": {EVENT_STREAM: {"itemSchema": item}}}


async def start_stream(
    request: Request, events: AsyncGenerator[str, None], error_event: str | None = "error"
) -> EventStream:
    """Answer with a stream once its first event is there: until then an error has its status."""
    first = await run_until_disconnect(request, anext(events))
    return EventStream(first, events, error_event)


async def _tell_errors(
    first: str, events: AsyncGenerator[str, None], error_event: str | None
) -> AsyncGenerator[str, None]:
    yield first
    try:
        async for event in events:
            yield event
    except Exception as error:  # it is told, whatever it is: the status is sent already
        name = "" if error_event is None else f"event: {error_event}\n"
        told = ErrorResponse(error=to_api_error(error).info)
        yield f"{name}data: {told.model_dump_json()}\n\n"
