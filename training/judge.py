"""Says from the pixels whether a picture shows a scene: no network is asked.

1. The background is fitted to the picture's border, where no object ever is.
2. What differs from it is cut into connected pieces, one for each object.
3. A piece's colour is the nearest by name; its silhouette is compared with all known ones, which
   gives the shape and the radius; its middle gives place and relation.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from training.glyphs import EXTENT, GLYPHS, half_extents, make_fields
from training.render import pattern_weights
from training.world import (
    BACKGROUND_COLOURS,
    CHECKED,
    COLOURS,
    GRADIENT,
    MARGIN,
    PATTERNS,
    PLACES,
    PLAIN,
    RELATIONS,
    SIZES,
    STRIPED,
    Background,
    Rgb,
    Said,
    Scene,
)

Image = NDArray[np.float64]  # [height, width, 3] from 0 to 1
Mask = NDArray[np.bool_]

_BORDER = 0.03  # of the shorter side: objects stay further in
_DIFFERENT = 0.17  # of the range: further than this from the background is an object
_MIN_AREA = 0.0015  # of the picture: smaller pieces are dirt
_MIN_OVERLAP = 0.6  # intersection over union with the silhouette it is taken for
_SAMPLES = 64  # a side, when silhouettes are compared


@dataclass(frozen=True)
class Piece:
    """One object found in a picture."""

    glyph: str
    overlap: float
    colour: str
    radius: float  # as a share of the shorter side
    x: float  # middle, as shares of each side
    y: float

    @property
    def size(self) -> str:
        return min(SIZES, key=lambda name: abs(np.log(self.radius / SIZES[name])))

    @property
    def place(self) -> str:
        reach = 0.5 - MARGIN - SIZES[self.size]
        across, down = (int(np.clip(round((at - 0.5) / reach), -1, 1)) for at in (self.x, self.y))
        return next(name for name, where in PLACES.items() if where == (across, down))


def judge(picture: NDArray[np.uint8], scene: Scene, said: Said) -> dict[str, bool]:
    """Each stated fact, right or wrong; `count` and `shape` are always judged."""
    found, pieces = look(picture)
    facts = {"count": len(pieces) == len(scene.things)}
    if said.background:
        facts["background"] = is_same_background(found, scene.background)
    names = ["shape", "colour", "size"] + (["place" if scene.place else "relation"] * said.where)
    best = dict.fromkeys(names, False)
    for order in permutations(pieces, len(scene.things)):
        judged = _judge_pieces(order, scene, said)
        if sum(judged.values()) > sum(best.values()):
            best = judged
    return facts | best


def look(picture: NDArray[np.uint8]) -> tuple[Background, list[Piece]]:
    """What is on a picture, the largest object first."""
    image = picture.astype(np.float64) / 255
    background, behind = fit_background(image)
    return background, find_pieces(image, behind)


def _judge_pieces(pieces: tuple[Piece, ...], scene: Scene, said: Said) -> dict[str, bool]:
    pairs = list(zip(pieces, scene.things, said.colours, said.sizes, strict=True))
    facts = {
        "shape": all(p.glyph == t.glyph and p.overlap > _MIN_OVERLAP for p, t, _, _ in pairs),
        "colour": all(p.colour == t.colour for p, t, is_said, _ in pairs if is_said),
        "size": all(p.size == t.size for p, t, _, is_said in pairs if is_said),
    }
    if said.where and scene.place:
        facts["place"] = pieces[0].place == scene.place
    if said.where and scene.relation:
        across, down = RELATIONS[scene.relation]
        dx, dy = pieces[0].x - pieces[1].x, pieces[0].y - pieces[1].y
        along, aside = (dx * across, dy) if across else (dy * down, dx)
        facts["relation"] = along > 0.15 and abs(aside) < along
    return facts


def is_same_background(found: Background, wanted: Background) -> bool:
    if found.pattern != wanted.pattern:
        return False
    if found.pattern in (STRIPED, CHECKED):  # which of the two comes first is no matter
        return set(found.colours) == set(wanted.colours)
    return found.colours == wanted.colours


# --- background ---


def fit_background(image: Image) -> tuple[Background, Image]:
    """The pattern that explains the border best, and a whole picture of it."""
    height, width, _ = image.shape
    shares = pattern_weights(height, width).numpy().astype(np.float64)  # [patterns, h, w]
    border = np.ones((height, width), dtype=bool)
    inset = max(3, round(_BORDER * min(height, width)))
    border[inset:-inset, inset:-inset] = False
    fits = []
    for pattern, share in zip(PATTERNS, shares, strict=True):
        first, second = _fit_colours(pattern, image[border], share[border])
        drawn = first + share[..., None] * (second - first)
        error = np.abs(drawn - image)[border].clip(max=0.2).mean()
        # The simpler one wins when both explain it.
        fits.append((error + (0.0 if pattern == PLAIN else 0.01), pattern, first, second, drawn))
    _, pattern, first, second, drawn = min(fits, key=lambda fit: fit[0])
    colours = (nearest(first, BACKGROUND_COLOURS), nearest(second, BACKGROUND_COLOURS))
    return Background(pattern, colours[:1] if pattern == PLAIN else colours), drawn


def _fit_colours(pattern: str, pixels: Image, share: Image) -> tuple[Image, Image]:
    """pixels [n, 3], share [n] of the second colour."""
    if pattern == PLAIN:
        median = np.median(pixels, axis=0)
        return median, median
    if pattern == GRADIENT:
        basis = np.stack([1 - share, share], axis=1)
        solution = np.linalg.lstsq(basis, pixels, rcond=None)[0]
        return solution[0], solution[1]
    return np.median(pixels[share < 0.5], axis=0), np.median(pixels[share >= 0.5], axis=0)


def nearest(colour: Image, names: dict[str, Rgb]) -> str:
    return min(names, key=lambda name: float(np.linalg.norm(np.array(names[name]) / 255 - colour)))


# --- objects ---


def find_pieces(image: Image, behind: Image) -> list[Piece]:
    """The objects in front of the background, largest first."""
    different = np.abs(image - behind).max(axis=-1) > _DIFFERENT
    tensor = torch.from_numpy(different).float()[None, None]
    # Opening: lines of a pixel or two are blur at the edges of stripes.
    opened = F.max_pool2d(-F.max_pool2d(-tensor, 3, 1, 1), 3, 1, 1)
    labels = label_pieces(opened)
    pieces = []
    for label, area in zip(*np.unique(labels[labels > 0], return_counts=True), strict=True):
        if area >= _MIN_AREA * labels.size:
            pieces.append((int(area), _measure(image, behind, labels == label)))
    return [piece for _, piece in sorted(pieces, key=lambda pair: -pair[0])]


def label_pieces(mask: Tensor) -> NDArray[np.int64]:
    """mask [1, 1, h, w] to [h, w]: one number for each connected piece, 0 elsewhere."""
    height, width = mask.shape[-2:]
    labels = torch.arange(1.0, height * width + 1, dtype=torch.float64).view(1, 1, height, width)
    labels = labels * mask
    while True:
        spread = labels
        for _ in range(16):
            spread = F.max_pool2d(spread, 3, 1, 1) * mask
        if torch.equal(spread, labels):
            return labels[0, 0].long().numpy()
        labels = spread


def _measure(image: Image, behind: Image, rough: Mask) -> Piece:
    colour = _solid_colour(image, rough)
    # How much of this colour a pixel has, against the background's: its silhouette is where that
    # is more than half.
    towards = colour - behind
    share = ((image - behind) * towards).sum(-1) / (towards**2).sum(-1).clip(min=1e-6)
    near = F.max_pool2d(torch.from_numpy(rough).float()[None, None], 5, 1, 2)[0, 0].numpy() > 0
    silhouette = (share > 0.5) & near
    if not silhouette.any():
        silhouette = rough
    ys, xs = np.nonzero(silhouette)
    x, y = (xs.min() + xs.max() + 1) / 2, (ys.min() + ys.max() + 1) / 2
    half = np.array([np.ptp(xs) + 1, np.ptp(ys) + 1]) / 2
    glyph, overlap, radius = _recognise(silhouette, x, y, half)
    height, width = rough.shape
    name = nearest(colour, COLOURS)
    return Piece(glyph, overlap, name, radius / min(height, width), x / width, y / height)


def _solid_colour(image: Image, rough: Mask) -> Image:
    inner = -F.max_pool2d(-torch.from_numpy(rough).float()[None, None], 3, 1, 1)[0, 0].numpy()
    pixels = image[inner > 0.5] if (inner > 0.5).sum() > 8 else image[rough]
    return np.asarray(np.median(pixels, axis=0))


def _recognise(silhouette: Mask, x: float, y: float, half: Image) -> tuple[str, float, float]:
    """The most similar glyph, how much it overlaps, and the radius in pixels it would have."""
    fields = torch.from_numpy(make_fields())
    radii = torch.from_numpy((half / half_extents()).mean(axis=1)).float()  # [glyphs]
    ticks = (torch.arange(_SAMPLES) + 0.5) / _SAMPLES * 2 - 1
    down, across = torch.meshgrid(ticks, ticks, indexing="ij")
    grid = torch.stack([across, down], dim=-1).expand(len(GLYPHS), -1, -1, -1)
    middles = _field_middles()
    inside = F.grid_sample(fields.unsqueeze(1), grid, align_corners=False)[:, 0] < 0

    height, width = silhouette.shape
    reach = radii.view(-1, 1, 1) * EXTENT
    px = x + across * reach - middles[:, 0].view(-1, 1, 1) * radii.view(-1, 1, 1)
    py = y + down * reach - middles[:, 1].view(-1, 1, 1) * radii.view(-1, 1, 1)
    sampled = torch.stack([px / width * 2 - 1, py / height * 2 - 1], dim=-1)
    mask = torch.from_numpy(silhouette).float().expand(len(GLYPHS), 1, -1, -1)
    seen = F.grid_sample(mask, sampled, align_corners=False)[:, 0] > 0.5
    overlaps = (seen & inside).sum(dim=(1, 2)) / (seen | inside).sum(dim=(1, 2)).clamp(min=1)
    best = int(overlaps.argmax())
    return GLYPHS[best], float(overlaps[best]), float(radii[best])


def _field_middles() -> Tensor:
    """[glyphs, 2] the middle of each silhouette's box, in radii from its centre."""
    inside = torch.from_numpy(make_fields()) < 0
    size = inside.shape[-1]
    ticks = ((torch.arange(size) + 0.5) / size * 2 - 1) * EXTENT
    middles = []
    for glyph in inside:
        ys, xs = torch.nonzero(glyph, as_tuple=True)
        middles.append(
            [
                float(ticks[xs.min()] + ticks[xs.max()]) / 2,
                float(ticks[ys.min()] + ticks[ys.max()]) / 2,
            ]
        )
    return torch.tensor(middles)
