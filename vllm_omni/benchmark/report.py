"""From outcomes to figures: latency, throughput, arrivals, and how many were in time.

A failed request has no latency, and has missed its SLO.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_omni.benchmark.load import Outcome
from vllm_omni.benchmark.workload import PictureClass

ALL = "all"  # the row of all classes together


@dataclass(frozen=True)
class Slo:
    """How soon a picture must be there: a number of seconds, or a multiple of its class alone."""

    seconds: float | None = None
    scale: float | None = None

    def for_class(self, alone: float | None) -> float | None:
        """Seconds for a class that takes `alone` seconds on an idle server; None: unknown."""
        if self.seconds is not None:
            return self.seconds
        if self.scale is not None and alone is not None:
            return self.scale * alone
        return None


@dataclass(frozen=True)
class Percentiles:
    """Of a number of durations, in seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles | None:
        """None where there is nothing to summarise; values between two ranks are interpolated."""
        if not seconds:
            return None
        ranks = (float(value) for value in np.percentile(seconds, (50, 90, 95, 99, 100)))
        return cls(float(np.mean(seconds)), *ranks)


@dataclass(frozen=True)
class ClassReport:
    """The requests of one class, or of all."""

    name: str
    num_ok: int
    num_failed: int
    latency: Percentiles | None
    first_preview: Percentiles | None
    alone_seconds: float | None  # latency on the idle server, from the warm-up
    slo_seconds: float | None
    slo_attainment: float | None  # share of all requests that were answered in time


@dataclass(frozen=True)
class Throughput:
    """Of what succeeded, per second of the whole run."""

    requests: float
    images: float
    megapixels: float
    megapixel_steps: float | None  # None: the server chose the steps


@dataclass(frozen=True)
class Arrivals:
    """How the load came in, and how much of it was under way at once."""

    requested_rate: float | None  # per second; None: closed loop, or all at once
    actual_rate: float | None  # of sending; None: fewer than two requests, or all at once
    late_p99_seconds: float  # sending after the intended time: the client's own lag
    mean_in_flight: float
    max_in_flight: int


@dataclass(frozen=True)
class LoadReport:
    """Everything that a run has shown."""

    duration: float  # seconds from the first arrival to the last answer
    num_ok: int
    num_failed: int
    num_unfinished: int  # sent, and cut off by the user
    failures: dict[str, int]  # by kind
    failure_examples: dict[str, str]  # the first message of each kind
    throughput: Throughput
    arrivals: Arrivals
    classes: list[ClassReport]  # by size; the last one is all of them


def make_report(
    outcomes: Sequence[Outcome],
    alone: Mapping[str, float],
    slo: Slo,
    num_sent: int | None = None,
    requested_rate: float | None = None,
) -> LoadReport:
    """The figures of a run that has ended or was cut short.

    Args:
        alone: seconds of each class on the idle server, by name; where it was measured.
        num_sent: requests that were sent, if not all of them have an outcome.
    """
    ok = [outcome for outcome in outcomes if outcome.failure is None]
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    first = min((outcome.arrival for outcome in outcomes), default=0.0)
    duration = max((outcome.end for outcome in outcomes), default=0.0) - first
    return LoadReport(
        duration=duration,
        num_ok=len(ok),
        num_failed=len(failures),
        num_unfinished=0 if num_sent is None else num_sent - len(outcomes),
        failures=dict(Counter(failure.kind for failure in failures).most_common()),
        failure_examples={failure.kind: failure.message for failure in reversed(failures)},
        throughput=_throughput(ok, duration),
        arrivals=_arrivals(outcomes, duration, requested_rate),
        classes=_classes(outcomes, alone, slo),
    )


def _throughput(ok: Sequence[Outcome], duration: float) -> Throughput:
    seconds = duration or 1.0  # of a run in which nothing happened
    pixels = [outcome.num_images * outcome.request.picture.megapixels for outcome in ok]
    steps = [outcome.request.picture.num_steps for outcome in ok]
    work = sum(p * (n or 0) for p, n in zip(pixels, steps, strict=True))
    return Throughput(
        requests=len(ok) / seconds,
        images=sum(outcome.num_images for outcome in ok) / seconds,
        megapixels=sum(pixels) / seconds,
        megapixel_steps=None if None in steps else work / seconds,
    )


def _arrivals(
    outcomes: Sequence[Outcome], duration: float, requested_rate: float | None
) -> Arrivals:
    sent = sorted(outcome.sent for outcome in outcomes)
    span = sent[-1] - sent[0] if sent else 0.0
    all_at_once = requested_rate == float("inf")
    late = [outcome.sent - outcome.arrival for outcome in outcomes]
    return Arrivals(
        requested_rate=None if all_at_once else requested_rate,
        actual_rate=(len(sent) - 1) / span if span and not all_at_once else None,
        late_p99_seconds=float(np.percentile(late, 99)) if late else 0.0,
        mean_in_flight=sum(outcome.latency for outcome in outcomes) / (duration or 1.0),
        max_in_flight=find_max_in_flight(outcomes),
    )


def find_max_in_flight(outcomes: Iterable[Outcome]) -> int:
    """The most requests that were under way at the same moment."""
    changes = [(outcome.arrival, 1) for outcome in outcomes]
    changes += [(outcome.end, -1) for outcome in outcomes]
    running, most = 0, 0
    for _, change in sorted(changes):  # at the same moment, ends come first
        running += change
        most = max(most, running)
    return most


def _classes(
    outcomes: Sequence[Outcome], alone: Mapping[str, float], slo: Slo
) -> list[ClassReport]:
    by_class: dict[PictureClass, list[Outcome]] = {}
    for outcome in outcomes:
        by_class.setdefault(outcome.request.picture, []).append(outcome)
    reports = []
    num_in_time = 0
    for picture in sorted(by_class, key=lambda p: (p.megapixels, p.num_steps or 0)):
        row = by_class[picture]
        seconds = slo.for_class(alone.get(picture.name))
        in_time = 0 if seconds is None else sum(_is_in_time(outcome, seconds) for outcome in row)
        num_in_time += in_time
        attainment = None if seconds is None else in_time / len(row)
        reports.append(
            _class_report(picture.name, row, alone.get(picture.name), seconds, attainment)
        )
    is_known = bool(reports) and all(report.slo_attainment is not None for report in reports)
    attainment = num_in_time / len(outcomes) if is_known else None
    return [*reports, _class_report(ALL, outcomes, None, slo.seconds, attainment)]


def _is_in_time(outcome: Outcome, seconds: float) -> bool:
    return outcome.failure is None and outcome.latency <= seconds


def _class_report(
    name: str,
    outcomes: Sequence[Outcome],
    alone: float | None,
    slo_seconds: float | None,
    slo_attainment: float | None,
) -> ClassReport:
    ok = [outcome for outcome in outcomes if outcome.failure is None]
    previews = [o.first_preview - o.arrival for o in ok if o.first_preview is not None]
    return ClassReport(
        name=name,
        num_ok=len(ok),
        num_failed=len(outcomes) - len(ok),
        latency=Percentiles.of([outcome.latency for outcome in ok]),
        first_preview=Percentiles.of(previews),
        alone_seconds=alone,
        slo_seconds=slo_seconds,
        slo_attainment=slo_attainment,
    )


def fastest_of_each_class(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Seconds by class name: the first request of a class may pay for what is made once."""
    fastest: dict[str, float] = {}
    for outcome in outcomes:
        if outcome.failure is None:
            name = outcome.request.picture.name
            fastest[name] = min(outcome.latency, fastest.get(name, outcome.latency))
    return fastest
