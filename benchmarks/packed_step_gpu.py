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
costs only itself; its traceback is in both files, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from vllm_omni.entrypoints.omni import Omni
from vllm_omni.models.qwen_image.adapter import pack_latents
from vllm_omni.models.qwen_image.checkpoint import write_checkpoint

if TYPE_CHECKING:
    from benchmarks import drawing, gpu_report, packed_rows
    from benchmarks.gpu_report import Call, Figures, relative_error, table
else:  # beside this script
    import drawing
    import gpu_report
    import packed_rows
    from gpu_report import Call, Figures, relative_error, table

NUM_ROUNDS = 7  # of each timing, after two that do not count
REFERENCE_LAYERS = 4  # of the comparison with float32
ENGINE_STEPS = 10


class Bench:
    """The device with its clock and its memory, the model, and what to put through it."""

    def __init__(
        self, device: torch.device, dimensions: packed_rows.Dimensions, sides: Sequence[int]
    ) -> None:
        self.device = device
        self.dimensions = dimensions
        self.sides = sides  # pixels, three of them, smallest first
        self.rows = packed_rows.RowMaker(dimensions, device)

    @cached_property
    def transformer(self) -> Any:
        return packed_rows.build_transformer(self.dimensions, self.device)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def time(self, calls: Sequence[Call]) -> list[dict[str, float]]:
        """Medians of each call; the calls take turns."""
        rounds = [[self._time_once(call) for call in calls] for _ in range(NUM_ROUNDS + 2)][2:]
        return [
            {
                "ms": statistics.median(done for done, _ in of_call),
                "min_ms": min(done for done, _ in of_call),
                "max_ms": max(done for done, _ in of_call),
                "issued_ms": statistics.median(issued for _, issued in of_call),
            }
            for of_call in zip(*rounds, strict=True)
        ]

    def _time_once(self, call: Call) -> tuple[float, float]:
        """Milliseconds until the device is done, and until the host has issued everything."""
        start = time.perf_counter()
        if not self.is_cuda:
            call()
            elapsed = (time.perf_counter() - start) * 1e3
            return elapsed, elapsed
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        issued = (time.perf_counter() - start) * 1e3
        end.synchronize()
        return begin.elapsed_time(end), issued

    def peak_gib(self, call: Call) -> float:
        """The most memory in tensors while the call runs, weights included."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() / 2**30 if self.is_cuda else float("nan")

    def drop_transformer(self) -> None:
        self.__dict__.pop("transformer", None)
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()


# --- the parts: each gives its figures and a table of them ---


def parity(bench: Bench) -> tuple[Figures, str]:
    """Parity in bfloat16 at full depth: ||ours - stock|| / ||stock|| of each row.

    The yardstick is stock's own batch of two against the same rows alone.
    """
    model = bench.transformer
    batches = {f"{side}²": bench.rows.make_guided(side) for side in bench.sides}
    batches["mixed"] = [
        bench.rows.make(side, num_text_tokens, timestep)
        for side, num_text_tokens, timestep in zip(
            bench.sides, (64, 12, 200), (0.75, 0.25, 0.5), strict=True
        )
    ]
    figures: Figures = {}
    for name, rows in batches.items():
        stock = [packed_rows.stock_forward(model, row) for row in rows]
        wrong_time = [replace(row, timestep=row.timestep - 0.125) for row in rows]
        wrong_text = [replace(row, text=row.text.flip(0)) for row in rows]
        figures[name] = {
            "ours": relative_errors(packed_rows.PackedStep(model, rows)(), stock),
            "wrong_time": relative_errors(packed_rows.PackedStep(model, wrong_time)(), stock),
            "wrong_text": relative_errors(packed_rows.PackedStep(model, wrong_text)(), stock),
            "stock_std": [float(velocity.float().std()) for velocity in stock],
        }
    for side in bench.sides:
        equal = [bench.rows.make(side, 64, timestep) for timestep in (0.75, 0.25)]
        figures[f"{side}²"]["stock_batch"] = batch_errors(model, equal)
        figures[f"{side}²"]["stock_padded"] = batch_errors(model, batches[f"{side}²"])

    columns = {
        "ours": "ours against stock",
        "stock_batch": "stock, batch of 2 against alone",
        "stock_padded": "the same, padded text",
        "wrong_time": "control: timestep off by 1/8",
        "wrong_text": "control: text reversed",
        "stock_std": "std of stock's output",
    }
    body = [[name, *(numbers(f.get(key, [])) for key in columns)] for name, f in figures.items()]
    return figures, table(["rows", *columns.values()], body)


def against_float32(bench: Bench) -> tuple[Figures, str]:
    """Few layers of full width: the error of either against stock in float32."""
    model = packed_rows.build_transformer(
        replace(bench.dimensions, num_layers=REFERENCE_LAYERS), bench.device
    )
    exact = copy.deepcopy(model).float()
    figures: Figures = {}
    for side in bench.sides:
        rows = bench.rows.make_guided(side)
        exact_rows = [row.to(torch.float32) for row in rows]
        reference = [packed_rows.stock_forward(exact, row) for row in exact_rows]
        stock = [packed_rows.stock_forward(model, row) for row in rows]
        figures[f"{side}²"] = {
            "stock_bfloat16": relative_errors(stock, reference),
            "ours_bfloat16": relative_errors(packed_rows.PackedStep(model, rows)(), reference),
            "ours_float32": relative_errors(packed_rows.PackedStep(exact, exact_rows)(), reference),
        }
    headers = ["rows", "stock, bfloat16", "ours, bfloat16", "ours, float32"]
    return figures, table(headers, [[n, *map(numbers, f.values())] for n, f in figures.items()])


def timings(bench: Bench) -> tuple[Figures, str]:
    """Guided steps: stock runs branch after branch, we run all of them in one forward.

    Medians of 7 after 2 that do not count. What our engine does once per batch (projecting the
    text, planning the packing) is left out.
    """
    model = bench.transformer
    batches = {f"{side}²": bench.rows.make_guided(side) for side in bench.sides}
    batches[" + ".join(batches)] = [row for rows in batches.values() for row in rows]
    smallest = bench.sides[0]
    batches[f"{smallest}² x 8"] = [
        row for _ in range(8) for row in bench.rows.make_guided(smallest)
    ]
    figures: Figures = {}
    for name, rows in batches.items():
        figures[name] = time_batch(bench, model, rows)

    ceiling = matrix_product_rate(bench)
    headers = ["guided step of", "tokens", "stock / ours"]
    headers += [f"{who}, {what}" for what in _TIMING_COLUMNS.values() for who in ("stock", "ours")]
    body = [
        [
            name,
            f"{f['num_tokens']}",
            f"{f['stock']['ms'] / f['ours']['ms']:.2f}",
            *(f"{f[who][key]:.1f}" for key in _TIMING_COLUMNS for who in ("stock", "ours")),
        ]
        for name, f in figures.items()
    ]
    figures["matrix_product_tflop_per_s"] = ceiling
    note = f"\nOne large bfloat16 matrix product, for comparison: {ceiling:.0f} TFLOP/s.\n"
    return figures, table(headers, body) + note


_TIMING_COLUMNS = {
    "ms": "ms",
    "issued_ms": "ms until the host has issued it",
    "tflop_per_s": "TFLOP/s",
    "peak_gib": "peak GiB",
}


def time_batch(bench: Bench, model: Any, rows: Sequence[packed_rows.Row]) -> Figures:
    stock = [packed_rows.StockStep(model, [row]) for row in rows]
    calls: dict[str, Call] = {
        "stock": lambda: [step() for step in stock],
        "ours": packed_rows.PackedStep(model, rows),
    }
    tflop = bench.dimensions.tflop(rows)
    figures: Figures = {"num_tokens": sum(row.num_tokens for row in rows), "tflop": tflop}
    for (name, call), times in zip(calls.items(), bench.time([*calls.values()]), strict=True):
        figures[name] = {
            **times,
            "tflop_per_s": tflop / times["ms"] * 1e3,
            "peak_gib": bench.peak_gib(call),
        }
    return figures


def matrix_product_rate(bench: Bench) -> float:
    size = 8192 if bench.is_cuda else 256
    a, b = bench.rows.noise(size, size), bench.rows.noise(size, size)
    [times] = bench.time([lambda: a @ b])
    return 2 * size**3 / times["ms"] / 1e9


def engine(bench: Bench) -> tuple[Figures, str]:
    """The whole engine, tiny random checkpoint: six mixed requests in one call, 10 steps."""
    figures: Figures = {}
    cases = drawing.make_cases(6, ENGINE_STEPS)
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder, "model"), "tiny")
        for dtype in (torch.float32, torch.bfloat16):
            figures[str(dtype)] = compare_engines(bench, model, dtype, cases)
    columns = {
        "max_difference": "largest difference of latents, ours to stock",
        "ours": "ours, relative error to float32",
        "stock": "stock, relative error to float32",
        "latents_std": "std of latents",
        "our_peak_gib": "ours, peak GiB, six at once",
        "stock_peak_gib": "stock, peak GiB, one by one",
    }
    body = [[name, *(numbers(f[key]) for key in columns)] for name, f in figures.items()]
    return figures, table(["dtype", *columns.values()], body)


def compare_engines(
    bench: Bench, model: Path, dtype: torch.dtype, cases: Sequence[drawing.Case]
) -> Figures:
    device = bench.device.type
    pipeline = drawing.StockPipeline(model, device, dtype)
    stock: list[drawing.Drawn] = []
    stock_peak_gib = bench.peak_gib(lambda: stock.extend(map(pipeline.draw, cases)))
    ours: list[drawing.Drawn] = []
    with Omni(str(model), device=device, dtype=str(dtype).removeprefix("torch.")) as omni:
        our_peak_gib = bench.peak_gib(lambda: ours.extend(drawing.draw_with_omni(omni, cases)))

    # What both are after: from the same noise, in float32 all the way.
    exact = drawing.StockPipeline(model, device, torch.float32)
    reference = [exact.draw(case, start_noise(case, dtype)).latents for case in cases]
    return {
        "max_difference": [drawing.max_difference(ours, stock)],
        "ours": relative_errors([drawn.latents for drawn in ours], reference),
        "stock": relative_errors([drawn.latents for drawn in stock], reference),
        "latents_std": [float(torch.cat(reference).std())],
        "our_peak_gib": [our_peak_gib],
        "stock_peak_gib": [stock_peak_gib],
    }


def start_noise(case: drawing.Case, dtype: torch.dtype) -> Tensor:
    """[1, image tokens, channels]: what a pipeline of that dtype starts from."""
    shape = (1, 1, packed_rows.IMAGE_CHANNELS // 4, case.height // 8, case.width // 8)
    generator = torch.Generator("cpu").manual_seed(case.seed)
    return pack_latents(randn_tensor(shape, generator=generator, dtype=dtype)[0, 0]).unsqueeze(0)


# --- figures ---


def relative_errors(ours: Sequence[Tensor], reference: Sequence[Tensor]) -> list[float]:
    return [relative_error(a, b) for a, b in zip(ours, reference, strict=True)]


def batch_errors(model: Any, rows: Sequence[packed_rows.Row]) -> list[float]:
    """Of stock's batch against the same rows alone."""
    alone = [packed_rows.stock_forward(model, row) for row in rows]
    return relative_errors([*packed_rows.StockStep(model, rows)()], alone)


def numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2g}" for value in values)


# --- the run ---


def main() -> None:
    args = parse_args()
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device(args.device)
    dimensions = packed_rows.Dimensions(args.layers, args.heads, args.head_dim, args.text_dim)
    bench = Bench(device, dimensions, args.sides)
    title = (__doc__ or "").splitlines()[0]
    about = {"transformer": str(dimensions)}
    report: gpu_report.Report[Bench] = gpu_report.Report(args.out, "packed_step_gpu", title, about)
    report.run(bench, parity)
    report.run(bench, timings)
    bench.drop_transformer()
    report.run(bench, against_float32)
    report.run(bench, engine)
    sys.exit(report.has_failed)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    full_size = packed_rows.Dimensions()
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--layers", type=int, default=full_size.num_layers)
    parser.add_argument("--heads", type=int, default=full_size.num_heads)
    parser.add_argument("--head-dim", type=int, default=full_size.head_dim)
    parser.add_argument("--text-dim", type=int, default=full_size.text_dim)
    parser.add_argument(
        "--sides", type=int, nargs=3, default=[256, 512, 1024], help="pixels, smallest first"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
