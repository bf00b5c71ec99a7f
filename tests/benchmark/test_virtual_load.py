"""The virtual load: costs are fitted, time adds up, small pictures do not wait for large ones."""

from __future__ import annotations

import pytest

from benchmarks.virtual_load import (
    MIX,
    Arrival,
    Latencies,
    Outcome,
    StepCosts,
    draw_arrivals,
    row_lens,
    run_engine,
    run_one_at_a_time,
)
from vllm_omni.config import DiTConfig

SIDES = tuple(size.side for size in MIX)
NO_DECODE = dict.fromkeys(SIDES, 0.0)


def cost(*sides: int) -> float:
    """Seconds of a step as one H200 about takes them: by tokens and by pairs that attend."""
    lens = [num_tokens for side in sides for num_tokens in row_lens(side)]
    return 0.004 + 2.1e-5 * sum(lens) + 1.3e-9 * sum(n * n for n in lens)


@pytest.fixture(scope="module")
def steps() -> StepCosts:
    mixes = [*((side,) for side in SIDES), (512, 512), (512, 1024), (1024, 1024)]
    return StepCosts({mix: cost(*mix) for mix in mixes})


def test_costs_of_other_mixes_come_from_the_measured_ones(steps: StepCosts) -> None:
    assert abs(steps.errors).max() < 1e-9
    for mix in [(768, 1536), (1536, 512, 768), (512,) * 7]:
        assert steps.get(mix) == pytest.approx(cost(*mix))
        assert steps.get(tuple(reversed(mix))) == steps.get(mix)


def test_no_term_of_a_fit_is_negative() -> None:
    noisy = StepCosts({(512,): 1.0, (1024,): 3.0, (1536,): 4.0, (512, 512): 2.5})
    assert (noisy.terms >= 0).all()
    assert noisy.get((512,)) == 1.0  # what was measured stays


def test_one_at_a_time() -> None:
    arrivals = [Arrival("a", 1.0, MIX[0]), Arrival("b", 2.0, MIX[0]), Arrival("c", 90.0, MIX[1])]
    step, decode = {512: 1.0, 768: 2.0}, {512: 0.5, 768: 0.25}
    assert run_one_at_a_time(arrivals, step, decode) == {"a": 21.5, "b": 42.0, "c": 130.25}


def test_a_request_alone_takes_its_steps_and_its_decode(steps: StepCosts) -> None:
    done = run_engine([Arrival("a", 3.0, MIX[2])], steps, {1024: 0.5}, DiTConfig())
    assert done == {"a": pytest.approx(3.0 + 25 * cost(1024) + 0.5)}


def test_latencies() -> None:
    latencies = Latencies.of([4.0, 1.0, 3.0, 2.0], [2.5] * 4)
    assert latencies == Latencies(4, 2.5, 2.0, 4.0, 4.0, 0.5)


def test_small_pictures_do_not_wait_for_large_ones(steps: StepCosts) -> None:
    """At the same throughput, P95 of the small ones is at most a third of first come, first
    served; nobody starves."""
    capacity = 1 / sum(size.share * size.num_steps * cost(size.side) for size in MIX)
    arrivals = draw_arrivals(0.9 * capacity, 300, seed=1)
    limits = dict.fromkeys(SIDES, 60.0)
    fcfs, shortest = (
        Outcome.of(arrivals, run_engine(arrivals, steps, NO_DECODE, config), limits)
        for config in (DiTConfig(policy="fcfs"), DiTConfig(policy="shortest"))
    )
    small, large = MIX[0].name, MIX[-1].name
    assert shortest.throughput == pytest.approx(fcfs.throughput, rel=0.03)
    assert shortest.by_class[small].p95 <= fcfs.by_class[small].p95 / 3
    assert shortest.by_class["all"].mean < fcfs.by_class["all"].mean
    assert shortest.by_class[large].p99 < 2 * fcfs.by_class[large].p99
