"""Pictures as Qwen2.5-VL's vision tower takes them, made on the device."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from training.models import MERGE, PATCH

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)


def resize_for_vision(pictures: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """[n, 3, H, W] from -1 to 1 to the nearest size of whole tokens, and its grid of patches."""
    token = PATCH * MERGE
    height, width = (round(side / token) * token for side in pictures.shape[-2:])
    levels = ((pictures + 1) * 127.5).round().clamp(0, 255)
    resized = F.interpolate(levels, (height, width), mode="bicubic", antialias=True)
    return resized.round().clamp(0, 255) / 255, (height // PATCH, width // PATCH)


def patchify(pictures: Tensor) -> Tensor:
    """[n, 3, H, W] from 0 to 1 to [n, patches, 3 * 2 * 14 * 14], in merge order."""
    mean, std = _statistics(pictures.device)
    n, _, height, width = pictures.shape
    rows, columns = height // PATCH // MERGE, width // PATCH // MERGE
    blocks = ((pictures - mean) / std).view(n, 3, rows, MERGE, PATCH, columns, MERGE, PATCH)
    # [n, row, column, row in token, column in token, channel, y, x]
    blocks = blocks.permute(0, 2, 5, 3, 6, 1, 4, 7)
    both_frames = blocks.unsqueeze(6).expand(-1, -1, -1, -1, -1, -1, 2, -1, -1)
    return both_frames.reshape(n, rows * columns * MERGE**2, -1)


@cache  # a transfer to the device would wait for it, each time
def _statistics(device: torch.device) -> list[Tensor]:
    return [torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (_MEAN, _STD)]
