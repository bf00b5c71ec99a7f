"""Is the fast step right? The parts of `step_latency.py` in which nothing is timed."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vllm_omni.diffusion.sampling import euler_step, guide
from vllm_omni.layers.linear import LinearPart, LinearWeights, linear, quantize_rows
from vllm_omni.models.qwen_image.fast_transformer import FastTransformer

if TYPE_CHECKING:
    from benchmarks import packed_rows
    from benchmarks.gpu_report import Figures, number, relative_error, table
    from benchmarks.step_bench import MAX_ROWS, Bench, FastStep
else:  # beside this script
    import packed_rows
    from gpu_report import Figures, number, relative_error, table
    from step_bench import MAX_ROWS, Bench, FastStep

NUM_MIXED_STEPS = 200
LATENT_STEPS = 20


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
    """Four layers of full width: the error of either in bfloat16 against stock in float32.
    With random weights a text counts for little, and a wrong one is lost in bfloat16's rounding:
    that it is read right is seen in float32."""
    few = replace(bench.dimensions, num_layers=min(4, bench.dimensions.num_layers))
    stock = packed_rows.build_transformer(few, bench.device)
    exact = copy.deepcopy(stock).float()
    fast = FastTransformer(packed_rows.build_transformer(few, bench.device), MAX_ROWS)
    fast.compile()
    figures: Figures = {}
    for side in bench.sides[:3]:
        rows = bench.batches[f"{side}²"]
        exact_rows = [row.to(torch.float32) for row in rows]
        expected = torch.cat([packed_rows.stock_forward(exact, row) for row in exact_rows])
        theirs = torch.cat([packed_rows.stock_forward(stock, row) for row in rows])
        figures[f"{side}²"] = {
            "stock": relative_error(theirs, expected),
            "ours": relative_error(FastStep(fast, rows)(), expected),
            "simple": relative_error(
                torch.cat(packed_rows.PackedStep(exact, exact_rows)()), expected
            ),
        }
    body = [
        [n, number(f["stock"], 4), number(f["ours"], 4), f"{f['simple']:.1e}"]
        for n, f in figures.items()
    ]
    headers = ["guided step of", "stock", "ours", "our simple loop in float32"]
    return figures, table(headers, body)


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


PARTS = (parity, fp8_layers, latents_bf16, mixed_steps, against_float32)
"""Those in bfloat16, in order."""
