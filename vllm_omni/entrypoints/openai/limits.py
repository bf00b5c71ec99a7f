"""How much one request may ask for, and how much may be under way at once."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.entrypoints.openai.errors import APIError
from vllm_omni.params import DiffusionParams

_DEFAULT_SPEED = 1e6  # pixel-steps a second, until one was measured
_HALF = re.compile("[\ud800-\udfff]")  # JSON can name these, UTF-8 cannot write them
_MAX_RETRY_AFTER = 600  # seconds
_MIN_MEASURED = 0.05  # seconds: requests of one batch end at once, and that says nothing


def get_cost(params: DiffusionParams) -> int:
    """Pixels x steps x pictures, over both branches of guidance; params are complete."""
    assert params.height and params.width and params.num_inference_steps
    rows = 2 if params.do_true_cfg else 1
    pixels = params.height * params.width * params.num_outputs_per_prompt
    return pixels * params.num_inference_steps * rows


def check_cost(params: DiffusionParams, config: ServerConfig) -> int:
    """The cost of a request, if it may ask for as much; the config's limits suit the model."""
    assert params.height and params.width
    if params.height * params.width > config.max_pixels:
        raise APIError(
            400,
            f"size={params.width}x{params.height} has {params.height * params.width} pixels: "
            f"at most {config.max_pixels}",
            "size",
            "size_limit_exceeded",
        )
    if params.num_outputs_per_prompt > config.max_n:
        raise APIError(
            400, f"n={params.num_outputs_per_prompt} is too large: at most {config.max_n}", "n"
        )
    cost = get_cost(params)
    if cost > config.max_cost:
        raise APIError(
            400,
            f"the request costs {cost} (pixels x steps x n, twice with guidance), more than "
            f"{config.max_cost}: ask for a smaller size, fewer steps or fewer pictures",
            "size",
            "cost_limit_exceeded",
        )
    return cost


def check_prompt(name: str, prompt: str | None, config: ServerConfig) -> None:
    """Refuse a prompt that nobody should have to tokenize, or can."""
    if prompt is None:
        return
    if len(prompt) > config.max_prompt_chars:
        raise APIError(
            400,
            f"{name} has {len(prompt)} characters: at most {config.max_prompt_chars}",
            name,
            "prompt_too_long",
        )
    if not prompt.isascii() and _HALF.search(prompt):
        message = f"{name} holds half of a character: a surrogate without the other one"
        raise APIError(400, message, name, "invalid_value")


@dataclass(eq=False)
class Ticket:
    """One request's place in the queue."""

    cost: int
    progress: float = 0.0  # the part of its steps that are done

    @property
    def is_started(self) -> bool:
        """Whether it is past the queue: it has taken a step."""
        return self.progress > 0

    @property
    def done(self) -> float:
        """Of the cost."""
        return self.cost * self.progress

    def note_step(self, step: int, num_steps: int) -> None:
        """That so many of its steps are done."""
        if num_steps:
            self.progress = max(self.progress, step / num_steps)


class Speed:
    """Pixel-steps a second, of requests of each size: what is small takes longer than it costs."""

    def __init__(self) -> None:
        self.last: float | None = None  # whatever was done last; None: nothing yet
        self._by_size: dict[int, float] = {}

    def note(self, cost: float, num_requests: int, seconds: float) -> None:
        """That so many requests, done in so much time, cost so much together."""
        size = _get_size(cost / num_requests)
        before = self._by_size.get(size, cost / seconds)
        self.last = self._by_size[size] = 0.7 * before + 0.3 * cost / seconds

    def get(self, cost: int) -> float:
        """Of requests that are most like one with this cost."""
        size = _get_size(cost)
        nearest = min(self._by_size, key=lambda other: abs(other - size), default=None)
        return _DEFAULT_SPEED if nearest is None else self._by_size[nearest]


def _get_size(cost: float) -> int:
    """The same for costs that differ by less than a factor of about four."""
    return int(cost).bit_length() // 2


class Admission:
    """The bounded queue: who is in, and how long it takes at the speed that was measured."""

    def __init__(self, max_num_queued: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_num_queued = max_num_queued
        self.tickets: dict[Ticket, None] = {}  # in order of arrival
        self.speed = Speed()
        self._clock = clock
        self._left = 0.0  # cost of what was done for those that have left
        self._start_measuring()

    @contextmanager
    def admit(self, cost: int) -> Iterator[Ticket]:
        """A place for as long as the request is under way; 429 when there is none."""
        ticket = self.enter(cost)
        try:
            yield ticket
        finally:
            self.leave(ticket)

    def enter(self, cost: int) -> Ticket:
        """A place, until `leave`; 429 when there is none."""
        if len(self.tickets) >= self.max_num_queued:
            raise APIError(
                429,
                f"the queue is full: {self.max_num_queued} requests are under way",
                code="queue_full",
                headers={"Retry-After": str(self.retry_after)},
            )
        if not self.tickets:
            self._since = self._clock()  # nothing was done while nobody was there
        ticket = Ticket(cost)
        self.tickets[ticket] = None
        return ticket

    def leave(self, ticket: Ticket) -> None:
        del self.tickets[ticket]
        self._left += ticket.done
        if not self.tickets:
            self._seconds += self._clock() - self._since

    def finish(self, ticket: Ticket) -> None:
        """Note that a request was answered: what has been done since, for all, says the speed."""
        ticket.progress = 1.0
        self._num_finished += 1
        seconds = self._seconds + self._clock() - self._since
        cost = self._done - self._done_before
        if cost > 0 and seconds >= _MIN_MEASURED:
            self.speed.note(cost, self._num_finished, seconds)
            self._start_measuring()

    @property
    def measured_speed(self) -> float | None:
        """Pixel-steps a second, lately."""
        return self.speed.last

    @property
    def num_waiting(self) -> int:
        return sum(not ticket.is_started for ticket in self.tickets)

    @property
    def num_running(self) -> int:
        return len(self.tickets) - self.num_waiting

    def get_position(self, ticket: Ticket) -> int | None:
        """How many wait before it; None once it runs or has ended."""
        waiting = [other for other in self.tickets if not other.is_started]
        return waiting.index(ticket) if ticket in waiting else None

    def estimate(self, ticket: Ticket | None = None) -> float:
        """Seconds until this request, or all there are, will be done.

        Requests that run share every step. One that waits comes after those before it.
        """
        if ticket is None:
            return sum(map(self._get_remaining, self.tickets))
        own = self._get_remaining(ticket)
        if ticket.is_started:
            running = (other for other in self.tickets if other.is_started)
            return sum(min(own, self._get_remaining(other)) for other in running)
        before = takewhile(lambda other: other is not ticket, self.tickets)
        return own + sum(map(self._get_remaining, before))

    @property
    def retry_after(self) -> int:
        """Seconds until there should be a place."""
        per_request = self.estimate() / max(1, len(self.tickets))
        return min(_MAX_RETRY_AFTER, max(1, math.ceil(per_request)))

    def _get_remaining(self, ticket: Ticket) -> float:
        """Seconds, if it were alone."""
        return (ticket.cost - ticket.done) / self.speed.get(ticket.cost)

    @property
    def _done(self) -> float:
        return self._left + sum(ticket.done for ticket in self.tickets)

    def _start_measuring(self) -> None:
        self._num_finished, self._done_before = 0, self._done
        self._seconds, self._since = 0.0, self._clock()  # with somebody there, until; from
