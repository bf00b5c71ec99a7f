"""The transformer's weights as the fast step reads them: query, key and value in one, or fp8."""

from __future__ import annotations

from typing import NamedTuple

from diffusers import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from torch import Tensor, nn

from vllm_omni.layers.linear import LinearWeights, PackedLinear


def pack_weights(transformer: QwenImageTransformer2DModel) -> None:
    """Join query, key and value of each stream, block after block: hardly any are there twice.

    The module stays what it was for those that call its parts: the simple loop, and caches that
    other packages bring.
    """
    for block in transformer.transformer_blocks:
        attn = block.attn
        if isinstance(getattr(attn, "to_qkv", None), PackedLinear):
            continue
        attn.to_qkv = PackedLinear((attn.to_q, attn.to_k, attn.to_v))
        attn.to_q, attn.to_k, attn.to_v = attn.to_qkv.parts()
        attn.to_added_qkv = PackedLinear((attn.add_q_proj, attn.add_k_proj, attn.add_v_proj))
        attn.add_q_proj, attn.add_k_proj, attn.add_v_proj = attn.to_added_qkv.parts()


def quantize_weights(transformer: QwenImageTransformer2DModel) -> None:
    """All large layers of the blocks in fp8; what they were in is given back."""
    pack_weights(transformer)
    for block in transformer.transformer_blocks:
        attn = block.attn
        attn.to_qkv.quantize()
        attn.to_added_qkv.quantize()
        attn.to_out[0] = _quantized(attn.to_out[0])
        attn.to_add_out = _quantized(attn.to_add_out)
        for mlp in (block.img_mlp, block.txt_mlp):
            mlp.net[0].proj = _quantized(mlp.net[0].proj)
            mlp.net[2] = _quantized(mlp.net[2])


def _quantized(layer: nn.Linear | PackedLinear) -> PackedLinear:
    packed = layer if isinstance(layer, PackedLinear) else PackedLinear((layer,))
    packed.quantize()
    return packed


class StreamWeights(NamedTuple):
    """Of one stream, image or text, in one block."""

    qkv: LinearWeights
    norms: tuple[Tensor, Tensor]  # of query and key, [head_dim]
    out: LinearWeights
    mlp_in: LinearWeights
    mlp_out: LinearWeights


class BlockWeights(NamedTuple):
    """Of one block."""

    image: StreamWeights
    text: StreamWeights


def read_block(block: QwenImageTransformerBlock) -> BlockWeights:
    """The weights of a block after `pack_weights`."""
    attn = block.attn
    return BlockWeights(
        image=StreamWeights(
            attn.to_qkv.weights,
            (attn.norm_q.weight, attn.norm_k.weight),
            _weights_of(attn.to_out[0]),
            _weights_of(block.img_mlp.net[0].proj),
            _weights_of(block.img_mlp.net[2]),
        ),
        text=StreamWeights(
            attn.to_added_qkv.weights,
            (attn.norm_added_q.weight, attn.norm_added_k.weight),
            _weights_of(attn.to_add_out),
            _weights_of(block.txt_mlp.net[0].proj),
            _weights_of(block.txt_mlp.net[2]),
        ),
    )


def _weights_of(layer: nn.Linear | PackedLinear) -> LinearWeights:
    if isinstance(layer, PackedLinear):
        return layer.weights
    return LinearWeights(layer.weight, layer.bias)
