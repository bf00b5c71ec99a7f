"""Quality against speed of step caches: the same pictures with and without, setting by setting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from vllm_omni.outputs import OmniOutput
from vllm_omni.params import DiffusionParams
from vllm_omni.step_cache import StepCacheParams

THRESHOLDS: Mapping[str, Sequence[float]] = {
    "first_block": (0.05, 0.1, 0.15, 0.2, 0.3),
    "tea": (0.1, 0.2, 0.3, 0.45, 0.6),
    "taylor": (0.1, 0.15, 0.2, 0.3, 0.4),
}
Pixels = NDArray[np.uint8]  # [height, width, 3]
SAME = 100.0  # dB, of pictures that are equal to the last bit


class Artist(Protocol):
    """What draws: an `Omni`."""

    def generate(
        self, prompts: Sequence[str], params: Sequence[DiffusionParams]
    ) -> list[OmniOutput]: ...


@dataclass(frozen=True)
class CacheResult:
    """What one setting did to a set of pictures."""

    cache: StepCacheParams
    skipped: float  # part of the rows that left out the tail
    block_ratio: float  # block computations without a cache over those with it
    time_ratio: float  # seconds without over seconds with
    psnr: float  # decibels against the pictures without, mean
    worst_psnr: float

    @property
    def name(self) -> str:
        return f"{self.cache.method} {self.cache.threshold:g}"


class CacheBench:
    """Draws a set of prompts once without a cache, then once with every setting.

    Args:
        num_blocks: of the model's transformer, by which block computations are counted.
        params: of all pictures; picture i is drawn with seed + i.
    """

    def __init__(
        self, artist: Artist, num_blocks: int, prompts: Sequence[str], params: DiffusionParams
    ) -> None:
        self.artist = artist
        self.num_blocks = num_blocks
        self.prompts = prompts
        seed = params.seed or 0
        self.params = [replace(params, seed=seed + index) for index in range(len(prompts))]
        self.images: list[Image] = []  # without a cache
        self.seconds = 0.0

    def measure_plain(self) -> None:
        """The pictures that all others are compared with; the first time is a warm-up."""
        for _ in range(2):
            self.images, _, self.seconds = self.draw(None)

    def run(self, settings: Sequence[StepCacheParams]) -> Iterator[CacheResult]:
        """One result a setting."""
        for cache in settings:
            images, skipped, seconds = self.draw(cache)
            psnrs = [get_psnr(a, b) for a, b in zip(self.images, images, strict=True)]
            kept = 1 - skipped * (self.num_blocks - 1) / self.num_blocks
            yield CacheResult(
                cache=cache,
                skipped=skipped,
                block_ratio=1 / kept,
                time_ratio=self.seconds / seconds,
                psnr=float(np.mean(psnrs)),
                worst_psnr=min(psnrs),
            )

    def draw(self, cache: StepCacheParams | None) -> tuple[list[Image], float, float]:
        """Pictures, the part of rows that were skipped, and seconds."""
        start = time.perf_counter()
        params = [replace(one, cache=cache) for one in self.params]
        outputs = self.artist.generate(self.prompts, params)
        seconds = time.perf_counter() - start
        for output in outputs:
            if output.error is not None:
                raise output.error
        num_rows = sum(output.metrics.num_rows for output in outputs)
        num_skipped = sum(output.metrics.num_skipped_rows for output in outputs)
        return [output.images[0] for output in outputs], num_skipped / num_rows, seconds


def make_settings(
    methods: Sequence[str], thresholds: Sequence[float] | None, **fields: Any
) -> list[StepCacheParams]:
    """All methods with their own thresholds, or with these."""
    return [
        StepCacheParams(method=method, threshold=threshold, **fields)  # type: ignore[arg-type]
        for method in methods
        for threshold in (thresholds or THRESHOLDS[method])
    ]


def get_psnr(image: Image | Pixels, other: Image | Pixels) -> float:
    """Peak signal-to-noise ratio in decibels."""
    difference = np.asarray(image).astype(float) - np.asarray(other).astype(float)
    error = float((difference**2).mean())
    return SAME if error == 0 else min(SAME, 10 * np.log10(255**2 / error))


def to_text(results: Sequence[CacheResult]) -> str:
    """A table for people."""
    lines = [
        f"{'cache':<18} {'rows skipped':>12} {'blocks':>8} {'time':>8} {'PSNR':>8} {'worst':>8}"
    ]
    lines += [
        f"{r.name:<18} {r.skipped:>11.0%} {r.block_ratio:>7.2f}x {r.time_ratio:>7.2f}x "
        f"{r.psnr:>7.1f} {r.worst_psnr:>8.1f}"
        for r in results
    ]
    return "\n".join(lines)


def to_json(results: Sequence[CacheResult]) -> list[dict[str, Any]]:
    return [asdict(result) for result in results]


def write_plot(path: Path, title: str, results: Sequence[CacheResult]) -> None:
    """Speed to the right, quality upwards: the best settings are in the upper right corner."""
    import matplotlib
    from matplotlib.figure import Figure

    from vllm_omni.benchmark.plot import COLOURS, STYLE

    def draw(axes: Any, label: str, get: Callable[[CacheResult], float]) -> None:
        methods = list(dict.fromkeys(result.cache.method for result in results))
        for method, colour in zip(methods, COLOURS, strict=False):
            points = [result for result in results if result.cache.method == method]
            x, y = [get(point) for point in points], [point.psnr for point in points]
            axes.plot(x, y, "o-", color=colour, label=method)
            for point, across, up in zip(points, x, y, strict=True):
                axes.annotate(
                    f"{point.cache.threshold:g}",
                    (across, up),
                    xytext=(4, 5),
                    textcoords="offset points",
                    fontsize=8,
                )
        axes.set_xlabel(label)
        axes.set_ylabel("PSNR against no cache, dB")

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.6), dpi=120)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        left, right = figure.subplots(1, 2)
        draw(left, "times fewer block computations", lambda result: result.block_ratio)
        draw(right, "times faster", lambda result: result.time_ratio)
        left.legend()
        figure.savefig(path)
