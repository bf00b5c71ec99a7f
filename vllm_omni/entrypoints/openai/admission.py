"""`Admission`: the bounded queue before the engine, its turns, and how long they will take."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from vllm_omni.entrypoints.openai.errors import APIError
from vllm_omni.entrypoints.openai.sharing import FairQueue, Quota
from vllm_omni.errors import DeadlineExceededError

_DEFAULT_SPEED = 1e6  # pixel-steps a second, until one was measured
_MAX_RETRY_AFTER = 600  # seconds
_LONG = 500  # tickets, for whose order nobody wants to wait each time
_MOMENT = 1.0  # seconds
_MIN_MEASURED = 0.05  # seconds: requests of one batch end at once, and that says nothing


@dataclass(eq=False)
class Ticket:
    """One request's place in the queue.

    Args:
        owner: whose key it came with.
        priority: lower goes first, of the same owner's.
        num_outputs: pictures; the engine has room for so many of them.
    """

    cost: int
    owner: str = ""
    priority: int = 0
    num_outputs: int = 1
    progress: float = 0.0  # the part of its steps that are done
    has_turn: bool = False  # the engine may have it, until it is given back
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    on_progress: Callable[[Ticket, float], None] | None = None  # told what was the progress before

    @property
    def is_started(self) -> bool:
        """Whether it is past the queue: it has taken a step."""
        return self.progress > 0

    @property
    def done(self) -> float:
        """Of the cost."""
        return self.cost * self.progress

    @property
    def left(self) -> float:
        """Of the cost."""
        return self.cost - self.done

    def note_step(self, step: int, num_steps: int) -> None:
        """That so many of its steps are done."""
        if num_steps:
            self.note_progress(step / num_steps)

    def note_progress(self, progress: float) -> None:
        """It does not go back."""
        before, self.progress = self.progress, max(self.progress, progress)
        if self.on_progress is not None and self.progress > before:
            self.on_progress(self, before)


class Speed:
    """Pixel-steps a second, of requests of each size: what is small takes longer than it costs."""

    def __init__(self) -> None:
        self.last: float | None = None  # whatever was done last; None: nothing yet
        self._by_size: dict[int, float] = {}

    def note(self, cost: float, num_requests: int, seconds: float) -> None:
        """That so many requests, done in so much time, cost so much together."""
        size = get_size(cost / num_requests)
        before = self._by_size.get(size, cost / seconds)
        self.last = self._by_size[size] = 0.7 * before + 0.3 * cost / seconds

    def get(self, cost: float) -> float:
        """Of requests that are most like one with this cost."""
        return self.get_of_size(get_size(cost))

    def get_of_size(self, size: int) -> float:
        nearest = min(self._by_size, key=lambda other: abs(other - size), default=None)
        return _DEFAULT_SPEED if nearest is None else self._by_size[nearest]


def get_size(cost: float) -> int:
    """The same for costs that differ by less than a factor of about four."""
    return int(cost).bit_length() // 2


class Admission:
    """Who is in, whose turn it is, and how long it takes at the speed that was measured.

    Sums are kept as they change: with ten thousand in the queue a refusal must be quick.

    Args:
        max_num_queued: requests at once, in the engine or before it.
        max_cost: of all of them together.
        max_num_running: pictures that the engine gets at once: enough for it to choose from, few
            enough that whoever comes next does not wait for all that came before.
        owners: of keys, each of which has a part of the queue to itself.
    """

    def __init__(
        self,
        max_num_queued: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_cost: float = math.inf,
        max_num_running: float = math.inf,
        owners: Sequence[str] = (),
    ) -> None:
        self.max_num_queued = max_num_queued
        self.max_num_running = max_num_running
        self.tickets: dict[Ticket, None] = {}  # in order of arrival
        self.speed = Speed()
        self.on_shed: Callable[[str], None] | None = None  # called with why one was refused
        self._clock = clock
        self._places, self._costs = Quota(max_num_queued, owners), Quota(max_cost, owners)
        self._queue: FairQueue[Ticket] = FairQueue()
        self._in_engine: dict[Ticket, None] = {}  # those that have their turn
        self._num_outputs = 0  # of those
        self._num_started = 0
        self._left: dict[int, float] = {}  # cost of what is still to be done, by size
        self._done = 0.0  # cost of what was done, ever
        self._order: dict[Ticket, tuple[int, float]] = {}
        self._is_order_old = False
        self._ordered_at = -math.inf
        self._start_measuring()

    # --- places ---

    @contextmanager
    def admit(
        self, cost: int, owner: str = "", priority: int = 0, num_outputs: int = 1
    ) -> Iterator[Ticket]:
        """A place for as long as the request is under way; 429 when there is none."""
        ticket = self.enter(cost, owner, priority, num_outputs)
        try:
            yield ticket
        finally:
            self.leave(ticket)

    def enter(
        self,
        cost: int,
        owner: str = "",
        priority: int = 0,
        num_outputs: int = 1,
        is_promised: bool = False,
    ) -> Ticket:
        """A place, until `leave`; 429 when there is none, unless it was promised before."""
        if not is_promised:
            self._check_room(owner, cost)
        if not self.tickets:
            self._since = self._clock()  # nothing was done while nobody was there
        ticket = Ticket(cost, owner, priority, num_outputs, on_progress=self._note_progress)
        self.tickets[ticket] = None
        self._places.take(owner, 1)
        self._costs.take(owner, cost)
        self._add_left(cost, cost)
        self._queue.push(ticket, owner, priority, cost)
        self._start_next()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        del self.tickets[ticket]
        ticket.on_progress = None  # its end may take a moment to get to the engine
        self._places.give_back(ticket.owner, 1)
        self._costs.give_back(ticket.owner, ticket.cost)
        self._add_left(ticket.cost, -ticket.left)
        self._num_started -= ticket.is_started
        if ticket.turn.is_set():
            self.end_turn(ticket)
        else:
            self._queue.remove(ticket, ticket.owner, ticket.priority)
        self._is_order_old = True
        if not self.tickets:
            self._seconds += self._clock() - self._since
            self._left.clear()  # and with it what rounding has left there
            self._order = {}

    def check_place(self, owner: str) -> None:
        """429 where a request would have to be refused, whatever it asks for."""
        if not self._places.has_room(owner, 1):
            is_full = len(self.tickets) >= self.max_num_queued
            what = f"{self.max_num_queued} requests are under way" if is_full else _OTHERS_PART
            raise self._refuse("places" if is_full else "share", what, self.retry_after)

    def _check_room(self, owner: str, cost: int) -> None:
        self.check_place(owner)
        if not self._costs.has_room(owner, cost):
            over = self._costs.used + cost - self._costs.most
            seconds = self.estimate() * min(1.0, max(0.0, over) / self._costs.used)
            what = "what is under way costs too much together" if over > 0 else _OTHERS_PART
            reason = "cost" if over > 0 else "share"
            raise self._refuse(reason, what, max(self.retry_after, _to_whole_seconds(seconds)))

    def _refuse(self, reason: str, what: str, retry_after: int) -> APIError:
        self.note_shed(reason)
        return APIError(
            429,
            f"the queue is full: {what}",
            code="queue_full",
            headers={"Retry-After": str(retry_after)},
        )

    def note_shed(self, reason: str) -> None:
        if self.on_shed is not None:
            self.on_shed(reason)

    # --- turns ---

    async def wait_turn(self, ticket: Ticket, seconds: float | None = None) -> None:
        """Until the engine may have it.

        Args:
            seconds: that the request has left; then it ends with `DeadlineExceededError`.
        """
        try:
            async with asyncio.timeout(seconds):
                await ticket.turn.wait()
        except TimeoutError:
            raise DeadlineExceededError("the deadline passed in the queue") from None

    def end_turn(self, ticket: Ticket) -> None:
        """The engine is done with it, and may have another. May be called twice."""
        if ticket.has_turn:
            ticket.has_turn = False
            del self._in_engine[ticket]
            self._num_outputs -= ticket.num_outputs
            self._start_next()

    def _start_next(self) -> None:
        while self._queue and self._num_outputs < self.max_num_running:
            ticket = self._queue.pop()
            ticket.has_turn = True
            ticket.turn.set()
            self._in_engine[ticket] = None
            self._num_outputs += ticket.num_outputs
        self._is_order_old = True

    # --- how long it takes ---

    def finish(self, ticket: Ticket) -> None:
        """Note that a request was answered: what has been done since, for all, says the speed."""
        ticket.note_progress(1.0)
        self._num_finished += 1
        seconds = self._seconds + self._clock() - self._since
        cost = self._done - self._done_before
        if cost > 0 and seconds >= _MIN_MEASURED:
            self.speed.note(cost, self._num_finished, seconds)
            self._start_measuring()
            self._is_order_old = True

    @property
    def measured_speed(self) -> float | None:
        """Pixel-steps a second, lately."""
        return self.speed.last

    @property
    def num_waiting(self) -> int:
        return len(self.tickets) - self._num_started

    @property
    def num_running(self) -> int:
        return self._num_started

    def get_position(self, ticket: Ticket) -> int | None:
        """How many wait before it; None once it runs or has ended."""
        if ticket.is_started or ticket not in self.tickets:
            return None
        # Who is not in it is new.
        return self._get_order().get(ticket, (max(0, self.num_waiting - 1), 0.0))[0]

    def estimate(self, ticket: Ticket | None = None) -> float:
        """Seconds until this request, or all there are, will be done.

        Requests that run share every step. One that waits comes after those before it.
        """
        if ticket is None:
            return sum(left / self.speed.get_of_size(size) for size, left in self._left.items())
        own = self._get_remaining(ticket)
        running = (other for other in self._in_engine if other.is_started)
        if ticket.is_started:
            return sum(min(own, self._get_remaining(other)) for other in running)
        if (place := self._get_order().get(ticket)) is None:
            return self.estimate()
        return own + place[1] + sum(map(self._get_remaining, running))

    @property
    def retry_after(self) -> int:
        """Seconds until there should be a place."""
        return _to_whole_seconds(self.estimate() / max(1, len(self.tickets)))

    def _get_order(self) -> dict[Ticket, tuple[int, float]]:
        """Of those that wait: how many are before it, and the seconds that those take.

        Where there are many, and it changes all the time, it is as it was a moment ago.
        """
        is_long = len(self._queue) > _LONG
        if self._is_order_old and not (is_long and self._clock() < self._ordered_at + _MOMENT):
            self._is_order_old, self._ordered_at = False, self._clock()
            self._order, seconds = {}, 0.0
            first = [ticket for ticket in self._in_engine if not ticket.is_started]
            for ticket in (*first, *self._queue):
                self._order[ticket] = (len(self._order), seconds)
                seconds += self._get_remaining(ticket)
        return self._order

    def _get_remaining(self, ticket: Ticket) -> float:
        """Seconds, if it were alone."""
        return ticket.left / self.speed.get(ticket.cost)

    def _note_progress(self, ticket: Ticket, before: float) -> None:
        cost = ticket.cost * (ticket.progress - before)
        self._done += cost
        self._add_left(ticket.cost, -cost)
        if not before:
            self._num_started += 1
            self._is_order_old = True

    def _add_left(self, cost: int, change: float) -> None:
        size = get_size(cost)
        self._left[size] = max(0.0, self._left.get(size, 0.0) + change)

    def _start_measuring(self) -> None:
        self._num_finished, self._done_before = 0, self._done
        self._seconds, self._since = 0.0, self._clock()  # with somebody there, until; from


_OTHERS_PART = "what is left of it is kept for other keys"


def _to_whole_seconds(seconds: float) -> int:
    return min(_MAX_RETRY_AFTER, max(1, math.ceil(seconds)))
