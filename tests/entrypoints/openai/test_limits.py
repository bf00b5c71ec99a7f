"""What one request may cost, who is in the queue, and how long it will take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.entrypoints.openai.errors import APIError
from vllm_omni.entrypoints.openai.limits import (
    Admission,
    Ticket,
    check_cost,
    check_prompt,
    get_cost,
)
from vllm_omni.params import DiffusionParams

TINY = 64 * 64 * 2
LARGE = 1024 * 1024 * 50
TINY_SPEED, LARGE_SPEED = 1e5, 1e6  # pixel-steps a second: small ones have more around them


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def create_admission(max_num_queued: int = 100) -> tuple[Admission, Clock]:
    clock = Clock()
    return Admission(max_num_queued, clock), clock


def draw(admission: Admission, clock: Clock, cost: int, speed: float) -> None:
    """One request alone, from its beginning to its end."""
    with admission.admit(cost) as ticket:
        for step in range(1, 5):
            clock.now += cost / speed / 4
            ticket.note_step(step, 4)
        admission.finish(ticket)


# --- what it costs ---


def make_params(**settings: Any) -> DiffusionParams:
    given = {"height": 128, "width": 64, "num_inference_steps": 10} | settings
    return DiffusionParams(**given)


def test_cost() -> None:
    assert get_cost(make_params()) == 128 * 64 * 10
    assert get_cost(make_params(num_outputs_per_prompt=3)) == 3 * 128 * 64 * 10
    guided = make_params(negative_prompt="ugly", true_cfg_scale=4.0)
    assert get_cost(guided) == 2 * 128 * 64 * 10


@pytest.mark.parametrize(
    ("limits", "param", "code"),
    [
        ({"max_pixels": 128 * 64 - 1}, "size", "size_limit_exceeded"),
        ({"max_n": 1}, "n", None),
        ({"max_cost": 2 * 128 * 64 * 10 - 1}, "size", "cost_limit_exceeded"),
    ],
)
def test_cost_over_each_limit(limits: dict[str, Any], param: str, code: str | None) -> None:
    params = make_params(num_outputs_per_prompt=2)
    config = ServerConfig().with_defaults(params)
    assert check_cost(params, config) == 2 * 128 * 64 * 10
    with pytest.raises(APIError) as caught:
        check_cost(params, ServerConfig(**limits).with_defaults(params))
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


def test_prompt() -> None:
    config = ServerConfig(max_prompt_chars=5)
    for fine in (None, "", "12345", "\u00e4\u00f6\u00fc", "\U0001f600"):
        check_prompt("prompt", fine, config)
    for bad in ("123456", "\ud83d", "a\ude00"):
        with pytest.raises(APIError) as caught:
            check_prompt("negative_prompt", bad, config)
        assert (caught.value.status, caught.value.param) == (400, "negative_prompt")


# --- who is in ---


def test_queue_is_bounded() -> None:
    admission, _ = create_admission(2)
    first, second = admission.enter(LARGE), admission.enter(LARGE)
    with pytest.raises(APIError) as caught, admission.admit(TINY):
        pass
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    assert 1 <= int(caught.value.headers["Retry-After"]) <= 600
    admission.leave(first)
    with admission.admit(TINY):
        assert len(admission.tickets) == 2
    admission.leave(second)
    assert not admission.tickets


def test_place_is_given_back_whatever_happens() -> None:
    admission, _ = create_admission(1)
    with pytest.raises(ZeroDivisionError), admission.admit(TINY):
        raise ZeroDivisionError
    assert not admission.tickets


def test_positions() -> None:
    admission, _ = create_admission()
    a, b, c = (admission.enter(TINY) for _ in range(3))
    assert [admission.get_position(ticket) for ticket in (a, b, c)] == [0, 1, 2]
    assert (admission.num_waiting, admission.num_running) == (3, 0)
    a.note_step(1, 4)
    assert [admission.get_position(ticket) for ticket in (a, b, c)] == [None, 0, 1]
    assert (admission.num_waiting, admission.num_running) == (2, 1)
    admission.leave(b)
    assert [admission.get_position(ticket) for ticket in (a, b, c)] == [None, None, 0]


def test_progress_does_not_go_back() -> None:
    """The second of two pictures begins at its first step again."""
    ticket = Ticket(100)
    ticket.note_step(0, 0)
    assert not ticket.is_started
    ticket.note_step(3, 4)
    ticket.note_step(1, 4)
    assert ticket.done == 75


# --- how long it takes ---


def test_nothing_is_measured_yet() -> None:
    admission, _ = create_admission()
    assert admission.measured_speed is None and admission.estimate() == 0.0
    ticket = admission.enter(LARGE)
    assert admission.estimate(ticket) == admission.estimate() > 0


@pytest.mark.parametrize("num_tiny", [1, 10, 1000])
def test_many_small_ones_say_nothing_of_a_large_one(num_tiny: int) -> None:
    admission, clock = create_admission()
    draw(admission, clock, LARGE, LARGE_SPEED)
    for _ in range(num_tiny):
        draw(admission, clock, TINY, TINY_SPEED)
    assert admission.estimate(admission.enter(LARGE)) == pytest.approx(LARGE / LARGE_SPEED)


def test_nor_the_other_way_round() -> None:
    admission, clock = create_admission()
    for cost, speed in ((TINY, TINY_SPEED), (LARGE, LARGE_SPEED), (LARGE, LARGE_SPEED)):
        draw(admission, clock, cost, speed)
    assert admission.estimate(admission.enter(TINY)) == pytest.approx(TINY / TINY_SPEED)
    # One in between is like the nearest of what was seen.
    assert admission.speed.get(LARGE // 4) == pytest.approx(LARGE_SPEED)


def test_speed_follows() -> None:
    admission, clock = create_admission()
    draw(admission, clock, LARGE, LARGE_SPEED)
    for _ in range(10):
        draw(admission, clock, LARGE, 3 * LARGE_SPEED)
    assert admission.measured_speed == pytest.approx(3 * LARGE_SPEED, rel=0.05)


def test_idle_time_does_not_count() -> None:
    admission, clock = create_admission()
    for _ in range(3):
        draw(admission, clock, LARGE, LARGE_SPEED)
        clock.now += 3600
    assert admission.measured_speed == pytest.approx(LARGE_SPEED)


def test_requests_too_short_to_time_are_timed_together() -> None:
    admission, clock = create_admission()
    for _ in range(20):
        draw(admission, clock, TINY, 1e6)  # 8 ms each
        clock.now += 60
    assert admission.measured_speed == pytest.approx(1e6)


def test_batch_that_ends_together() -> None:
    """Eight in the same steps: the speed is that of all, and each takes as long as all."""
    admission, clock = create_admission()
    tickets = [admission.enter(LARGE) for _ in range(8)]
    seconds = 8 * LARGE / LARGE_SPEED
    for step in range(1, 5):
        clock.now += seconds / 4
        for ticket in tickets:
            ticket.note_step(step, 4)
    for ticket in tickets:
        admission.finish(ticket)
        admission.leave(ticket)
        clock.now += 0.001
    assert admission.measured_speed == pytest.approx(LARGE_SPEED)


def test_those_that_run_share_the_steps() -> None:
    admission, clock = create_admission()
    draw(admission, clock, LARGE, LARGE_SPEED)
    each = LARGE / LARGE_SPEED
    a, b, c = (admission.enter(LARGE) for _ in range(3))
    assert admission.estimate(c) == pytest.approx(3 * each)  # after the others
    a.note_step(1, 2)
    b.note_step(1, 4)
    assert admission.estimate(a) == pytest.approx(each)  # half of its own, half of the other
    assert admission.estimate(b) == pytest.approx(1.25 * each)
    assert admission.estimate(c) == pytest.approx(2.25 * each)
    assert admission.estimate() == pytest.approx(2.25 * each)


def test_work_for_those_who_leave_was_work() -> None:
    admission, clock = create_admission()
    gone, stays = admission.enter(LARGE), admission.enter(LARGE)
    clock.now += LARGE / LARGE_SPEED
    gone.note_step(1, 2)
    stays.note_step(1, 2)
    admission.leave(gone)
    clock.now += LARGE / 2 / LARGE_SPEED
    admission.finish(stays)
    assert admission.measured_speed == pytest.approx(LARGE_SPEED)


def test_chats_have_no_cost_here() -> None:
    admission, clock = create_admission(1)
    with admission.admit(0) as ticket:
        clock.now += 10
        admission.finish(ticket)
        with pytest.raises(APIError) as caught:
            admission.enter(0)
        assert caught.value.headers["Retry-After"] == "1"
    assert admission.measured_speed is None


def test_retry_after_is_when_the_next_is_done() -> None:
    admission, clock = create_admission()
    draw(admission, clock, LARGE, LARGE_SPEED)
    for _ in range(3):
        admission.enter(LARGE)
    assert admission.retry_after == 53  # seconds of one
    admission.enter(10**15)
    assert admission.retry_after == 600
