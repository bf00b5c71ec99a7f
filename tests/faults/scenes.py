"""What is done to a server, whichever it is, and the figures that come of it."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tests.faults.load import Ask, Load, judge_all
from tests.faults.victim import Victim
from tests.faults.watch import Watch

IDLE, QUEUED, MID_STEP, SENDING = "idle", "queued", "mid-step", "sending"
PHASES = (IDLE, QUEUED, MID_STEP, SENDING)
SIGNALS = {signal.SIGKILL: "kill -9", signal.SIGSTOP: "SIGSTOP"}
RECOVERY = 180.0  # seconds to wait for a server to be ready again before calling it dead

Figures = dict[str, Any]


def hurt_under_load(
    victim: Victim,
    name: str,
    signum: int,
    phase: str,
    load: Load,
    expected: Mapping[str, bytes],
    recovery: float = RECOVERY,
) -> Figures:
    """Signal one process while requests are under way, or before them, and see how they end."""
    with Watch(victim) as watch:
        watch.wait_until(True, time.monotonic(), 30)
        if phase != IDLE:
            load.start()
        _reach(phase, load)
        hurt_at = victim.hurt(name, signum)
        noticed, ready = watch.wait_for_pause(hurt_at, recovery)
        if phase == IDLE:
            load.start()
        answers = load.join()
    return {
        **judge_all(answers, expected),
        "noticed_s": noticed,
        "ready_s": ready,
        "longest_s": round(max(answer.seconds for answer in answers), 1),
        "health_p99_ms": watch.get_p99(),
        "exit_code": None if ready else victim.wait_for_exit(5),  # None: it goes on
    }


def _reach(phase: str, load: Load) -> None:
    if phase == QUEUED:
        time.sleep(0.1)  # all are sent, and few have begun
    elif phase == MID_STEP:
        load.wait_for_answers(2)
        time.sleep(0.15)
    elif phase == SENDING:
        load.wait_for_answers(4)  # those that were in the batch with it are on their way


def end(victim: Victim, name: str, signum: int) -> Figures:
    """End a whole server by what is done to one process, and see what is left of it."""
    victim.hurt(name, signum)
    exit_code = victim.wait_for_exit()
    return {"exit_code": exit_code, **victim.find_leftovers().figures}


def terminate_under_load(
    victim: Victim,
    asks: Sequence[Ask],
    expected: Mapping[str, bytes],
    num_at_once: int = 8,
    num_signals: int = 1,
    patience: float = 90.0,
) -> Figures:
    """SIGTERM while requests are under way; their clients go on asking after it."""
    load = Load(victim.url, asks, num_at_once).start()
    load.wait_for_answers(num_at_once // 2)
    told_at = victim.hurt(str(victim.process.pid), signal.SIGTERM)
    for _ in range(num_signals - 1):
        time.sleep(0.3)
        victim.hurt(str(victim.process.pid), signal.SIGTERM)
    exit_code = victim.wait_for_exit(patience)
    seconds = time.monotonic() - told_at
    leftovers = victim.find_leftovers()
    if exit_code is None:  # or its clients would wait for ever
        victim.process.kill()
    answers = load.join()
    # Who comes when the door is shut has lost nothing: no connection, no request.
    too_late = [a for a in answers if a.sent_at > told_at and not a.status and not a.is_whole]
    return {
        **judge_all([answer for answer in answers if answer not in too_late], expected),
        "too_late": len(too_late),
        "unended": int(exit_code is None),
        "exit_code": exit_code,
        "exit_s": round(seconds, 1),
        **leftovers.figures,
    }


def add_up(all_figures: Sequence[Figures]) -> Figures:
    """Of several ends: sums, the longest time, the largest exit code, all that was left."""
    totals: Figures = {"times": len(all_figures)}
    for name in dict.fromkeys(name for figures in all_figures for name in figures):
        values = [figures[name] for figures in all_figures if figures.get(name) is not None]
        if name == "left":
            totals[name] = ", ".join(values)
        else:
            totals[name] = max(values, default=None) if name.startswith("exit") else sum(values)
    return totals
