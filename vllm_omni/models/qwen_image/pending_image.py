"""`PendingImage`: what a Qwen-Image request comes to, while its picture may be in the making."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vllm_omni.diffusion.decode_manager import PendingPicture, apply_mask
from vllm_omni.diffusion.messages import RequestResult


@dataclass(frozen=True, eq=False)
class PendingImage:
    """The result of a request, whose picture may be in the making; without one, its latents."""

    picture: PendingPicture | None
    latents: Tensor | None  # on the CPU, if they were asked for
    mask: Tensor | None  # [H, W] uint8

    def is_ready(self) -> bool:
        return self.picture is None or self.picture.is_ready()

    def wait(self) -> RequestResult:
        if self.picture is None:
            assert self.latents is not None
            return RequestResult(self.latents)
        image = self.picture.wait()
        additional: dict[str, Tensor] = {}
        if self.latents is not None:
            additional["latents"] = self.latents
        if self.mask is not None:
            additional["mask"] = self.mask
            image = apply_mask(image, self.mask)
        return RequestResult(image, additional)
