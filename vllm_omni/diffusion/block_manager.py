"""`DiffusionBlockManager`: the noise schedule of a request, and guidance inside a packed step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_omni.diffusion.sampling import guide, make_sigmas


class DiffusionBlockManager:
    """Knows the checkpoint's schedule; keeps no state of any request."""

    def __init__(self, scheduler_config: Mapping[str, Any]) -> None:
        self.scheduler_config = scheduler_config
        self.num_train_timesteps = int(scheduler_config.get("num_train_timesteps", 1000))

    def get_sigmas(
        self, num_steps: int, num_image_tokens: int, sigmas: Sequence[float] | None = None
    ) -> Tensor:
        """Noise levels [num_steps + 1], float32 on the CPU; the last one is 0."""
        return make_sigmas(self.scheduler_config, num_steps, num_image_tokens, sigmas)

    def get_timesteps(
        self,
        num_steps: int,
        device: str | torch.device,
        num_image_tokens: int = 256,
        sigmas: Sequence[float] | None = None,
    ) -> Tensor:
        """What the model is told of each step's noise level [num_steps], from 1000 down."""
        levels = self.get_sigmas(num_steps, num_image_tokens, sigmas)[:-1]
        return (levels * self.num_train_timesteps).to(device)

    def schedule_denoising_steps(self, num_computed_steps: int, num_steps: int) -> list[int]:
        """The steps a request has still to take."""
        return list(range(num_computed_steps, num_steps))

    def apply_classifier_free_guidance(self, velocity: Tensor, guidance_scale: Tensor) -> Tensor:
        """Fold the unconditional rows of a packed batch into the conditional ones.

        Args:
            velocity: [tokens, channels]: the conditional rows of all requests, guided requests
                first, then the unconditional rows of the guided ones in the same order.
            guidance_scale: [guided tokens, 1].
        """
        num_guided = guidance_scale.shape[0]
        if not num_guided:
            return velocity
        cond, uncond = velocity[:-num_guided], velocity[-num_guided:]
        return torch.cat((guide(cond[:num_guided], uncond, guidance_scale), cond[num_guided:]))
