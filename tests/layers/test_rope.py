"""Both ways of rotating, with complex and with real numbers, do the same."""

from collections.abc import Callable

import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen
from torch import Tensor

from vllm_omni.layers.rope import apply_rope, rotate

Rotate = Callable[[Tensor, Tensor], Tensor]

# The compiled forward takes the second one.
both_ways = pytest.mark.parametrize("turn", [apply_rope, rotate])

NUM_TOKENS, NUM_HEADS, HEAD_DIM = 9, 3, 16


def create_tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(NUM_TOKENS, NUM_HEADS, HEAD_DIM, generator=generator).to(dtype)


def create_angles() -> Tensor:
    """[tokens, head_dim / 2], another one for each token and pair of channels."""
    generator = torch.Generator().manual_seed(1)
    return torch.rand(NUM_TOKENS, HEAD_DIM // 2, generator=generator) * 20 - 10


def cos_sin(angles: Tensor) -> Tensor:
    return torch.stack((angles.cos(), angles.sin()), -1)


@both_ways
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=str
)
def test_equals_complex_multiplication(turn: Rotate, dtype: torch.dtype, tolerance: float) -> None:
    x, angles = create_tokens(dtype), create_angles()
    rotated = turn(x, cos_sin(angles))
    assert rotated.dtype == dtype
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    turns = torch.polar(torch.ones_like(angles, dtype=torch.float64), angles.double())
    expected = torch.view_as_real(pairs * turns.unsqueeze(1)).flatten(-2)
    torch.testing.assert_close(rotated.double(), expected, atol=tolerance, rtol=tolerance)


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_diffusers(turn: Rotate, dtype: torch.dtype) -> None:
    x, angles = create_tokens(dtype), create_angles()
    turns = torch.polar(torch.ones_like(angles), angles)
    expected = apply_rotary_emb_qwen(x.unsqueeze(0), turns, use_real=False)[0]
    rotated = turn(x, torch.view_as_real(turns))
    # The last bit may differ: a fused multiply-add rounds once less.
    torch.testing.assert_close(rotated, expected)


@both_ways
def test_angle_zero_changes_nothing(turn: Rotate) -> None:
    x, zeros = create_tokens(), torch.zeros(NUM_TOKENS, HEAD_DIM // 2)
    assert torch.equal(turn(x, cos_sin(zeros)), x)


@both_ways
def test_quarter_turn_moves_even_channels_to_odd_ones(turn: Rotate) -> None:
    x = torch.zeros(1, 1, 4)
    x[0, 0] = torch.tensor([1.0, 0.0, 0.0, 2.0])
    quarter = torch.tensor([[[0.0, 1.0]] * 2])
    assert turn(x, quarter).flatten().tolist() == [0.0, 1.0, -2.0, 0.0]


@both_ways
def test_bfloat16_is_rotated_in_float32(turn: Rotate) -> None:
    x, angles = create_tokens(torch.bfloat16), create_angles()
    exact = turn(x.float(), cos_sin(angles))
    assert torch.equal(turn(x, cos_sin(angles)), exact.bfloat16())
