"""Who is in the queue, whose turn it is, and how long it will take."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import pytest

from vllm_omni.entrypoints.openai.admission import Admission, Ticket
from vllm_omni.entrypoints.openai.errors import APIError
from vllm_omni.errors import DeadlineExceededError

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


# --- cost, shares and turns ---


def test_queue_is_bounded_by_cost() -> None:
    clock = Clock()
    admission = Admission(100, clock, max_cost=3 * LARGE)
    reasons: list[str] = []
    admission.on_shed = reasons.append
    draw(admission, clock, LARGE, LARGE_SPEED)
    tickets = [admission.enter(LARGE) for _ in range(3)]
    with pytest.raises(APIError, match="costs too much together") as caught:
        admission.enter(LARGE)
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    assert caught.value.headers["Retry-After"] == "53"  # until one of them is done
    admission.leave(tickets[0])
    assert admission.enter(LARGE) in admission.tickets
    assert reasons == ["cost"]


def test_one_request_always_fits() -> None:
    admission = Admission(100, max_cost=TINY)
    admission.leave(admission.enter(LARGE))
    admission.enter(TINY)
    with pytest.raises(APIError):
        admission.enter(TINY)


def test_key_leaves_room_for_others() -> None:
    admission = Admission(8, owners=("a", "b"))
    reasons: list[str] = []
    admission.on_shed = reasons.append
    for _ in range(6):
        admission.enter(TINY, "a")
    with pytest.raises(APIError, match="kept for other keys") as caught:
        admission.enter(TINY, "a")
    assert caught.value.status == 429
    for _ in range(2):
        admission.enter(TINY, "b")
    with pytest.raises(APIError, match="8 requests are under way"):
        admission.enter(TINY, "b")
    assert reasons == ["share", "places"]


def test_what_was_promised_is_let_in() -> None:
    admission, _ = create_admission(1)
    admission.enter(TINY)
    admission.enter(TINY, is_promised=True)
    assert len(admission.tickets) == 2


def test_turns() -> None:
    """The engine has two pictures at most, and whatever waits gets the next place by its key."""
    admission = Admission(100, max_num_running=2, owners=("a", "b"))
    many = [admission.enter(LARGE, "a") for _ in range(10)]
    one = admission.enter(LARGE, "b")
    urgent = admission.enter(LARGE, "a", priority=-1)
    assert [ticket.has_turn for ticket in many] == [True, True] + [False] * 8
    assert [admission.get_position(ticket) for ticket in (one, urgent, many[2])] == [2, 3, 4]
    admission.end_turn(many[0])
    assert one.has_turn and not urgent.has_turn
    admission.end_turn(many[0])  # again: nothing
    assert not urgent.has_turn
    admission.leave(many[1])
    assert urgent.has_turn and not many[2].has_turn
    admission.leave(many[3])  # it only waited
    assert not many[2].has_turn
    admission.leave(one)
    assert many[2].has_turn


def test_a_turn_counts_pictures() -> None:
    admission = Admission(100, max_num_running=4)
    first = admission.enter(LARGE, num_outputs=10)  # more than it has room for, and all it has
    second, third = admission.enter(LARGE, num_outputs=3), admission.enter(LARGE)
    assert (first.has_turn, second.has_turn) == (True, False)
    admission.leave(first)
    assert second.has_turn and third.has_turn


def test_deadline_in_the_queue() -> None:
    admission = Admission(100, max_num_running=1)

    async def wait() -> None:
        admission.enter(LARGE)
        with admission.admit(LARGE) as ticket, pytest.raises(DeadlineExceededError):
            await admission.wait_turn(ticket, 0.05)
        with admission.admit(LARGE) as ticket, pytest.raises(DeadlineExceededError):
            await admission.wait_turn(ticket, -1.0)

    asyncio.run(wait())
    assert len(admission.tickets) == 1


def test_late_news_of_one_that_left() -> None:
    admission, _ = create_admission()
    ticket = admission.enter(LARGE)
    admission.leave(ticket)
    ticket.note_step(1, 2)
    assert (admission.num_running, admission.num_waiting, admission.estimate()) == (0, 0, 0.0)


def test_ten_thousand_in_the_queue() -> None:
    """Refusals are quick, whatever is there, and so is looking at it."""
    admission = Admission(10_000, max_num_running=8, owners=("a", "b"))
    tickets = [admission.enter(TINY + i % 7, "a", i % 3) for i in range(7_500)]
    tickets += [admission.enter(TINY, "b") for i in range(2_500)]
    times = []
    for _ in range(200):
        start = time.perf_counter()
        with pytest.raises(APIError):
            admission.enter(TINY, "a")
        times.append(time.perf_counter() - start)
    assert sorted(times)[198] < 0.02
    positions = sorted(admission.get_position(ticket) or 0 for ticket in tickets)
    assert positions == list(range(10_000))
    for ticket in tickets:
        admission.leave(ticket)
    assert admission.estimate() == 0.0 and not admission.tickets
