"""The silhouettes of the demo world: ten shapes, the capital letters and the digits.

Each is a signed distance field (negative inside) over the square from -EXTENT to EXTENT; a
silhouette itself fits between -1 and 1. Letters are strokes of our own, on a grid of 4 by 6.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Field = NDArray[np.floating]
Points = list[tuple[float, float]]

EXTENT = 1.25
RESOLUTION = 160  # samples a side of a field

SHAPES = (
    "circle",
    "square",
    "triangle",
    "star",
    "ring",
    "diamond",
    "cross",
    "heart",
    "crescent",
    "hexagon",
)
LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
DIGITS = tuple("0123456789")
GLYPHS = SHAPES + LETTERS + DIGITS

_STROKE = 0.6  # half the width of a stroke, in cells of the letter grid
_CELL = 2 / (6 + 2 * _STROKE)

_C = "3.9,1.2 3,.1 1.2,0 0,1.4 0,4.6 1.2,6 3,5.9 3.9,4.8"
_O = "1.3,0 2.7,0 4,1.4 4,4.6 2.7,6 1.3,6 0,4.6 0,1.4 1.3,0"
_P = "0,6 0,0 2.6,0 3.8,.7 3.8,2.5 2.6,3.3 0,3.3"
_STROKES = {
    "A": "0,6 2,0 4,6 / .67,4 3.33,4",
    "B": "0,6 0,0 2.5,0 3.6,.6 3.6,2.2 2.6,2.9 0,2.9 / 2.6,2.9 3.9,3.6 3.9,5.2 2.7,6 0,6",
    "C": _C,
    "D": "0,0 0,6 2.2,6 3.9,4.6 3.9,1.4 2.2,0 0,0",
    "E": "3.6,0 0,0 0,6 3.6,6 / 0,3 3,3",
    "F": "3.6,0 0,0 0,6 / 0,3 3,3",
    "G": _C + " 3.9,3.2 2.4,3.2",
    "H": "0,0 0,6 / 4,0 4,6 / 0,3 4,3",
    "I": "2,0 2,6 / .8,0 3.2,0 / .8,6 3.2,6",
    "J": "3.4,0 3.4,4.6 2.4,6 1,6 .1,4.8",
    "K": "0,0 0,6 / 3.8,0 0,3.6 / 1.2,2.5 3.9,6",
    "L": "0,0 0,6 3.6,6",
    "M": "0,6 0,0 2,3.2 4,0 4,6",
    "N": "0,6 0,0 4,6 4,0",
    "O": _O,
    "P": _P,
    "Q": _O + " / 2.4,4.2 4.1,6.2",
    "R": _P + " / 1.8,3.3 3.9,6",
    "S": "3.8,1 2.8,0 1.1,0 .1,.9 .1,2.1 1,2.8 3,3.2 3.9,4 3.9,5 2.9,6 1,6 0,5",
    "T": "0,0 4,0 / 2,0 2,6",
    "U": "0,0 0,4.6 1.2,6 2.8,6 4,4.6 4,0",
    "V": "0,0 2,6 4,0",
    "W": "0,0 .9,6 2,2.6 3.1,6 4,0",
    "X": "0,0 4,6 / 4,0 0,6",
    "Y": "0,0 2,3 4,0 / 2,3 2,6",
    "Z": "0,0 4,0 0,6 4,6",
    "0": "1.5,0 2.5,0 3.6,1.4 3.6,4.6 2.5,6 1.5,6 .4,4.6 .4,1.4 1.5,0 / 3.1,1.4 .9,4.6",
    "1": ".9,1.2 2.2,0 2.2,6 / .8,6 3.6,6",
    "2": ".1,1.3 1.1,0 2.9,0 3.9,1.1 3.9,2.1 0,6 4,6",
    "3": ".2,.8 1.1,0 2.9,0 3.7,.8 3.7,2.2 2.8,2.9 1.5,2.9 / "
    "2.8,2.9 3.9,3.8 3.9,5.1 2.9,6 1,6 0,5.1",
    "4": "3,6 3,0 0,4.3 4,4.3",
    "5": "3.7,0 .5,0 .3,2.6 2.6,2.4 3.9,3.4 3.9,4.9 2.8,6 1,6 0,5.2",
    "6": "3.5,.5 2.6,0 1.4,0 0,1.8 0,4.8 1.1,6 2.9,6 3.9,5 3.9,3.8 2.9,2.8 1.1,2.8 0,3.8",
    "7": "0,0 4,0 1.6,6",
    "8": "1.2,0 2.8,0 3.6,.7 3.6,2.1 2.8,2.8 1.2,2.8 .4,2.1 .4,.7 1.2,0 / "
    "1.2,2.8 .1,3.6 .1,5.1 1.1,6 2.9,6 3.9,5.1 3.9,3.6 2.8,2.8",
    "9": ".5,5.5 1.4,6 2.6,6 4,4.2 4,1.2 2.9,0 1.1,0 .1,1 .1,2.2 1.1,3.2 2.9,3.2 4,2.2",
}


@cache
def make_fields() -> Field:
    """[glyphs, RESOLUTION, RESOLUTION] signed distances, y down."""
    fields: Field = np.stack([_field(glyph) for glyph in GLYPHS]).astype(np.float32)
    return fields


@cache
def half_extents() -> Field:
    """[glyphs, 2] half the width and half the height of each silhouette."""
    ticks = _ticks()
    boxes = []
    for field in make_fields():
        ys, xs = np.nonzero(field < 0)
        boxes.append([np.ptp(ticks[xs]) / 2, np.ptp(ticks[ys]) / 2])
    return np.array(boxes, dtype=np.float32) + EXTENT / RESOLUTION


def _ticks() -> Field:
    return ((np.arange(RESOLUTION) + 0.5) / RESOLUTION * 2 - 1).astype(np.float32) * EXTENT


def _field(glyph: str) -> Field:
    x, y = np.meshgrid(_ticks(), _ticks())
    radius = np.hypot(x, y)
    if glyph in _STROKES:
        return _strokes_field(_STROKES[glyph], x, y)
    if glyph == "circle":
        return radius - 0.95
    if glyph == "ring":
        return np.abs(radius - 0.72) - 0.23
    if glyph == "crescent":
        crescent: Field = np.maximum(np.hypot(x + 0.1, y) - 0.95, 0.78 - np.hypot(x - 0.38, y))
        return crescent
    return _polygon_field(_polygon(glyph), x, y)


def _polygon(glyph: str) -> Points:
    if glyph == "square":
        return [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)]
    if glyph == "triangle":
        return [(0, -0.9), (0.98, 0.85), (-0.98, 0.85)]
    if glyph == "diamond":
        return [(0, -1), (0.75, 0), (0, 1), (-0.75, 0)]
    if glyph == "hexagon":
        return _around(6, [0.97], 0.0)
    if glyph == "star":
        return _around(10, [1.0, 0.42], -0.5)
    if glyph == "cross":
        a, b = 0.32, 0.95
        quarter = [(a, -b), (a, -a), (b, -a)]
        return [p for k in range(4) for p in [_turn(q, k) for q in quarter]]
    assert glyph == "heart"
    t = np.linspace(0, 2 * np.pi, 120, endpoint=False)
    across = 16 * np.sin(t) ** 3
    up = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return list(zip((across / 17).tolist(), ((-up - 2.5) / 17).tolist(), strict=True))


def _turn(point: tuple[float, float], quarters: int) -> tuple[float, float]:
    x, y = point
    for _ in range(quarters):
        x, y = -y, x
    return x, y


def _around(count: int, radii: list[float], start: float) -> Points:
    """Points on circles in turn; `start` in half turns, 0 is to the right."""
    return [
        (
            radii[k % len(radii)] * float(np.cos(np.pi * (start + 2 * k / count))),
            radii[k % len(radii)] * float(np.sin(np.pi * (start + 2 * k / count))),
        )
        for k in range(count)
    ]


def _polygon_field(points: Points, x: Field, y: Field) -> Field:
    distance = np.full_like(x, np.inf)
    inside = np.zeros(x.shape, dtype=bool)
    for (ax, ay), (bx, by) in zip(points, points[1:] + points[:1], strict=True):
        distance = np.minimum(distance, _segment_distance(x, y, ax, ay, bx, by))
        if ay != by:
            crosses = (ay > y) != (by > y)
            inside ^= crosses & (x < (bx - ax) * (y - ay) / (by - ay) + ax)
    return np.where(inside, -distance, distance)


def _strokes_field(strokes: str, x: Field, y: Field) -> Field:
    distance = np.full_like(x, np.inf)
    for stroke in strokes.split("/"):
        points = [tuple(map(float, pair.split(","))) for pair in stroke.split()]
        for a, b in pairwise(points):
            ax, ay, bx, by = (a[0] - 2, a[1] - 3, b[0] - 2, b[1] - 3)
            segment = _segment_distance(x, y, ax * _CELL, ay * _CELL, bx * _CELL, by * _CELL)
            distance = np.minimum(distance, segment)
    return distance - np.float32(_STROKE * _CELL)


def _segment_distance(x: Field, y: Field, ax: float, ay: float, bx: float, by: float) -> Field:
    dx, dy = bx - ax, by - ay
    along = np.clip(((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy), 0, 1)
    distance: Field = np.hypot(x - ax - along * dx, y - ay - along * dy).astype(np.float32)
    return distance
