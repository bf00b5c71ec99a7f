"""The Draw tab: a form, and the pictures that come of it."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import gradio as gr

from vllm_omni.apps.gradio import view
from vllm_omni.apps.gradio.api import ApiError, Message, ModelInfo, Step
from vllm_omni.apps.gradio.gate import Visit
from vllm_omni.apps.gradio.sessions import Form, Picture, Sessions

PATH = "/v1/images/generations"
GUIDANCE = 3.0
MAX_PARTIAL_IMAGES = 3  # OpenAI's most
TICK = 0.5  # seconds between looks at the clock
_RATIOS = {"square": 1.0, "portrait": 3 / 4, "landscape": 4 / 3, "tall": 9 / 16, "wide": 16 / 9}

Update = tuple[Any, ...]


def make_sizes(model: ModelInfo) -> list[tuple[str, str]]:
    """Sizes to choose from, with about as many pixels as the model's own: (label, value)."""
    width, height = model.default_size
    side = (width * height) ** 0.5

    def whole(pixels: float) -> int:
        return max(1, round(pixels / model.size_multiple)) * model.size_multiple

    sizes = {
        name: (whole(side * ratio**0.5), whole(side / ratio**0.5))
        for name, ratio in _RATIOS.items()
    }
    choices = [(f"{w} {view.TIMES} {h} {name}", f"{w}x{h}") for name, (w, h) in sizes.items()]
    if model.default_size not in sizes.values():
        choices.insert(0, (f"{width} {view.TIMES} {height}", f"{width}x{height}"))
    return [*choices, ("Custom", view.CUSTOM)]


@dataclass
class Drawing:
    """One request, from the click to its pictures."""

    form: Form
    start: float = field(default_factory=time.monotonic)
    step: int = 0
    num_steps: int = 0
    previews: dict[int, str] = field(default_factory=dict)  # by picture, as data URLs
    pictures: list[Picture] = field(default_factory=list)

    def take(self, message: Message | Step) -> bool:
        """Note what the server sent; whether there is a new preview to look at."""
        if isinstance(message, Step):
            self.step, self.num_steps = message.step, message.num_steps
        elif message["type"] == "image_generation.partial_image":
            self.step, self.num_steps = message["step"], message["num_steps"]
            media_type = f"image/{message['output_format']}"
            self.previews[message["image_index"]] = (
                f"data:{media_type};base64,{message['b64_json']}"
            )
            return True
        elif message["type"] == "image_generation.completed":
            self.pictures.append(self._make_picture(message))
        return False

    def _make_picture(self, message: Message) -> Picture:
        return Picture(
            data=base64.b64decode(message["b64_json"]),
            media_type=f"image/{message['output_format']}",
            form=self.form,
            seed=message["seed"],
            shape=parse_size(message["size"]),
            seconds=message.get("metrics", {}).get("total_time", self.seconds),
            revised_prompt=message.get("revised_prompt"),
        )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    @property
    def size(self) -> tuple[int, int]:
        return parse_size(self.form["size"])

    def show(self) -> str:
        return view.show_forming(self.previews, self.form["n"], self.size)

    def show_bar(self) -> str:
        if not self.step:
            return view.show_bar(
                0, self.form["num_inference_steps"], f"Waiting · {self.seconds:.0f} s"
            )
        text = f"Step {self.step} of {self.num_steps} · {self.seconds:.0f} s"
        return view.show_bar(self.step, self.num_steps, text)


class DrawTab:
    """The components, and what happens when they are used."""

    def __init__(self, sessions: Sessions, pictures_url: str) -> None:
        self.sessions = sessions
        self.pictures_url = pictures_url
        with gr.Row(elem_id="draw"):
            with gr.Column(elem_id="ask", scale=2, min_width=320):
                self._make_prompt()
                self._make_options()
            with gr.Column(elem_id="see", scale=5, min_width=320):
                self.bar = gr.HTML("", elem_id="bar")
                self.stage = gr.HTML(view.show_hint(), elem_id="stage", js_on_load=view.JS_ON_LOAD)
                self.gallery = gr.HTML("", elem_id="gallery", js_on_load=view.JS_ON_LOAD)
        self._connect()

    def _make_prompt(self) -> None:
        with gr.Column(elem_id="prompt-box"):
            self.prompt = gr.Textbox(
                label="Prompt",
                placeholder="a large red circle on a white background",
                lines=1,
                max_lines=6,
                elem_id="prompt",
            )
            with gr.Row(elem_id="buttons"):
                self.generate = gr.Button(
                    "Generate", variant="primary", scale=3, min_width=120, elem_id="generate"
                )
                self.cancel = gr.Button(
                    "Cancel",
                    variant="stop",
                    scale=1,
                    min_width=80,
                    interactive=False,
                    elem_id="cancel",
                )

    def _make_options(self) -> None:
        with gr.Column(elem_id="options"):
            with gr.Row():
                self.size = gr.Dropdown([], label="Size", scale=3, min_width=160, elem_id="size")
                self.count = gr.Number(
                    1,
                    label="Pictures",
                    precision=0,
                    minimum=1,
                    scale=1,
                    min_width=80,
                    elem_id="count",
                )
            with gr.Row(visible=False) as self.custom:
                self.width = gr.Number(label="Width", precision=0, min_width=100, elem_id="width")
                self.height = gr.Number(
                    label="Height", precision=0, min_width=100, elem_id="height"
                )
            self.steps = gr.Slider(1, 100, 20, step=1, label="Steps", elem_id="steps")
            self.guidance = gr.Slider(
                0, 10, GUIDANCE, step=0.5, label="Guidance", elem_id="guidance"
            )
            self.negative = gr.Textbox(
                label="What not to draw", placeholder="blurry", elem_id="negative"
            )
            with gr.Row():
                self.seed = gr.Textbox(
                    label="Seed", placeholder="random", scale=3, min_width=120, elem_id="seed"
                )
                self.reuse = gr.Button("Reuse last", scale=1, min_width=90, elem_id="reuse")
            self.rewrite = gr.Checkbox(label="Rewrite my prompt", elem_id="rewrite")

    # --- events ---

    @property
    def _form(self) -> list[Any]:
        return [
            self.prompt, self.negative, self.size, self.width, self.height,
            self.steps, self.guidance, self.seed, self.count, self.rewrite,
        ]  # fmt: skip

    def _connect(self) -> None:
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        shown = [self.stage, self.bar, self.gallery, self.generate, self.cancel]
        gr.on(
            [self.generate.click, self.prompt.submit, self.negative.submit, self.seed.submit],
            self._draw,
            self._form,
            shown,
            **quiet,
        )
        self.cancel.click(self._cancel, None, None, **quiet)
        self.reuse.click(self._get_last_seed, None, self.seed, **quiet)
        self.size.change(None, self.size, self.custom, js=view.SHOW_CUSTOM_JS, **quiet)
        for pictures in (self.stage, self.gallery):
            pictures.select(self._select, None, self.stage, **quiet)
        self.stage.submit(self._use_settings, None, self._form, **quiet)

    @property
    def loaded(self) -> list[Any]:
        """What `load` sets."""
        return [self.size, self.width, self.height, self.steps, self.count, self.gallery]

    def load(self, visit: Visit, model: ModelInfo) -> Update:
        """The form as it suits the model, and what this browser has drawn before."""
        width, height = model.default_size
        return (
            gr.update(choices=make_sizes(model), value=f"{width}x{height}"),
            gr.update(value=width, step=model.size_multiple),
            gr.update(value=height, step=model.size_multiple),
            gr.update(value=model.default_steps),
            gr.update(maximum=model.max_n),
            view.show_gallery(visit.session.gallery, self.pictures_url),
        )

    async def _draw(
        self,
        request: gr.Request,
        prompt: str,
        negative: str,
        size: str | None,
        width: int | None,
        height: int | None,
        steps: float,
        guidance: float,
        seed: str,
        count: int | None,
        rewrite: bool,
    ) -> AsyncGenerator[Update, None]:
        visit = Visit.of(request)
        try:
            form = make_form(
                prompt, negative, size, width, height, steps, guidance, seed, count, rewrite
            )
        except ValueError as error:
            yield self._show_end(visit, view.show_note(str(error), is_error=True))
            return
        drawing = Drawing(form)
        body = form | {"stream": True, "partial_images": MAX_PARTIAL_IMAGES}
        yield self._show_busy(drawing, True)
        work = (str(request.session_hash), "draw")
        note = "The server sent no picture."
        try:
            async with visit.session.run(work, visit.api.stream(PATH, body)) as running:
                async with aclosing(running.messages(TICK)) as messages:
                    async for message in messages:
                        is_new = message is not None and drawing.take(message)
                        yield self._show_busy(drawing, is_new)
                if running.is_cancelled:
                    note = "Cancelled."
        except ApiError as error:
            note = str(error)
        for picture in reversed(drawing.pictures):  # the newest comes first in the gallery
            self.sessions.keep(visit.session, picture)
        if drawing.pictures:
            stage = view.show_pictures(drawing.pictures, self.pictures_url)
        else:
            stage = view.show_note(note, is_error=note != "Cancelled.")
        yield self._show_end(visit, stage)

    def _show_busy(self, drawing: Drawing, is_new: bool) -> Update:
        stage = drawing.show() if is_new else gr.skip()
        buttons = gr.update(interactive=False), gr.update(interactive=True)
        return stage, drawing.show_bar(), gr.skip(), *buttons

    def _show_end(self, visit: Visit, stage: str) -> Update:
        gallery = view.show_gallery(visit.session.gallery, self.pictures_url)
        return stage, "", gallery, gr.update(interactive=True), gr.update(interactive=False)

    def _cancel(self, request: gr.Request) -> None:
        Visit.of(request).session.cancel(str(request.session_hash), "draw")

    def _get_last_seed(self, request: gr.Request) -> str:
        gallery = Visit.of(request).session.gallery
        return str(gallery[0].seed) if gallery else ""

    def _select(self, request: gr.Request, event: gr.EventData) -> Any:
        picture = Visit.of(request).session.pictures.get(str(event.id))
        if picture is None or picture.form is None:
            return view.show_note("This picture has given way to newer ones.")
        return view.show_picture(picture, self.pictures_url)

    def _use_settings(self, request: gr.Request, event: gr.EventData) -> Update:
        session = Visit.of(request).session
        picture = session.pictures.get(str(event.id))
        if picture is None or picture.form is None or session.model is None:
            return tuple(gr.skip() for _ in self._form)
        form = picture.form
        width, height = picture.shape
        size = f"{width}x{height}"
        is_preset = size in [value for _, value in make_sizes(session.model)]
        return (
            form["prompt"],
            form.get("negative_prompt", ""),
            size if is_preset else view.CUSTOM,
            width,
            height,
            form["num_inference_steps"],
            form["true_cfg_scale"],
            str(picture.seed),
            1,
            form["rewrite_prompt"],
        )


def parse_size(size: str) -> tuple[int, int]:
    """Width and height of WIDTHxHEIGHT."""
    width, height = size.split("x")
    return int(width), int(height)


def make_form(
    prompt: str,
    negative: str,
    size: str | None,
    width: int | None,
    height: int | None,
    steps: float,
    guidance: float,
    seed: str,
    count: int | None,
    rewrite: bool,
) -> Form:
    """The API's parameters; what only the page can get wrong is a ValueError for the visitor."""
    if not prompt.strip():
        raise ValueError("Write what to draw first.")
    if seed.strip() and not seed.strip().isdecimal():
        raise ValueError("The seed is a whole number, or nothing for a random one.")
    if not size:
        raise ValueError("The page is not loaded yet: try again.")
    if size == view.CUSTOM:
        if not width or not height:
            raise ValueError("Give a width and a height.")
        size = f"{width}x{height}"
    form: Form = {
        "prompt": prompt.strip(),
        "size": size,
        "num_inference_steps": int(steps),
        "true_cfg_scale": guidance,
        "n": count or 1,
        "rewrite_prompt": rewrite,
    }
    if negative.strip():
        form["negative_prompt"] = negative.strip()
    if seed.strip():
        form["seed"] = int(seed)
    return form
