"""Linear layers as plain tensors, in the model's dtype or in fp8.

fp8 is e4m3 with a scale for each row of the activations, found on the way, and one for each output
channel of the weight, found once. The product runs on the matrix units where there are any
(`torch._scaled_mm`), and in the model's dtype with the same rounded values elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
_TINY = 1e-12  # the scale of a row of zeros
_GELU_SLOPE = 2 * (2 / math.pi) ** 0.5


class LinearWeights(NamedTuple):
    """What a linear layer reads; functions that take it compile once for all layers of a shape."""

    weight: Tensor  # [out, in]
    bias: Tensor  # [out]
    scale: Tensor | None = None  # [out, 1] float32, of a weight in fp8

    def slice(self, start: int, end: int) -> LinearWeights:
        """Some of the outputs; nothing is copied."""
        scale = None if self.scale is None else self.scale[start:end]
        return LinearWeights(self.weight[start:end], self.bias[start:end], scale)


def linear(x: Tensor, weights: LinearWeights) -> Tensor:
    """x [rows, in] to [rows, out]."""
    if weights.scale is None:
        return F.linear(x, weights.weight, weights.bias)
    return _fp8_product(*quantize_rows(x), weights, x.dtype)


def linear_gelu(x: Tensor, weights: LinearWeights) -> Tensor:
    """`linear`, then GELU as tanh approximates it."""
    if weights.scale is None and x.is_cuda:
        # The matrix product's own last step: 8 * D bytes less per token to read and to write.
        return torch._addmm_activation(weights.bias, x, weights.weight.t(), use_gelu=True)
    return gelu(linear(x, weights))


def gelu(x: Tensor) -> Tensor:
    """GELU as tanh approximates it, written with the one function that GPUs have a unit for."""
    wide = x.float()
    return (wide * torch.sigmoid(_GELU_SLOPE * wide * (1 + 0.044715 * wide * wide))).to(x.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values in fp8 and the float32 scale [rows, 1] that gives them back."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=_TINY) / FP8_MAX
    return (x.float() * scale.reciprocal()).to(FP8), scale


def _fp8_product(x: Tensor, scale: Tensor, weights: LinearWeights, dtype: torch.dtype) -> Tensor:
    assert weights.scale is not None
    if x.is_cuda and dtype == torch.bfloat16:
        return torch._scaled_mm(
            x,
            weights.weight.t(),
            scale_a=scale,
            scale_b=weights.scale.t(),
            bias=weights.bias,
            out_dtype=dtype,
            use_fast_accum=True,
        )
    product = F.linear(x.to(dtype), weights.weight.to(dtype)).float() * scale * weights.scale.t()
    return (product + weights.bias).to(dtype)


class PackedLinear(nn.Module):
    """Linear layers that read the same input, as one."""

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        super().__init__()
        assert all(part.bias is not None for part in parts)
        self.part_sizes = [part.out_features for part in parts]
        weights = [part.weight.data for part in parts]
        self.weight = _constant(torch.cat(weights) if len(parts) > 1 else weights[0])
        self.bias = _constant(torch.cat([part.bias.data for part in parts]))
        self.scale: nn.Parameter | None = None

    def quantize(self) -> None:
        """Keep the weight in fp8 from now on."""
        if self.scale is None:
            values, scale = quantize_rows(self.weight)
            self.weight, self.scale = _constant(values), _constant(scale)

    @property
    def weights(self) -> LinearWeights:
        return LinearWeights(self.weight, self.bias, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return _apply(x, self.weights)

    def parts(self) -> list[LinearPart]:
        """Each of the layers it was made of, over the same weights."""
        starts = [sum(self.part_sizes[:index]) for index in range(len(self.part_sizes))]
        return [
            LinearPart(self, start, start + size)
            for start, size in zip(starts, self.part_sizes, strict=True)
        ]


class LinearPart(nn.Module):
    """One of the layers inside a `PackedLinear`, for code that calls them one by one."""

    def __init__(self, packed: PackedLinear, start: int, end: int) -> None:
        super().__init__()
        self.packed = packed
        self.start, self.end = start, end

    def forward(self, x: Tensor) -> Tensor:
        return _apply(x, self.packed.weights.slice(self.start, self.end))


def round_up_rows(num_rows: int) -> int:
    """How many rows products in fp8 need: for a few, cuBLAS has no kernel with scales for rows."""
    return max(128, -(-num_rows // 64) * 64)


def _apply(x: Tensor, weights: LinearWeights) -> Tensor:
    rows = x.flatten(0, -2)
    if weights.scale is not None and x.is_cuda:
        rows = F.pad(rows, (0, 0, 0, round_up_rows(rows.shape[0]) - rows.shape[0]))
    applied = linear(rows, weights)[: x.shape[:-1].numel()]
    of_all: Tensor = applied.unflatten(0, x.shape[:-1])
    return of_all


def _constant(tensor: Tensor) -> nn.Parameter:
    # A parameter, because compiled code takes the shapes of those as fixed.
    return nn.Parameter(tensor, requires_grad=False)
