"""Flow-matching sampling as pure functions: noise levels, guidance, Euler step, previews."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor


def make_sigmas(
    scheduler_config: Mapping[str, Any],
    num_steps: int,
    num_image_tokens: int,
    sigmas: Sequence[float] | None = None,
) -> Tensor:
    """Noise levels [num_steps + 1] in float32 from 1 down to 0, as the stock pipeline has them.

    `sigmas` replaces the even spacing before the resolution-dependent shift.
    """
    unshifted = np.linspace(1.0, 1 / num_steps, num_steps) if sigmas is None else np.array(sigmas)
    config = dict(scheduler_config)
    shifted = _shift(config, unshifted, num_image_tokens)
    if not shifted.isfinite().all():
        # A single step from pure noise has no tail to stretch to `shift_terminal`: the stock
        # scheduler divides 0 by 0.
        shifted = _shift(config | {"shift_terminal": None}, unshifted, num_image_tokens)
    return shifted


def guide(cond: Tensor, uncond: Tensor, scale: Tensor) -> Tensor:
    """Classifier-free guidance that keeps the norm of each conditional token.

    cond, uncond: [tokens, channels]; scale: [tokens, 1].
    """
    combined = uncond + scale * (cond - uncond)
    cond_norm = torch.linalg.vector_norm(cond, dim=-1, keepdim=True)
    guided: Tensor = combined * (
        cond_norm / torch.linalg.vector_norm(combined, dim=-1, keepdim=True)
    )
    return guided


def euler_step(latents: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """One step along the flow; all float32, sigma and sigma_next [tokens, 1]."""
    return latents + (sigma_next - sigma) * velocity


def estimate_final(before: Tensor, after: Tensor, sigma: float, sigma_next: float) -> Tensor:
    """Where the flow ends if it goes on as straight as in the step from `before` to `after`."""
    if sigma == sigma_next:
        return after  # noise levels next to each other can be one in float32: no direction is seen
    velocity = (after - before) / (sigma_next - sigma)
    return after - sigma_next * velocity


def _shift(config: Mapping[str, Any], sigmas: np.ndarray[Any, Any], num_tokens: int) -> Tensor:
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    with np.errstate(divide="ignore", invalid="ignore"):
        scheduler.set_timesteps(sigmas=sigmas, mu=_resolution_shift(config, num_tokens))
    shifted: Tensor = scheduler.sigmas
    return shifted


def _resolution_shift(config: Mapping[str, Any], num_image_tokens: int) -> float:
    """More tokens, more noise: linear between the scheduler config's two anchor points."""
    base_tokens, base_shift = config.get("base_image_seq_len", 256), config.get("base_shift", 0.5)
    max_tokens, max_shift = config.get("max_image_seq_len", 4096), config.get("max_shift", 1.15)
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    shift: float = num_image_tokens * slope + (base_shift - slope * base_tokens)
    return shift
