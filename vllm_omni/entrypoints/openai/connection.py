"""A connection: uvicorn's, with an end to waiting, and with our errors where it has its own.

Seams, checked against uvicorn 0.54: `H11Protocol`, its `cycle`, `conn` and `transport`, and that
it calls `send_400_response` while it handles h11's error.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.entrypoints.openai.errors import APIError
from vllm_omni.entrypoints.openai.exchange import log_access

_LINGER = 5.0  # seconds for a client to read why it was refused, while it goes on sending
_MAX_REFUSED = 64  # connections that are told why; further ones are only closed
_MIN_READ = 2**16  # bytes that a client must read within `send_timeout`


class Connection(H11Protocol):
    """One client's. The time for a body is another one, in `exchange.py`."""

    def __init__(self, server_config: ServerConfig, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._server_config = server_config
        self._is_refused = False
        self._receiving = _Timer(self.loop)
        self._sending = _Timer(self.loop)
        self._last_heard = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Whatever is not read is watched, however little: see `pause_writing`.
        transport.set_write_buffer_limits(high=0)
        self._expect_request()
        most = self._server_config.max_connections
        if len(self.connections) > most and not self._close_idle():
            self._refuse_connection(most)

    def connection_lost(self, exc: Exception | None) -> None:
        self._receiving.stop()
        self._sending.stop()
        super().connection_lost(exc)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def has_unsent(self) -> bool:
        """Whether a part of an answer is still here."""
        return not self._is_refused and bool(self.transport.get_write_buffer_size())

    # --- how many there are ---

    def _close_idle(self) -> bool:
        """Make room: close the connection on which nothing was asked for the longest time."""
        others = [one for one in self.connections if isinstance(one, Connection) and one.is_idle]
        oldest = min((one for one in others if one is not self), key=_get_last_heard, default=None)
        if oldest is not None:
            oldest.transport.abort()
            # Now: many may come before the loop gets to `connection_lost`, each to make room.
            self.connections.discard(oldest)
        return oldest is not None

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for anything on it."""
        return not (self._is_answering or self._is_refused or self.has_unsent)

    def _refuse_connection(self, most: int) -> None:
        self._is_refused = True
        if len(self.connections) > most + _MAX_REFUSED:
            self.transport.abort()
        else:
            message = f"there are too many connections: at most {most}"
            self._refuse(APIError(503, message, code="too_many_connections"))

    # --- what a client sends ---

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._last_heard = self.loop.time()
        super().data_received(data)
        # Between two requests uvicorn's own time for idle connections runs, until something comes:
        # the beginning of a request, or the rest of one that is answered already.
        if self._is_answering:
            self._receiving.stop()
        elif not self._is_refused:
            self._expect_request()

    def _expect_request(self) -> None:
        self._receiving.start(self._server_config.receive_timeout, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, or has no end."""
        error = sys.exc_info()[1]
        assert isinstance(error, h11.RemoteProtocolError)
        self._is_refused = True
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # in the middle of an answer
            return
        if error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            most = self._server_config.max_header_bytes
            self._refuse(APIError(431, f"the headers are too large: at most {most} bytes"))
        else:
            self._refuse(APIError(error.error_status_hint, "this is not valid HTTP"))

    def _refuse(self, refusal: APIError) -> None:
        state = self.cycle.scope["state"] if self._is_answering else {}
        request_id = state.get("request_id", uuid.uuid4().hex)
        response = refusal.to_response()
        start = h11.Response(
            status_code=refusal.status,
            headers=[
                *response.raw_headers,
                (b"x-request-id", request_id.encode()),
                (b"connection", b"close"),
            ],
            reason=HTTPStatus(refusal.status).phrase.encode(),
        )
        for event in (start, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        if self._is_answering:  # whoever waits for the rest of a body, and tells of it
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        else:
            log_access("- -", refusal.status, self.client, request_id)
        # Not closed at once: what still comes in would make the client's system drop the answer.
        self.transport.write_eof()
        self._receiving.stop()
        self._receiving.start(_LINGER, self.transport.abort)

    # --- what a client reads ---

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._sending.stop()

    def _watch_reader(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._sending.start(self._server_config.send_timeout, lambda: self._check_reader(waiting))

    def _check_reader(self, waiting: int) -> None:
        """Cut off a client that keeps its place and its answer's memory, and does not read."""
        if waiting - self.transport.get_write_buffer_size() < _MIN_READ:
            self.transport.abort()
        else:
            self._watch_reader()


def _get_last_heard(connection: Connection) -> float:
    return connection._last_heard


class _Timer:
    """Calls a function once, unless it is stopped before."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    def start(self, seconds: float, function: Callable[[], None]) -> None:
        """Unless it runs already."""
        if self._handle is None:
            self._handle = self._loop.call_later(seconds, self._run, function)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _run(self, function: Callable[[], None]) -> None:
        self._handle = None
        function()
