"""Percentiles, throughput, SLO and the table, from outcomes with known figures."""

from __future__ import annotations

import math

import pytest

from vllm_omni.benchmark.client import Failure
from vllm_omni.benchmark.load import Outcome
from vllm_omni.benchmark.report import (
    Percentiles,
    Slo,
    fastest_of_each_class,
    find_max_in_flight,
    make_report,
)
from vllm_omni.benchmark.table import to_text
from vllm_omni.benchmark.workload import PictureClass, PictureRequest

SMALL = PictureClass(100, 100, num_steps=10)  # 0.01 megapixels
LARGE = PictureClass(1000, 1000, num_steps=20)
BUSY = Failure("HTTP 429", "queue full")


def create_outcome(
    arrival: float,
    latency: float,
    picture: PictureClass = SMALL,
    failure: Failure | None = None,
    first_preview: float | None = None,
    late: float = 0.0,
) -> Outcome:
    return Outcome(
        request=PictureRequest(0, picture, "a cat"),
        arrival=arrival,
        sent=arrival + late,
        end=arrival + latency,
        num_images=0 if failure else 2,
        first_preview=first_preview,
        failure=failure,
    )


def test_percentiles_of_known_numbers() -> None:
    percentiles = Percentiles.of([value / 100 for value in range(101)])
    assert percentiles is not None
    values = (percentiles.p50, percentiles.p90, percentiles.p95, percentiles.p99, percentiles.max)
    assert values == pytest.approx((0.5, 0.9, 0.95, 0.99, 1.0))
    assert percentiles.mean == pytest.approx(0.5)


def test_percentiles_between_two_values_and_of_one_and_none() -> None:
    two, one = Percentiles.of([1.0, 3.0]), Percentiles.of([7.0])
    assert two is not None and (two.mean, two.p50, two.p90) == pytest.approx((2.0, 2.0, 2.8))
    assert one == Percentiles(7.0, 7.0, 7.0, 7.0, 7.0, 7.0)
    assert Percentiles.of([]) is None


def test_slo_is_a_multiple_of_alone_or_fixed() -> None:
    assert Slo(scale=3.0).for_class(alone=2.0) == 6.0
    assert Slo(scale=3.0).for_class(alone=None) is None
    assert Slo(seconds=5.0).for_class(alone=2.0) == 5.0
    assert Slo().for_class(alone=2.0) is None


def test_classes_and_attainment() -> None:
    outcomes = [
        create_outcome(0, 1.0),
        create_outcome(0, 3.0),
        create_outcome(0, 3.1),
        create_outcome(0, 0.1, failure=BUSY),  # not in time, though soon
        create_outcome(0, 20.0, LARGE),
        create_outcome(0, 30.0, LARGE),
    ]
    report = make_report(outcomes, {SMALL.name: 1.0, LARGE.name: 8.0}, Slo(scale=3.0))
    small, large, overall = report.classes
    assert (small.name, small.num_ok, small.num_failed) == ("100x100/10", 3, 1)
    assert (small.alone_seconds, small.slo_seconds, small.slo_attainment) == (1.0, 3.0, 0.5)
    assert small.latency is not None and small.latency.p50 == 3.0 and small.latency.max == 3.1
    assert (large.name, large.slo_seconds, large.slo_attainment) == ("1000x1000/20", 24.0, 0.5)
    assert (overall.name, overall.num_ok, overall.num_failed) == ("all", 5, 1)
    assert (overall.slo_seconds, overall.slo_attainment) == (None, 0.5)
    assert report.failures == {"HTTP 429": 1}
    assert report.failure_examples == {"HTTP 429": "queue full"}


def test_attainment_of_all_is_unknown_where_one_class_was_not_measured_alone() -> None:
    outcomes = [create_outcome(0, 1.0), create_outcome(0, 1.0, LARGE)]
    report = make_report(outcomes, {SMALL.name: 1.0}, Slo(scale=3.0))
    assert [row.slo_attainment for row in report.classes] == [1.0, None, None]
    fixed = make_report(outcomes, {}, Slo(seconds=2.0))
    assert [row.slo_attainment for row in fixed.classes] == [1.0, 1.0, 1.0]


def test_throughput_counts_what_succeeded() -> None:
    outcomes = [
        create_outcome(1.0, 2.0),
        create_outcome(2.0, 9.0, LARGE),
        create_outcome(3.0, 1.0, LARGE, failure=BUSY),
    ]
    report = make_report(outcomes, {}, Slo())
    assert report.duration == 10.0  # from the first arrival
    assert report.throughput.requests == pytest.approx(0.2)
    assert report.throughput.images == pytest.approx(0.4)
    assert report.throughput.megapixels == pytest.approx((2 * 0.01 + 2 * 1.0) / 10)
    assert report.throughput.megapixel_steps == pytest.approx((2 * 0.01 * 10 + 2 * 20) / 10)


def test_steps_that_the_server_chose_are_not_counted() -> None:
    report = make_report([create_outcome(0, 1.0, PictureClass(100, 100))], {}, Slo())
    assert report.throughput.megapixel_steps is None
    assert "megapixel-steps" not in to_text(report)


def test_arrivals() -> None:
    outcomes = [create_outcome(0.5 * index, 1.0, late=0.01) for index in range(5)]
    arrivals = make_report(outcomes, {}, Slo(), requested_rate=1.9).arrivals
    assert arrivals.requested_rate == 1.9
    assert arrivals.actual_rate == pytest.approx(2.0)
    assert arrivals.late_p99_seconds == pytest.approx(0.01)
    assert arrivals.mean_in_flight == pytest.approx(5 * 1.0 / 3.0)
    assert arrivals.max_in_flight == 2  # the third comes as the first goes
    at_once = make_report(outcomes, {}, Slo(), requested_rate=math.inf).arrivals
    assert at_once.requested_rate is None and at_once.actual_rate is None


def test_in_flight_counts_overlaps() -> None:
    assert find_max_in_flight([]) == 0
    nested = [create_outcome(0, 10), create_outcome(1, 1), create_outcome(3, 1)]
    assert find_max_in_flight(nested) == 2


def test_the_fastest_of_a_class_is_its_time_alone() -> None:
    outcomes = [
        create_outcome(0, 5.0),
        create_outcome(5, 2.0),
        create_outcome(7, 0.1, failure=BUSY),
        create_outcome(8, 0.1, LARGE, failure=BUSY),
    ]
    assert fastest_of_each_class(outcomes) == {SMALL.name: 2.0}


def test_first_previews_are_measured_from_arrival() -> None:
    outcomes = [create_outcome(2.0, 5.0, first_preview=3.5), create_outcome(2.0, 5.0)]
    report = make_report(outcomes, {}, Slo())
    preview = report.classes[0].first_preview
    assert preview is not None and preview.p50 == preview.max == 1.5
    assert "first preview" in to_text(report)


def test_a_run_without_outcomes_is_a_report_too() -> None:
    report = make_report([], {}, Slo(scale=3.0), num_sent=4)
    assert (report.num_ok, report.num_failed, report.num_unfinished) == (0, 0, 4)
    assert report.classes[0].latency is None and report.classes[0].slo_attainment is None
    assert "0 ok, 0 failed, 4 unfinished" in to_text(report)


def test_table() -> None:
    outcomes = [
        create_outcome(0.0, 1.0),
        create_outcome(1.0, 3.0),
        create_outcome(2.0, 0.5, failure=BUSY),
    ]
    report = make_report(outcomes, {SMALL.name: 1.0}, Slo(scale=2.0), requested_rate=1.0)
    assert to_text(report).splitlines() == [
        "requests    2 ok, 1 failed",
        "duration    4.00 s",
        "throughput  0.500 requests/s, 1.000 images/s, 0.0100 megapixels/s, "
        "0.100 megapixel-steps/s",
        "arrivals    1.000 requests/s (asked: 1), in flight 1.1 on average, 2 at most, "
        "sent late by 0 ms (P99)",
        "            1 x HTTP 429: queue full",
        "",
        "latency in s       ok   failed     mean      p50      p90      p95      p99      max"
        "    alone      SLO  in time",
        "100x100/10          2        1    2.000    2.000    2.800    2.900    2.980    3.000"
        "    1.000    2.000   33.3 %",
        "all                 2        1    2.000    2.000    2.800    2.900    2.980    3.000"
        "        -        -   33.3 %",
    ]
