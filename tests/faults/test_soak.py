"""Ten thousand requests, some of whose clients leave: nothing grows. Cases 16 and 33."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

import httpx
import psutil
import pytest

from tests.drawing import MakeCheckpoint
from tests.faults.conftest import MakeVictim
from tests.faults.load import NEVER, Answer, Ask, create_asks, judge_all, learn, send
from tests.faults.record import Record
from tests.faults.victim import Victim

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600)]

NUM, WARM_UP, CHUNK = 10_000, 500, 500
ABORTS = 0.05  # of all
NUM_AT_ONCE = 8


@dataclass(frozen=True)
class Size:
    """Of one process."""

    rss: float  # MB
    descriptors: int
    threads: int


def test_nothing_grows(start: MakeVictim, checkpoint: MakeCheckpoint, record: Record) -> None:
    # Finished jobs and their pictures are kept for an hour unless told otherwise.
    victim = start(str(checkpoint(0)), "--max-jobs", "100")
    victim.wait_until_ready()
    asks = create_asks(CHUNK, steps=2)
    expected = learn(victim.url, asks)
    begun_at = time.monotonic()
    asyncio.run(ask_and_leave(victim.url, asks))
    before = settle(victim)
    totals: dict[str, int] = {}
    for _ in range(NUM // CHUNK):
        answers = asyncio.run(ask_and_leave(victim.url, asks))
        for name, num in judge_all(answers, expected).items():
            totals[name] = totals.get(name, 0) + num
    after = settle(victim)
    assert before.keys() == after.keys()  # nothing was started anew
    growth = {name: round(after[name].rss - before[name].rss, 1) for name in before}
    missed = record.note(
        "33",
        f"{NUM} requests, {ABORTS:.0%} of the clients leave, after {WARM_UP} to warm up",
        {
            **totals,
            "left": NUM - totals["requests"],
            "growth_mb": max(growth.values()),
            "grown": max(growth, key=lambda name: growth[name]),
            "more_descriptors": max(after[n].descriptors - before[n].descriptors for n in before),
            "more_threads": max(after[n].threads - before[n].threads for n in before),
            "more_tasks": count_open(victim),
            "seconds": round(time.monotonic() - begun_at),
        },
        at_most={
            **NEVER,
            "failed": 0,
            "growth_mb": 20,
            "more_descriptors": 2,  # a connection that is being closed
            "more_threads": 0,
            "more_tasks": 0,
        },
    )
    assert missed == [], growth


async def ask_and_leave(url: str, asks: list[Ask]) -> list[Answer]:
    """All of them, so many at once; some clients go away before they are answered."""
    chance = random.Random(16)
    left, answers = list(asks), []

    async def ask_on(client: httpx.AsyncClient) -> None:
        while left:
            ask = left.pop()
            if chance.random() >= ABORTS:
                answers.append(await send(client, ask))
                continue
            task = asyncio.create_task(send(client, ask))
            await asyncio.sleep(chance.uniform(0, 0.1))
            if task.done():
                answers.append(task.result())
            task.cancel()

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        await asyncio.gather(*(ask_on(client) for _ in range(NUM_AT_ONCE)))
    return answers


def settle(victim: Victim) -> dict[str, Size]:
    """The size of each process, once nothing is under way."""
    deadline = time.monotonic() + 60
    while count_open(victim) and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(2)
    sizes = {}
    for pid, name in victim.list_processes().items():
        process = psutil.Process(pid)
        rss = process.memory_info().rss / 1e6
        sizes[f"{name} ({pid})"] = Size(rss, process.num_fds(), process.num_threads())
    return sizes


def count_open(victim: Victim) -> int:
    """Requests that the server still holds."""
    queue = httpx.get(f"{victim.url}/v1/queue", timeout=60).json()
    return int(queue["running"] + queue["waiting"])
