"""What the page shows, as HTML. Everything that comes from outside is escaped here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from vllm_omni.apps.gradio.api import ModelInfo
from vllm_omni.apps.gradio.sessions import Picture

# Clicks inside a `gr.HTML`, as Gradio's events: a picture is chosen, its settings are taken over.
JS_ON_LOAD = """
element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-id]');
  if (button) trigger(button.dataset.event, {id: button.dataset.id});
});
"""

# The status line asks for itself: it must go on when the server was away for a while.
STATUS_JS_ON_LOAD = """
const show = async () => {
  if (document.hidden) return;
  let text;
  try {
    const answer = await fetch('STATUS_URL');
    text = answer.status === 401 ? 'Not signed in: load the page again.'
      : answer.ok ? (await answer.json()).status : 'The server does not answer.';
  } catch (error) {
    text = 'The server does not answer.';
  }
  const line = element.querySelector('.status');
  if (line && line.textContent !== text) line.textContent = text;
};
show();
setInterval(show, 2000);
document.addEventListener('visibilitychange', show);
"""

# Once: a Textbox with autofocus also takes the focus back whenever its text grows.
FOCUS_JS = "() => document.querySelector('#prompt textarea').focus()"

CUSTOM = "custom"  # a size of which the visitor gives width and height
SHOW_CUSTOM_JS = f"(size) => ({{__type__: 'update', visible: size === '{CUSTOM}'}})"

TIMES = "\N{MULTIPLICATION SIGN}"
STAGE_HEIGHT = 440  # CSS pixels
HINT = "Your picture appears here."


def show_header(model: str) -> str:
    """The name, the model, and the status line."""
    return (
        '<header class="top"><h1>vLLM-omni</h1>'
        f'<span class="model">{escape(model)}</span>'
        '<span class="status" role="status"></span></header>'
    )


def describe_queue(queue: Mapping[str, Any], model: ModelInfo | None) -> str:
    """The status line."""
    running, waiting = queue["running"], queue["waiting"]
    parts = [f"{running} running, {waiting} waiting" if running or waiting else "Idle"]
    if waiting and queue.get("estimated_wait_seconds"):
        parts.append(f"{queue['estimated_wait_seconds']:.0f} s to wait")
    speed = queue.get("pixel_steps_per_second")
    if speed and model is not None:
        width, height = model.default_size
        cost = width * height * model.default_steps * 2  # guidance counts twice
        parts.append(f"about {cost / speed:.1f} s a picture")
    return " · ".join(parts)


def show_hint() -> str:
    """The stage before anything was drawn."""
    return f'<div class="stage empty"><p>{HINT}</p></div>'


def show_note(message: str, is_error: bool = False) -> str:
    """A sentence in place of a picture."""
    kind, role = ("error", "alert") if is_error else ("note", "status")
    return f'<div class="stage {kind}"><p role="{role}">{escape(message)}</p></div>'


def show_forming(previews: Mapping[int, str], count: int, size: tuple[int, int]) -> str:
    """Pictures while they form: previews, by picture, as data URLs."""
    shape = f"aspect-ratio:{size[0]}/{size[1]}"
    tiles = [
        f'<img class="tile" style="{shape}" alt="Preview" src="{previews[index]}">'
        if index in previews
        else f'<div class="tile blank" style="{shape}"></div>'
        for index in range(count)
    ]
    return f'<div class="stage forming">{_tiles(tiles, size, STAGE_HEIGHT - 40)}</div>'


def show_bar(step: int, num_steps: int, text: str) -> str:
    """The progress bar; it moves from side to side while nothing is known."""
    percent = 100 * step / num_steps if num_steps else 0
    moving = "" if step else " waiting"
    return (
        f'<div class="bar{moving}" role="progressbar" aria-valuemin="0" '
        f'aria-valuemax="{num_steps}" aria-valuenow="{step}" aria-label="Progress">'
        f'<i style="width:{percent:.1f}%"></i></div><p class="progress">{escape(text)}</p>'
    )


def show_pictures(pictures: list[Picture], url: str) -> str:
    """What was just drawn: one picture with what is told of it, or all to choose from."""
    if len(pictures) == 1:
        return show_picture(pictures[0], url)
    tiles = [_button(picture, url, "tile") for picture in pictures]
    return f'<div class="stage">{_tiles(tiles, pictures[0].shape, STAGE_HEIGHT)}</div>'


def show_picture(picture: Picture, url: str) -> str:
    """One picture, large, with its parameters."""
    assert picture.form is not None
    source = f"{url}/{picture.id}"
    width = _fit(picture.shape, STAGE_HEIGHT, max_width=STAGE_HEIGHT)
    name = f"{picture.seed}.{picture.media_type.partition('/')[2]}"
    rows = "".join(
        f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in _parameters(picture)
    )
    return (
        '<div class="stage one">'
        f'<a class="frame" style="width:min(100%,{width}px)" href="{source}" target="_blank">'
        f'<img src="{source}" '
        f'alt="{escape(picture.form["prompt"], quote=True)}"></a>'
        f'<div class="about"><dl>{rows}</dl><div class="actions">'
        f'<a class="action" href="{source}" download="{name}">Download</a>'
        f'<button class="action" data-event="submit" data-id="{picture.id}">'
        "Use these settings</button></div></div></div>"
    )


def show_gallery(pictures: Iterable[Picture], url: str) -> str:
    """All pictures of this session."""
    thumbs = "".join(_button(picture, url, "thumb") for picture in pictures)
    if not thumbs:
        return ""
    return f'<section class="gallery" aria-label="Your pictures">{thumbs}</section>'


def _tiles(tiles: list[str], size: tuple[int, int], max_height: int) -> str:
    columns = math.ceil(math.sqrt(len(tiles)))
    rows = math.ceil(len(tiles) / columns)
    width = _fit((size[0] * columns, size[1] * rows), max_height)
    style = f"--columns:{columns};width:min(100%,{width}px)"
    return f'<div class="tiles" style="{style}">{"".join(tiles)}</div>'


def _fit(size: tuple[int, int], max_height: int, max_width: int = 640) -> int:
    """The width, in CSS pixels, of something of this shape that is to fit into the stage."""
    return round(min(max_width, max_height * size[0] / size[1]))


def _button(picture: Picture, url: str, kind: str) -> str:
    assert picture.form is not None
    label = escape(f"{picture.form['prompt']}, seed {picture.seed}", quote=True)
    return (
        f'<button class="{kind}" data-event="select" data-id="{picture.id}" title="{label}">'
        f'<img src="{url}/{picture.id}" alt="{label}" loading="lazy"></button>'
    )


def _parameters(picture: Picture) -> list[tuple[str, str]]:
    form = picture.form
    assert form is not None
    rows = [
        ("Prompt", form["prompt"]),
        ("Rewritten", picture.revised_prompt),
        ("Not", form.get("negative_prompt")),
        ("Seed", str(picture.seed)),
        ("Size", f"{picture.shape[0]} {TIMES} {picture.shape[1]}"),
        ("Steps", str(form.get("num_inference_steps", ""))),
        ("Guidance", f"{form['true_cfg_scale']:g}" if "true_cfg_scale" in form else None),
        ("Time", f"{picture.seconds:.1f} s" if picture.seconds is not None else None),
    ]
    return [(name, value) for name, value in rows if value]
