"""How much one request may ask for, and how much may be under way at once."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.entrypoints.openai.errors import APIError
from vllm_omni.params import DiffusionParams

_DEFAULT_SPEED = 1e6  # pixel-steps a second, until one was measured
_MAX_RETRY_AFTER = 600  # seconds


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
    """Refuse a prompt that nobody should have to tokenize."""
    if prompt is not None and len(prompt) > config.max_prompt_chars:
        raise APIError(
            400,
            f"{name} has {len(prompt)} characters: at most {config.max_prompt_chars}",
            name,
            "prompt_too_long",
        )


@dataclass(eq=False)
class Ticket:
    """One request's place in the queue."""

    cost: int
    is_started: bool = False  # it is past the queue: it has taken a step


@dataclass(eq=False)
class Admission:
    """The bounded queue: who is in, and how long it takes at the speed that was measured."""

    max_num_queued: int
    tickets: dict[Ticket, None] = field(default_factory=dict)  # in order of arrival
    measured_speed: float | None = None  # pixel-steps a second, over the last requests
    _busy_since: float = 0.0
    _cost_done: int = 0

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
            self._busy_since, self._cost_done = time.monotonic(), 0
        ticket = Ticket(cost)
        self.tickets[ticket] = None
        return ticket

    def leave(self, ticket: Ticket) -> None:
        del self.tickets[ticket]

    def finish(self, ticket: Ticket) -> None:
        """Note that a request was answered: what it cost and how long that took says the speed."""
        self._cost_done += ticket.cost
        busy = time.monotonic() - self._busy_since
        if ticket.cost and busy > 0:
            speed = self._cost_done / busy
            before = speed if self.measured_speed is None else self.measured_speed
            self.measured_speed = 0.7 * before + 0.3 * speed

    @property
    def speed(self) -> float:
        """Pixel-steps a second while there is work."""
        return self.measured_speed or _DEFAULT_SPEED

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
        """Seconds until all up to this request, or all there are, will be done."""
        cost = 0
        for other in self.tickets:
            cost += other.cost
            if other is ticket:
                break
        return cost / self.speed

    @property
    def retry_after(self) -> int:
        """Seconds until there should be a place."""
        per_request = self.estimate() / max(1, len(self.tickets))
        return min(_MAX_RETRY_AFTER, max(1, math.ceil(per_request)))
