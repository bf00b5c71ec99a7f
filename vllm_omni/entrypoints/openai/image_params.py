"""From a body to `DiffusionParams`, and back to a body that makes one picture again."""

from __future__ import annotations

import math
from typing import Any, cast

from vllm_omni.entrypoints.openai.config import NO_CACHE
from vllm_omni.entrypoints.openai.errors import APIError
from vllm_omni.entrypoints.openai.protocol import (
    DrawnQuality,
    ImageGenerationRequest,
    ImageParameters,
    Quality,
)
from vllm_omni.params import DiffusionParams, OutputMode, make_guidance
from vllm_omni.step_cache import CacheParams

QUALITY_STEPS: dict[DrawnQuality, float] = {
    "low": 0.5,
    "medium": 1.0,
    "high": 1.5,
    "xhigh": 2.0,
    "max": 3.0,
}
"""How many steps, times the model's own number."""

BODY_NAMES = {
    "height": "size",
    "width": "size",
    "num_outputs_per_prompt": "n",
    "deadline": "timeout",
}
"""Names in `DiffusionParams` -> names in a body, for error messages."""

_OTHER_NAMES: dict[Quality, DrawnQuality] = {"auto": "medium", "standard": "medium", "hd": "high"}


def get_quality(body: ImageParameters) -> DrawnQuality:
    """The quality that is meant."""
    return _OTHER_NAMES.get(body.quality) or cast(DrawnQuality, body.quality)


def read_params(
    body: ImageParameters,
    default_steps: int,
    default_cache: CacheParams | None,
    max_timeout: float,
) -> DiffusionParams:
    """What a body says; raises `InvalidParameterError`.

    Args:
        default_steps: the model's own.
        default_cache: the server's own.
        max_timeout: seconds that the request may take, whatever it says.
    """
    steps = body.num_inference_steps
    if steps is None:
        steps = max(1, round(default_steps * QUALITY_STEPS[get_quality(body)]))
    width, height = None, None
    if body.size != "auto":
        width, height = (int(side) for side in body.size.split("x"))
    cache = default_cache if body.cache is None else body.cache
    given: dict[str, Any] = {"cache": None if cache == NO_CACHE else cache, "lora": body.lora}
    return DiffusionParams(
        height=height,
        width=width,
        num_inference_steps=steps,
        **make_guidance(body.true_cfg_scale, body.negative_prompt),
        seed=body.seed,
        num_outputs_per_prompt=body.n,
        output_mode=body.output_mode,
        priority=body.priority,
        deadline=min(body.timeout or math.inf, max_timeout),
        **given,
    )


def write_body(model: str, prompt: str, params: DiffusionParams, seed: int) -> dict[str, Any]:
    """What makes a picture again, alone: its prompt, its seed, and all that was filled in."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "size": f"{params.width}x{params.height}",
        "num_inference_steps": params.num_inference_steps,
        "seed": seed,
    }
    if params.do_true_cfg:
        body["negative_prompt"] = params.negative_prompt
        body["true_cfg_scale"] = params.true_cfg_scale
    if params.cache is not None:
        body["cache"] = params.cache.to_json()
    if params.output_mode is not OutputMode.PIXELS:
        body["output_mode"] = params.output_mode.value
    return body


def get_preview_period(num_steps: int, num_previews: int) -> int:
    """Steps from preview to preview: evenly spread, and as many as there can be."""
    return min(math.ceil(num_steps / (num_previews + 1)), max(1, (num_steps - 1) // num_previews))


def check_output(body: ImageParameters) -> None:
    """Refuse combinations that no picture can be given in."""
    if body.background == "transparent":
        message = "background='transparent' is not supported by this model: opaque or auto"
        raise APIError(400, message, "background", "invalid_value")
    if body.output_mode.has_latents:
        message = f"output_mode={body.output_mode.value!r}: over HTTP, pixels or pixels_and_mask"
        raise APIError(400, message, "output_mode", "invalid_value")
    if body.output_mode.has_mask and body.output_format == "jpeg":
        message = "output_format='jpeg' cannot hold a mask: png or webp"
        raise APIError(400, message, "output_format", "invalid_value")
    if body.output_format == "png" and body.output_compression != 100:
        message = (
            f"output_compression={body.output_compression} is for jpeg and webp: png has no loss"
        )
        raise APIError(400, message, "output_compression", "invalid_value")
    if isinstance(body, ImageGenerationRequest) and body.partial_images and not body.stream:
        message = f"partial_images={body.partial_images} needs stream=true"
        raise APIError(400, message, "partial_images", "invalid_value")
