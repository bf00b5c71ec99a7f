"""Linear layers: packed they are the same layers, in fp8 they are near."""

import pytest
import torch
from torch import nn

from vllm_omni.layers.linear import (
    FP8,
    LinearWeights,
    PackedLinear,
    linear,
    linear_gelu,
    quantize_rows,
)


def create_layers(sizes: list[int]) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(32, size).requires_grad_(False) for size in sizes]


@torch.no_grad()
def test_packed_layers_and_their_parts_are_the_layers() -> None:
    layers = create_layers([16, 48, 8])
    packed = PackedLinear(layers)
    x = torch.randn(2, 5, 32)
    expected = [layer(x) for layer in layers]
    torch.testing.assert_close(packed(x), torch.cat(expected, -1))
    for part, of_layer in zip(packed.parts(), expected, strict=True):
        torch.testing.assert_close(part(x), of_layer)


def test_parts_share_the_weights_of_the_whole() -> None:
    packed = PackedLinear(create_layers([16, 16]))
    part = packed.parts()[1]
    weights = packed.weights.slice(part.start, part.end)
    assert weights.weight.data_ptr() == packed.weight[16:].data_ptr()
    assert [name for name, _ in nn.ModuleList([packed, part]).named_parameters()] == [
        "0.weight",
        "0.bias",
    ]


def test_rows_in_fp8_are_within_a_sixteenth() -> None:
    # e4m3 has three bits behind the point: at most 2**-4 off, relative to each value.
    x = torch.randn(7, 64) * torch.logspace(-6, 6, 7).unsqueeze(1)
    x[3] = 0
    values, scale = quantize_rows(x)
    assert values.dtype == FP8
    assert scale.shape == (7, 1)
    restored = values.float() * scale
    largest = x.abs().amax(1, keepdim=True)
    assert ((restored - x).abs() <= x.abs() / 16 + largest * 2**-15).all()
    torch.testing.assert_close(restored.abs().amax(1), largest.squeeze(1))
    assert (restored[3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_product_in_fp8_is_that_of_the_rounded_values(dtype: torch.dtype) -> None:
    packed = PackedLinear(create_layers([24])).to(dtype)
    exact = packed.weights
    x = torch.randn(9, 32).to(dtype)
    expected = linear(x, exact).double()
    packed.quantize()
    packed.quantize()  # once is enough
    assert packed.weight.dtype == FP8
    assert packed.scale is not None
    values, scale = quantize_rows(x)
    rounded = values.double() * scale @ (packed.weight.double() * packed.scale).t() + packed.bias
    error = float((packed(x).double() - rounded).norm() / rounded.norm())
    assert error < (1e-6 if dtype == torch.float32 else 1e-2)
    assert 0.005 < float((packed(x).double() - expected).norm() / expected.norm()) < 0.08


@torch.no_grad()
def test_gelu_is_the_one_of_tanh() -> None:
    [layer] = create_layers([40])
    x = 3 * torch.randn(11, 32)
    expected = nn.functional.gelu(layer(x), approximate="tanh")
    torch.testing.assert_close(linear_gelu(x, LinearWeights(layer.weight, layer.bias)), expected)
