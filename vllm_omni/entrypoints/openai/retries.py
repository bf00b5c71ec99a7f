"""Requests that are sent again: with the same `Idempotency-Key` there is one execution, one answer.

What has the header is drawn to its end even where its client leaves: it is expected back.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Header
from pydantic import BaseModel

from vllm_omni.entrypoints.openai.access import RETRY_HEADER
from vllm_omni.entrypoints.openai.errors import APIError

HEADER = RETRY_HEADER
REPLAYED = "Idempotency-Replayed"  # header of an answer that was there already
MAX_KEPT = 1000  # answers
MAX_KEPT_BYTES = 64 * 2**20

RetryKey = Annotated[
    str | None,
    Header(
        alias=HEADER,
        max_length=255,
        pattern=r"^[!-~]+$",
        description="Of a request that may be sent again: it is drawn once, and answered alike.",
    ),
]


def get_fingerprint(body: BaseModel) -> str:
    """The same for bodies that ask for the same."""
    return hashlib.sha256(body.model_dump_json(exclude_unset=True).encode()).hexdigest()


def check_same(fingerprint: str | None, other: str | None) -> None:
    """400 for a key that has been used with another body."""
    if fingerprint != other:
        message = f"this {HEADER} was used with another body: take a new one"
        raise APIError(400, message, HEADER, "idempotency_key_reused")


@dataclass(frozen=True, eq=False)
class _Kept:
    fingerprint: str
    work: asyncio.Task[bytes]
    expires_at: float

    @property
    def num_bytes(self) -> int:
        has_answer = self.work.done() and not self.work.cancelled() and not self.work.exception()
        return len(self.work.result()) if has_answer else 0


class Retries:
    """Answers by key, those under way included; the oldest give way when there are too many."""

    def __init__(self, ttl: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.ttl = ttl
        self._clock = clock
        self._kept: dict[tuple[str, str], _Kept] = {}  # by owner and key, oldest first

    async def run(
        self, owner: str, key: str, body: BaseModel, work: Callable[[], Awaitable[bytes]]
    ) -> tuple[bytes, bool]:
        """The answer, and whether it was asked for before. What fails may be tried again."""
        self._tidy()
        fingerprint = get_fingerprint(body)
        kept = self._kept.get((owner, key))
        is_known = kept is not None
        if kept is None:
            task = asyncio.ensure_future(work())
            kept = _Kept(fingerprint, task, self._clock() + self.ttl)
            self._kept[owner, key] = kept
            task.add_done_callback(lambda done: self._note_end((owner, key), done))
        check_same(fingerprint, kept.fingerprint)
        return await asyncio.shield(kept.work), is_known

    def _note_end(self, key: tuple[str, str], done: asyncio.Future[bytes]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._kept.pop(key, None)
        self._tidy()

    def _tidy(self) -> None:
        now = self._clock()
        ended = [key for key, kept in self._kept.items() if kept.work.done()]
        num_bytes = sum(self._kept[key].num_bytes for key in ended)
        for key in ended:
            is_too_much = len(self._kept) > MAX_KEPT or num_bytes > MAX_KEPT_BYTES
            if self._kept[key].expires_at > now and not is_too_much:
                break
            num_bytes -= self._kept.pop(key).num_bytes
