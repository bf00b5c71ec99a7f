"""Requests over time without a device: the real scheduler, and a clock moved by measured costs."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_omni.config import DiTConfig
from vllm_omni.diffusion.messages import (
    DiffusionModelRunnerOutput,
    DiffusionRequest,
    RequestResult,
)
from vllm_omni.diffusion.scheduler import DiffusionScheduler

NUM_TEXT_TOKENS = (64, 64)  # of the two guidance branches


@dataclass(frozen=True)
class SizeClass:
    """A part of the load."""

    side: int  # pixels
    num_steps: int
    share: float

    @property
    def name(self) -> str:
        return f"{self.side}²/{self.num_steps}"


MIX = (
    SizeClass(512, 20, 0.15),
    SizeClass(768, 20, 0.25),
    SizeClass(1024, 25, 0.45),
    SizeClass(1536, 35, 0.15),
)


def row_lens(side: int) -> tuple[int, ...]:
    """Tokens of each row of a guided request."""
    return tuple((side // 16) ** 2 + num_text for num_text in NUM_TEXT_TOKENS)


class StepCosts:
    """Seconds of a step with any mix of sizes.

    Mixes that were measured cost what they did; the others what a sum of three terms says that is
    fitted to those: one for the step, one for each token, one for each pair that attends.
    """

    def __init__(self, measured: Mapping[tuple[int, ...], float]) -> None:
        self.measured = {tuple(sorted(sides)): seconds for sides, seconds in measured.items()}
        features = np.array([_features(sides) for sides in self.measured])
        seconds = np.array(list(self.measured.values()))
        # Relative errors count, and no term may be negative.
        self.terms = _fit_positive(features / seconds[:, None], np.ones(len(seconds)))
        self.errors = features @ self.terms / seconds - 1

    def get(self, sides: Sequence[int]) -> float:
        key = tuple(sorted(sides))
        if key not in self.measured:
            self.measured[key] = float(_features(key) @ self.terms)
        return self.measured[key]


def _features(sides: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    lens = [num_tokens for side in sides for num_tokens in row_lens(side)]
    return np.array([1.0, sum(lens), sum(num_tokens**2 for num_tokens in lens)])


def _fit_positive(
    features: np.ndarray[Any, Any], target: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Least squares without negative terms: terms that would be are left out, worst first."""
    kept = list(range(features.shape[1]))
    while True:
        solution = np.linalg.lstsq(features[:, kept], target, rcond=None)[0]
        if (solution >= 0).all():
            break
        del kept[int(solution.argmin())]
    terms = np.zeros(features.shape[1])
    terms[kept] = solution
    return terms


@dataclass(frozen=True)
class Arrival:
    """A request of the load."""

    request_id: str
    time: float
    size: SizeClass


def draw_arrivals(rate: float, count: int, seed: int) -> list[Arrival]:
    """Poisson arrivals of the mix."""
    rng = random.Random(seed)
    now = 0.0
    arrivals = []
    for index in range(count):
        now += rng.expovariate(rate)
        [size] = rng.choices(MIX, [size.share for size in MIX])
        arrivals.append(Arrival(str(index), now, size))
    return arrivals


@dataclass(frozen=True)
class VirtualInputs:
    """What the scheduler needs to know of a request."""

    side: int
    num_steps: int
    num_rows: int = len(NUM_TEXT_TOKENS)
    output_type: str = "image"
    preview_every: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(row_lens(self.side))


class VirtualClock:
    """Seconds since the beginning of the load."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run_engine(
    arrivals: Sequence[Arrival],
    steps: StepCosts,
    decode_seconds: Mapping[int, float],
    config: DiTConfig,
) -> dict[str, float]:
    """When each request of the load was done by the engine of a config.

    A decode counts as if the next step waited for it: beside a step that fills the device it takes
    as much from that step.
    """
    clock = VirtualClock()
    scheduler = DiffusionScheduler(config, clock)
    size_of = {arrival.request_id: arrival.size for arrival in arrivals}
    num_computed = dict.fromkeys(size_of, 0)
    done: dict[str, float] = {}
    waiting = list(reversed(arrivals))
    while waiting or scheduler.has_requests():
        if not scheduler.has_requests():
            clock.now = max(clock.now, waiting[-1].time)
        while waiting and waiting[-1].time <= clock.now:
            scheduler.add_request(_request(waiting.pop()))
        step = scheduler.schedule()
        if step.num_scheduled_steps:
            clock.now += steps.get([size_of[id].side for id in step.num_scheduled_steps])
        output = DiffusionModelRunnerOutput()
        for request_id in step.num_scheduled_steps:
            num_computed[request_id] += 1
            output.num_computed_steps[request_id] = num_computed[request_id]
            if num_computed[request_id] == size_of[request_id].num_steps:
                clock.now += decode_seconds[size_of[request_id].side]
                done[request_id] = clock.now
                output.results[request_id] = RequestResult(pooling_output=None)  # type: ignore[arg-type]
        scheduler.update_from_output(step, output)
    return done


def _request(arrival: Arrival) -> DiffusionRequest[VirtualInputs]:
    return DiffusionRequest(
        request_id=arrival.request_id,
        custom_inputs=VirtualInputs(arrival.size.side, arrival.size.num_steps),
        arrival_time=arrival.time,
    )


def run_one_at_a_time(
    arrivals: Sequence[Arrival],
    step_seconds: Mapping[int, float],
    decode_seconds: Mapping[int, float],
) -> dict[str, float]:
    """When each request was done by a pipeline that takes them one after another."""
    now = 0.0
    done = {}
    for arrival in arrivals:
        side = arrival.size.side
        start = max(now, arrival.time)
        now = start + arrival.size.num_steps * step_seconds[side] + decode_seconds[side]
        done[arrival.request_id] = now
    return done


@dataclass(frozen=True)
class Latencies:
    """Of a size class, or of all: seconds from arrival to picture."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    in_time: float  # share of requests

    @classmethod
    def of(cls, seconds: Sequence[float], limits: Sequence[float]) -> Latencies:
        ordered = sorted(seconds)
        in_time = sum(took <= limit for took, limit in zip(seconds, limits, strict=True))
        return cls(
            count=len(ordered),
            mean=sum(ordered) / len(ordered),
            p50=_percentile(ordered, 0.5),
            p95=_percentile(ordered, 0.95),
            p99=_percentile(ordered, 0.99),
            in_time=in_time / len(ordered),
        )


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[math.ceil(share * len(ordered)) - 1]


@dataclass(frozen=True)
class Outcome:
    """What one way of serving made of a load."""

    throughput: float  # pictures per second, first arrival to last picture
    by_class: dict[str, Latencies]  # of each size, and of all

    @classmethod
    def of(
        cls, arrivals: Sequence[Arrival], done: Mapping[str, float], limits: Mapping[int, float]
    ) -> Outcome:
        groups = {size.name: [a for a in arrivals if a.size is size] for size in MIX}
        by_class = {
            name: Latencies.of(
                [done[a.request_id] - a.time for a in members],
                [limits[a.size.side] for a in members],
            )
            for name, members in {**groups, "all": list(arrivals)}.items()
            if members
        }
        seconds = max(done.values()) - arrivals[0].time
        return cls(len(arrivals) / seconds, by_class)
