"""The same faults against vLLM's own server, where they apply: the table's next column.

Nothing is asked of it: what happens is noted.
"""

from __future__ import annotations

import signal

import pytest

from tests.drawing import MakeCheckpoint
from tests.faults.conftest import MakeVictim
from tests.faults.load import NEVER, Load, judge_all, learn
from tests.faults.plain_vllm import CORE, WORKER, PlainVllm, create_texts, write_model
from tests.faults.record import PLAIN, Record
from tests.faults.scenes import (
    MID_STEP,
    SIGNALS,
    add_up,
    end,
    hurt_under_load,
    terminate_under_load,
)
from tests.faults.victim import GONE, Victim

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]

SECONDS = 45.0  # to wait for it to notice, or to come back
TIMES = 5
NUM = 24  # requests of one case


@pytest.fixture(scope="module")
def model(checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("plain") / "model", checkpoint(0) / "tokenizer")


def launch(start: MakeVictim, model: str, *arguments: str) -> Victim:
    victim = start(model, *arguments, kind=PlainVllm)
    victim.wait_until_ready()
    return victim


@pytest.mark.parametrize(
    ("case", "name", "signum"),
    [
        ("1", CORE, signal.SIGKILL),
        ("2", WORKER, signal.SIGKILL),
        ("7", CORE, signal.SIGSTOP),
        ("7", WORKER, signal.SIGSTOP),
    ],
)
def test_an_engine_is_hurt(
    start: MakeVictim, model: str, record: Record, case: str, name: str, signum: signal.Signals
) -> None:
    victim = launch(start, model)
    asks = create_texts(model, NUM)
    expected = learn(victim.url, asks)
    load = Load(victim.url, asks, 8, timeout=SECONDS)
    figures = hurt_under_load(victim, name, signum, MID_STEP, load, expected, recovery=SECONDS)
    engine = "the AR engine" if name == CORE else "the AR worker"
    fault = f"{SIGNALS[signum]} of {engine}, {MID_STEP}"
    record.note(case, fault, figures, server=PLAIN, at_most={**NEVER, "failed": 0, "ready_s": 90})


def test_the_server_is_killed(start: MakeVictim, model: str, record: Record) -> None:
    victim = launch(start, model)
    figures = end(victim, str(victim.process.pid), signal.SIGKILL)
    record.note("5", "kill -9 of the API process, serving", figures, server=PLAIN, at_most=GONE)


def test_told_to_end_under_load(start: MakeVictim, model: str, record: Record) -> None:
    asks = create_texts(model, 200)
    all_figures = []
    for i in range(TIMES):
        victim = launch(start, model)
        expected = learn(victim.url, asks)
        figures = terminate_under_load(victim, asks, expected, num_at_once=4 + 4 * i, patience=45)
        all_figures.append(figures)
    record.note(
        "13",
        "SIGTERM under load",
        add_up(all_figures),
        server=PLAIN,
        at_most={**NEVER, "failed": 0, "unended": 0, "exit_code": 0, **GONE},
    )


def test_a_thousand_requests_and_five_kills(start: MakeVictim, model: str, record: Record) -> None:
    victim = launch(start, model)
    asks = create_texts(model, 1000, num_tokens=20)
    expected = learn(victim.url, asks)
    load = Load(victim.url, asks, 8).start()
    load.wait_for_answers(100)
    victim.hurt(CORE)  # there is no second time
    figures = judge_all(load.join(), expected)
    unaided = {"unaided_percent": figures["right"] / 10}
    record.note(
        "8",
        "1000 requests, 5 kills of engines",
        {**figures, **unaided, "exit_code": victim.wait_for_exit()},
        server=PLAIN,
        at_most=NEVER,
        at_least={"unaided_percent": 99},
    )


def test_more_than_can_be_done(start: MakeVictim, model: str, record: Record) -> None:
    victim = launch(start, model)
    asks = create_texts(model, 1000, num_tokens=8)
    expected = learn(victim.url, asks)
    answers = Load(victim.url, asks, 500).run()
    record.note(
        "14",
        "more requests than the queue holds",
        {**judge_all(answers, expected), "longest_s": max(round(a.seconds, 1) for a in answers)},
        server=PLAIN,
    )
