"""SIGTERM in every state, and ten times under load: case 13. Ten ends of each kind: case 34."""

from __future__ import annotations

import signal

import pytest

from tests.drawing import MakeCheckpoint
from tests.faults.conftest import MakeVictim
from tests.faults.load import CONNECTED, NEVER, create_asks, learn
from tests.faults.record import Record
from tests.faults.scenes import add_up, end, terminate_under_load
from tests.faults.victim import API, AR, GONE, WORKER

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]

TIMES = 10
MAX_EXIT = 32  # seconds: the time for running requests, and two


def test_ten_times_under_load(
    start: MakeVictim, checkpoint: MakeCheckpoint, record: Record
) -> None:
    asks = create_asks(200, kinds=CONNECTED, steps=12)
    expected: dict[str, bytes] = {}
    all_figures = []
    for i in range(TIMES):
        victim = start(str(checkpoint(0)), "--worker-processes", str(i % 2))
        victim.wait_until_ready()
        expected = expected or learn(victim.url, asks)
        all_figures.append(terminate_under_load(victim, asks, expected, num_at_once=4 + 4 * i))
    missed = record.note(
        "13",
        "SIGTERM under load",
        add_up(all_figures),
        at_most={**NEVER, "failed": 0, "unended": 0, "exit_code": 0, "exit_s": MAX_EXIT, **GONE},
    )
    assert missed == [], all_figures


def test_twice_under_load(start: MakeVictim, checkpoint: MakeCheckpoint, record: Record) -> None:
    """The second one does not wait: everybody is told."""
    victim = start(str(checkpoint(0)))
    victim.wait_until_ready()
    asks = create_asks(40, kinds=CONNECTED, steps=100)
    expected = learn(victim.url, asks)
    figures = terminate_under_load(victim, asks, expected, num_at_once=8, num_signals=2)
    at_most = {**NEVER, "exit_code": 0, "exit_s": 6, **GONE}
    missed = record.note("13", "SIGTERM twice under load", figures, at_most=at_most)
    assert missed == [], victim.log.read_text()[-5000:]


@pytest.mark.parametrize("state", ["idle", "loading"])
def test_with_nobody_there(
    start: MakeVictim, checkpoint: MakeCheckpoint, record: Record, state: str
) -> None:
    victim = start(str(checkpoint(0)), "--worker-processes", "1")
    if state == "idle":
        victim.wait_until_ready()
    else:
        victim.find(AR)
    figures = end(victim, API, signal.SIGTERM)
    missed = record.note("13", f"SIGTERM, {state}", figures, at_most=GONE)
    assert missed == []


def test_ten_kills_of_the_server(
    start: MakeVictim, checkpoint: MakeCheckpoint, record: Record
) -> None:
    """At ten moments of its start, and once it serves: nothing is left of any."""
    all_figures = []
    for i in range(TIMES):
        victim = start(str(checkpoint(0)), "--worker-processes", "1")
        victim.find([API, AR, WORKER][i % 3])
        if i % 3 == 2:
            victim.wait_until_ready()
        all_figures.append(end(victim, API, signal.SIGKILL))
    totals = add_up(all_figures)
    missed = record.note("34", "kill -9 of the API process, at any time", totals, at_most=GONE)
    assert missed == [], all_figures
