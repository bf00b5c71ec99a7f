"""Whatever happens in whatever order, each request ends once: case 23. Clocks that jump: 32."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import httpx
import pytest

from tests.drawing import MakeCheckpoint
from tests.faults.conftest import MakeVictim
from tests.faults.load import NEVER, TIMEOUT, Answer, Ask, Load, create_asks, judge_all, learn, send
from tests.faults.record import Record
from tests.faults.victim import AR, DIFFUSION, Victim

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

NUM_ACTS = 200
ACTS = {"ask": 12, "leave": 4, "wait": 4, "kill": 1}  # how often, one to another
JUMPS = (0, 3600, -3600)  # seconds

# In every Python process of the server: what its clock says is off by what a file says.
SHIFT = """
import os, time
_time, _path = time.time, os.environ["VLLM_OMNI_TEST_CLOCK"]
def shifted():
    with open(_path) as file:
        return _time() + float(file.read() or 0)
time.time = shifted
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_each_ends_once(
    start: MakeVictim, checkpoint: MakeCheckpoint, record: Record, seed: int
) -> None:
    victim = start(str(checkpoint(0)), "--worker-processes", "1", "--max-restarts", "1000")
    victim.wait_until_ready()
    asks = create_asks(NUM_ACTS, steps=6)
    expected = learn(victim.url, asks)
    answers, num_left, num_kills = asyncio.run(walk(victim, asks, random.Random(seed)))
    missed = record.note(
        "23",
        f"asking, leaving and killing at random, walk {seed}",
        {
            **judge_all(answers, expected),
            "left": num_left,
            "kills": num_kills,
            "held": wait_for_silence(victim),
        },
        at_most={**NEVER, "failed": 0, "held": 0},
    )
    assert missed == [], victim.log.read_text()[-5000:]
    assert victim.stop() == 0


async def walk(
    victim: Victim, asks: list[Ask], chance: random.Random
) -> tuple[list[Answer], int, int]:
    """Do one thing after another; the answers of those who stayed, and how many left and died."""
    asked: list[asyncio.Task[Answer]] = []
    num_left = num_kills = 0
    acts = chance.choices(list(ACTS), weights=list(ACTS.values()), k=NUM_ACTS)
    async with httpx.AsyncClient(base_url=victim.url, timeout=TIMEOUT) as client:
        for act, ask in zip(acts, asks, strict=True):
            waiting = [task for task in asked if not task.done()]
            if act == "ask":
                asked.append(asyncio.create_task(send(client, ask)))
            elif act == "leave" and waiting:
                task = chance.choice(waiting)
                num_left += task.cancel()
                asked.remove(task)
            elif act == "kill":
                await asyncio.to_thread(victim.hurt, chance.choice([DIFFUSION, DIFFUSION, AR]))
                num_kills += 1
            await asyncio.sleep(chance.expovariate(20))
        return await asyncio.gather(*asked), num_left, num_kills


def wait_for_silence(victim: Victim) -> int:
    """How many requests the server holds when all clients have gone."""
    deadline = time.monotonic() + 60
    held = -1
    while held and time.monotonic() < deadline:
        time.sleep(0.2)
        queue = httpx.get(f"{victim.url}/v1/queue", timeout=60).json()
        held = queue["running"] + queue["waiting"]
    return held


def test_a_clock_that_jumps(
    start: MakeVictim, checkpoint: MakeCheckpoint, record: Record, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SHIFT)
    clock = tmp_path / "clock"
    clock.write_text("0")
    env = {"PYTHONPATH": str(tmp_path), "VLLM_OMNI_TEST_CLOCK": str(clock)}
    victim = start(str(checkpoint(0)), env=env)
    victim.wait_until_ready()
    asks = create_asks(60, steps=12)
    expected = learn(victim.url, asks)
    stages = {pid: name for pid, name in victim.list_processes().items() if "vllm-omni" in name}
    load = Load(victim.url, asks, 4).start()
    for num, jump in enumerate(JUMPS):
        load.wait_for_answers(15 * (num + 1))
        clock.write_text(str(jump))
    answers = load.join()
    missed = record.note(
        "32",
        "the clock jumps by an hour, forwards and back",
        {
            **judge_all(answers, expected),
            "restarts": len(stages.keys() - victim.list_processes().keys()),
        },
        at_most={**NEVER, "failed": 0, "restarts": 0},
    )
    assert missed == [], victim.log.read_text()[-5000:]
    assert victim.stop() == 0
