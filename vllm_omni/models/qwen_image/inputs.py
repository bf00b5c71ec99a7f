"""`QwenImageCustomInputs`: one Qwen-Image request as the engine sees it. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from vllm_omni.params import SIZE_MULTIPLE, OutputMode
from vllm_omni.step_cache import CacheParams

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

TASK_TEXT_ENCODING: Literal["text_encoding"] = "text_encoding"
TASK_IMAGE_GENERATION: Literal["image_generation"] = "image_generation"


class QwenImageCustomInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts come as token ids (the worker encodes them) or as embeddings (another stage has)."""

    task: Literal["text_encoding", "image_generation"] = TASK_IMAGE_GENERATION

    # what to draw
    prompt_token_ids: list[int] | None = None  # the whole template, prefix included
    prompt_embeds: Tensor | None = None  # [tokens, hidden], template prefix dropped
    negative_prompt_token_ids: list[int] | None = None
    negative_prompt_embeds: Tensor | None = None
    num_prefix_tokens: int = 0  # of the template, dropped after encoding
    height: int = 0
    width: int = 0
    output_mode: OutputMode = OutputMode.PIXELS
    mask: Tensor | None = None  # [H, W] uint8, for PIXELS_AND_MASK; everything when not given
    preview_every: int = 0  # steps from one preview to the next; 0: none

    # how to sample
    num_inference_steps: int = 0
    true_cfg_scale: float = 4.0
    seed: int = 0
    sigmas: tuple[float, ...] | None = None
    latents: Tensor | None = None  # [image tokens, channels] to start from, instead of the seed's
    cache: CacheParams | None = None

    @property
    def do_true_cfg(self) -> bool:
        has_negative = (
            self.negative_prompt_token_ids is not None or self.negative_prompt_embeds is not None
        )
        return self.true_cfg_scale > 1 and has_negative

    @property
    def grid(self) -> tuple[int, int]:
        """Height and width in tokens."""
        return self.height // SIZE_MULTIPLE, self.width // SIZE_MULTIPLE

    @property
    def num_image_tokens(self) -> int:
        height, width = self.grid
        return height * width

    @property
    def num_text_tokens(self) -> list[int]:
        """Of each guidance branch, conditional first."""
        counts = [self._count(self.prompt_token_ids, self.prompt_embeds)]
        if self.do_true_cfg:
            counts.append(self._count(self.negative_prompt_token_ids, self.negative_prompt_embeds))
        return counts

    @property
    def num_steps(self) -> int:
        return 0 if self.task == TASK_TEXT_ENCODING else self.num_inference_steps

    @property
    def num_tokens(self) -> int:
        if self.task == TASK_TEXT_ENCODING:
            return sum(self.num_text_tokens)
        return sum(self.num_image_tokens + num_text for num_text in self.num_text_tokens)

    @property
    def num_rows(self) -> int:
        return 2 if self.do_true_cfg else 1

    @property
    def output_type(self) -> str:
        if self.task == TASK_TEXT_ENCODING:
            return "hidden_states"
        return "image" if self.output_mode.has_pixels else "latents"

    def _count(self, token_ids: list[int] | None, embeds: Tensor | None) -> int:
        if embeds is not None:
            return int(embeds.shape[0])
        return len(token_ids or ()) - self.num_prefix_tokens
