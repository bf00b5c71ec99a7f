"""The page: its tabs, its looks, and what happens when it is opened and closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr

from vllm_omni.apps.gradio import view
from vllm_omni.apps.gradio.api import ApiError
from vllm_omni.apps.gradio.chat import ChatTab
from vllm_omni.apps.gradio.draw import DrawTab
from vllm_omni.apps.gradio.gate import Page, Visit

CSS = Path(__file__).with_name("page.css")
MAX_UPLOAD_BYTES = 8 * 2**20
_UPLOADS_LIVE = 600  # seconds; a picture is taken out of its file as soon as it is sent

_SANS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
_MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "monospace"]


def make_theme() -> gr.themes.Base:
    """Fonts that every machine has: nothing is fetched from elsewhere."""
    return gr.themes.Default(
        primary_hue=gr.themes.colors.indigo,
        neutral_hue=gr.themes.colors.slate,
        font=_SANS,
        font_mono=_MONO,
        radius_size=gr.themes.sizes.radius_md,
        spacing_size=gr.themes.sizes.spacing_md,
    )


def make_page(page: Page) -> gr.Blocks:
    """All that is on it."""
    pictures_url = f"{page.path}/pictures"
    blocks = gr.Blocks(
        title="vLLM-omni",
        analytics_enabled=False,
        fill_width=True,
        delete_cache=(_UPLOADS_LIVE, _UPLOADS_LIVE),
    )
    with blocks:
        header = gr.HTML(
            view.show_header(""),
            elem_id="header",
            js_on_load=view.STATUS_JS_ON_LOAD.replace("STATUS_URL", f"{page.path}/status"),
        )
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Draw"):
                draw = DrawTab(page.sessions, pictures_url)
            with gr.Tab("Chat"):
                chat = ChatTab(page.sessions, pictures_url)

        async def load(request: gr.Request) -> Any:
            visit = Visit.of(request)
            try:
                model = await visit.api.get_model()
            except ApiError as error:
                raise gr.Error(str(error), print_exception=False) from error
            visit.session.model = model
            return view.show_header(model.id), *draw.load(visit, model), *chat.load(visit, model)

        blocks.load(js=view.FOCUS_JS, api_visibility="private")
        blocks.load(
            load,
            None,
            [header, *draw.loaded, *chat.loaded],
            show_progress="hidden",
            api_visibility="private",
        )
        blocks.unload(_leave)
    # How many may be under way at once is for the API to say.
    blocks.queue(default_concurrency_limit=None, api_open=False)
    return blocks


def _leave(request: gr.Request) -> None:
    """A tab was closed: what it waits for is of use to nobody."""
    Visit.of(request).session.cancel(str(request.session_hash))
