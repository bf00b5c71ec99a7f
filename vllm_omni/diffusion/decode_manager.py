"""`ParallelDecodeManager`: latents to pixels, in batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

PREVIEW_SIDE = 32
"""Longer side of a preview's latents, at most: 256 pixels, as VAEs enlarge 8 times."""


class ParallelDecodeManager:
    """Batches VAE decodes of equal shape, and lays masks over the pictures.

    Args:
        decode: latents [batch, channels, 1, h, w] to pictures [batch, 3, H, W] from -1 to 1.
        max_batch: most pictures in one decode; decoding takes much more memory than denoising.
    """

    def __init__(self, decode: Callable[[Tensor], Tensor], max_batch: int = 32) -> None:
        self.decode = decode
        self.max_batch = max_batch

    def batch_decode_latents(self, latents_batch: Sequence[Tensor]) -> list[Tensor]:
        """Latents [channels, 1, h, w] each, to pictures [3, H, W] uint8 on the CPU, in order."""
        by_shape: defaultdict[torch.Size, list[int]] = defaultdict(list)
        for index, latents in enumerate(latents_batch):
            by_shape[latents.shape].append(index)
        images: dict[int, Tensor] = {}
        for indices in by_shape.values():
            for start in range(0, len(indices), self.max_batch):
                batch = indices[start : start + self.max_batch]
                decoded = self.decode(torch.stack([latents_batch[i] for i in batch]))
                images.update(zip(batch, to_uint8(decoded).cpu(), strict=True))
        return [images[index] for index in range(len(latents_batch))]

    def batch_decode_previews(self, latents_batch: Sequence[Tensor]) -> list[Tensor]:
        """The same in small: a quarter of the latents to decode, or fewer."""
        return self.batch_decode_latents([shrink_latents(latents) for latents in latents_batch])

    def apply_masks_batch(self, images: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
        """Pictures [3, H, W] uint8 with masks [H, W] uint8 as their alpha channel: [4, H, W]."""
        return [
            torch.cat((image, mask.unsqueeze(0))) for image, mask in zip(images, masks, strict=True)
        ]


def shrink_latents(latents: Tensor) -> Tensor:
    """[channels, 1, h, w] averaged over 2 x 2, or more where `PREVIEW_SIDE` asks for it."""
    height, width = latents.shape[-2:]
    factor = max(2, max(height, width) / PREVIEW_SIDE)
    size = (max(1, round(height / factor)), max(1, round(width / factor)))
    return adaptive_avg_pool2d(latents, size)


def to_uint8(images: Tensor) -> Tensor:
    """Pictures from -1..1 to 0..255, rounded as diffusers does."""
    return ((images.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
