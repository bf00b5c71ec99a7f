"""The faults in short, for every run of the tests: one server, and what is done to it in turn."""

from __future__ import annotations

import signal

import pytest

from tests.drawing import MakeCheckpoint
from tests.faults.conftest import MakeVictim
from tests.faults.load import CONNECTED, NEVER, Load, create_asks, learn
from tests.faults.scenes import MID_STEP, SENDING, hurt_under_load, terminate_under_load
from tests.faults.victim import DIFFUSION, Leftovers, Victim

NUM = 30
ASKS = create_asks(NUM, steps=8)
Expected = dict[str, bytes]


@pytest.fixture(scope="module")
def victim(start: MakeVictim, checkpoint: MakeCheckpoint) -> Victim:
    victim = start(str(checkpoint(0)), "--hang-timeout", "3")
    victim.wait_until_ready()
    return victim


@pytest.fixture(scope="module")
def expected(victim: Victim) -> Expected:
    return learn(victim.url, ASKS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "phase"), [(signal.SIGKILL, MID_STEP), (signal.SIGSTOP, SENDING)]
)
def test_an_engine_is_hurt(victim: Victim, expected: Expected, signum: int, phase: str) -> None:
    load = Load(victim.url, ASKS, 8)
    figures = hurt_under_load(victim, DIFFUSION, signum, phase, load, expected)
    assert figures["right"] == NUM, (figures, victim.log.read_text()[-5000:])
    assert figures["noticed_s"] is not None and figures["ready_s"] is not None


@pytest.mark.slow
def test_told_to_end_under_load(victim: Victim, expected: Expected) -> None:
    """The last that is done to it."""
    asks = [ask for ask in ASKS if ask.kind in CONNECTED]
    figures = terminate_under_load(victim, asks, expected)
    assert figures["exit_code"] == 0, victim.log.read_text()[-5000:]
    assert {name: figures[name] for name in NEVER} == NEVER and figures["failed"] == 0
    assert victim.find_leftovers() == Leftovers()
