"""How much one request may ask for."""

from __future__ import annotations

import re

from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.entrypoints.openai.errors import APIError
from vllm_omni.params import DiffusionParams

_HALF = re.compile("[\ud800-\udfff]")  # JSON can name these, UTF-8 cannot write them


def get_cost(params: DiffusionParams) -> int:
    """Pixels x steps x pictures, over both branches of guidance; params are complete."""
    assert params.height and params.width and params.num_inference_steps
    rows = 2 if params.do_true_cfg else 1
    pixels = params.height * params.width * params.num_outputs_per_prompt
    return pixels * params.num_inference_steps * rows


def check_cost(params: DiffusionParams, config: ServerConfig) -> int:
    """The cost of a request, if it may ask for as much; the config's limits suit the model."""
    assert params.height and params.width
    if params.height * params.width > config.max_pixels:
        raise APIError(
            400,
            f"size={params.width}x{params.height} has {params.height * params.width} pixels: "
            f"at most {config.max_pixels}",
            "size",
            "size_limit_exceeded",
        )
    if params.num_outputs_per_prompt > config.max_n:
        raise APIError(
            400, f"n={params.num_outputs_per_prompt} is too large: at most {config.max_n}", "n"
        )
    cost = get_cost(params)
    if cost > config.max_cost:
        raise APIError(
            400,
            f"the request costs {cost} (pixels x steps x n, twice with guidance), more than "
            f"{config.max_cost}: ask for a smaller size, fewer steps or fewer pictures",
            "size",
            "cost_limit_exceeded",
        )
    return cost


def check_prompt(name: str, prompt: str | None, config: ServerConfig) -> None:
    """Refuse a prompt that nobody should have to tokenize, or can."""
    if prompt is None:
        return
    check_length(name, len(prompt), config)
    if not prompt.isascii() and _HALF.search(prompt):
        message = f"{name} holds half of a character: a surrogate without the other one"
        raise APIError(400, message, name, "invalid_value")


def check_length(name: str, num_chars: int, config: ServerConfig) -> None:
    """Refuse a prompt that is too long."""
    if num_chars > config.max_prompt_chars:
        message = f"{name} has {num_chars} characters: at most {config.max_prompt_chars}"
        raise APIError(400, message, name, "prompt_too_long")
