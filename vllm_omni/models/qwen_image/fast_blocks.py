"""A block of the fast step, cut where the streams meet: at attention.

Between two attentions, image and text go their own ways: the rest of a block, then what the next
one needs for its attention. Plain functions from tensors to tensors, so that each compiles once,
for all blocks, both streams and any number of tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_omni.layers.linear import LinearWeights, linear, linear_gelu
from vllm_omni.layers.rope import rotate
from vllm_omni.models.qwen_image.weights import StreamWeights

EPS = 1e-6  # of all norms


def project(x: Tensor, slots: Tensor, modulation: Tensor, weights: LinearWeights) -> Tensor:
    """Query, key and value of a stream, [n, 3 * D].

    Args:
        x: [n, D].
        slots: [n] row of `modulation` of each token.
        modulation: [slots, 6, D] of this block and stream.
        weights: of query, key and value.
    """
    return linear(norm_attention(x, slots, modulation), weights)


def join(
    text: Tensor,
    image: Tensor,
    to_segments: Tensor,
    rope: Tensor,
    text_norms: tuple[Tensor, Tensor],
    image_norms: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [N, heads, head_dim] in segment order, normed and turned.

    Args:
        text: [N_txt, 3 * D], from `project`.
        image: [N_img, 3 * D].
        to_segments: [N] indices into (text tokens, image tokens).
        rope: [N, head_dim / 2, 2] in segment order.
        text_norms: weights [head_dim] of query and key.
    """
    head_dim = 2 * rope.shape[1]
    num_text = text.shape[0]
    is_text = (to_segments < num_text)[:, None]
    # Written so that one pass over memory does it all: no copy of both streams put together.
    packed = torch.where(
        is_text, text[to_segments.clamp(max=num_text - 1)], image[(to_segments - num_text).clamp(0)]
    )
    query, key, value = packed.unflatten(-1, (3, -1, head_dim)).unbind(1)

    def turn(x: Tensor, of_text: Tensor, of_image: Tensor) -> Tensor:
        weight = torch.where(is_text, of_text.float(), of_image.float()).unsqueeze(1)
        normed = F.rms_norm(x.float(), (head_dim,), eps=EPS) * weight
        return rotate(normed, rope).to(x.dtype)

    return (
        turn(query, text_norms[0], image_norms[0]),
        turn(key, text_norms[1], image_norms[1]),
        value.contiguous(),
    )


def finish(
    x: Tensor, attended: Tensor, slots: Tensor, modulation: Tensor, weights: StreamWeights
) -> Tensor:
    """A stream behind a block, [n, D]; attended [n, D]."""
    x = torch.addcmul(x, modulation[:, 2][slots], linear(attended, weights.out))
    normed = _modulate(x, modulation[:, 3][slots], modulation[:, 4][slots])
    hidden = linear_gelu(normed, weights.mlp_in)
    return torch.addcmul(x, modulation[:, 5][slots], linear(hidden, weights.mlp_out))


def advance(
    x: Tensor,
    attended: Tensor,
    slots: Tensor,
    modulation: Tensor,
    weights: StreamWeights,
    next_modulation: Tensor,
    next_weights: LinearWeights,
) -> tuple[Tensor, Tensor]:
    """`finish` a block, and `project` for the next."""
    x = finish(x, attended, slots, modulation, weights)
    return x, project(x, slots, next_modulation, next_weights)


def norm_attention(x: Tensor, slots: Tensor, modulation: Tensor) -> Tensor:
    """What a block's attention reads of a stream, [n, D]."""
    return _modulate(x, modulation[:, 0][slots], modulation[:, 1][slots])


def make_velocity(
    image: Tensor, slots: Tensor, modulation: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """The output layer; modulation [slots, 2, D], scale and shift."""
    scale, shift = modulation[:, 0][slots], modulation[:, 1][slots]
    return F.linear(_modulate(image, shift, scale), weight, bias)


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(shift, F.layer_norm(x, (x.shape[-1],), eps=EPS), 1 + scale)
