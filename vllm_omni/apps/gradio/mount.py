"""Putting the page into the server's own app."""

from __future__ import annotations

import importlib.util
import os
import tempfile

from fastapi import FastAPI
from fastapi.responses import RedirectResponse, Response

from vllm_omni.apps.gradio.gate import Page, PageGate
from vllm_omni.errors import ConfigError

_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
    '<circle cx="8" cy="8" r="5.5" fill="none" stroke="#6366f1" stroke-width="4"/></svg>'
)


def require_gradio() -> None:
    """Say how to get Gradio where it is missing."""
    if importlib.util.find_spec("gradio") is None:
        raise ConfigError("ui", True, "the page needs Gradio: pip install 'vllm-omni[ui]'")


def mount_page(app: FastAPI, path: str = "/ui") -> Page:
    """Mount the page; call it before the layers that decide who may come in are added."""
    require_gradio()
    uploads = tempfile.TemporaryDirectory(prefix="vllm-omni-page-")
    # Gradio reads these when it is imported: where uploads go, and that nobody is told of us.
    os.environ["GRADIO_TEMP_DIR"] = uploads.name
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    import gradio as gr

    from vllm_omni.apps.gradio.page import CSS, MAX_UPLOAD_BYTES, make_page, make_theme

    page = Page(path, uploads)
    gr.mount_gradio_app(
        app,
        make_page(page),
        path,
        footer_links=[],
        run_history=False,
        app_kwargs={"docs_url": None, "redoc_url": None, "openapi_url": None},
        allowed_paths=[],
        show_error=False,  # what is meant for the visitor is on the page
        max_file_size=MAX_UPLOAD_BYTES,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=make_theme(),
        css_paths=CSS,
    )
    app.add_middleware(PageGate, page=page)

    async def go_to_page() -> Response:
        return RedirectResponse(f"{path}/")

    app.add_api_route("/", go_to_page, include_in_schema=False)
    app.add_api_route("/favicon.ico", get_icon, include_in_schema=False)
    return page


async def get_icon() -> Response:
    """Browsers ask for it at the server's root."""
    return Response(_ICON, media_type="image/svg+xml")
