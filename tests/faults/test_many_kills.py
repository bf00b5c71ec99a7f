"""A thousand requests while engines die: case 8. An engine that always dies: case 9."""

from __future__ import annotations

import random
import time

import pytest

from tests.drawing import MakeCheckpoint
from tests.faults.conftest import MakeVictim
from tests.faults.load import NEVER, Load, create_asks, judge_all, learn
from tests.faults.record import Record
from tests.faults.victim import AR, DIFFUSION, GONE
from tests.faults.watch import Watch

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]

NUM, NUM_KILLS = 1000, 5
GIVES_UP = 2  # restarts


@pytest.mark.parametrize("model", ["demo", "tiny"])
def test_a_thousand_requests_and_five_kills(
    start: MakeVictim, checkpoint: MakeCheckpoint, record: Record, model: str
) -> None:
    chance = random.Random(8)
    path = str(checkpoint(0)) if model == "tiny" else model
    victim = start(path, "--max-restarts", "1000")
    victim.wait_until_ready()
    asks = create_asks(NUM, num_keys=25, side=64, steps=4)
    expected = learn(victim.url, asks)
    moments = sorted(chance.sample(range(NUM // 20, NUM - NUM // 20), NUM_KILLS))
    begun_at = time.monotonic()
    with Watch(victim) as watch:
        load = Load(victim.url, asks, 8).start()
        for moment in moments:
            load.wait_for_answers(moment)
            time.sleep(chance.uniform(0, 0.2))
            victim.hurt(chance.choice([DIFFUSION, DIFFUSION, AR]))
        answers = load.join()
    seconds = time.monotonic() - begun_at
    figures = judge_all(answers, expected)
    differences = [answer.compare(expected) for answer in answers if len(answer.results) == 1]
    missed = record.note(
        "8",
        f"{NUM} requests, {NUM_KILLS} kills of engines"
        + ("" if model == "demo" else ", tiny model"),
        {
            **figures,
            "unaided_percent": 100 * figures["right"] / NUM,
            "largest_difference": max(differences, default=None),
            "longest_s": round(max(answer.seconds for answer in answers), 1),
            "seconds": round(seconds),
            "health_p99_ms": watch.get_p99(),
        },
        at_most=NEVER,
        at_least={"unaided_percent": 99},
    )
    assert missed == [], victim.log.read_text()[-5000:]
    assert victim.stop() == 0


def test_an_engine_that_always_dies(
    start: MakeVictim, checkpoint: MakeCheckpoint, record: Record
) -> None:
    """It is started again so many times; then the server ends, and says why."""
    victim = start(str(checkpoint(0)), "--max-restarts", str(GIVES_UP))
    victim.wait_until_ready()
    asks = create_asks(8, kinds=("answer", "stream"), steps=40)
    expected = learn(victim.url, asks)
    load = Load(victim.url, asks, 8).start()
    pid, kills = None, 0
    while kills <= GIVES_UP and victim.process.poll() is None:
        pid = victim.find(DIFFUSION, other_than=pid)
        victim.hurt(DIFFUSION)
        kills += 1
    exit_code = victim.wait_for_exit(60)
    leftovers = victim.find_leftovers()
    victim.process.kill()
    figures = judge_all(load.join(), expected)
    missed = record.note(
        "9",
        f"the diffusion engine always dies (--max-restarts {GIVES_UP})",
        {**figures, "kills": kills, "exit_code": exit_code, **leftovers.figures},
        at_most={**NEVER, **GONE},
        at_least={"exit_code": 1},
    )
    log = victim.log.read_text()
    assert missed == [], log[-5000:]
    [error] = [line for line in log.splitlines() if line.startswith("error: ")]
    assert "diffusion" in error
