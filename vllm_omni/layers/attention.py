"""Attention over packed segments: no padding, no mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


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
