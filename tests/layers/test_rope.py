"""Rotation with real numbers equals multiplication with complex ones."""

import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen
from torch import Tensor

from vllm_omni.layers.rope import apply_rope

NUM_TOKENS, NUM_HEADS, HEAD_DIM = 9, 3, 16


def create_tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(NUM_TOKENS, NUM_HEADS, HEAD_DIM, generator=generator).to(dtype)


def create_angles() -> Tensor:
    """[tokens, head_dim / 2], another one for each token and pair of channels."""
    generator = torch.Generator().manual_seed(1)
    return torch.rand(NUM_TOKENS, HEAD_DIM // 2, generator=generator) * 20 - 10


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=str
)
def test_equals_complex_multiplication(dtype: torch.dtype, tolerance: float) -> None:
    x, angles = create_tokens(dtype), create_angles()
    rotated = apply_rope(x, angles.cos(), angles.sin())
    assert rotated.dtype == dtype
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    turns = torch.polar(torch.ones_like(angles, dtype=torch.float64), angles.double())
    expected = torch.view_as_real(pairs * turns.unsqueeze(1)).flatten(-2)
    torch.testing.assert_close(rotated.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_diffusers(dtype: torch.dtype) -> None:
    x, angles = create_tokens(dtype), create_angles()
    turns = torch.polar(torch.ones_like(angles), angles)
    expected = apply_rotary_emb_qwen(x.unsqueeze(0), turns, use_real=False)[0]
    rotated = apply_rope(x, turns.real, turns.imag)
    # The last bit may differ: a fused multiply-add rounds once less.
    torch.testing.assert_close(rotated, expected)


def test_angle_zero_changes_nothing() -> None:
    x, zeros = create_tokens(), torch.zeros(NUM_TOKENS, HEAD_DIM // 2)
    assert torch.equal(apply_rope(x, zeros.cos(), zeros.sin()), x)


def test_quarter_turn_moves_even_channels_to_odd_ones() -> None:
    x = torch.zeros(1, 1, 4)
    x[0, 0] = torch.tensor([1.0, 0.0, 0.0, 2.0])
    cos, sin = torch.zeros(1, 2), torch.ones(1, 2)
    assert apply_rope(x, cos, sin).flatten().tolist() == [0.0, 1.0, -2.0, 0.0]


def test_bfloat16_is_rotated_in_float32() -> None:
    x, angles = create_tokens(torch.bfloat16), create_angles()
    exact = apply_rope(x.float(), angles.cos(), angles.sin())
    assert torch.equal(apply_rope(x, angles.cos(), angles.sin()), exact.bfloat16())
