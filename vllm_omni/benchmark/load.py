"""Sends requests at the times they are meant to be sent, and keeps what came of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm_omni.benchmark.client import Answer, Failure
from vllm_omni.benchmark.workload import PictureRequest

Draw = Callable[[PictureRequest], Awaitable[Answer]]


@dataclass(frozen=True)
class Outcome:
    """One request's life; all times are seconds since the load began."""

    request: PictureRequest
    arrival: float  # when it was meant to be sent
    sent: float  # when it was
    end: float
    num_images: int
    first_preview: float | None
    failure: Failure | None

    @property
    def latency(self) -> float:
        """From the time it was meant to be sent: a client that is late does not hide it."""
        return self.end - self.arrival


class Load:
    """A number of requests on their way to a server. Can be read at any time, also when cut short.

    Args:
        draw: sends one request; does not raise.
        on_outcome: called after each.
    """

    def __init__(self, draw: Draw, on_outcome: Callable[[], object] = lambda: None) -> None:
        self._draw = draw
        self._on_outcome = on_outcome
        self._start = 0.0
        self.outcomes: list[Outcome] = []
        self.num_sent = 0

    async def run_open_loop(
        self, requests: Sequence[PictureRequest], arrivals: Sequence[float]
    ) -> None:
        """Each request at its time, however slow the answers to the others are."""
        self._start = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for request, arrival in zip(requests, arrivals, strict=True):
                await asyncio.sleep(max(0.0, arrival - self._now()))
                tasks.create_task(self._send(request, arrival))

    async def run_closed_loop(self, requests: Iterable[PictureRequest], concurrency: int) -> None:
        """Always `concurrency` requests at once: an answer is followed by the next request."""
        self._start = time.perf_counter()
        remaining = iter(requests)

        async def user() -> None:
            for request in remaining:
                await self._send(request, self._now())

        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(user())

    async def _send(self, request: PictureRequest, arrival: float) -> None:
        self.num_sent += 1
        sent = self._now()
        answer = await self._draw(request)
        preview = answer.first_preview
        self.outcomes.append(
            Outcome(
                request=request,
                arrival=arrival,
                sent=sent,
                end=self._now(),
                num_images=answer.num_images,
                first_preview=None if preview is None else preview - self._start,
                failure=answer.failure,
            )
        )
        self._on_outcome()

    def _now(self) -> float:
        return time.perf_counter() - self._start
