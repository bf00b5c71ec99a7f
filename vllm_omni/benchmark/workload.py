"""What is asked for, and when: mixes of picture sizes, prompts, and arrival times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from types import MappingProxyType

DIFFUSERS = "diffusers:"
"""What a url begins with that is the path of a checkpoint, for diffusers, and no server's."""


@dataclass(frozen=True)
class PictureClass:
    """One kind of request in a mix."""

    width: int  # pixels
    height: int  # pixels
    num_steps: int | None = None  # None: the server's own number
    share: float = 1.0  # of the requests, relative to the other classes

    @property
    def size(self) -> str:
        """As OpenAI's `size` says it."""
        return f"{self.width}x{self.height}"

    @property
    def name(self) -> str:
        """Size and, where they are asked for, steps: "512x512/20"."""
        return self.size if self.num_steps is None else f"{self.size}/{self.num_steps}"

    @property
    def megapixels(self) -> float:
        return self.width * self.height / 1e6


def _squares(*rows: tuple[int, int, float]) -> tuple[PictureClass, ...]:
    return tuple(PictureClass(side, side, steps, share) for side, steps, share in rows)


MIXES: Mapping[str, tuple[PictureClass, ...]] = MappingProxyType(
    {
        "section9": _squares((512, 20, 15), (768, 20, 25), (1024, 25, 45), (1536, 35, 15)),
        "demo": _squares((128, 20, 15), (192, 20, 25), (256, 25, 45), (384, 35, 15)),
        "small": (PictureClass(256, 256),),
    }
)
"""Shares in percent. `demo` is `section9` with sides a quarter as long."""


@dataclass(frozen=True)
class PictureRequest:
    """One request to send."""

    index: int
    picture: PictureClass
    prompt: str


PROMPTS = tuple(
    f"a {size} {colour} {shape} on a {background} background"
    for size, colour, shape, background in product(
        ("small", "large"),
        ("red", "blue", "green", "yellow", "orange", "purple"),
        ("circle", "square", "triangle", "star"),
        ("white", "black", "gray"),
    )
)
"""What is drawn when the user has no prompts of their own."""


def make_requests(
    mix: Sequence[PictureClass], num_requests: int, seed: int, prompts: Sequence[str] = PROMPTS
) -> list[PictureRequest]:
    """Requests in shuffled order; the mix's shares hold as exactly as whole requests can."""
    random = Random(f"{seed} requests")
    counts = apportion([picture.share for picture in mix], num_requests)
    pictures = [picture for picture, count in zip(mix, counts, strict=True) for _ in range(count)]
    random.shuffle(pictures)
    order = random.sample(prompts, len(prompts))
    return [
        PictureRequest(index, picture, order[index % len(order)])
        for index, picture in enumerate(pictures)
    ]


def apportion(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to `shares` that add up to `total`."""
    exact = [total * share / sum(shares) for share in shares]
    counts = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def poisson_arrivals(rate: float, num_requests: int, seed: int) -> list[float]:
    """Seconds after the start; an infinite rate is all at once.

    The pattern depends on the seed only: another rate stretches it.
    """
    random = Random(f"{seed} arrivals")
    arrivals, now = [], 0.0
    for _ in range(num_requests):
        now += random.expovariate(1.0)
        arrivals.append(now / rate)
    return arrivals
