"""What a guided step takes at full size on one GPU: stock diffusers, ours, ours in fp8, the floor.

Random weights in the shape of Qwen-Image (60 layers, 24 heads of 128). A guided step is two rows,
with 64 and 12 text tokens: stock runs one after the other, we run all rows of all requests in one
forward. For a machine with torch and transformers; `vendor/` is made as README.md says:

    PYTHONPATH=.:vendor/site:vendor/diffusers-0.42.1-py3-none-any.whl \\
        python3 benchmarks/step_latency.py --out $OUT

`--tiny` runs all of it on a CPU, to see that it runs. Writes step_latency.json and step_latency.md,
anew after every part; the last part is the summary.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from vllm_omni.config import DiTCacheConfig
from vllm_omni.diffusion.cache_manager import DiTCacheManager
from vllm_omni.diffusion.step_cache import PackedStepCache, RowCache, make_row_caches
from vllm_omni.layers.linear import LinearWeights, quantize_rows
from vllm_omni.models.qwen_image.transformer import StepCachePlan, select_plan
from vllm_omni.step_cache import StepCacheParams

if TYPE_CHECKING:
    from benchmarks import gpu_report, packed_rows, step_checks
    from benchmarks.gpu_report import Figures, number, table
    from benchmarks.step_bench import Bench, FastStep
else:  # beside this script
    import gpu_report
    import packed_rows
    import step_checks
    from gpu_report import Figures, number, table
    from step_bench import Bench, FastStep


# --- the parts: each gives its figures and a table of them ---


def ceilings(bench: Bench) -> tuple[Figures, str]:
    """The best rates of this device on random data: what the floors are made of."""
    size = 8192 if bench.clock.is_cuda else 256
    a, b = bench.rows.noise(size, size), bench.rows.noise(size, size)
    bench.rates["bf16"] = 2e-9 * size**3 / bench.clock.time(lambda: a @ b, 20)
    weights = LinearWeights(*_quantized(b))
    x, scale = quantize_rows(a)
    product = _fp8_product(x, scale, weights)
    bench.rates["fp8"] = 2e-9 * size**3 / bench.clock.time(product, 20)
    source = torch.empty(size * size * 16, dtype=torch.bfloat16, device=bench.device).normal_()
    target = torch.empty_like(source)
    bench.rates["copy"] = 2e-9 * source.nbytes / bench.clock.time(lambda: target.copy_(source))
    body = [
        ["matrix product, bfloat16", f"{bench.rates['bf16']:.0f} TFLOP/s"],
        ["matrix product, fp8, a scale for each row", f"{bench.rates['fp8']:.0f} TFLOP/s"],
        ["copy, bytes read and written", f"{bench.rates['copy']:.2f} TB/s"],
    ]
    return dict(bench.rates), table(["what", "rate"], body)


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, scale = quantize_rows(weight)
    return values, weight.new_zeros(weight.shape[0]), scale


def _fp8_product(x: Tensor, scale: Tensor, weights: LinearWeights) -> Callable[[], object]:
    assert weights.scale is not None
    scale_b, weight = weights.scale.t(), weights.weight.t()
    if not x.is_cuda:
        return lambda: x.float() @ weight.float()
    return lambda: torch._scaled_mm(
        x,
        weight,
        scale_a=scale,
        scale_b=scale_b,
        bias=weights.bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def stock_eager(bench: Bench) -> tuple[Figures, str]:
    """Stock diffusers, eager. A request alone: one forward for each branch. Several of one size:
    one after the other, and, for comparison, all conditional ones as a batch, then the others."""
    model = bench.stock_model
    body = []
    for name, rows in bench.batches.items():
        if len(rows) == 2:
            alone = [packed_rows.StockStep(model, [row]) for row in rows]
            bench.ms[name]["stock"] = bench.clock.time(lambda a=alone: [s() for s in a], 5)  # type: ignore[misc]
    for name, rows in bench.batches.items():
        sizes = [f"{16 * row.grid[1]}²" for row in rows[::2]]
        bench.ms[name]["stock"] = sum(bench.ms[size]["stock"] for size in sizes)
        if len(rows) > 2 and len(set(sizes)) == 1:
            batched = [packed_rows.StockStep(model, rows[branch::2]) for branch in (0, 1)]
            bench.ms[name]["stock batched"] = bench.clock.time(
                lambda b=batched: [step() for step in b],  # type: ignore[misc]
                5,
            )
        body.append(
            [name, number(bench.ms[name]["stock"]), number(bench.ms[name].get("stock batched"))]
        )
    return _times_of(bench, "stock", "stock batched"), table(
        ["guided step of", "one after the other, ms", "as a batch, ms"], body
    )


def ours_bf16(bench: Bench) -> tuple[Figures, str]:
    """Ours in bfloat16: compiled; as CUDA graphs up to 8192 tokens and segments of 2048."""
    return _time_ours(bench, "ours bf16")


def ours_fp8(bench: Bench) -> tuple[Figures, str]:
    """Ours with the large layers in fp8."""
    return _time_ours(bench, "ours fp8")


def _time_ours(bench: Bench, variant: str) -> tuple[Figures, str]:
    is_fp8 = variant.endswith("fp8")
    body = []
    for name, rows in bench.batches.items():
        ms = bench.ms[name][variant] = bench.clock.time(FastStep(bench.fast, rows), 7, 4)
        floor = bench.ms[name][f"floor {variant[5:]}"] = bench.floor_ms(name, is_fp8)
        stock = bench.ms[name].get("stock")
        body.append(
            [
                name,
                number(ms, 2),
                number(bench.dimensions.tflop(rows) / ms * 1e3, 0),
                number(stock / ms if stock else None, 2),
                number(floor, 1),
            ]
        )
    headers = ["guided step of", "ms", "TFLOP/s", "stock / ours", "floor, ms"]
    return _times_of(bench, variant, f"floor {variant[5:]}"), table(headers, body)


def _times_of(bench: Bench, *variants: str) -> Figures:
    return {
        name: {variant: ms[variant] for variant in variants if variant in ms}
        for name, ms in bench.ms.items()
    }


def kernels_bf16(bench: Bench) -> tuple[Figures, str]:
    """Where the time goes, kernel by kernel, in bfloat16; kernels beside each other count twice."""
    return _profile(bench)


def kernels_fp8(bench: Bench) -> tuple[Figures, str]:
    """Where the time goes, kernel by kernel, in fp8."""
    return _profile(bench)


def _profile(bench: Bench) -> tuple[Figures, str]:
    figures: Figures = {}
    text = ""
    for side in (bench.sides[2], bench.sides[0]):
        step = FastStep(bench.fast, bench.batches[f"{side}²"])
        for _ in range(3):
            step()
        activity = ProfilerActivity.CUDA if bench.clock.is_cuda else ProfilerActivity.CPU
        with profile(activities=[activity]) as profiled:
            step()
            if bench.clock.is_cuda:
                torch.cuda.synchronize()
        kind = "device" if bench.clock.is_cuda else "cpu"
        kernels = [
            {"name": e.key, "count": e.count, "ms": getattr(e, f"self_{kind}_time_total") / 1e3}
            for e in profiled.key_averages()
        ]
        kernels.sort(key=lambda kernel: -float(kernel["ms"]))
        total = sum(float(kernel["ms"]) for kernel in kernels)
        figures[f"{side}²"] = {"total_ms": total, "kernels": kernels[:25]}
        body = [
            [f"{k['ms']:.2f}", f"{100 * float(k['ms']) / total:.1f} %", k["count"], k["name"][:90]]
            for k in kernels[:14]
        ]
        text += f"\nA guided {side}² step, {total:.1f} ms of kernels:\n\n"
        text += table(["ms", "share", "calls", "kernel"], body)
    return figures, text


def step_caches(bench: Bench) -> tuple[Figures, str]:
    """The step cache: what it costs when no row hits, and what a step takes as more rows hit.
    The stock column is without a cache. Rows that hit run one block of all; the rest as a
    sub-batch. The inputs change from step to step, so that distances are real."""
    figures: Figures = {}
    body = []
    counts = ((bench.sides[2], 1), (bench.sides[1], 5))
    for side, count in counts:
        name = f"{side}² x {count}"
        rows = [row for _ in range(count) for row in bench.rows.make_guided(side)]
        step = FastStep(bench.fast, rows)
        plain = bench.clock.time(step, 7, 4)
        stock = bench.ms[f"{side}²"].get("stock", float("nan")) * count
        figures[name] = {"without_ms": plain, "stock_ms": stock}
        for num_hits in sorted({0, len(rows) // 2, round(0.6 * len(rows)), len(rows)}):
            ms = bench.clock.time(CachedStep(bench, step, num_hits), 6, 4)
            figures[name][f"{num_hits} of {len(rows)}"] = ms
            body.append([name, f"{num_hits} of {len(rows)}", *_compare(ms, plain, stock)])
        missed, hit = (
            figures[name][f"0 of {len(rows)}"],
            figures[name][f"{len(rows)} of {len(rows)}"],
        )
        average = 0.4 * missed + 0.6 * hit
        figures[name]["average_at_60_percent_of_steps"] = average
        body.append([name, "all rows in 60 % of the steps", *_compare(average, plain, stock)])
    headers = ["requests", "rows that hit", "ms", "without cache, ms", "ratio", "stock / ours"]
    return figures, table(headers, body)


def step_caches_fp8(bench: Bench) -> tuple[Figures, str]:
    """The step cache on top of fp8."""
    return step_caches(bench)


def _compare(ms: float, plain: float, stock: float) -> list[str]:
    return [number(ms, 2), number(plain, 2), f"{ms / plain:.3f}", number(stock / ms, 2)]


class CachedStep:
    """A step in which the first rows hit and the others do not."""

    def __init__(self, bench: Bench, step: FastStep, num_hits: int) -> None:
        self.step = step
        self.manager = DiTCacheManager(DiTCacheConfig(max_cache_size=16 * 2**30), bench.device)
        plan = step.packed.plan
        self.caches: list[RowCache] = []
        for row in range(len(plan.image_lens)):
            # The smallest threshold there is: it is compared, and never near.
            params = StepCacheParams(threshold=10.0 if row < num_hits else 1e-9, warmup_steps=0)
            self.caches += make_row_caches(f"row {row}", params, 1, self.manager)
        latents = step.packed.latents
        self.inputs = [latents, latents + 0.01 * bench.rows.noise(*latents.shape)]
        self.num_steps = 0

    def __call__(self) -> None:
        plan, packed = self.step.packed.plan, self.step.packed
        cache = PackedStepCache(self.caches, plan.image_lens, [0.5] * len(self.caches))
        packed.latents = self.inputs[self.num_steps % 2]
        self.num_steps += 1
        self.step(StepCachePlan(cache, lambda rows: self._plan_rows(tuple(rows))))
        for row in self.caches:
            row.commit()

    def _plan_rows(self, rows: tuple[int, ...]) -> Any:
        if not hasattr(self, "_sub_plan"):  # as the engine does: kept while it is the same
            self._sub_plan = select_plan(self.step.packed.plan, rows)
        return self._sub_plan


def stock_compiled(bench: Bench) -> tuple[Figures, str]:
    """Stock diffusers after `compile_repeated_blocks(fullgraph=True, dynamic=True)`."""
    bench.stock_model.compile_repeated_blocks(fullgraph=True, dynamic=True)
    body = []
    for side in bench.sides[:3]:
        name = f"{side}²"
        steps = [packed_rows.StockStep(bench.stock_model, [row]) for row in bench.batches[name]]
        ms = bench.clock.time(lambda s=steps: [step() for step in s], 5)  # type: ignore[misc]
        bench.ms[name]["stock compiled"] = ms
        body.append([name, number(ms), number(bench.ms[name]["stock"] / ms, 2)])
    return _times_of(bench, "stock compiled"), table(["guided step of", "ms", "eager / this"], body)


def summary(bench: Bench) -> tuple[Figures, str]:
    """Milliseconds per guided step, and how many times faster than stock, eager, one by one."""
    variants = ["stock", "stock batched", "stock compiled", "ours bf16", "floor bf16"]
    variants += ["ours fp8", "floor fp8"]
    body = []
    for name, ms in bench.ms.items():
        ratios = [
            number(ms["stock"] / ms[v] if v in ms else None, 2) for v in ("ours bf16", "ours fp8")
        ]
        rate = bench.dimensions.tflop(bench.batches[name]) * 1e3
        rates = [number(rate / ms[v] if v in ms else None, 0) for v in ("ours bf16", "ours fp8")]
        body.append([name, *(number(ms.get(v)) for v in variants), *ratios, *rates])
    headers = ["guided step of", *variants, "bf16: stock / ours", "fp8: stock / ours"]
    headers += ["bf16, TFLOP/s", "fp8, TFLOP/s"]
    return {name: dict(ms) for name, ms in bench.ms.items()}, table(headers, body)


# --- the run ---


def main() -> None:
    args = parse_args()
    torch.set_grad_enabled(False)
    sides = [64, 96, 128, 144] if args.tiny else [256, 512, 1024, 1328]
    dimensions = packed_rows.Dimensions()
    if args.tiny:
        dimensions = packed_rows.Dimensions(3, 2, 32, 24)
    device = torch.device("cpu" if args.tiny else "cuda")
    bench = Bench(device, dimensions, sides)
    report: gpu_report.Report[Bench] = gpu_report.Report(
        args.out, "step_latency", (__doc__ or "").splitlines()[0], {"transformer": str(dimensions)}
    )
    for part in step_checks.PARTS:
        report.run(bench, part)
    for part in (ceilings, stock_eager, ours_bf16, step_caches, kernels_bf16):
        report.run(bench, part)
    bench.quantize()
    for part in (ours_fp8, step_caches_fp8, kernels_fp8, step_checks.latents_fp8, summary):
        report.run(bench, part)
    for part in (stock_compiled, summary):
        report.run(bench, part)
    sys.exit(report.has_failed)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
