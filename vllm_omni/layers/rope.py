"""Rotary embedding of packed tokens: neighbouring channels are turned by an angle of their own.

The table is real-valued, `cos_sin` [tokens, head_dim / 2, 2]. Rotations are computed in float32, as
diffusers does, and returned in x's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate x [tokens, heads, head_dim]."""
    if torch.compiler.is_compiling():
        return rotate(x, cos_sin)
    # The same as one complex product: a single pass over memory, many times faster in eager mode.
    # Both views are free; complex numbers do not compile, though.
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    turned = pairs * torch.view_as_complex(cos_sin).unsqueeze(1)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """`apply_rope` written out with real numbers."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_sin.unsqueeze(1).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)
