"""Every process, killed and frozen, in every phase: cases 1 to 7."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.drawing import MakeCheckpoint
from tests.faults.conftest import MakeVictim
from tests.faults.load import NEVER, Ask, Load, create_asks, judge_all, learn
from tests.faults.record import Record
from tests.faults.scenes import (
    MID_STEP,
    PHASES,
    QUEUED,
    SIGNALS,
    Figures,
    end,
    hurt_under_load,
)
from tests.faults.victim import (
    API,
    AR,
    DIFFUSION,
    FORKSERVER,
    GONE,
    TRACKER,
    WORKER,
    Victim,
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

NUM = 24  # requests of one case
PAUSE = 3  # seconds, and no hang
# Seconds until a death or a standstill is noticed, and from then on until the stage works again.
NOTICED = {signal.SIGKILL: 1, signal.SIGSTOP: 10}
BACK = {AR: 90, DIFFUSION: 15, WORKER: 15}
CASES = {AR: "1", DIFFUSION: "3", WORKER: "4"}
NAMES = {
    AR: "the AR engine",
    DIFFUSION: "the diffusion engine",
    WORKER: "the diffusion worker",
    API: "the API process",
    TRACKER: "Python's resource tracker",
}


@dataclass
class Stage:
    """A server that is used again for as long as it lives."""

    start: MakeVictim
    arguments: tuple[str, ...]
    victim: Victim | None = None
    expected: dict[str, bytes] | None = None

    def get(self, asks: list[Ask]) -> tuple[Victim, dict[str, bytes]]:
        if self.victim is None or self.victim.process.poll() is not None:
            self.victim = self.start(*self.arguments)
            self.victim.wait_until_ready()
        if self.expected is None:
            self.expected = learn(self.victim.url, asks)
        return self.victim, self.expected


@pytest.fixture(scope="module")
def stage(start: MakeVictim, checkpoint: MakeCheckpoint) -> Iterator[Stage]:
    yield Stage(start, (str(checkpoint(0)), "--worker-processes", "1", "--max-restarts", "1000"))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("name", [DIFFUSION, WORKER, AR], ids=["core", "worker", "ar"])
def test_a_stage_is_hurt(
    stage: Stage, record: Record, name: str, signum: signal.Signals, phase: str
) -> None:
    asks = create_asks(NUM, steps=12)
    victim, expected = stage.get(asks)
    load = Load(victim.url, asks, NUM if phase == QUEUED else 8)
    figures = hurt_under_load(victim, name, signum, phase, load, expected)
    case = CASES[name] if signum == signal.SIGKILL else "7"
    noticed = NOTICED[signum]
    missed = record.note(
        case,
        f"{SIGNALS[signum]} of {NAMES[name]}, {phase}",
        figures,
        at_most={**NEVER, "failed": 0, "noticed_s": noticed, "ready_s": noticed + BACK[name]},
    )
    assert missed == [], victim.log.read_text()[-5000:]


def test_a_stage_is_slow(stage: Stage, record: Record) -> None:
    """It stands still for less than what counts as a hang: nothing is done about it."""
    asks = create_asks(NUM, steps=12)
    victim, expected = stage.get(asks)
    pid = victim.find(DIFFUSION)
    load = Load(victim.url, asks, 8).start()
    load.wait_for_answers(4)
    victim.hurt(DIFFUSION, signal.SIGSTOP)
    time.sleep(PAUSE)
    victim.hurt(DIFFUSION, signal.SIGCONT)
    answers = load.join()
    is_new = victim.find(DIFFUSION) != pid
    figures = {**judge_all(answers, expected), "restarts": int(is_new)}
    missed = record.note(
        "31",
        f"the diffusion engine stands still for {PAUSE} s",
        figures,
        at_most={**NEVER, "failed": 0, "restarts": 0},
    )
    assert missed == [], victim.log.read_text()[-5000:]


def test_the_forkserver_is_killed(stage: Stage, record: Record) -> None:
    """Stages go on; the next one to die comes back too."""
    asks = create_asks(NUM, steps=12)
    victim, expected = stage.get(asks)
    victim.hurt(FORKSERVER)
    load = Load(victim.url, asks, 8)
    figures = hurt_under_load(victim, DIFFUSION, signal.SIGKILL, MID_STEP, load, expected)
    missed = record.note(
        "6",
        "kill -9 of the forkserver, then of the diffusion engine, mid-step",
        figures,
        at_most={**NEVER, "failed": 0, "ready_s": BACK[AR]},
    )
    assert missed == [], victim.log.read_text()[-5000:]


@pytest.mark.parametrize("name", [AR, DIFFUSION, WORKER], ids=["ar", "core", "worker"])
def test_a_stage_is_killed_while_it_loads(
    start: MakeVictim, checkpoint: MakeCheckpoint, record: Record, name: str
) -> None:
    """It starts all the same."""
    victim = start(str(checkpoint(0)), "--worker-processes", "1")
    victim.hurt(name)
    victim.wait_until_ready()
    exit_code = victim.stop()
    missed = record.note(
        CASES[name],
        f"kill -9 of {NAMES[name]}, loading",
        {"came_to": "ready", "exit_code": exit_code, **victim.find_leftovers().figures},
        at_most={"exit_code": 0, **GONE},
    )
    assert missed == [], victim.log.read_text()[-5000:]


@pytest.mark.parametrize("name", [API, TRACKER], ids=["api", "tracker"])
@pytest.mark.parametrize("is_loading", [False, True], ids=["serving", "loading"])
def test_the_server_itself_is_killed(
    start: MakeVictim, checkpoint: MakeCheckpoint, record: Record, name: str, is_loading: bool
) -> None:
    victim = start(str(checkpoint(0)), "--worker-processes", "1")
    if is_loading:
        victim.find(WORKER)
    else:
        victim.wait_until_ready()
    figures = end(victim, name, signal.SIGKILL) if name == API else _lose(victim, name)
    phase = "loading" if is_loading else "serving"
    missed = record.note("5", f"kill -9 of {NAMES[name]}, {phase}", figures, at_most=GONE)
    assert missed == []


def _lose(victim: Victim, name: str) -> Figures:
    """A process that nobody misses is gone; then the server ends as ever."""
    victim.hurt(name)
    victim.wait_until_ready()
    exit_code = victim.stop()
    return {"exit_code": exit_code, **victim.find_leftovers().figures}
