"""Who is looking at the page, and the pictures that were made for them; all of it in memory."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm_omni.apps.gradio.api import ApiError, Message, ModelInfo, Step

Work = tuple[str, str]
"""A tab of a browser, and the kind of work: of each there is one at a time."""

Form = dict[str, Any]
"""What a picture was asked for with, by the names of the form's fields."""


@dataclass(frozen=True)
class Picture:
    """One picture, and what is told of it."""

    data: bytes
    media_type: str
    form: Form | None = None  # None: a picture that a visitor sent
    seed: int | None = None
    shape: tuple[int, int] = (0, 0)  # width, height; known of those that were drawn
    seconds: float | None = None
    revised_prompt: str | None = None
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))


@dataclass
class Turn:
    """A question of a chat and its answer, each with the ids of its pictures."""

    question: str
    question_ids: list[str]
    answer: str = ""
    answer_ids: list[str] = field(default_factory=list)
    error: str = ""  # why there is no answer


@dataclass(eq=False)
class Session:
    """One browser: it keeps its pictures and its chat when the page is loaded again."""

    id: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    pictures: dict[str, Picture] = field(default_factory=dict)  # by id, oldest first
    model: ModelInfo | None = None  # as it was when the page was loaded
    chat: list[Turn] = field(default_factory=list)
    running: dict[Work, Running] = field(default_factory=dict)

    @property
    def gallery(self) -> list[Picture]:
        """What was drawn, newest first."""
        drawn = [picture for picture in self.pictures.values() if picture.form is not None]
        return drawn[::-1]

    @asynccontextmanager
    async def run(
        self, work: Work, messages: AsyncGenerator[Message | Step, None]
    ) -> AsyncIterator[Running]:
        """A request that ends with this context at the latest."""
        running = Running(messages)
        self.running[work] = running
        try:
            yield running
        finally:
            if self.running.get(work) is running:
                del self.running[work]
            await running.close()

    def cancel(self, tab: str, kind: str | None = None) -> None:
        """End what a tab has asked for: one kind of work, or all of it."""
        for work, running in self.running.items():
            if work[0] == tab and kind in (None, work[1]):
                running.cancel()


class Sessions:
    """All visitors, within a budget of bytes and a number: the oldest give way."""

    def __init__(self, max_sessions: int = 256, max_bytes: int = 256 * 2**20) -> None:
        self.max_sessions = max_sessions
        self.max_bytes = max_bytes
        self._sessions: dict[str, Session] = {}  # by id, the longest unseen first
        self._kept: dict[str, tuple[Session, int]] = {}  # picture's id -> whose, bytes
        self._num_bytes = 0

    def find(self, session_id: str | None) -> Session | None:
        """A session by the id in its cookie; it is now the last one seen."""
        session = self._sessions.pop(session_id or "", None)
        if session is not None:
            self._sessions[session.id] = session
        return session

    def create(self) -> Session:
        """A session for a new visitor."""
        session = Session()
        self._sessions[session.id] = session
        while len(self._sessions) > self.max_sessions:
            self._forget(next(iter(self._sessions.values())))
        return session

    def keep(self, session: Session, picture: Picture) -> None:
        """Keep a picture for a visitor for as long as there is room."""
        session.pictures[picture.id] = picture
        self._kept[picture.id] = (session, len(picture.data))
        self._num_bytes += len(picture.data)
        while self._num_bytes > self.max_bytes:
            self._drop(next(iter(self._kept)))

    def _forget(self, session: Session) -> None:
        del self._sessions[session.id]
        for running in session.running.values():
            running.cancel()
        for picture_id in list(session.pictures):
            self._drop(picture_id)

    def _drop(self, picture_id: str) -> None:
        session, num_bytes = self._kept.pop(picture_id)
        del session.pictures[picture_id]
        self._num_bytes -= num_bytes


class Running:
    """A request on its way, read by a task of its own so that it can be ended at any time."""

    def __init__(self, messages: AsyncGenerator[Message | Step, None]) -> None:
        self.is_cancelled = False
        self._received: asyncio.Queue[Message | Step | ApiError | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._read(messages))

    async def messages(self, tick: float) -> AsyncGenerator[Message | Step | None, None]:
        """What the server sends, and None whenever it sent nothing for so many seconds."""
        while True:
            try:
                received = await asyncio.wait_for(self._received.get(), tick)
            except TimeoutError:
                yield None
                continue
            if received is None:
                return
            if isinstance(received, ApiError):
                raise received
            yield received

    def cancel(self) -> None:
        """Close the connection, which ends the work at the server's next step."""
        self.is_cancelled = True
        self._task.cancel()

    async def close(self) -> None:
        """End it, if it has not ended, and wait until the connection is closed."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _read(self, messages: AsyncGenerator[Message | Step, None]) -> None:
        try:
            async for message in messages:
                self._received.put_nowait(message)
        except ApiError as error:
            self._received.put_nowait(error)
        finally:
            await messages.aclose()
            self._received.put_nowait(None)
