"""The packed forward of Qwen-Image's transformer, over the stock module's own weights.

All image tokens of all rows are one `[N_img, D]` tensor and all text tokens one `[N_txt, D]`, so
every linear layer runs once for the whole batch, whatever mix of sizes, prompt lengths and
timesteps is in it. Modulation and RoPE are gathered per token; attention runs per segment, a
segment being one row's text tokens followed by its image tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from torch import Tensor

from vllm_omni.diffusion.external_cache import share_weights
from vllm_omni.diffusion.step_cache import PackedStepCache, Signal
from vllm_omni.layers.attention import segment_attention
from vllm_omni.layers.rope import apply_rope

ImageShapes = tuple[tuple[int, int, int], ...]
"""(frames, height, width) in tokens of each picture of a row; the first is the one being drawn."""


@dataclass(frozen=True)
class RowShape:
    """All that the packing needs to know of one row (one guidance branch of one request)."""

    image_shapes: ImageShapes
    num_text_tokens: int

    @property
    def num_image_tokens(self) -> int:
        return sum(frames * height * width for frames, height, width in self.image_shapes)


@dataclass(frozen=True, eq=False)
class PackPlan:
    """Where every token of every row goes. Depends on the rows' shapes only, not on their values,
    so one plan serves all steps of an unchanged batch."""

    image_rows: Tensor  # [N_img] row of each image token
    text_rows: Tensor  # [N_txt] row of each text token
    image_rope: Tensor  # [N_img, head_dim / 2, 2] float32, cos and sin
    text_rope: Tensor  # [N_txt, head_dim / 2, 2]
    to_segments: Tensor  # [N] segment order, as indices into (text tokens, image tokens)
    from_segments: Tensor  # [N] its inverse
    segment_lens: list[int]
    text_lens: list[int]  # of each row
    image_lens: list[int]


def make_plan(
    transformer: QwenImageTransformer2DModel,
    rows: Sequence[RowShape],
    device: torch.device | None = None,
) -> PackPlan:
    """The packing of rows, on the device where the transformer runs."""
    device = device or transformer.proj_out.weight.device
    frequencies = [
        transformer.pos_embed(
            [list(row.image_shapes)], device=device, max_txt_seq_len=row.num_text_tokens
        )
        for row in rows
    ]
    return _plan_lens(
        text_lens=[row.num_text_tokens for row in rows],
        image_lens=[row.num_image_tokens for row in rows],
        text_rope=torch.view_as_real(torch.cat([text for _, text in frequencies])),
        image_rope=torch.view_as_real(torch.cat([image for image, _ in frequencies])),
    )


def select_plan(plan: PackPlan, rows: Sequence[int]) -> PackPlan:
    """The packing of some of the rows."""
    return _plan_lens(
        text_lens=[plan.text_lens[row] for row in rows],
        image_lens=[plan.image_lens[row] for row in rows],
        text_rope=select_rows(plan.text_rope, plan.text_lens, rows),
        image_rope=select_rows(plan.image_rope, plan.image_lens, rows),
    )


def _plan_lens(
    text_lens: list[int], image_lens: list[int], text_rope: Tensor, image_rope: Tensor
) -> PackPlan:
    device = image_rope.device
    text_ids = torch.arange(sum(text_lens)).split(text_lens)
    image_ids = torch.arange(sum(text_lens), sum(text_lens) + sum(image_lens)).split(image_lens)
    to_segments = torch.cat([ids for pair in zip(text_ids, image_ids, strict=True) for ids in pair])
    return PackPlan(
        image_rows=_row_of_each_token(image_lens).to(device),
        text_rows=_row_of_each_token(text_lens).to(device),
        image_rope=image_rope,
        text_rope=text_rope,
        to_segments=to_segments.to(device),
        from_segments=torch.argsort(to_segments).to(device),
        segment_lens=[text + image for text, image in zip(text_lens, image_lens, strict=True)],
        text_lens=text_lens,
        image_lens=image_lens,
    )


def project_text(transformer: QwenImageTransformer2DModel, prompt_embeds: Tensor) -> Tensor:
    """Prompt embeddings [L, joint_attention_dim] as the text stream's first hidden states [L, D].

    The same in every step, so it is done once per request.
    """
    projected: Tensor = transformer.txt_in(transformer.txt_norm(prompt_embeds))
    return projected


def packed_forward(
    transformer: QwenImageTransformer2DModel,
    plan: PackPlan,
    latents: Tensor,
    text: Tensor,
    timesteps: Tensor,
    step_cache: StepCachePlan | None = None,
) -> Tensor:
    """Predicted velocity [N_img, channels].

    Args:
        latents: [N_img, channels] of all rows.
        text: [N_txt, D] of all rows, from `project_text`.
        timesteps: [rows], from 0 to 1.
        step_cache: lets rows leave out all blocks but the first.
    """
    image = transformer.img_in(latents)
    temb = transformer.time_text_embed(timesteps.to(image.dtype), image)  # [rows, D]
    if step_cache is None:
        for block in transformer.transformer_blocks:
            image, text = packed_block(block, plan, image, text, temb)
    else:
        image = _cached_blocks(transformer, plan, image, text, temb, step_cache)

    norm_out = transformer.norm_out
    scale, shift = norm_out.linear(norm_out.silu(temb).to(image.dtype))[plan.image_rows].chunk(2, 1)
    velocity: Tensor = transformer.proj_out(_modulate(norm_out.norm(image), shift, scale))
    return velocity


def make_single_row_module(
    transformer: QwenImageTransformer2DModel,
) -> QwenImageTransformer2DModel:
    """The stock module over the same weights, for text that is projected already."""
    module = share_weights(transformer)
    module.txt_norm = module.txt_in = torch.nn.Identity()
    return module


def single_row_forward(
    module: torch.nn.Module, row: RowShape, latents: Tensor, text: Tensor, timestep: Tensor
) -> Tensor:
    """Predicted velocity [tokens, channels] of one row, by the stock forward.

    Args:
        module: from `make_single_row_module`.
        latents: [tokens, channels].
        text: [L, D], from `project_text`.
        timestep: [], from 0 to 1.
    """
    (velocity,) = module(
        hidden_states=latents.unsqueeze(0),
        encoder_hidden_states=text.unsqueeze(0),
        timestep=timestep.unsqueeze(0),
        img_shapes=[list(row.image_shapes)],
        return_dict=False,
    )
    of_row: Tensor = velocity.squeeze(0)
    return of_row


@dataclass(frozen=True)
class StepCachePlan:
    """The caches of a step's rows, and how to pack those that are to be computed."""

    cache: PackedStepCache
    plan_rows: Callable[[Sequence[int]], PackPlan]


def _cached_blocks(
    transformer: QwenImageTransformer2DModel,
    plan: PackPlan,
    image: Tensor,
    text: Tensor,
    temb: Tensor,
    step_cache: StepCachePlan,
) -> Tensor:
    """All blocks for rows that miss, the first one for rows that hit; [N_img, D]."""
    head, *tail = transformer.transformer_blocks
    after_head, text_after_head = packed_block(head, plan, image, text, temb)
    signals = {}
    if Signal.HEAD_RESIDUAL in step_cache.cache.signals:
        signals[Signal.HEAD_RESIDUAL] = after_head - image
    if Signal.MODULATED_INPUT in step_cache.cache.signals:
        shift, scale = head.img_mod(temb)[plan.image_rows].chunk(6, -1)[:2]
        signals[Signal.MODULATED_INPUT] = _modulate(head.img_norm1(image), shift, scale)

    def run_tail(rows: list[int]) -> Tensor:
        if len(rows) == len(plan.image_lens):
            row_plan, of_image, of_text, of_temb = plan, after_head, text_after_head, temb
        else:
            row_plan = step_cache.plan_rows(rows)
            of_image = select_rows(after_head, plan.image_lens, rows)
            of_text = select_rows(text_after_head, plan.text_lens, rows)
            of_temb = temb[torch.tensor(rows, device=temb.device)]
        for block in tail:
            of_image, of_text = packed_block(block, row_plan, of_image, of_text, of_temb)
        return of_image

    return step_cache.cache.apply(signals, after_head, run_tail)


def select_rows(packed: Tensor, lens: Sequence[int], rows: Sequence[int]) -> Tensor:
    """The tokens of some rows."""
    by_row = packed.split(list(lens))
    return torch.cat([by_row[row] for row in rows])


def packed_block(
    block: QwenImageTransformerBlock, plan: PackPlan, image: Tensor, text: Tensor, temb: Tensor
) -> tuple[Tensor, Tensor]:
    """One dual-stream block; image [N_img, D], text [N_txt, D], temb [rows, D]."""
    # Shift, scale and gate of the attention, then those of the MLP: [N_img, D] or [N_txt, D] each.
    image_mod = block.img_mod(temb)[plan.image_rows].chunk(6, -1)
    text_mod = block.txt_mod(temb)[plan.text_rows].chunk(6, -1)

    image_attn, text_attn = joint_attention(
        block,
        plan,
        _modulate(block.img_norm1(image), *image_mod[0:2]),
        _modulate(block.txt_norm1(text), *text_mod[0:2]),
    )
    image = torch.addcmul(image, image_mod[2], image_attn)
    text = torch.addcmul(text, text_mod[2], text_attn)
    image_mlp = block.img_mlp(_modulate(block.img_norm2(image), *image_mod[3:5]))
    text_mlp = block.txt_mlp(_modulate(block.txt_norm2(text), *text_mod[3:5]))
    return torch.addcmul(image, image_mod[5], image_mlp), torch.addcmul(text, text_mod[5], text_mlp)


def joint_attention(
    block: QwenImageTransformerBlock, plan: PackPlan, image: Tensor, text: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of each row's text and image tokens to each other."""
    attn = block.attn
    head_dim = attn.inner_dim // attn.heads

    def heads(projection: torch.nn.Linear, x: Tensor) -> Tensor:
        projected: Tensor = projection(x)
        return projected.view(x.shape[0], -1, head_dim)

    def segments(of_text: Tensor, of_image: Tensor) -> Tensor:
        return torch.cat((of_text, of_image))[plan.to_segments]

    query = segments(
        apply_rope(attn.norm_added_q(heads(attn.add_q_proj, text)), plan.text_rope),
        apply_rope(attn.norm_q(heads(attn.to_q, image)), plan.image_rope),
    )
    key = segments(
        apply_rope(attn.norm_added_k(heads(attn.add_k_proj, text)), plan.text_rope),
        apply_rope(attn.norm_k(heads(attn.to_k, image)), plan.image_rope),
    )
    value = segments(heads(attn.add_v_proj, text), heads(attn.to_v, image))
    attended = segment_attention(query, key, value, plan.segment_lens)[plan.from_segments]
    of_text, of_image = attended.flatten(1).split((text.shape[0], image.shape[0]))
    return attn.to_out[0](of_image), attn.to_add_out(of_text)


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(shift, x, 1 + scale)


def _row_of_each_token(lens: Sequence[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
