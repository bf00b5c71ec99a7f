"""What a guided step takes at full size on one GPU: stock diffusers, ours, ours in fp8, the floor.

Random weights in the shape of Qwen-Image (60 layers, 24 heads of 128). A guided step is two rows,
with 64 and 12 text tokens: stock runs one after the other, we run all rows of all requests in one
forward. For a machine with torch and transformers; `vendor/` is made as `packed_step_gpu.py` says:

    PYTHONPATH=.:vendor/site:vendor/diffusers-0.42.1-py3-none-any.whl \\
        python3 benchmarks/step_latency.py --out $OUT

`--tiny` runs all of it on a CPU, to see that it runs. Writes step_latency.json and step_latency.md,
anew after every part; the last part is the summary.
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from vllm_omni.config import DiTCacheConfig
from vllm_omni.diffusion.cache_manager import DiTCacheManager
from vllm_omni.diffusion.sampling import euler_step, guide
from vllm_omni.diffusion.step_cache import PackedStepCache, RowCache, make_row_caches
from vllm_omni.layers.linear import LinearPart, LinearWeights, linear, quantize_rows
from vllm_omni.models.qwen_image.fast_transformer import FastTransformer
from vllm_omni.models.qwen_image.transformer import StepCachePlan, select_plan
from vllm_omni.models.qwen_image.weights import quantize_weights
from vllm_omni.step_cache import StepCacheParams

if TYPE_CHECKING:
    from benchmarks import gpu_report, packed_rows
    from benchmarks.gpu_report import Figures, number, relative_error, table
else:  # beside this script
    import gpu_report
    import packed_rows
    from gpu_report import Figures, number, relative_error, table

MAX_ROWS = 64
MAX_GRAPH_TOKENS = 8192
NUM_MIXED_STEPS = 200
LATENT_STEPS = 20


class Bench:
    """The model in its changing states, the batches, and what was found so far."""

    def __init__(
        self, device: torch.device, dimensions: packed_rows.Dimensions, sides: Sequence[int]
    ) -> None:
        self.device = device
        self.dimensions = dimensions
        self.sides = sides  # pixels, four of them, smallest first
        self.clock = gpu_report.Clock(device)
        self.rows = packed_rows.RowMaker(dimensions, device)
        self.ms: dict[str, dict[str, float]] = defaultdict(dict)  # batch -> variant -> time
        self.rates: dict[str, float] = {}
        self.latents: dict[str, Tensor] = {}  # of the simple loop, by size
        self._fast: FastTransformer | None = None

    @cached_property
    def model(self) -> Any:
        """The one whose weights we lay out anew."""
        return packed_rows.build_transformer(self.dimensions, self.device)

    @cached_property
    def stock_model(self) -> Any:
        """The same weights, untouched."""
        return packed_rows.build_transformer(self.dimensions, self.device)

    @cached_property
    def batches(self) -> dict[str, list[packed_rows.Row]]:
        a, b, c = self.sides[:3]
        alone = {f"{side}²": self.rows.make_guided(side) for side in self.sides}
        several = {
            f"{side}² x {count}": [r for _ in range(count) for r in self.rows.make_guided(side)]
            for side, count in ((a, 8), (b, 4), (c, 2))
        }
        together = {
            f"{a}² + {b}² + {c}²": [r for side in (a, b, c) for r in alone[f"{side}²"]],
        }
        return {**alone, **several, **together}

    @property
    def fast(self) -> FastTransformer:
        """Ours, compiled, over the model as it is now."""
        if self._fast is None:
            graph_tokens = MAX_GRAPH_TOKENS if self.device.type == "cuda" else 0
            self._fast = FastTransformer(self.model, MAX_ROWS, graph_tokens)
            self._fast.compile()
        return self._fast

    def quantize(self) -> None:
        self._fast = None
        quantize_weights(self.model)
        self.free()

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def count_weight_bytes(self) -> float:
        """Of what a step reads: the blocks without what makes the modulation."""
        return 2.0 * 24 * self.dimensions.width**2 * self.dimensions.num_layers

    def floor_ms(self, name: str, is_fp8: bool = False) -> float:
        """Everything at the best rates that were measured, or one read of the weights."""
        rows = self.batches[name]
        total = self.dimensions.tflop(rows)
        linears = 24e-12 * self.dimensions.width**2 * self.dimensions.num_layers
        linears *= sum(row.num_tokens for row in rows)
        rate = self.rates["fp8"] if is_fp8 else self.rates["bf16"]
        compute = linears / rate + (total - linears) / self.rates["bf16"]
        read = self.count_weight_bytes() / (2 if is_fp8 else 1) / self.rates["copy"] / 1e12
        return max(compute, read) * 1e3


class FastStep:
    """Our fast forward over any mix of rows."""

    def __init__(self, fast: FastTransformer, rows: Sequence[packed_rows.Row]) -> None:
        self.fast = fast
        self.packed = packed_rows.PackedStep(fast.transformer, rows)
        self.timesteps = self.packed.timesteps.cpu()

    def __call__(self, step_cache: StepCachePlan | None = None) -> Tensor:
        """[image tokens of all rows, channels]"""
        packed = self.packed
        return self.fast.forward(
            packed.plan, packed.latents, packed.text, self.timesteps, step_cache
        )


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


def parity(bench: Bench) -> tuple[Figures, str]:
    """Ours in bfloat16, compiled, against stock alone: ||ours - stock|| / ||stock|| over all rows.
    The yardstick is stock's own batch of two (the shorter text padded and masked) against alone."""
    figures: Figures = {}
    for name, rows in bench.batches.items():
        expected = torch.cat([packed_rows.stock_forward(bench.stock_model, row) for row in rows])
        step = FastStep(bench.fast, rows)
        errors = [relative_error(step(), expected) for _ in range(3)]  # the second on: as a graph
        figures[name] = {"ours": max(errors)}
        if len(rows) == 2:
            batch = packed_rows.StockStep(bench.stock_model, rows)().flatten(0, 1)
            figures[name]["stock_batch"] = relative_error(batch, expected)
    body = [
        [name, number(f["ours"], 4), number(f.get("stock_batch"), 4)] for name, f in figures.items()
    ]
    return figures, table(["guided step of", "ours", "stock, batch of 2"], body)


def against_float32(bench: Bench) -> tuple[Figures, str]:
    """Four layers of full width: the error of either in bfloat16 against stock in float32."""
    few = replace(bench.dimensions, num_layers=min(4, bench.dimensions.num_layers))
    stock = packed_rows.build_transformer(few, bench.device)
    exact = copy.deepcopy(stock).float()
    fast = FastTransformer(packed_rows.build_transformer(few, bench.device), MAX_ROWS)
    fast.compile()
    figures: Figures = {}
    for side in bench.sides[:3]:
        rows = bench.batches[f"{side}²"]
        expected = torch.cat(
            [packed_rows.stock_forward(exact, row.to(torch.float32)) for row in rows]
        )
        theirs = torch.cat([packed_rows.stock_forward(stock, row) for row in rows])
        figures[f"{side}²"] = {
            "stock": relative_error(theirs, expected),
            "ours": relative_error(FastStep(fast, rows)(), expected),
        }
    body = [[n, number(f["stock"], 4), number(f["ours"], 4)] for n, f in figures.items()]
    return figures, table(["guided step of", "stock", "ours"], body)


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


def mixed_steps(bench: Bench) -> tuple[Figures, str]:
    """200 steps with random mixes of sizes and prompt lengths, twice: what is compiled, and what is
    captured for batches of a size that was seen before, and how much memory is used afterwards."""
    fast, generator = bench.fast, random.Random(0)
    mixes = []
    for _ in range(NUM_MIXED_STEPS):
        sides = bench.sides[:2] if generator.random() < 0.7 else bench.sides[:3]
        shapes = [
            (generator.choice(sides), generator.randint(5, 200))
            for _ in range(generator.randint(1, 6))
        ]
        mixes.append((shapes, generator.randint(1, 128) / 128))
    figures: Figures = {}
    for turn in ("first", "second"):
        before = _count_compiled(), fast.graphs.num_captures
        for shapes, timestep in mixes:
            FastStep(fast, [bench.rows.make(*shape, timestep) for shape in shapes])()
        bench.free()
        figures[turn] = {
            "compiled": _count_compiled() - before[0],
            "captured": fast.graphs.num_captures - before[1],
            "allocated_gib": torch.cuda.memory_allocated() / 2**30 if bench.clock.is_cuda else 0.0,
            "reserved_gib": torch.cuda.memory_reserved() / 2**30 if bench.clock.is_cuda else 0.0,
        }
    headers = ["turn", *figures["first"]]
    return figures, table(headers, [[turn, *f.values()] for turn, f in figures.items()])


def _count_compiled() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


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


def fp8_layers(bench: Bench) -> tuple[Figures, str]:
    """What fp8 does to each kind of layer: ||fp8 - bfloat16|| / ||bfloat16|| of its output, on what
    the layer reads in a guided 512² step; over all blocks."""
    errors: dict[str, list[float]] = defaultdict(list)
    hooks = []

    def compare(kind: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            exact = _weights_of(module)
            values, scale = quantize_rows(exact.weight)
            quantized = LinearWeights(values, exact.bias, scale)
            errors[kind].append(relative_error(linear(args[0], quantized), output))

        return hook

    for block in bench.model.transformer_blocks:
        attn = block.attn
        layers = {
            "image query": attn.to_q,
            "image key": attn.to_k,
            "image value": attn.to_v,
            "image attention out": attn.to_out[0],
            "image MLP in": block.img_mlp.net[0].proj,
            "image MLP out": block.img_mlp.net[2],
            "text query": attn.add_q_proj,
            "text value": attn.add_v_proj,
            "text attention out": attn.to_add_out,
            "text MLP in": block.txt_mlp.net[0].proj,
            "text MLP out": block.txt_mlp.net[2],
        }
        hooks += [layer.register_forward_hook(compare(kind)) for kind, layer in layers.items()]
    packed_rows.PackedStep(bench.model, bench.batches[f"{bench.sides[1]}²"])()
    for hook in hooks:
        hook.remove()
    figures: Figures = {
        kind: {"mean": sum(e) / len(e), "max": max(e), "by_block": e} for kind, e in errors.items()
    }
    body = [[kind, number(f["mean"], 4), number(f["max"], 4)] for kind, f in figures.items()]
    return figures, table(["layer", "mean of all blocks", "worst block"], body)


def _weights_of(module: nn.Module) -> LinearWeights:
    if isinstance(module, LinearPart):
        return module.packed.weights.slice(module.start, module.end)
    assert isinstance(module, nn.Linear)
    return LinearWeights(module.weight, module.bias)


def latents_bf16(bench: Bench) -> tuple[Figures, str]:
    """Final latents of 20 guided steps, compiled against the simple loop, from the same noise."""
    return _compare_latents(bench, "bf16")


def latents_fp8(bench: Bench) -> tuple[Figures, str]:
    """Final latents of 20 guided steps, fp8 against the simple loop in bfloat16, the same noise."""
    return _compare_latents(bench, "fp8")


def _compare_latents(bench: Bench, variant: str) -> tuple[Figures, str]:
    figures: Figures = {}
    for side in bench.sides[:2]:
        step = FastStep(bench.fast, bench.batches[f"{side}²"])
        if variant == "bf16":
            bench.latents[f"{side}²"] = _denoise(step, is_simple=True)
        expected = bench.latents[f"{side}²"]
        ours = _denoise(step)
        figures[f"{side}²"] = {
            "relative_error": relative_error(ours, expected),
            "cosine": float(nn.functional.cosine_similarity(ours.ravel(), expected.ravel(), 0)),
        }
    body = [[n, number(f["relative_error"], 4), f"{f['cosine']:.6f}"] for n, f in figures.items()]
    return figures, table(["request", "relative error", "cosine"], body)


def _denoise(step: FastStep, is_simple: bool = False) -> Tensor:
    """Latents [image tokens, channels] float32 after all steps."""
    packed, noise = step.packed, step.packed.latents
    latents = noise.float().chunk(2)[0]
    scale = latents.new_full((latents.shape[0], 1), 4.0)
    levels = torch.linspace(1, 0, LATENT_STEPS + 1)
    for sigma, sigma_next in pairwise(levels):
        packed.latents = torch.cat((latents, latents)).to(torch.bfloat16)
        step.timesteps = sigma.to(torch.bfloat16).repeat(2)
        if is_simple:
            packed.timesteps = step.timesteps.to(latents.device)
            velocity = torch.cat(packed())
        else:
            velocity = step()
        cond, uncond = velocity.float().chunk(2)
        latents = euler_step(
            latents, guide(cond, uncond, scale), sigma.to(scale), sigma_next.to(scale)
        )
    packed.latents = noise
    return latents


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
    # Right?
    for part in (parity, fp8_layers, latents_bf16, mixed_steps, against_float32):
        report.run(bench, part)
    # And fast?
    for part in (ceilings, stock_eager, ours_bf16, step_caches, kernels_bf16):
        report.run(bench, part)
    bench.quantize()
    for part in (ours_fp8, step_caches_fp8, kernels_fp8, latents_fp8, summary):
        report.run(bench, part)
    for part in (stock_compiled, summary):
        report.run(bench, part)
    sys.exit(report.has_failed)


def step_caches_fp8(bench: Bench) -> tuple[Figures, str]:
    """The step cache on top of fp8."""
    return step_caches(bench)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
