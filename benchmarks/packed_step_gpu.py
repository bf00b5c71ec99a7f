"""The packed forward at full size on one GPU: is it right, and what does a guided step take?

Random weights in the shape of Qwen-Image (60 layers, 24 heads of 128), stock diffusers beside it,
plain eager for both: no compilation, no CUDA graphs. For a machine with torch and transformers but
without diffusers, msgspec and a network. What is missing there comes along in `vendor/`:

    pip download --no-deps -d vendor diffusers==0.42.1
    pip install --no-deps --target vendor/site --only-binary :all: --python-version 3.12 \\
        --platform manylinux2014_x86_64 msgspec==0.22.0 setproctitle==1.3.8
    PYTHONPATH=.:vendor/site:vendor/diffusers-0.42.1-py3-none-any.whl \\
        python3 benchmarks/packed_step_gpu.py --out $OUT

Writes packed_step_gpu.json and packed_step_gpu.md, anew after every part, so that a part that fails
costs only itself; its traceback is in both, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import json
import shlex
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor, nn

from vllm_omni.entrypoints.omni import Omni
from vllm_omni.models.qwen_image.adapter import pack_latents
from vllm_omni.models.qwen_image.checkpoint import write_checkpoint
from vllm_omni.models.qwen_image.transformer import (
    RowShape,
    make_plan,
    packed_forward,
    project_text,
)

if TYPE_CHECKING:
    from benchmarks import drawing
else:
    import drawing  # beside this script

NUM_ROUNDS = 7  # of each timing, after two that do not count
REFERENCE_LAYERS = 4  # of the comparison with float32


# --- what goes through the transformer ---


@dataclass(frozen=True)
class Row:
    """One guidance branch of one request, with random contents."""

    latents: Tensor  # [image tokens, channels]
    embeds: Tensor  # [text tokens, joint_attention_dim]
    timestep: float  # 0 to 1, exact in bfloat16

    @property
    def grid(self) -> tuple[int, int, int]:
        side = round(self.latents.shape[0] ** 0.5)
        return (1, side, side)

    @property
    def shape(self) -> RowShape:
        return RowShape((self.grid,), self.embeds.shape[0])

    @property
    def num_tokens(self) -> int:
        return self.latents.shape[0] + self.embeds.shape[0]

    def to(self, dtype: torch.dtype) -> Row:
        return Row(self.latents.to(dtype), self.embeds.to(dtype), self.timestep)


def stock_forward(model: Any, row: Row) -> Tensor:
    """[image tokens, channels], as the stock pipeline calls it for one request."""
    return stock_batch(model, [row])[0]


def stock_batch(model: Any, rows: Sequence[Row]) -> Tensor:
    """[rows, image tokens, channels]: rows of one size; shorter texts are padded and masked."""
    texts = nn.utils.rnn.pad_sequence([row.embeds for row in rows], batch_first=True)
    lens = torch.tensor([row.embeds.shape[0] for row in rows], device=texts.device)
    mask = torch.arange(texts.shape[1], device=texts.device) < lens.unsqueeze(1)
    velocity: Tensor = model(
        hidden_states=torch.stack([row.latents for row in rows]),
        encoder_hidden_states=texts,
        encoder_hidden_states_mask=None if mask.all() else mask,
        timestep=make_timesteps(rows),
        img_shapes=[[row.grid] for row in rows],
        return_dict=False,
    )[0]
    return velocity


def make_timesteps(rows: Sequence[Row]) -> Tensor:
    latents = rows[0].latents
    return torch.tensor([r.timestep for r in rows], device=latents.device, dtype=latents.dtype)


class PackedStep:
    """Our forward over any mix of rows; what the engine does once per batch is done here once."""

    def __init__(self, model: Any, rows: Sequence[Row]) -> None:
        self.model = model
        self.plan = make_plan(model, [row.shape for row in rows])
        self.latents = torch.cat([row.latents for row in rows])
        self.text = torch.cat([project_text(model, row.embeds) for row in rows])
        self.timesteps = make_timesteps(rows)
        self.image_lens = [row.latents.shape[0] for row in rows]

    def __call__(self) -> tuple[Tensor, ...]:
        """[image tokens, channels] of each row."""
        velocity = packed_forward(
            self.model, self.plan, self.latents, self.text, self.timesteps
        )
        return velocity.split(self.image_lens)


def relative_error(ours: Tensor, reference: Tensor) -> float:
    reference = reference.double()
    return float((ours.double() - reference).norm() / reference.norm())


# --- the machine and the model ---


class Bench:
    """The device, the model's dimensions, and the model once somebody needs it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.generator = torch.Generator(args.device).manual_seed(0)

    @cached_property
    def transformer(self) -> Any:
        return self.build_transformer(self.args.layers)

    def build_transformer(self, num_layers: int) -> Any:
        """In bfloat16 with random weights, made on the device."""
        head_dim = self.args.head_dim
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with self.device:
                model = QwenImageTransformer2DModel(
                    num_layers=num_layers,
                    num_attention_heads=self.args.heads,
                    attention_head_dim=head_dim,
                    joint_attention_dim=self.args.joint_dim,
                    axes_dims_rope=(head_dim // 8, head_dim * 7 // 16, head_dim * 7 // 16),
                )
        finally:
            torch.set_default_dtype(torch.float32)
        # He's gain, as in our random checkpoints: with torch's default the blocks add so little
        # that a wrong timestep or prompt would hardly be seen.
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.data.mul_(6**0.5)
        return model.requires_grad_(False).eval()

    def row(self, side: int, num_text_tokens: int, timestep: float = 0.75) -> Row:
        """side: pixels."""
        return Row(
            self._noise((side // 16) ** 2, 64),
            self._noise(num_text_tokens, self.args.joint_dim),
            timestep,
        )

    def guided(self, side: int) -> list[Row]:
        """Both branches of a request: the same latents, a prompt and a short negative prompt."""
        cond = self.row(side, 64)
        return [cond, Row(cond.latents, self._noise(12, self.args.joint_dim), cond.timestep)]

    def tflop(self, rows: Sequence[Row]) -> float:
        """Of one forward: linear layers and attention."""
        width, layers = self.args.heads * self.args.head_dim, self.args.layers
        tokens = [row.num_tokens for row in rows]
        return sum(layers * width * (24 * width * n + 4 * n * n) for n in tokens) / 1e12

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(
            shape, generator=self.generator, device=self.device, dtype=torch.bfloat16
        )

    # clock and memory

    def milliseconds(self, call: Callable[[], object]) -> tuple[float, float]:
        """Until the device is done, and until the host has issued everything."""
        start = time.perf_counter()
        if self.device.type != "cuda":
            call()
            return ((time.perf_counter() - start) * 1e3,) * 2
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        issued = (time.perf_counter() - start) * 1e3
        end.synchronize()
        return begin.elapsed_time(end), issued

    def median_milliseconds(self, calls: Sequence[Callable[[], object]]) -> list[dict[str, float]]:
        """Of each call; the calls take turns."""
        rounds = [[self.milliseconds(call) for call in calls] for _ in range(NUM_ROUNDS + 2)][2:]
        return [
            {
                "ms": statistics.median(done for done, _ in of_call),
                "min_ms": min(done for done, _ in of_call),
                "max_ms": max(done for done, _ in of_call),
                "issued_ms": statistics.median(issued for _, issued in of_call),
            }
            for of_call in zip(*rounds, strict=True)
        ]

    def peak_gib(self, call: Callable[[], object]) -> float:
        """The most memory in tensors while the call runs, weights included."""
        if self.device.type != "cuda":
            return 0.0
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() / 2**30

    def free_memory(self) -> None:
        self.__dict__.pop("transformer", None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


# --- the parts: each gives its figures and its tables ---


Part = tuple[dict[str, Any], str]


def parity(bench: Bench) -> Part:
    """bfloat16, full depth: ours against stock, and stock against itself in a batch of two."""
    model = bench.transformer
    figures: dict[str, Any] = {"output_std": {}, "ours": {}, "stock_batch_of_2": {}, "control": {}}
    batches = {f"{side}²": bench.guided(side) for side in bench.args.sides}
    texts = (64, 12, 200)
    timesteps = (0.75, 0.25, 0.5)
    batches["mixed"] = [
        bench.row(*row) for row in zip(bench.args.sides, texts, timesteps, strict=True)
    ]
    for name, rows in batches.items():
        references = [stock_forward(model, row) for row in rows]
        pairs = zip(PackedStep(model, rows)(), references, strict=True)
        figures["ours"][name] = [relative_error(*pair) for pair in pairs]
        figures["output_std"][name] = [float(reference.float().std()) for reference in references]

        wrong_time = [Row(row.latents, row.embeds, row.timestep - 0.125) for row in rows]
        wrong_text = [Row(row.latents, row.embeds.flip(0), row.timestep) for row in rows]
        figures["control"][name] = {
            what: min(
                relative_error(*pair)
                for pair in zip(PackedStep(model, wrong)(), references, strict=True)
            )
            for what, wrong in (("timestep", wrong_time), ("text", wrong_text))
        }
        if name != "mixed":
            cond, uncond = rows
            equal = [cond, bench.row(bench.args.sides[0], 64)]
            equal[1] = Row(bench._noise(*cond.latents.shape), equal[1].embeds, 0.25)
            figures["stock_batch_of_2"][name] = {
                "equal_text": batch_of_2_errors(model, equal),
                "padded_text": batch_of_2_errors(model, [cond, uncond]),
            }
    rows_of_table = []
    for name, errors in figures["ours"].items():
        of_stock = figures["stock_batch_of_2"].get(name, {"equal_text": [], "padded_text": []})
        control = figures["control"][name]
        rows_of_table.append(
            [
                name,
                _errors(errors),
                _errors(of_stock["equal_text"]),
                _errors(of_stock["padded_text"]),
                f"{control['timestep']:.2f}",
                f"{control['text']:.2f}",
                f"{statistics.mean(figures['output_std'][name]):.2f}",
            ]
        )
    headers = [
        "rows",
        "ours, packed, against stock alone",
        "stock batch of 2 against alone",
        "the same, padded text",
        "control: timestep off by 1/8",
        "control: text reversed",
        "output std",
    ]
    return figures, table(headers, rows_of_table)


def batch_of_2_errors(model: Any, rows: Sequence[Row]) -> list[float]:
    batch = stock_batch(model, rows)
    return [relative_error(batch[i], stock_forward(model, row)) for i, row in enumerate(rows)]


def against_float32(bench: Bench) -> Part:
    """Few layers: both in bfloat16, and ours in float32, against stock in float32."""
    model = bench.build_transformer(REFERENCE_LAYERS)
    exact = copy.deepcopy(model).float()
    figures: dict[str, Any] = {}
    for side in bench.args.sides:
        rows = bench.guided(side)
        exact_rows = [row.to(torch.float32) for row in rows]
        references = [stock_forward(exact, row) for row in exact_rows]
        candidates = {
            "stock_bfloat16": [stock_forward(model, row) for row in rows],
            "ours_bfloat16": PackedStep(model, rows)(),
            "ours_float32": PackedStep(exact, exact_rows)(),
        }
        figures[f"{side}²"] = {
            name: [relative_error(*pair) for pair in zip(velocities, references, strict=True)]
            for name, velocities in candidates.items()
        }
    headers = ["rows", "stock, bfloat16", "ours, bfloat16", "ours, float32"]
    rows_of_table = [
        [name, *(_errors(errors) for errors in by_candidate.values())]
        for name, by_candidate in figures.items()
    ]
    return figures, table(headers, rows_of_table)


def timings(bench: Bench) -> Part:
    """Guided steps: stock runs each branch by itself, we run everything in one forward."""
    model = bench.transformer
    batches = {f"{side}²": bench.guided(side) for side in bench.args.sides}
    smallest = bench.args.sides[0]
    batches[f"{smallest}² x 8"] = [row for _ in range(8) for row in bench.guided(smallest)]
    batches[" + ".join(batches[:0] if False else [f"{side}²" for side in bench.args.sides])] = [
        row for side in bench.args.sides for row in bench.guided(side)
    ]
    figures: dict[str, Any] = {"matrix_product_tflop_per_s": matrix_product_rate(bench)}
    rows_of_table = []
    for name, rows in batches.items():
        packed = PackedStep(model, rows)

        def one_by_one(rows: Sequence[Row] = rows) -> None:
            for row in rows:
                stock_forward(model, row)

        stock, ours = bench.median_milliseconds([one_by_one, packed])
        tflop = bench.tflop(rows)
        for result, call in ((stock, one_by_one), (ours, packed)):
            result["tflop_per_s"] = tflop / result["ms"] * 1e3
            result["peak_gib"] = bench.peak_gib(call)
        figures[name] = {
            "num_rows": len(rows),
            "num_tokens": sum(row.num_tokens for row in rows),
            "tflop": tflop,
            "stock": stock,
            "ours": ours,
        }
        rows_of_table.append(
            [
                name,
                f"{len(rows)}",
                f"{figures[name]['num_tokens']}",
                *(f"{r['ms']:.1f} ({r['min_ms']:.1f} to {r['max_ms']:.1f})" for r in (stock, ours)),
                f"{stock['ms'] / ours['ms']:.2f}",
                *(f"{r['issued_ms']:.1f}" for r in (stock, ours)),
                *(f"{r['tflop_per_s']:.0f}" for r in (stock, ours)),
                *(f"{r['peak_gib']:.1f}" for r in (stock, ours)),
            ]
        )
    headers = [
        "guided step of",
        "rows",
        "tokens",
        "stock, ms",
        "ours, ms",
        "stock / ours",
        "stock, ms until issued",
        "ours, ms until issued",
        "stock, TFLOP/s",
        "ours, TFLOP/s",
        "stock, peak GiB",
        "ours, peak GiB",
    ]
    ceiling = f"Ceiling, one bfloat16 matrix product: {figures['matrix_product_tflop_per_s']:.0f}"
    return figures, f"{table(headers, rows_of_table)}\n{ceiling} TFLOP/s.\n"


def matrix_product_rate(bench: Bench) -> float:
    size = 8192 if bench.device.type == "cuda" else 256
    a, b = bench._noise(size, size), bench._noise(size, size)
    [result] = bench.median_milliseconds([lambda: a @ b])
    return 2 * size**3 / result["ms"] / 1e9


def engine(bench: Bench) -> Part:
    """Tiny random checkpoint: six mixed requests in one call against the stock pipeline."""
    figures: dict[str, Any] = {}
    cases = drawing.make_cases(6, num_steps=10)
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder, "model"), "tiny")
        exact = drawing.StockPipeline(model, bench.args.device, torch.float32)
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            stock = drawing.StockPipeline(model, bench.args.device, dtype)
            theirs: list[drawing.Drawn] = []
            stock_peak = bench.peak_gib(lambda: theirs.extend(stock.draw(c) for c in cases))
            ours: list[drawing.Drawn] = []
            with Omni(str(model), device=bench.args.device, dtype=name) as omni:
                our_peak = bench.peak_gib(lambda: ours.extend(drawing.draw_with_omni(omni, cases)))
            # What both should have drawn: the same noise, in float32 all the way.
            references = [exact.draw(case, start_noise(case, dtype)) for case in cases]
            figures[name] = {
                "max_latents_difference": drawing.max_difference(ours, theirs),
                "latents_std": float(torch.cat([drawn.latents for drawn in theirs]).std()),
                "ours_relative_error": errors_of(ours, references),
                "stock_relative_error": errors_of(theirs, references),
                "stock_peak_gib": stock_peak,
                "our_peak_gib": our_peak,
            }
    headers = [
        "dtype",
        "largest difference of latents, ours to stock",
        "std of latents",
        "ours against stock in float32",
        "stock against stock in float32",
        "ours, peak GiB (six at once)",
        "stock, peak GiB (one by one)",
    ]
    rows_of_table = [
        [
            name,
            f"{f['max_latents_difference']:.1e}",
            f"{f['latents_std']:.2f}",
            _errors(f["ours_relative_error"]),
            _errors(f["stock_relative_error"]),
            f"{f['our_peak_gib']:.3f}",
            f"{f['stock_peak_gib']:.3f}",
        ]
        for name, f in figures.items()
    ]
    return figures, table(headers, rows_of_table)


