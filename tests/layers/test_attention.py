"""Attention per segment equals full attention under a block-diagonal mask."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_omni.layers import attention
from vllm_omni.layers.attention import (
    LONG_SEGMENT,
    Segments,
    attend_by_segment,
    attend_together,
    best_kernels,
    can_attend_together,
    find_varlen_kernel,
    find_vllm_kernel,
    segment_attention,
)

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


class TestSegments:
    def test_long_ones_are_told_from_short_ones(self) -> None:
        segments = Segments.make([2000, LONG_SEGMENT, 7, 0], torch.device("cpu"))
        assert segments.num_long == 2
        assert segments.max_len == 2000
        assert segments.starts.tolist() == [0, 2000, 3024, 3031, 3031]
        assert segments.short_starts.tolist() == [0, 7, 7]
        assert segments.starts.dtype == torch.int32

    def test_a_bucket_promises_its_own_length(self) -> None:
        assert Segments.make([5, 3], torch.device("cpu"), max_len=512).max_len == 512


@pytest.mark.parametrize("segment_lens", [[33, 5, 1], [40], [9, 9, 0, 0]])
def test_by_segment_and_together_are_the_same(segment_lens: list[int]) -> None:
    query, key, value = (create_tokens(sum(segment_lens), seed) for seed in range(3))
    segments = Segments.make(segment_lens, query.device)
    expected = attend_with_mask(query, key, value, segment_lens).float()
    by_segment = attend_by_segment(query, key, value, segments)
    assert [part.shape[0] for part in by_segment] == segment_lens
    torch.testing.assert_close(torch.cat(by_segment), expected, atol=1e-5, rtol=1e-5)
    together = attend_together(query, key, value, segments)
    torch.testing.assert_close(together, expected, atol=1e-5, rtol=1e-5)


def test_a_cpu_has_no_varlen_kernel() -> None:
    assert find_varlen_kernel("cpu", torch.bfloat16) is None
    assert find_varlen_kernel("cuda", torch.float32) is None  # and no GPU has one for float32
    assert find_vllm_kernel("cpu", torch.bfloat16) is None
    assert not can_attend_together(torch.device("cpu"), torch.bfloat16)


def test_vllms_kernel_is_taken_for_the_dtypes_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    flash = SimpleNamespace(flash_attn_varlen_func=lambda *_: pytest.fail("it is not called"))
    monkeypatch.setattr(attention, "find_spec", lambda _: flash)
    monkeypatch.setattr(attention, "import_module", lambda _: flash)
    find = find_vllm_kernel.__wrapped__  # not from the cache, and not into it
    assert find("cuda", torch.bfloat16) is not None
    assert find("cuda", torch.float32) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("segment_lens", [[1500, 1030, 300, 40], [4160], [320, 268, 0, 0]])
def test_kernels_of_a_gpu(segment_lens: list[int]) -> None:
    def create(seed: int) -> Tensor:
        generator = torch.Generator("cuda").manual_seed(seed)
        shape = (sum(segment_lens), 4, 128)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    query, key, value = (create(seed) for seed in range(3))
    segments = Segments.make(segment_lens, query.device)
    expected = segment_attention(query.float(), key.float(), value.float(), segment_lens)
    with best_kernels(query.device):
        by_segment = torch.cat(attend_by_segment(query, key, value, segments))
    together = attend_together(query, key, value, segments)
    for attended in (by_segment, together):
        assert float((attended.float() - expected).norm() / expected.norm()) < 5e-3
