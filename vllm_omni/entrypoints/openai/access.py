"""Who may come in, and how: an ASGI layer around every route, those of the page included.

In order: a request id; the size of the headers; the Host and Origin; the key; the size of the
body; and when the answer is out, a line in the log. Nothing gets past it that is not named here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.entrypoints.openai.disconnect import CLIENT_CLOSED_REQUEST
from vllm_omni.entrypoints.openai.errors import APIError

access_logger = logging.getLogger("vllm_omni.access")

REQUEST_ID = "x-request-id"
OPEN_PREFIX = "/health/"  # probes of a load balancer have no key
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MAX_LOGGED = 128  # characters of anything that a client chose

ObserveHTTP = Callable[[str, str, int, float], None]
"""Called with (method, route, status, seconds) when an answer is out."""


class AccessMiddleware:
    """The one door."""

    def __init__(
        self, app: ASGIApp, config: ServerConfig, observe: ObserveHTTP | None = None
    ) -> None:
        self.app = app
        self.config = config
        self.observe = observe
        self._keys = [_digest(key) for key in config.api_keys]
        self._hosts = {*_LOOPBACK, config.host, *config.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:  # no route here is a web socket
            await send({"type": "websocket.close", "code": 1008})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = time.monotonic()
        request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        sent = _Sent(send, request_id)
        try:
            self._check(scope)
            await self.app(scope, self._limit_body(scope, receive), sent)
        except APIError as error:
            await error.to_response()(scope, receive, sent)
        finally:
            self._log(scope, sent, request_id, time.monotonic() - start)

    # --- who may come in ---

    def _check(self, scope: Scope) -> None:
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self.config.max_header_bytes:
            most = self.config.max_header_bytes
            raise APIError(431, f"the headers have {size} bytes: at most {most}")
        headers = Headers(scope=scope)
        if not self._keys:
            self._check_host(headers)
        elif not scope["path"].startswith(OPEN_PREFIX) and not self._has_key(headers):
            # The page is opened by a browser, which asks for a password when it reads this.
            raise APIError(
                401,
                "a valid API key is needed: send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": 'Basic realm="vllm-omni", charset="UTF-8"'},
            )
        length = headers.get("content-length", "0")
        if not length.isdecimal():
            raise APIError(400, "Content-Length is not a number")
        if int(length) > self.config.max_body_bytes:
            raise APIError(413, self._too_large)

    def _check_host(self, headers: Headers) -> None:
        """Without a key a page of another site must not get in, by whatever name it comes."""
        is_open = self.config.allow_no_key
        if not is_open and _host_of(f"//{headers.get('host', '')}") not in self._hosts:
            message = "this Host is not answered without an API key: see allowed_hosts"
            raise APIError(403, message, code="host_not_allowed")
        origin = headers.get("origin")
        if origin is not None and origin not in self.config.allowed_origins:
            same_host = origin.partition("://")[2] == headers.get("host")
            if not same_host:
                message = "pages of other origins may not call this server: see allowed_origins"
                raise APIError(403, message, code="origin_not_allowed")

    def _has_key(self, headers: Headers) -> bool:
        given = _digest(_read_key(headers.get("authorization", "")))
        # All are compared, so that the time says nothing about which one is near.
        return any([hmac.compare_digest(given, key) for key in self._keys])

    # --- how much ---

    @property
    def _too_large(self) -> str:
        return f"the body is too large: at most {self.config.max_body_bytes} bytes"

    def _limit_body(self, scope: Scope, receive: Receive) -> Receive:
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.config.max_body_bytes:
                raise HTTPException(413, self._too_large)
            return message

        return limited

    # --- what is told of it ---

    def _log(self, scope: Scope, sent: _Sent, request_id: str, seconds: float) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "other")
        # Nobody was there any more to send an answer to.
        status = sent.status or CLIENT_CLOSED_REQUEST
        if self.observe is not None:
            self.observe(scope["method"], path, status, seconds)
        client = scope.get("client") or ("-", 0)
        access_logger.info(
            "%s %s %d",
            scope["method"][:_MAX_LOGGED],
            _clean(scope["path"]),
            status,
            extra={
                "fields": {
                    "seconds": round(seconds, 4),
                    "bytes": sent.num_bytes,
                    "client": client[0],
                    "request_id": request_id,
                    **_own_id(scope),
                }
            },
        )


class _Sent:
    """Passes an answer on, and remembers what it was."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.status = 0
        self.num_bytes = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers[REQUEST_ID] = self._request_id
            headers.setdefault("X-Content-Type-Options", "nosniff")
        self.num_bytes += len(message.get("body", b""))
        await self._send(message)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to an address."""
    return host in _LOOPBACK or host.startswith("127.")


def check_exposure(config: ServerConfig) -> str | None:
    """Why a server may not listen as it is told to; None if it may."""
    if config.api_keys or config.allow_no_key or is_loopback(config.host):
        return None
    return (
        f"host={config.host!r} can be reached by others, and there is no API key: "
        "give --api-key, or --allow-no-key if that is meant"
    )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _read_key(authorization: str) -> str:
    """The key of a Bearer token, or the password of Basic authentication."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


def _host_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _own_id(scope: Scope) -> dict[str, str]:
    """The id that the client gave its request: for the log only."""
    own = Headers(scope=scope).get(REQUEST_ID)
    return {} if own is None else {"client_request_id": _clean(own)}


def _clean(text: str) -> str:
    """Something that a client chose, safe to put on a line of a log."""
    return text[:_MAX_LOGGED].encode("unicode_escape", "backslashreplace").decode("ascii")


__all__: Sequence[str] = ("AccessMiddleware", "check_exposure", "is_loopback")
