"""Attention over packed segments: no padding, no mask, and the best kernel that is there.

On a GPU: vLLM's FlashAttention where vLLM is installed; else cuDNN's for each long segment, and
torch's varlen kernel for all short ones at once. On a CPU, torch's own for each segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_VARLEN_DTYPES = (torch.bfloat16, torch.float16)

LONG_SEGMENT = 1024  # tokens from which a cuDNN call of its own beats its share of a varlen call

VarlenKernel = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""query, key, value [tokens, heads, head_dim], starts [segments + 1], longest segment."""


def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, segment_lens: Sequence[int]
) -> Tensor:
    """Full attention inside each segment; all tensors [tokens, heads, head_dim]."""
    segments = zip(
        query.split(segment_lens), key.split(segment_lens), value.split(segment_lens), strict=True
    )
    return torch.cat([_attend(q, k, v) for q, k, v in segments])


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    # SDPA wants [batch, heads, tokens, head_dim]; these are views, nothing is copied.
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1)


@dataclass(frozen=True, eq=False)
class Segments:
    """Where segments begin and end, on the host and on the device."""

    lens: list[int]  # the long ones first
    starts: Tensor  # [segments + 1] int32
    max_len: int
    num_long: int  # those that get a call of their own
    short_starts: Tensor  # [short ones + 1] int32, from the first of them on

    @staticmethod
    def make(lens: Sequence[int], device: torch.device, max_len: int | None = None) -> Segments:
        """Of lengths that are sorted, the longest first.

        Args:
            max_len: what to promise, if it is more than the longest.
        """
        num_long = sum(length >= LONG_SEGMENT for length in lens)
        starts = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return Segments(
            lens=list(lens),
            starts=starts.to(device),
            max_len=max_len or max(lens),
            num_long=num_long,
            short_starts=(starts[num_long:] - starts[num_long]).to(device),
        )


def attend_by_segment(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments
) -> list[Tensor]:
    """The attention of each segment [its tokens, heads, head_dim]."""
    kind = query.device.type, query.dtype
    if (flash := find_vllm_kernel(*kind)) is not None:
        return list(
            flash(query, key, value, segments.starts, segments.max_len).split(segments.lens)
        )
    varlen = find_varlen_kernel(*kind)
    num_alone = segments.num_long if varlen is not None else len(segments.lens)
    by_segment = [tensor.split(segments.lens)[:num_alone] for tensor in (query, key, value)]
    attended = [_attend(q, k, v) for q, k, v in zip(*by_segment, strict=True)]
    if varlen is not None and (short := segments.lens[num_alone:]):
        start = sum(segments.lens[:num_alone])
        together = varlen(
            query[start:], key[start:], value[start:], segments.short_starts, max(short)
        )
        attended += together.split(short)
    return attended


def attend_together(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
    """All segments in one call that reads their starts on the device: it can be captured."""
    kind = query.device.type, query.dtype
    varlen = find_vllm_kernel(*kind) or find_varlen_kernel(*kind)
    if varlen is None:
        return segment_attention(query, key, value, segments.lens)
    return varlen(query, key, value, segments.starts, segments.max_len)


def can_attend_together(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `attend_together` can be captured there."""
    return find_varlen_kernel(device.type, dtype) is not None


@contextmanager
def best_kernels(device: torch.device) -> Iterator[None]:
    """cuDNN's attention first: the fastest of those in torch from about a thousand tokens on."""
    if device.type != "cuda":
        yield
        return
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    with sdpa_kernel(order, set_priority=True):
        yield


@cache
def find_varlen_kernel(device_type: str, dtype: torch.dtype) -> VarlenKernel | None:
    """torch's own, where it is for this device and dtype."""
    if device_type != "cuda" or dtype not in _VARLEN_DTYPES:
        return None
    try:
        varlen_attn = import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:  # torch before 2.10
        return None

    def attend(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, max_len: int) -> Tensor:
        attended: Tensor = varlen_attn(query, key, value, starts, starts, max_len, max_len)
        return attended

    return attend


@cache
def find_vllm_kernel(device_type: str, dtype: torch.dtype) -> VarlenKernel | None:
    """vLLM's FlashAttention, where vLLM is installed with it and it is for this dtype."""
    if device_type != "cuda" or dtype not in _VARLEN_DTYPES or find_spec("vllm") is None:
        return None
    try:
        flash = import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
    except ImportError:  # a vLLM for another device
        return None

    def attend(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, max_len: int) -> Tensor:
        attended: Tensor = flash(query, key, value, max_len, starts, max_len, starts)
        return attended

    return attend
