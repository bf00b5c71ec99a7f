"""Draws scenes: many at once, on any device, without loops over pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.glyphs import EXTENT, GLYPHS, make_fields
from training.world import BACKGROUND_COLOURS, CELLS, COLOURS, PATTERNS, Scene


@dataclass(frozen=True)
class SceneBatch:
    """Scenes as tensors; an object that is not there has radius 0."""

    glyph: Tensor  # [n, 2] int64
    colour: Tensor  # [n, 2, 3] from 0 to 1
    centre: Tensor  # [n, 2, 2] x and y as shares of each side
    radius: Tensor  # [n, 2] as a share of the shorter side
    pattern: Tensor  # [n] int64, index into PATTERNS
    background: Tensor  # [n, 2, 3] from 0 to 1

    def to(self, device: torch.device | str) -> SceneBatch:
        return SceneBatch(*(getattr(self, f.name).to(device) for f in fields(self)))


def encode_scenes(scenes: Sequence[Scene]) -> SceneBatch:
    count = len(scenes)
    glyph = np.zeros((count, 2), np.int64)
    colour = np.zeros((count, 2, 3), np.float32)
    centre = np.full((count, 2, 2), 0.5, np.float32)
    radius = np.zeros((count, 2), np.float32)
    pattern = np.zeros(count, np.int64)
    background = np.zeros((count, 2, 3), np.float32)
    for row, scene in enumerate(scenes):
        for column, thing in enumerate(scene.things):
            glyph[row, column] = GLYPHS.index(thing.glyph)
            colour[row, column] = COLOURS[thing.colour]
            centre[row, column] = thing.x, thing.y
            radius[row, column] = thing.radius
        pattern[row] = PATTERNS.index(scene.background.pattern)
        names = scene.background.colours
        background[row] = BACKGROUND_COLOURS[names[0]], BACKGROUND_COLOURS[names[-1]]
    arrays = (glyph, colour / 255, centre, radius, pattern, background / 255)
    return SceneBatch(*map(torch.from_numpy, arrays))


class Renderer:
    """Draws with antialiased edges; keeps the silhouettes on its device."""

    def __init__(self, device: torch.device | str) -> None:
        self.fields = torch.from_numpy(make_fields()).to(device)  # [glyphs, r, r]

    def draw(self, batch: SceneBatch, height: int, width: int) -> Tensor:
        """[n, 3, height, width] from -1 to 1, on the renderer's device."""
        batch = batch.to(self.fields.device)
        y, x = _pixel_grid(height, width, self.fields.device)
        picture = _draw_background(batch, y, x, min(height, width))
        for index in range(2):
            cover = self._cover(batch, index, y, x, height, width)  # [n, 1, h, w]
            picture = picture + cover * (batch.colour[:, index, :, None, None] - picture)
        return picture * 2 - 1

    def _cover(
        self, batch: SceneBatch, index: int, y: Tensor, x: Tensor, height: int, width: int
    ) -> Tensor:
        centre = batch.centre[:, index]
        radius = batch.radius[:, index, None, None] * min(height, width)  # pixels
        safe = radius.clamp(min=1e-3)
        across = (x - centre[:, 0, None, None] * width) / safe / EXTENT
        down = (y - centre[:, 1, None, None] * height) / safe / EXTENT
        field = self.fields[batch.glyph[:, index]].unsqueeze(1)
        # Beyond the field it counts as outside.
        is_near = (across.abs() < 1) & (down.abs() < 1)
        grid = torch.stack([across, down], dim=-1).clamp(-1, 1)
        distance = F.grid_sample(field, grid, padding_mode="border", align_corners=False)
        cover = (0.5 - distance * radius.unsqueeze(1)).clamp(0, 1)
        return cover * (is_near & (radius > 0)).unsqueeze(1)


def _pixel_grid(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[1, h, w] each: the middle of every pixel, in pixels."""
    y, x = torch.meshgrid(
        torch.arange(height, device=device) + 0.5,
        torch.arange(width, device=device) + 0.5,
        indexing="ij",
    )
    return y.unsqueeze(0), x.unsqueeze(0)


def pattern_weights(height: int, width: int, device: torch.device | str = "cpu") -> Tensor:
    """[patterns, h, w]: the share of the second colour, in the order of PATTERNS."""
    y, x = _pixel_grid(height, width, torch.device(device))
    row, column = (torch.floor(axis * CELLS / min(height, width)) for axis in (y, x))
    return torch.cat([torch.zeros_like(y), y / height, row % 2, (row + column) % 2])


def _draw_background(batch: SceneBatch, y: Tensor, x: Tensor, side: int) -> Tensor:
    weights = pattern_weights(y.shape[1], y.shape[2], y.device)
    share = weights[batch.pattern].unsqueeze(1)  # [n, 1, h, w]
    first, second = batch.background[..., None, None].unbind(1)
    return first + share * (second - first)
