"""Attention per segment equals full attention under a block-diagonal mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_omni.layers.attention import segment_attention

NUM_HEADS = 3
HEAD_DIM = 8


def create_tokens(num_tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, generator=generator).to(dtype)


def attend_with_mask(query: Tensor, key: Tensor, value: Tensor, segment_lens: list[int]) -> Tensor:
    """All tokens to all tokens in float64, other segments masked out."""
    q, k, v = (tensor.double().transpose(0, 1) for tensor in (query, key, value))  # [heads, N, d]
    segments = torch.repeat_interleave(
        torch.arange(len(segment_lens)), torch.tensor(segment_lens, dtype=torch.long)
    )
    scores = q @ k.transpose(1, 2) / HEAD_DIM**0.5
    scores = scores.masked_fill(segments.unsqueeze(0) != segments.unsqueeze(1), -torch.inf)
    attended: Tensor = (scores.softmax(-1) @ v).transpose(0, 1)
    return attended


@settings(max_examples=50, deadline=None)
@given(
    segment_lens=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_equals_masked_attention(segment_lens: list[int], seed: int) -> None:
    query, key, value = (create_tokens(sum(segment_lens), 3 * seed + i) for i in range(3))
    attended = segment_attention(query, key, value, segment_lens)
    expected = attend_with_mask(query, key, value, segment_lens).float()
    torch.testing.assert_close(attended, expected, atol=1e-5, rtol=1e-5)


def test_bfloat16() -> None:
    segment_lens = [5, 1, 33]
    query, key, value = (create_tokens(39, seed, torch.bfloat16) for seed in range(3))
    attended = segment_attention(query, key, value, segment_lens)
    assert attended.dtype == torch.bfloat16
    expected = attend_with_mask(query, key, value, segment_lens).float()
    torch.testing.assert_close(attended.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segment_does_not_see_its_neighbours(dtype: torch.dtype) -> None:
    query, key, value = (create_tokens(12, seed, dtype) for seed in range(3))
    attended = segment_attention(query, key, value, [5, 7])
    for tensor in (query, key, value):
        tensor[5:] = 100.0
    assert torch.equal(segment_attention(query, key, value, [5, 7])[:5], attended[:5])


def test_segment_of_one_token_is_its_value() -> None:
    query, key, value = (create_tokens(3, seed) for seed in range(3))
    assert torch.equal(segment_attention(query, key, value, [1, 1, 1]), value)


def test_lengths_have_to_add_up() -> None:
    tokens = create_tokens(4, 0)
    with pytest.raises(RuntimeError, match="sum exactly to 4"):
        segment_attention(tokens, tokens, tokens, [2, 1])
