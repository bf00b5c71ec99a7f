"""Rows of random contents, and the two ways of running them through Qwen-Image's transformer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor, nn

from vllm_omni.models.qwen_image.transformer import (
    RowShape,
    make_plan,
    packed_forward,
    project_text,
)

IMAGE_CHANNELS = 64


@dataclass(frozen=True)
class Dimensions:
    """Of the transformer; the defaults are Qwen-Image's."""

    num_layers: int = 60
    num_heads: int = 24
    head_dim: int = 128
    text_dim: int = 3584

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    def tflop(self, rows: Sequence[Row]) -> float:
        """Of one forward: linear layers and attention."""
        tokens = [row.num_tokens for row in rows]
        per_layer = sum(24 * self.width**2 * n + 4 * self.width * n**2 for n in tokens)
        return self.num_layers * per_layer / 1e12


@dataclass(frozen=True)
class Row:
    """One guidance branch of one request."""

    latents: Tensor  # [image tokens, channels]; the picture is a square
    text: Tensor  # [text tokens, text_dim]
    timestep: float  # 0 to 1, exact in bfloat16

    @property
    def grid(self) -> tuple[int, int, int]:
        side = round(self.latents.shape[0] ** 0.5)
        return (1, side, side)

    @property
    def num_tokens(self) -> int:
        return self.latents.shape[0] + self.text.shape[0]

    def to(self, dtype: torch.dtype) -> Row:
        return Row(self.latents.to(dtype), self.text.to(dtype), self.timestep)


class RowMaker:
    """Draws rows in bfloat16; no two are alike."""

    def __init__(self, dimensions: Dimensions, device: torch.device) -> None:
        self.text_dim = dimensions.text_dim
        self.generator = torch.Generator(device).manual_seed(0)

    def make(self, side: int, num_text_tokens: int, timestep: float = 0.75) -> Row:
        """side: in pixels."""
        latents = self.noise((side // 16) ** 2, IMAGE_CHANNELS)
        return Row(latents, self.noise(num_text_tokens, self.text_dim), timestep)

    def make_guided(self, side: int) -> list[Row]:
        """Both branches of a request: the same latents, a prompt and a short negative prompt."""
        cond = self.make(side, 64)
        return [cond, Row(cond.latents, self.noise(12, self.text_dim), cond.timestep)]

    def noise(self, *shape: int) -> Tensor:
        device = self.generator.device
        return torch.randn(shape, generator=self.generator, device=device, dtype=torch.bfloat16)


def build_transformer(dimensions: Dimensions, device: torch.device) -> Any:
    """The stock module in bfloat16 with random weights, made on the device."""
    head_dim = dimensions.head_dim
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = QwenImageTransformer2DModel(
                num_layers=dimensions.num_layers,
                num_attention_heads=dimensions.num_heads,
                attention_head_dim=head_dim,
                joint_attention_dim=dimensions.text_dim,
                axes_dims_rope=(head_dim // 8, head_dim * 7 // 16, head_dim * 7 // 16),
            )
    finally:
        torch.set_default_dtype(torch.float32)
    # He's gain, as in our random checkpoints: with torch's default the blocks add so little that
    # a wrong timestep or prompt would hardly be seen.
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(6**0.5)
    return model.requires_grad_(False).eval()


class StockStep:
    """The stock forward over rows of one size; shorter texts are padded and masked."""

    def __init__(self, model: Any, rows: Sequence[Row]) -> None:
        self.model = model
        text = nn.utils.rnn.pad_sequence([row.text for row in rows], batch_first=True)
        ends = torch.tensor([row.text.shape[0] for row in rows], device=text.device)
        mask = torch.arange(text.shape[1], device=text.device) < ends.unsqueeze(1)
        self.inputs = {
            "hidden_states": torch.stack([row.latents for row in rows]),
            "encoder_hidden_states": text,
            "encoder_hidden_states_mask": None if mask.all() else mask,  # as the pipeline does
            "timestep": _timesteps(rows),
            "img_shapes": [[row.grid] for row in rows],
        }

    def __call__(self) -> Tensor:
        """[rows, image tokens, channels]"""
        velocity: Tensor = self.model(**self.inputs, return_dict=False)[0]
        return velocity


def stock_forward(model: Any, row: Row) -> Tensor:
    """[image tokens, channels] of a row alone."""
    return StockStep(model, [row])()[0]


class PackedStep:
    """Our forward over any mix of rows; what the engine does once per batch is done here once."""

    def __init__(self, model: Any, rows: Sequence[Row]) -> None:
        self.model = model
        self.plan = make_plan(model, [RowShape((row.grid,), row.text.shape[0]) for row in rows])
        self.latents = torch.cat([row.latents for row in rows])
        self.text = torch.cat([project_text(model, row.text) for row in rows])
        self.timesteps = _timesteps(rows)
        self.image_lens = [row.latents.shape[0] for row in rows]

    def __call__(self) -> tuple[Tensor, ...]:
        """[image tokens, channels] of each row."""
        velocity = packed_forward(self.model, self.plan, self.latents, self.text, self.timesteps)
        by_row: tuple[Tensor, ...] = velocity.split(self.image_lens)
        return by_row


def _timesteps(rows: Sequence[Row]) -> Tensor:
    latents = rows[0].latents
    return torch.tensor([r.timestep for r in rows], device=latents.device, dtype=latents.dtype)
