"""The pictures that this engine and the stock pipeline are both asked for, and the latter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImagePipeline
from diffusers.utils import logging as diffusers_logging
from PIL import Image
from torch import Tensor

from vllm_omni.entrypoints.omni import Omni
from vllm_omni.models.progress import progress_bars_off
from vllm_omni.params import DiffusionParams, OutputMode

SIZES = (
    (128, 128),
    (256, 256),
    (192, 128),
    (128, 256),
    (224, 160),
    (160, 208),
    (256, 192),
    (208, 144),
)
"""Width and height in pixels; the pictures of a round take them in turn."""

_PROMPTS = (
    "a red circle",
    "a painting of an old house and a tree in the garden, white and brown",
    "a cat on the table",
    "a photo of a dog with a large orange hat, left of a small blue square",
    "a yellow star",
)


@dataclass(frozen=True)
class Case:
    """One picture to draw."""

    prompt: str
    negative_prompt: str | None  # guided when there is one
    width: int
    height: int
    seed: int
    num_steps: int

    @property
    def true_cfg_scale(self) -> float:
        return 1.0 if self.negative_prompt is None else 4.0


def make_cases(count: int, num_steps: int, round_index: int = 0) -> list[Case]:
    """Mixed sizes, every other one guided. No prompt comes back in another round, so that none
    is found in a cache."""
    return [
        Case(
            prompt=f"{_PROMPTS[index % len(_PROMPTS)]}, {index} of {round_index}",
            negative_prompt=f"black and white, {index} of {round_index}" if index % 2 else None,
            width=SIZES[index % len(SIZES)][0],
            height=SIZES[index % len(SIZES)][1],
            seed=1000 * round_index + index,
            num_steps=num_steps,
        )
        for index in range(count)
    ]


@dataclass(frozen=True)
class Drawn:
    """What either engine made of a case."""

    image: Image.Image
    latents: Tensor  # [image tokens, channels] float32 on the CPU


class StockPipeline:
    """`diffusers.QwenImagePipeline`, one request at a time, as its users call it."""

    def __init__(self, model: Path, device: str, dtype: torch.dtype) -> None:
        diffusers_logging.disable_progress_bar()
        with progress_bars_off():
            self.pipeline = QwenImagePipeline.from_pretrained(model, dtype=dtype).to(device)
        self.pipeline.set_progress_bar_config(disable=True)

    def draw(self, case: Case) -> Drawn:
        """To pixels."""
        last: list[Tensor] = []

        def keep_latents(_: Any, step: int, __: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
            last[:] = [tensors["latents"]]
            return {}

        [image] = self.pipeline(
            prompt=case.prompt,
            negative_prompt=case.negative_prompt,
            true_cfg_scale=case.true_cfg_scale,
            width=case.width,
            height=case.height,
            num_inference_steps=case.num_steps,
            generator=torch.Generator("cpu").manual_seed(case.seed),
            callback_on_step_end=keep_latents,
        ).images
        return Drawn(image, last[0][0].float().cpu())


def draw_with_omni(omni: Omni, cases: Sequence[Case]) -> list[Drawn]:
    """All of them in one call, to pixels; raises if any fails."""
    params = [
        DiffusionParams(
            negative_prompt=case.negative_prompt,
            true_cfg_scale=case.true_cfg_scale,
            width=case.width,
            height=case.height,
            num_inference_steps=case.num_steps,
            seed=case.seed,
            output_mode=OutputMode.PIXELS_AND_LATENTS,
        )
        for case in cases
    ]
    outputs = omni.generate([case.prompt for case in cases], params)
    drawn = []
    for output in outputs:
        if output.error is not None:
            raise output.error
        assert output.latents is not None
        drawn.append(Drawn(output.images[0], output.latents[0]))
    return drawn


def max_difference(ours: Sequence[Drawn], theirs: Sequence[Drawn]) -> float:
    """The largest absolute difference of any latent of any picture."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((a.latents - b.latents).abs().max()) for a, b in pairs)
