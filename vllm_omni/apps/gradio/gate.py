"""Between the browser and Gradio: sessions, pictures, and only those of Gradio's routes we use."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni.apps.gradio.api import Api, ApiError, make_client
from vllm_omni.apps.gradio.sessions import Session, Sessions
from vllm_omni.apps.gradio.view import describe_queue

# Gradio has many more, some of which read files, fetch addresses or run code.
_GRADIO_ROUTES = re.compile(
    r"""/(
        assets/.* | static/.* | theme\.css | config | favicon\.ico
        | gradio_api/(queue/(join|data) | heartbeat/[^/]+ | upload | upload_progress
                     | startup-events | app_id | cancel | reset)/?
    )?""",
    re.VERBOSE,
)

# Gradio's scripts are inline and evaluate templates. Nothing may go to another host, or be framed.
_POLICY = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; object-src 'none'; base-uri 'self'; "
    "form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer"}
_SESSION_ROUTES = ("/", "/gradio_api/queue/join")  # where a visit begins, or goes on elsewhere
_SAFE_METHODS = ("GET", "HEAD")


@dataclass(frozen=True)
class Visit:
    """One request of a visitor: whose it is, and the API as they may use it."""

    session: Session
    api: Api

    @classmethod
    def of(cls, request: Any) -> Visit:
        """The visit behind Gradio's `gr.Request`."""
        visit: Visit = request.request.state.page_visit
        return visit


@dataclass(frozen=True)
class Page:
    """What all visits to a page share; `mount_page` makes it."""

    path: str  # under which the page is, without a slash at its end
    uploads: tempfile.TemporaryDirectory[str]  # where Gradio puts files for a moment
    sessions: Sessions = field(default_factory=Sessions)
    client: httpx.AsyncClient = field(default_factory=make_client)

    def close(self) -> None:
        """Leave no files behind."""
        self.uploads.cleanup()


class PageGate:
    """An ASGI layer that looks at the page's paths only."""

    def __init__(self, app: ASGIApp, page: Page) -> None:
        self.app = app
        self.page = page
        self.path = page.path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not f"{scope['path']}/".startswith(f"{self.path}/"):
            await self.app(scope, receive, send)
            return
        visit, cookie = self._visit(scope)
        send = _with_headers(send, cookie)
        answer = await self._answer(scope, visit)
        if answer is not None:
            await answer(scope, receive, send)
            return
        scope.setdefault("state", {})["page_visit"] = visit
        await self.app(scope, receive, send)

    # --- who it is ---

    def _visit(self, scope: Scope) -> tuple[Visit, str | None]:
        """The visit, and the cookie that a new visitor gets."""
        connection = HTTPConnection(scope)
        host, port = scope["server"]
        name = f"vllm_omni_page_{port}"  # browsers share cookies among the ports of a host
        session = self.page.sessions.find(connection.cookies.get(name))
        cookie = None
        if session is None and scope["path"].removeprefix(self.path) in _SESSION_ROUTES:
            session = self.page.sessions.create()
            secure = "; Secure" if scope["scheme"] == "https" else ""
            cookie = f"{name}={session.id}; Path={self.path}; HttpOnly; SameSite=Strict{secure}"
        host = f"[{host}]" if ":" in host else host
        # The API is on the address on which the browser's request came in.
        url, key = f"http://{host}:{port}", connection.headers.get("authorization")
        api = Api(self.page.client, url, key)
        return Visit(session or Session(), api), cookie

    # --- what is answered here ---

    async def _answer(self, scope: Scope, visit: Visit) -> Response | None:
        """The answer to all but what Gradio is to answer."""
        path = scope["path"].removeprefix(self.path)
        if scope["method"] not in _SAFE_METHODS and not _is_same_origin(Headers(scope=scope)):
            return PlainTextResponse("pages of other origins may not use this one", 403)
        if path == "":
            return RedirectResponse(f"{self.path}/")
        if path == "/status":
            return await _get_status(visit)
        if path.startswith("/pictures/"):
            return _get_picture(visit, path.removeprefix("/pictures/"))
        if not _GRADIO_ROUTES.fullmatch(path) and not self._is_upload(path):
            return PlainTextResponse("there is nothing here", 404)
        return None

    def _is_upload(self, path: str) -> bool:
        """Whether it is one of the files that visitors are about to send."""
        return path.startswith(f"/gradio_api/file={self.page.uploads.name}/") and ".." not in path


async def _get_status(visit: Visit) -> Response:
    try:
        queue = await visit.api.get_queue()
        return JSONResponse({"status": describe_queue(queue, visit.session.model)})
    except ApiError as error:
        return JSONResponse({"status": str(error)})


def _get_picture(visit: Visit, picture_id: str) -> Response:
    picture = visit.session.pictures.get(picture_id)
    if picture is None:
        return PlainTextResponse("no such picture: it may have given way to newer ones", 404)
    headers = {"Cache-Control": "private, max-age=31536000, immutable"}
    return Response(picture.data, media_type=picture.media_type, headers=headers)


def _is_same_origin(headers: Headers) -> bool:
    """Whether a request comes from this page, or from no page at all."""
    if site := headers.get("sec-fetch-site"):  # browsers set it, scripts cannot
        return site in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")


def _with_headers(send: Send, cookie: str | None) -> Callable[[Message], Awaitable[None]]:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.update(_HEADERS)
            if cookie is not None:
                headers.append("Set-Cookie", cookie)
            if headers.get("content-type", "").startswith("text/html"):
                headers["Cache-Control"] = "no-store"
        await send(message)

    return send_with_headers
