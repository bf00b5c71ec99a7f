"""Builders for tests that draw: cases, a run of the engine, a run of the stock pipeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from vllm_omni.diffusion.engine_core import DiffusionEngineCore
from vllm_omni.diffusion.messages import DiffusionRequest
from vllm_omni.models.qwen_image.inputs import QwenImageCustomInputs
from vllm_omni.models.qwen_image.prompt import TEXT_TO_IMAGE
from vllm_omni.outputs import EngineCoreOutput
from vllm_omni.params import OutputMode

# Latents of about 4, alone and in company: kernels cut a larger batch in other places. Seen so far:
# 7e-6 with AVX2, 1.2e-5 with AVX-512; the contract is 1e-4.
COMPANY_TOLERANCE = 3e-5

MakeCheckpoint = Callable[[int], Path]
MakeStock = Callable[[int], Any]
MakeEngineCore = Callable[[int], DiffusionEngineCore]


@dataclass(frozen=True)
class Case:
    """One picture to draw."""

    prompt: str
    height: int
    width: int
    num_steps: int
    true_cfg_scale: float | None  # None: no guidance
    seed: int
    arrival: int = 0  # the step before which it is added

    @property
    def negative_prompt(self) -> str | None:
        return None if self.true_cfg_scale is None else "blurry, ugly"


def inputs_of(case: Case, tokenizer: Any, **changes: Any) -> QwenImageCustomInputs:
    def token_ids(prompt: str) -> list[int]:
        ids: list[int] = tokenizer(TEXT_TO_IMAGE.apply(prompt)).input_ids
        return ids

    negative = case.negative_prompt
    fields: dict[str, Any] = {
        "prompt_token_ids": token_ids(case.prompt),
        "negative_prompt_token_ids": None if negative is None else token_ids(negative),
        "num_prefix_tokens": TEXT_TO_IMAGE.num_prefix_tokens,
        "height": case.height,
        "width": case.width,
        "num_inference_steps": case.num_steps,
        "true_cfg_scale": case.true_cfg_scale or 1.0,
        "seed": case.seed,
        "output_mode": OutputMode.PIXELS_AND_LATENTS,
    }
    return QwenImageCustomInputs(**(fields | changes))


def load_tokenizer(core: DiffusionEngineCore) -> Any:
    return AutoTokenizer.from_pretrained(f"{core.dit_config.model}/tokenizer")


def run_engine(
    core: DiffusionEngineCore,
    inputs: Sequence[QwenImageCustomInputs],
    arrivals: Sequence[int] | None = None,
) -> list[EngineCoreOutput]:
    """The final output of each request, added before the step of its arrival."""
    return [outputs[-1] for outputs in watch_engine(core, inputs, arrivals)]


def watch_engine(
    core: DiffusionEngineCore,
    inputs: Sequence[QwenImageCustomInputs],
    arrivals: Sequence[int] | None = None,
) -> list[list[EngineCoreOutput]]:
    """All outputs of each request, in order; the last is the final one."""
    arrivals = arrivals or [0] * len(inputs)
    watched: dict[str, list[EngineCoreOutput]] = defaultdict(list)
    for step in range(10_000):
        for index, arrival in enumerate(arrivals):
            if arrival == step:
                request = DiffusionRequest(request_id=str(index), custom_inputs=inputs[index])
                core.add_request(request)
        if step > max(arrivals) and not core.has_requests():
            break
        news, _ = core.step()
        for outputs in news.values():
            for output in outputs.outputs:
                watched[output.request_id].append(output)
    for seen in watched.values():
        assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
    return [watched[str(index)] for index in range(len(inputs))]


def previews_of(outputs: Sequence[EngineCoreOutput]) -> dict[int, Tensor]:
    """The previews of one request, by the step that gave them."""
    return {
        output.output_metadata["step"]: output.additional_outputs["preview"]
        for output in outputs
        if "preview" in output.additional_outputs
    }


def latents_of(output: EngineCoreOutput) -> Tensor:
    assert output.error is None, output.error
    latents = output.additional_outputs["latents"]
    assert isinstance(latents, Tensor)
    return latents


def pixels_of(output: EngineCoreOutput) -> np.ndarray[Any, Any]:
    """[H, W, 3] from 0 to 255."""
    assert output.pooling_output is not None
    pixels: np.ndarray[Any, Any] = output.pooling_output.permute(1, 2, 0).numpy().astype(int)
    return pixels


def draw_stock(
    pipeline: Any, case: Case, noise: Tensor | None = None
) -> tuple[Tensor, np.ndarray[Any, Any]]:
    """Latents [tokens, channels] and pixels [H, W, 3] of diffusers' own pipeline."""
    latents, pixels = draw_stock_steps(pipeline, case, noise)
    return latents[-1], pixels


def draw_stock_steps(
    pipeline: Any, case: Case, noise: Tensor | None = None
) -> tuple[list[Tensor], np.ndarray[Any, Any]]:
    """The latents after every step, and the pixels."""
    latents: list[Tensor] = []

    def keep(_: Any, __: int, ___: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        latents.append(tensors["latents"][0])
        return tensors

    [image] = pipeline(
        prompt=case.prompt,
        negative_prompt=case.negative_prompt,
        true_cfg_scale=case.true_cfg_scale or 1.0,
        height=case.height,
        width=case.width,
        num_inference_steps=case.num_steps,
        generator=torch.Generator().manual_seed(case.seed),
        latents=None if noise is None else noise.unsqueeze(0),
        callback_on_step_end=keep,
        callback_on_step_end_tensor_inputs=["latents"],
    ).images
    return latents, np.asarray(image).astype(int)
