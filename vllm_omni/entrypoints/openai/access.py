"""Who may come in, and how: an ASGI layer around every route, those of the page included.

In order: a request id; the size of the headers; the Host and Origin; the key; the size of the
body; and when the answer is out, a line in the log. Nothing gets past it that is not named here.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import re
import time
import uuid
from collections.abc import Callable
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_omni.entrypoints.openai.config import ServerConfig, digest_key, get_owner
from vllm_omni.entrypoints.openai.disconnect import CLIENT_CLOSED_REQUEST
from vllm_omni.entrypoints.openai.errors import APIError, shutting_down
from vllm_omni.entrypoints.openai.exchange import (
    MAX_LOGGED,
    Answer,
    limit_body,
    log_access,
    say_too_large,
)
from vllm_omni.entrypoints.openai.listener import is_loopback

REQUEST_ID = "x-request-id"
RETRY_HEADER = "Idempotency-Key"
OPEN_PATHS = ("/health/live", "/health/ready")  # probes of a load balancer have no key
LARGE_BODIES = ("/v1/chat/completions", "/v1/images/edits", "/ui/")  # pictures may be in them
MAX_SMALL_BODY = 2**20  # bytes, of all others: what is no picture is parsed in the event loop

_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"([\w.-]+|\[[\da-f:.]+\])(:\d{1,5})?", re.ASCII | re.IGNORECASE)
_SAFETY = {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "SAMEORIGIN"}

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
        self.is_closing = False  # nothing new is begun
        # Called with (path, owner) before a body is read: a full queue is no reason to read it.
        self.check_place: Callable[[str, str], None] | None = None
        self._keys = [digest_key(key) for key in config.api_keys]
        self._hosts = {name.lower() for name in (*_LOCAL_NAMES, config.host, *config.allowed_hosts)}
        # Whoever lets everybody in does not know the names they use, unless some were given.
        self._checks_host = (
            not config.allow_no_key or bool(config.allowed_hosts) or is_loopback(config.host)
        )
        self._open: dict[asyncio.Task[None], Scope] = {}  # requests that are not answered yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:  # no route here is a web socket
            await send({"type": "websocket.close", "code": 1008})

    @property
    def num_working(self) -> int:
        """Requests that ask for work and are not answered yet."""
        return sum(scope["method"] == "POST" for scope in self._open.values())

    def answer_all(self) -> None:
        """End whatever is under way: each is told so."""
        self.is_closing = True
        for task in self._open:
            task.cancel()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = time.monotonic()
        headers = Headers(scope=scope)
        request_id = uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"], state["owner"] = request_id, ""
        answer = Answer(send, {REQUEST_ID: request_id, **_SAFETY, **self._get_cors(headers)})
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = scope
        # A route that answers GET answers HEAD too; the server leaves the body out.
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        try:
            self._check(scope, headers)
            if self._is_preflight(scope, headers):
                await _answer_preflight(headers)(scope, receive, answer)
            else:
                most, timeout = self._get_max_body(scope), self.config.receive_timeout
                limited = limit_body(receive, answer, headers, most, timeout)
                await self.app(inner, limited, answer)
        except APIError as error:
            await error.to_response()(scope, receive, answer)
        except asyncio.CancelledError:
            if not self.is_closing:
                raise
            await answer.end_with(shutting_down(), scope, receive)
        except Exception:
            if not answer.is_complete:
                raise
            # It has been logged and answered: see `errors.install`.
        finally:
            del self._open[task]
            self._tell(scope, _get_route(inner), answer, request_id, time.monotonic() - start)

    # --- who may come in ---

    def _check(self, scope: Scope, headers: Headers) -> None:
        size = len(scope["path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        if size > (most := self.config.max_header_bytes):
            raise APIError(431, f"the headers have {size} bytes: at most {most}")
        host = headers.get("host")
        if host and not _HOST.fullmatch(host):
            raise APIError(400, "the Host header is no host")
        if not self._keys:
            self._check_host(host or "")
            self._check_origin(headers)
        elif scope["path"] not in OPEN_PATHS and not self._is_preflight(scope, headers):
            scope["state"]["owner"] = self._check_key(headers)
        length = headers.get("content-length", "0")
        if not re.fullmatch(r"[0-9]{1,20}", length):
            raise APIError(400, "Content-Length is not a number")
        if int(length) > (most := self._get_max_body(scope)):
            raise APIError(413, say_too_large(most))
        if self.is_closing and scope["method"] == "POST":
            raise shutting_down()
        # Who comes again with a key may find an answer that is there already.
        is_new = scope["method"] == "POST" and RETRY_HEADER not in headers
        if is_new and self.check_place is not None:
            self.check_place(scope["path"], scope["state"]["owner"])

    def _check_host(self, host: str) -> None:
        """Without a key a page of another site must not get in under a name of its own."""
        name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
        if self._checks_host and name.lower() not in self._hosts:
            message = "this Host is not answered without an API key: see --allowed-host"
            raise APIError(403, message, code="host_not_allowed")

    def _check_origin(self, headers: Headers) -> None:
        """Where a browser would let it in by itself, a page must be one of ours, or allowed."""
        origin = headers.get("origin")
        if origin is None or origin in self.config.allowed_origins:
            return
        if origin.partition("://")[2] != headers.get("host"):
            message = "pages of other origins may not call this server: see --allowed-origin"
            raise APIError(403, message, code="origin_not_allowed")

    def _check_key(self, headers: Headers) -> str:
        """Whose key it is."""
        scheme, key = _read_key(headers.get("authorization", ""))
        given = digest_key(key)
        # All are compared, so that the time says nothing about which one is near.
        if not any([hmac.compare_digest(given, known) for known in self._keys]):
            # The page is opened by a browser, which asks for a password when it reads this.
            raise APIError(
                401,
                "a valid API key is needed: send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": 'Basic realm="vllm-omni", charset="UTF-8"'},
            )
        if scheme == "basic":  # a browser sends it along whatever page made the request
            self._check_origin(headers)
        return get_owner(key)

    # --- pages of other origins ---

    def _is_preflight(self, scope: Scope, headers: Headers) -> bool:
        """A browser asks first, without a key, whether a page may ask."""
        return (
            scope["method"] == "OPTIONS"
            and headers.get("origin") in self.config.allowed_origins
            and "access-control-request-method" in headers
        )

    def _get_cors(self, headers: Headers) -> dict[str, str]:
        if not self.config.allowed_origins:
            return {}
        origin = headers.get("origin")
        if origin not in self.config.allowed_origins:
            return {"Vary": "Origin"}
        return {
            "Vary": "Origin",
            "Access-Control-Allow-Origin": origin or "",
            "Access-Control-Expose-Headers": f"{REQUEST_ID}, Retry-After",
        }

    # --- how much ---

    def _get_max_body(self, scope: Scope) -> int:
        most = self.config.max_body_bytes
        return most if scope["path"].startswith(LARGE_BODIES) else min(most, MAX_SMALL_BODY)

    # --- what is told of it ---

    def _tell(
        self, scope: Scope, route: str, answer: Answer, request_id: str, seconds: float
    ) -> None:
        # 0: nobody was there any more to send an answer to.
        status = answer.status or CLIENT_CLOSED_REQUEST
        method = scope["method"]
        if self.observe is not None:
            self.observe(method, route, status, seconds)
        fields: dict[str, object] = {"seconds": round(seconds, 4), "bytes": answer.num_bytes}
        if (own_id := Headers(scope=scope).get(REQUEST_ID)) is not None:
            fields["client_request_id"] = own_id[:MAX_LOGGED]
        what = f"{method[:MAX_LOGGED]} {quote(scope['path'], errors='replace')[:MAX_LOGGED]}"
        log_access(what, status, scope.get("client"), request_id, **fields)


def _answer_preflight(headers: Headers) -> Response:
    """Any header may come: the origin is known, and a key among them is what decides."""
    allowed = {
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Allow-Headers": headers.get("access-control-request-headers", "*"),
        "Access-Control-Max-Age": "600",
    }
    return Response(status_code=204, headers=allowed)


def _get_route(scope: Scope) -> str:
    """The route's pattern: there are few of them, whatever paths clients think of."""
    path = getattr(scope.get("route"), "path", None)
    return "other" if path is None else f"{scope.get('root_path', '')}{path}"


def _read_key(authorization: str) -> tuple[str, str]:
    """The scheme, and the key: a Bearer token, or the password of Basic authentication."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            value = base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            value = ""
    elif scheme.lower() != "bearer":
        value = ""
    return scheme.lower(), value.strip()
