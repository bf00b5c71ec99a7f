"""What `step_latency.py`, its checks and `scaling.py` work on: the model, batches, and our step."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_omni.models.qwen_image.fast_transformer import FastTransformer
from vllm_omni.models.qwen_image.transformer import StepCachePlan
from vllm_omni.models.qwen_image.weights import quantize_weights

if TYPE_CHECKING:
    from benchmarks import gpu_report, packed_rows
else:  # beside this script
    import gpu_report
    import packed_rows

MAX_ROWS = 64
MAX_GRAPH_TOKENS = 8192


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
