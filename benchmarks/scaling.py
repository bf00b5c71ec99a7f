"""What a picture costs on one GPU, against batch size, resolution and number of steps.

Full-size Qwen-Image with random weights, as in `step_latency.py`; README.md says what the machine
needs. Steps are measured; a picture is its guided steps, and the decoding of its latents.

    PYTHONPATH=.:vendor/site:vendor/diffusers-0.42.1-py3-none-any.whl \\
        python3 benchmarks/scaling.py --out $OUT
    python benchmarks/scaling.py --plot benchmarks/results/scaling.json   # draws scaling.svg

`--tiny` runs all of it on a CPU, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from benchmarks import gpu_report, packed_rows
    from benchmarks.gpu_report import Call, Figures, number, table
    from benchmarks.step_bench import Bench, FastStep
else:  # beside this script
    import gpu_report
    import packed_rows
    from gpu_report import Call, Figures, number, table
    from step_bench import Bench, FastStep

BATCH_SIZES = (1, 2, 4, 8, 16)
MAX_TOKENS = 18_000  # of a step of ours; more take longer in proportion
MAX_STOCK_TOKENS = 9_000
STEP_COUNTS = (1, 2, 4, 8, 20, 50)


def ours_bf16(bench: Bench) -> tuple[Figures, str]:
    """Ours in bfloat16: milliseconds per guided step and picture."""
    return _measure_ours(bench)


def ours_fp8(bench: Bench) -> tuple[Figures, str]:
    """Ours in fp8: milliseconds per guided step and picture."""
    return _measure_ours(bench)


def stock_batched(bench: Bench) -> tuple[Figures, str]:
    """Stock diffusers, eager, pictures of one size as a batch, a forward for each branch:
    milliseconds per guided step and picture."""

    def make_step(rows: Sequence[packed_rows.Row]) -> Call:
        steps = [packed_rows.StockStep(bench.stock_model, rows[branch::2]) for branch in (0, 1)]
        return lambda: [step() for step in steps]

    return _measure(bench, make_step, MAX_STOCK_TOKENS, rounds=3, warm_up=1)


def modulation(bench: Bench) -> tuple[Figures, str]:
    """What a request costs before its first step, however many steps it has: the modulation of all
    its timesteps. Milliseconds."""
    slots = bench.fast.table

    def make(count: int) -> None:
        slots.clear()  # as if none had been met before
        slots.find([(step + 1) / 64 for step in range(count)])

    figures = {str(n): bench.clock.time(partial(make, n), 5) for n in STEP_COUNTS}
    return figures, table(["steps", "ms"], [[n, number(ms, 2)] for n, ms in figures.items()])


def _measure_ours(bench: Bench) -> tuple[Figures, str]:
    return _measure(bench, partial(FastStep, bench.fast), MAX_TOKENS, rounds=4, warm_up=3)


def _measure(
    bench: Bench,
    make_step: Callable[[Sequence[packed_rows.Row]], Call],
    max_tokens: int,
    rounds: int,
    warm_up: int,
) -> tuple[Figures, str]:
    """Of every size, as many pictures at once as the tokens allow, and at least one."""
    figures: Figures = {}
    for side in bench.sides:
        figures[f"{side}²"] = {}
        for count in BATCH_SIZES:
            rows = [row for _ in range(count) for row in bench.rows.make_guided(side)]
            if count > 1 and sum(row.num_tokens for row in rows) > max_tokens:
                break
            ms = bench.clock.time(make_step(rows), rounds, warm_up)
            figures[f"{side}²"][str(count)] = ms / count
    return figures, _table(figures)


def _table(figures: Figures) -> str:
    body = [
        [size, *(number(by_count.get(str(count)), 2) for count in BATCH_SIZES)]
        for size, by_count in figures.items()
    ]
    return table(["size", *(f"{count} at once" for count in BATCH_SIZES)], body)


def plot(path: Path) -> None:
    """Draw what was measured, beside the file with the figures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = json.loads(path.read_text())
    variants = [
        ("stock_batched", "stock diffusers", "tab:gray"),
        ("ours_bf16", "ours", "tab:blue"),
        ("ours_fp8", "ours, fp8", "tab:orange"),
    ]
    drawn, axes = pyplot.subplots(1, 3, figsize=(15, 4.6))
    for key, label, color in variants:
        by_size = figures[key]
        sizes = [int(size[:-1]) for size in by_size]
        for size, by_count in by_size.items():
            counts = [int(count) for count in by_count]
            axes[0].plot(counts, [*by_count.values()], "o-", color=color, ms=3, lw=1)
            if key != "stock_batched":
                axes[0].annotate(size, (counts[-1], [*by_count.values()][-1]), fontsize=7)
        alone = [by_count["1"] for by_count in by_size.values()]
        axes[1].plot([(s / 16) ** 2 for s in sizes], alone, "o-", color=color, label=label, ms=4)
        for size, style in ((sizes[0], ":"), (1024, "-")):
            if f"{size}²" in by_size:
                step = by_size[f"{size}²"]["1"] / 1e3
                counts = [1, 2, 4, 8, 20, 50]
                name = f"{label}, {size}²"
                axes[2].plot(counts, [n * step for n in counts], style, color=color, label=name)
    axes[0].set(xlabel="requests in a step", ylabel="ms per guided step and picture")
    axes[0].set_title("batch size")
    axes[1].set(xlabel="image tokens of a picture", ylabel="ms per guided step, one request")
    axes[1].set_title("resolution")
    axes[2].set(xlabel="steps", ylabel="seconds per picture, one request")
    axes[2].set_title("steps")
    for axis in axes:
        axis.set(xscale="log", yscale="log")
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=8)
    axes[2].legend(fontsize=7)
    drawn.tight_layout()
    drawn.savefig(path.with_suffix(".svg"))


def main() -> None:
    args = parse_args()
    if args.plot is not None:
        plot(args.plot)
        return
    torch.set_grad_enabled(False)
    sides: Sequence[int] = (64, 96, 128) if args.tiny else (256, 384, 512, 768, 1024, 1328, 1536)
    dimensions = packed_rows.Dimensions()
    if args.tiny:
        dimensions = packed_rows.Dimensions(3, 2, 32, 24)
    bench = Bench(torch.device("cpu" if args.tiny else "cuda"), dimensions, sides)
    report: gpu_report.Report[Bench] = gpu_report.Report(
        args.out, "scaling", (__doc__ or "").splitlines()[0], {"transformer": str(dimensions)}
    )
    for part in (stock_batched, ours_bf16, modulation):
        report.run(bench, part)
    bench.quantize()
    report.run(bench, ours_fp8)
    sys.exit(report.has_failed)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the two files")
    parser.add_argument("--plot", type=Path, help="a scaling.json to draw instead of measuring")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    args = parser.parse_args()
    if args.out is None and args.plot is None:
        parser.error("one of --out and --plot is needed")
    return args


if __name__ == "__main__":
    main()
