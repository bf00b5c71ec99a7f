"""`ParallelDecodeManager`: latents to pixels, in batches, beside the next steps on a GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

PREVIEW_SIDE = 32
"""Longer side of a preview's latents, at most: 256 pixels, as VAEs enlarge 8 times."""


@dataclass(frozen=True, eq=False)
class PendingPicture:
    """A picture that a GPU may still be working on."""

    pixels: Tensor  # [3, H, W] uint8 in host memory, not to be read before it is ready
    done: torch.cuda.Event | None = None  # None: it is there

    def is_ready(self) -> bool:
        return self.done is None or self.done.query()

    def wait(self) -> Tensor:
        """The pixels, as soon as they are there."""
        if self.done is None:
            return self.pixels
        self.done.synchronize()
        return self.pixels.clone()  # the pinned memory goes back to those that decode


class ParallelDecodeManager:
    """Batches VAE decodes of equal shape, and lays masks over the pictures.

    On a GPU they run in a stream of their own: whoever starts a decode goes on at once, and the
    next denoising step shares the device with it. On a CPU a decode is done when it is started.

    Args:
        decode: latents [batch, channels, 1, h, w] to pictures [batch, 3, H, W] from -1 to 1.
        max_batch: most pictures in one decode; decoding takes much more memory than denoising.
    """

    def __init__(
        self,
        decode: Callable[[Tensor], Tensor],
        max_batch: int = 32,
        device: torch.device | None = None,
    ) -> None:
        self.decode = decode
        self.max_batch = max_batch
        self.max_latents: int | None = None  # latent positions in one decode; one picture always
        is_cuda = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None

    def start_decode(self, latents_batch: Sequence[Tensor]) -> list[PendingPicture]:
        """Latents [channels, 1, h, w] each, to pictures that will be there, in order."""
        by_shape: defaultdict[torch.Size, list[int]] = defaultdict(list)
        for index, latents in enumerate(latents_batch):
            by_shape[latents.shape].append(index)
        pictures: dict[int, PendingPicture] = {}
        for shape, indices in by_shape.items():
            batch_size = self._batch_size(shape)
            for start in range(0, len(indices), batch_size):
                batch = indices[start : start + batch_size]
                decoded = self._start_batch([latents_batch[index] for index in batch])
                pictures.update(zip(batch, decoded, strict=True))
        return [pictures[index] for index in range(len(latents_batch))]

    def batch_decode_latents(self, latents_batch: Sequence[Tensor]) -> list[Tensor]:
        """Latents [channels, 1, h, w] each, to pictures [3, H, W] uint8 on the CPU, in order."""
        return [picture.wait() for picture in self.start_decode(latents_batch)]

    def batch_decode_previews(self, latents_batch: Sequence[Tensor]) -> list[Tensor]:
        """The same in small: a quarter of the latents to decode, or fewer."""
        return self.batch_decode_latents([shrink_latents(latents) for latents in latents_batch])

    def apply_masks_batch(self, images: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
        """Pictures [3, H, W] uint8 with masks [H, W] uint8 as their alpha channel: [4, H, W]."""
        return [apply_mask(image, mask) for image, mask in zip(images, masks, strict=True)]

    def _batch_size(self, shape: torch.Size) -> int:
        if self.max_latents is None:
            return self.max_batch
        return max(1, min(self.max_batch, self.max_latents // (shape[-2] * shape[-1])))

    def _start_batch(self, latents: Sequence[Tensor]) -> list[PendingPicture]:
        if self._stream is None:
            images = to_uint8(self.decode(torch.stack(list(latents))))
            return [PendingPicture(image) for image in images.cpu()]
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for tensor in latents:  # their memory is not lent again before the decode is done
                tensor.record_stream(self._stream)
            images = to_uint8(self.decode(torch.stack(list(latents))))
            pixels = torch.empty(images.shape, dtype=torch.uint8, pin_memory=True)
            pixels.copy_(images, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return [PendingPicture(image, done) for image in pixels]


def apply_mask(image: Tensor, mask: Tensor) -> Tensor:
    """A picture [3, H, W] with a mask [H, W] as its alpha channel: [4, H, W]."""
    return torch.cat((image, mask.unsqueeze(0)))


def shrink_latents(latents: Tensor) -> Tensor:
    """[channels, 1, h, w] averaged over 2 x 2, or more where `PREVIEW_SIDE` asks for it."""
    height, width = latents.shape[-2:]
    factor = max(2, max(height, width) / PREVIEW_SIDE)
    size = (max(1, round(height / factor)), max(1, round(width / factor)))
    return adaptive_avg_pool2d(latents, size)


def to_uint8(images: Tensor) -> Tensor:
    """Pictures from -1..1 to 0..255, rounded as diffusers does."""
    return ((images.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
