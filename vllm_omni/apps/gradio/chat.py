"""The Chat tab: text and pictures in, text and pictures out."""

from __future__ import annotations

import asyncio
import base64
import mimetypes
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import gradio as gr

from vllm_omni.apps.gradio.api import ApiError, Message, ModelInfo, Step
from vllm_omni.apps.gradio.gate import Visit
from vllm_omni.apps.gradio.sessions import Picture, Session, Sessions, Turn

PATH = "/v1/chat/completions"
MAX_INPUT_IMAGES = 4  # of a chat, the newest; what a server takes by default
TICK = 1.0  # seconds between looks at whether anybody still listens
FILE_TYPES = [".png", ".jpg", ".jpeg", ".webp"]

Update = tuple[Any, ...]


class ChatTab:
    """The components, and what happens when they are used."""

    def __init__(self, sessions: Sessions, pictures_url: str) -> None:
        self.sessions = sessions
        self.pictures_url = pictures_url
        self.chatbot = gr.Chatbot(
            show_label=False,
            height="calc(100dvh - 300px)",
            min_height=260,
            buttons=[],
            feedback_options=None,
            allow_file_downloads=False,
            placeholder="Ask something, or send a picture and ask what is on it.",
            elem_id="chatbot",
        )
        self.message = gr.MultimodalTextbox(
            placeholder="Message",
            show_label=False,
            sources=["upload"],
            file_types=FILE_TYPES,
            file_count="multiple",
            elem_id="message",
        )
        with gr.Row(elem_id="chat-options"):
            self.with_picture = gr.Checkbox(
                label="Answer with a picture", scale=3, min_width=200, elem_id="with-picture"
            )
            self.clear = gr.Button("New chat", scale=1, min_width=100, elem_id="new-chat")
        self._connect()

    @property
    def loaded(self) -> list[Any]:
        """What `load` sets."""
        return [self.chatbot, self.with_picture]

    def load(self, visit: Visit, model: ModelInfo) -> Update:
        """The chat that this browser had before, and what the model can answer with."""
        can_draw = "image" in model.output_modalities
        return self._show(visit.session), gr.update(visible=can_draw)

    def _connect(self) -> None:
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        self.message.submit(
            self._send, [self.message, self.with_picture], [self.chatbot, self.message], **quiet
        )
        self.message.stop(self._stop, None, None, **quiet)
        gr.on([self.clear.click, self.chatbot.clear], self._clear, None, self.chatbot, **quiet)

    # --- events ---

    async def _send(
        self, request: gr.Request, message: dict[str, Any], with_picture: bool
    ) -> AsyncGenerator[Update, None]:
        visit = Visit.of(request)
        session = visit.session
        pictures = await asyncio.to_thread(read_pictures, message["files"])
        turn = Turn(message["text"].strip(), [picture.id for picture in pictures])
        if not turn.question and not pictures:
            return
        for picture in pictures:
            self.sessions.keep(session, picture)
        session.chat.append(turn)
        yield self._show(session), _busy()
        body = await asyncio.to_thread(make_body, session, with_picture)
        work = (str(request.session_hash), "chat")
        try:
            async with (
                session.run(work, visit.api.stream(PATH, body)) as running,
                aclosing(running.messages(TICK)) as messages,
            ):
                async for part in messages:
                    if part is not None and self._take(session, turn, part):
                        yield self._show(session), gr.skip()
        except ApiError as error:
            turn.error = str(error)
        if not (turn.answer or turn.answer_ids or turn.error):
            turn.error = "Stopped." if running.is_cancelled else "The model said nothing."
        yield self._show(session), _ready()

    def _take(self, session: Session, turn: Turn, part: Message | Step) -> bool:
        """Add to an answer what the server sent; whether that was anything."""
        choices = [] if isinstance(part, Step) else part.get("choices", [])
        if not choices:
            return False
        delta = choices[0].get("delta", {})
        turn.answer += delta.get("content") or ""
        for image in delta.get("images") or []:
            picture = from_data_url(image["image_url"]["url"])
            self.sessions.keep(session, picture)
            turn.answer_ids.append(picture.id)
        return bool(delta.get("content") or delta.get("images"))

    def _stop(self, request: gr.Request) -> None:
        Visit.of(request).session.cancel(str(request.session_hash), "chat")

    def _clear(self, request: gr.Request) -> list[Message]:
        session = Visit.of(request).session
        session.cancel(str(request.session_hash), "chat")
        session.chat.clear()
        return []

    def _show(self, session: Session) -> list[Message]:
        return [message for turn in session.chat for message in self._show_turn(turn)]

    def _show_turn(self, turn: Turn) -> list[Message]:
        question = [*self._show_pictures(turn.question_ids), turn.question]
        answer = [turn.answer, *self._show_pictures(turn.answer_ids)]
        if turn.error:
            answer.append(f"⚠️ {turn.error}")
        return [
            *({"role": "user", "content": text} for text in question if text),
            *({"role": "assistant", "content": text} for text in answer if text),
        ]

    def _show_pictures(self, picture_ids: list[str]) -> list[str]:
        return [f"![picture]({self.pictures_url}/{picture_id})" for picture_id in picture_ids]


def make_body(session: Session, with_picture: bool) -> Message:
    """The API's parameters for the whole chat, of which the last turn waits for its answer."""
    sent = [turn for turn in session.chat[:-1] if not turn.error] + session.chat[-1:]
    kept = [i for turn in sent for i in turn.question_ids if i in session.pictures]
    newest = set(kept[-MAX_INPUT_IMAGES:])
    messages: list[Message] = []
    for turn in sent:
        pictures = [session.pictures[i] for i in turn.question_ids if i in newest]
        messages.append({"role": "user", "content": _make_content(turn.question, pictures)})
        messages.append({"role": "assistant", "content": turn.answer})
    body: Message = {"messages": messages[:-1], "stream": True}
    if with_picture:
        body["modalities"] = ["text", "image"]
    return body


def _make_content(text: str, pictures: list[Picture]) -> str | list[Message]:
    if not pictures:
        return text
    parts: list[Message] = [
        {"type": "image_url", "image_url": {"url": to_data_url(picture)}} for picture in pictures
    ]
    return [*parts, {"type": "text", "text": text}] if text else parts


def read_pictures(files: list[str]) -> list[Picture]:
    """Pictures that were uploaded; their files are not kept."""
    pictures = []
    for file in map(Path, files):
        media_type = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        pictures.append(Picture(file.read_bytes(), media_type))
        file.unlink()
    return pictures


def to_data_url(picture: Picture) -> str:
    """A picture as the API takes it."""
    return f"data:{picture.media_type};base64,{base64.b64encode(picture.data).decode()}"


def from_data_url(url: str) -> Picture:
    """A picture as the API gives it."""
    head, _, data = url.partition(";base64,")
    return Picture(base64.b64decode(data), head.removeprefix("data:"))


def _busy() -> Any:
    return gr.update(value=None, interactive=False, submit_btn=False, stop_btn=True)


def _ready() -> Any:
    return gr.update(interactive=True, submit_btn=True, stop_btn=False)
