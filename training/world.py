"""The demo world: which scenes there are, and which are held out of training.

A scene has one or two objects on a background. `training.captions` puts them into words.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from training.glyphs import DIGITS, LETTERS, SHAPES

Rgb = tuple[int, int, int]

COLOURS: dict[str, Rgb] = {
    "red": (220, 30, 40),
    "orange": (250, 140, 20),
    "yellow": (250, 220, 40),
    "green": (40, 160, 60),
    "cyan": (40, 210, 220),
    "blue": (40, 80, 220),
    "purple": (130, 50, 180),
    "pink": (250, 130, 185),
    "brown": (125, 75, 35),
    "black": (20, 20, 20),
    "gray": (135, 135, 135),
    "white": (245, 245, 245),
}
SHADES: dict[str, Rgb] = {
    "dark red": (100, 8, 25),
    "dark green": (10, 75, 35),
    "dark blue": (15, 25, 95),
    "dark purple": (60, 15, 85),
    "light blue": (170, 205, 250),
    "light green": (175, 235, 170),
    "light yellow": (253, 245, 180),
    "light pink": (253, 210, 225),
}
"""Shades that only backgrounds have."""
BACKGROUND_COLOURS: dict[str, Rgb] = COLOURS | SHADES

SIZES: dict[str, float] = {"small": 0.09, "medium": 0.15, "large": 0.225}
"""Radius as a share of the picture's shorter side."""

PLACES: dict[str, tuple[int, int]] = {
    "top left": (-1, -1),
    "top": (0, -1),
    "top right": (1, -1),
    "left": (-1, 0),
    "center": (0, 0),
    "right": (1, 0),
    "bottom left": (-1, 1),
    "bottom": (0, 1),
    "bottom right": (1, 1),
}
MARGIN = 0.06  # from an object to the border, as a share of the shorter side

RELATIONS: dict[str, tuple[int, int]] = {
    "above": (0, -1),
    "below": (0, 1),
    "left of": (-1, 0),
    "right of": (1, 0),
}
"""Where the first object is, seen from the second."""
INVERSE = {"above": "below", "below": "above", "left of": "right of", "right of": "left of"}
APART = 0.235  # each of two objects from the middle, as a share of that side

PLAIN, GRADIENT, STRIPED, CHECKED = "plain", "gradient", "striped", "checked"
PATTERNS = (PLAIN, GRADIENT, STRIPED, CHECKED)
CELLS = 8  # of stripes and checks along the shorter side

_MIN_CONTRAST = 115.0  # between an object and its background, in RGB levels


@dataclass(frozen=True)
class Thing:
    """One object; `x` and `y` are where its centre is, as a share of each side."""

    glyph: str
    colour: str
    size: str
    x: float
    y: float
    jitter: float  # factor on its radius

    @property
    def radius(self) -> float:
        return SIZES[self.size] * self.jitter


@dataclass(frozen=True)
class Background:
    """`colours` has one name for a plain background and two for all others.

    A gradient goes from the first (top) to the second (bottom); stripes lie.
    """

    pattern: str
    colours: tuple[str, ...]


@dataclass(frozen=True)
class Scene:
    """What a picture shows. Exactly one of `place` and `relation` is set."""

    things: tuple[Thing, ...]
    background: Background
    place: str | None = None
    relation: str | None = None

    @property
    def is_held_out(self) -> bool:
        """One combination in 16 of what is where is never trained on."""
        where = self.place or self.relation
        key = [f"{thing.glyph} {thing.colour}" for thing in self.things]
        return zlib.crc32(f"{key} {where}".encode()) % 16 == 0


@dataclass(frozen=True)
class Said:
    """Which facts of a scene a caption mentions."""

    colours: tuple[bool, ...]
    sizes: tuple[bool, ...]
    where: bool
    background: bool

    @classmethod
    def everything(cls, scene: Scene) -> Said:
        count = len(scene.things)
        return cls((True,) * count, (True,) * count, True, True)

    @classmethod
    def nothing(cls, scene: Scene) -> Said:
        count = len(scene.things)
        return cls((False,) * count, (False,) * count, False, False)

    @classmethod
    def sample(cls, rng: Random, scene: Scene) -> Said:
        """Everything in most captions, each fact by a coin in the others."""
        if rng.random() < 0.5:
            return cls.everything(scene)
        share = rng.random()
        coins = [rng.random() < share for _ in range(6)]
        count = len(scene.things)
        return cls(tuple(coins[:count]), tuple(coins[2 : 2 + count]), coins[4], coins[5])


# --- scenes ---


def sample_scene(rng: Random, num_things: int | None = None, kind: str | None = None) -> Scene:
    """Any scene; `kind` "shape" or "symbol" restricts a single object."""
    count = num_things or (1 if rng.random() < 0.5 else 2)
    background = sample_background(rng)
    glyphs = [_sample_glyph(rng, kind) for _ in range(count)]
    colours = [_sample_colour(rng, background) for _ in range(count)]
    sizes = [rng.choice(list(SIZES)) for _ in range(count)]
    if count == 1:
        place = rng.choice(list(PLACES))
        return place_one(rng, glyphs[0], colours[0], sizes[0], place, background)
    relation = rng.choice(list(RELATIONS))
    return place_two(rng, glyphs, colours, sizes, relation, background)


def sample_training_scene(rng: Random) -> Scene:
    while (scene := sample_scene(rng)).is_held_out:
        pass
    return scene


def sample_held_out_scene(rng: Random, num_things: int, kind: str | None = None) -> Scene:
    while not (scene := sample_scene(rng, num_things, kind)).is_held_out:
        pass
    return scene


def sample_background(rng: Random) -> Background:
    pattern = rng.choices(PATTERNS, weights=(5, 2, 2, 2))[0]
    first = rng.choice(list(BACKGROUND_COLOURS))
    if pattern == PLAIN:
        return Background(pattern, (first,))
    others = [name for name in BACKGROUND_COLOURS if contrast(name, first) > 90]
    return Background(pattern, (first, rng.choice(others)))


def place_one(
    rng: Random, glyph: str, colour: str, size: str, place: str, background: Background
) -> Scene:
    jitter = rng.uniform(0.95, 1.05)
    across, down = PLACES[place]
    reach = 0.5 - MARGIN - SIZES[size]  # exact for the shorter side, fine for the longer
    thing = Thing(
        glyph,
        colour,
        size,
        0.5 + across * reach + rng.uniform(-0.012, 0.012),
        0.5 + down * reach + rng.uniform(-0.012, 0.012),
        jitter,
    )
    return Scene((thing,), background, place=place)


def place_two(
    rng: Random,
    glyphs: Sequence[str],
    colours: Sequence[str],
    sizes: Sequence[str],
    relation: str,
    background: Background,
) -> Scene:
    across, down = RELATIONS[relation]
    things = []
    for index, side in enumerate((1, -1)):
        aside = rng.uniform(-0.05, 0.05)
        things.append(
            Thing(
                glyphs[index],
                colours[index],
                sizes[index],
                0.5 + side * across * APART + (aside if not across else 0.0),
                0.5 + side * down * APART + (aside if not down else 0.0),
                rng.uniform(0.95, 1.0),
            )
        )
    return Scene(tuple(things), background, relation=relation)


@cache
def contrast(first: str, second: str) -> float:
    """Distance of two colours in RGB levels."""
    a, b = BACKGROUND_COLOURS[first], BACKGROUND_COLOURS[second]
    return float(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5)


@cache
def stands_out(colour: str, background: Background) -> bool:
    """Whether an object of that colour can be seen there, on a gradient also half way."""
    if any(contrast(colour, name) < _MIN_CONTRAST for name in background.colours):
        return False
    if background.pattern != GRADIENT:
        return True
    a, b = (BACKGROUND_COLOURS[name] for name in background.colours)
    own = COLOURS[colour]
    for share in (0.25, 0.5, 0.75):
        mixed = [x + (y - x) * share for x, y in zip(a, b, strict=True)]
        if sum((x - y) ** 2 for x, y in zip(own, mixed, strict=True)) ** 0.5 < _MIN_CONTRAST * 0.8:
            return False
    return True


def _sample_glyph(rng: Random, kind: str | None) -> str:
    if kind is None:
        kind = "shape" if rng.random() < 0.5 else "symbol"
    return rng.choice(SHAPES if kind == "shape" else LETTERS + DIGITS)


def _sample_colour(rng: Random, background: Background) -> str:
    visible = [name for name in COLOURS if stands_out(name, background)]
    return rng.choice(visible or ["white" if background.colours[0] != "white" else "black"])
