"""Mixes, prompts and arrival times."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from vllm_omni.benchmark.workload import (
    MIXES,
    PROMPTS,
    PictureClass,
    apportion,
    make_requests,
    poisson_arrivals,
)


def test_section9_is_the_mix_of_the_design() -> None:
    shares = {picture.name: picture.share for picture in MIXES["section9"]}
    assert shares == {"512x512/20": 15, "768x768/20": 25, "1024x1024/25": 45, "1536x1536/35": 15}


def test_demo_is_the_same_mix_a_quarter_as_large() -> None:
    for small, large in zip(MIXES["demo"], MIXES["section9"], strict=True):
        assert (4 * small.width, 4 * small.height) == (large.width, large.height)
        assert (small.num_steps, small.share) == (large.num_steps, large.share)
        assert small.width % 16 == 0


def test_small_leaves_the_steps_to_the_server() -> None:
    assert MIXES["small"] == (PictureClass(256, 256, num_steps=None),)
    assert MIXES["small"][0].name == "256x256"


@pytest.mark.parametrize(
    ("shares", "total", "counts"),
    [
        ((15, 25, 45, 15), 100, [15, 25, 45, 15]),
        ((15, 25, 45, 15), 20, [3, 5, 9, 3]),
        ((15, 25, 45, 15), 7, [1, 2, 3, 1]),
        ((1, 1, 1), 2, [1, 1, 0]),
        ((1,), 5, [5]),
    ],
)
def test_shares_become_whole_numbers(
    shares: tuple[float, ...], total: int, counts: list[int]
) -> None:
    assert apportion(shares, total) == counts


def test_requests_keep_the_shares_in_shuffled_order() -> None:
    requests = make_requests(MIXES["section9"], 200, seed=1)
    counts = Counter(request.picture.width for request in requests)
    assert counts == {512: 30, 768: 50, 1024: 90, 1536: 30}
    assert [request.index for request in requests] == list(range(200))
    widths = [request.picture.width for request in requests]
    assert widths != sorted(widths)


def test_the_same_seed_gives_the_same_requests() -> None:
    first = make_requests(MIXES["demo"], 50, seed=1)
    assert make_requests(MIXES["demo"], 50, seed=1) == first
    assert make_requests(MIXES["demo"], 50, seed=2) != first


def test_prompts_come_back_only_after_all_others() -> None:
    prompts = ["one", "two", "three"]
    drawn = [request.prompt for request in make_requests(MIXES["small"], 7, 0, prompts)]
    assert sorted(drawn[:3]) == sorted(prompts)
    assert drawn[3:] == [*drawn[:3], drawn[0]]
    assert len(set(PROMPTS)) == len(PROMPTS) == 144


def test_poisson_arrivals_have_the_rate_and_its_spread() -> None:
    arrivals = poisson_arrivals(rate=5.0, num_requests=20_000, seed=3)
    gaps = [after - before for before, after in zip([0.0, *arrivals], arrivals, strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(0.2, rel=0.03)
    assert deviation == pytest.approx(0.2, rel=0.03)  # of an exponential: its mean
    assert min(gaps) >= 0


def test_the_same_seed_gives_the_same_arrivals_at_every_rate() -> None:
    slow, fast = poisson_arrivals(1.0, 50, seed=4), poisson_arrivals(10.0, 50, seed=4)
    assert slow == poisson_arrivals(1.0, 50, seed=4)
    assert slow == pytest.approx([10 * arrival for arrival in fast])
    assert slow != poisson_arrivals(1.0, 50, seed=5)


def test_an_infinite_rate_is_all_at_once() -> None:
    assert poisson_arrivals(math.inf, 3, seed=0) == [0.0, 0.0, 0.0]
