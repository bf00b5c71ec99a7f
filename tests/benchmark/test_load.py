"""When requests are sent, and what is kept of them."""

from __future__ import annotations

import asyncio
import time

import pytest

from vllm_omni.benchmark.client import Answer, Failure
from vllm_omni.benchmark.load import Load
from vllm_omni.benchmark.workload import MIXES, PictureRequest, make_requests

REQUESTS = make_requests(MIXES["small"], 6, seed=0)


class Server:
    """Takes a while, counts who is there."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.running = self.most = 0

    async def draw(self, request: PictureRequest) -> Answer:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1
        if request.index == 3:
            return Answer(failure=Failure("HTTP 500", "broken"))
        return Answer(num_images=1, first_preview=time.perf_counter())


def test_open_loop_does_not_wait_for_answers() -> None:
    server = Server(seconds=1.0)
    load = Load(server.draw)
    arrivals = [0.0, 0.02, 0.04, 0.06, 0.08, 0.1]
    asyncio.run(load.run_open_loop(REQUESTS, arrivals))
    assert server.most == 6
    assert sorted(outcome.arrival for outcome in load.outcomes) == arrivals
    for outcome in load.outcomes:
        assert outcome.sent >= outcome.arrival - 0.001
        assert outcome.end >= outcome.sent + 0.999


def test_latency_counts_from_the_intended_time() -> None:
    """A client that is held up sends late; the wait is part of the latency all the same."""

    async def draw(request: PictureRequest) -> Answer:
        if request.index == 0:
            time.sleep(0.3)  # holds up the whole event loop
        return Answer(num_images=1)

    load = Load(draw)
    asyncio.run(load.run_open_loop(REQUESTS[:2], [0.0, 0.05]))
    second = load.outcomes[1]
    assert second.arrival == 0.05
    assert second.sent >= 0.3
    assert second.latency >= 0.25


def test_closed_loop_keeps_the_concurrency() -> None:
    server = Server(seconds=0.02)
    load = Load(server.draw)
    asyncio.run(load.run_closed_loop(REQUESTS, concurrency=2))
    assert server.most == 2
    assert sorted(outcome.request.index for outcome in load.outcomes) == list(range(6))
    assert max(outcome.end for outcome in load.outcomes) >= 0.059  # three after another
    arrivals = sorted(outcome.arrival for outcome in load.outcomes)
    assert arrivals[2] >= 0.019  # when the first answer came


def test_outcomes_have_images_previews_and_failures() -> None:
    calls: list[None] = []
    load = Load(Server(seconds=0.01).draw, on_outcome=lambda: calls.append(None))
    asyncio.run(load.run_closed_loop(REQUESTS, concurrency=6))
    by_index = {outcome.request.index: outcome for outcome in load.outcomes}
    assert by_index[3].failure == Failure("HTTP 500", "broken")
    assert by_index[3].first_preview is None and by_index[3].num_images == 0
    preview = by_index[0].first_preview
    assert preview is not None and 0.009 <= preview <= by_index[0].end
    assert by_index[0].failure is None and by_index[0].num_images == 1
    assert len(calls) == load.num_sent == 6


def test_a_load_that_is_cut_short_keeps_what_has_ended() -> None:
    async def draw(request: PictureRequest) -> Answer:
        await asyncio.sleep(0 if request.index < 2 else 600)
        return Answer(num_images=1)

    load = Load(draw)

    async def cut() -> None:
        async with asyncio.timeout(1.0):
            await load.run_open_loop(REQUESTS, [0.0, 0.0, 0.05, 0.05, 600.0, 600.0])

    with pytest.raises(TimeoutError):
        asyncio.run(cut())
    assert [outcome.request.index for outcome in load.outcomes] == [0, 1]
    assert load.num_sent == 4
