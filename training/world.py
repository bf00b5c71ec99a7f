"""The demo world: scenes, what can be said about them, and which are held out of training.

A scene has one or two objects on a background. A caption says all of it or leaves things out, in
many word orders; `canonical_caption` is the one full form, which the language model writes.
"""

from __future__ import annotations

import re
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


# --- captions ---


def name_of(glyph: str) -> str:
    if glyph in LETTERS:
        return f"letter {glyph}"
    return f"digit {glyph}" if glyph in DIGITS else glyph


def background_phrase(background: Background) -> str:
    """`blue background`, `gradient background from red to blue`, …, without an article."""
    first, *rest = background.colours
    if background.pattern == PLAIN:
        return f"{first} background"
    if background.pattern == GRADIENT:
        return f"gradient background from {first} to {rest[0]}"
    return f"{background.pattern} background in {first} and {rest[0]}"


def article(phrase: str) -> str:
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def canonical_caption(scene: Scene) -> str:
    """The full form: everything said, in a fixed order."""
    things = [article(f"{t.size} {t.colour} {name_of(t.glyph)}") for t in scene.things]
    behind = article(background_phrase(scene.background))
    if scene.relation is None:
        assert scene.place is not None
        return f"{things[0]} {_CANONICAL_PLACES[scene.place]} on {behind}"
    relation = scene.relation
    if relation in ("below", "right of"):  # the upper or the left one comes first
        things.reverse()
        relation = INVERSE[relation]
    return f"{things[0]} {_CANONICAL_RELATIONS[relation]} {things[1]} on {behind}"


_CANONICAL_PLACES = {
    place: f"in the {place}" if place == "center" or " " in place else f"at the {place}"
    for place in PLACES
} | {"left": "on the left", "right": "on the right"}
_CANONICAL_RELATIONS = {
    "above": "above",
    "below": "below",
    "left of": "to the left of",
    "right of": "to the right of",
}

_COLOUR = "|".join(COLOURS)
_BEHIND_COLOUR = "|".join(sorted(BACKGROUND_COLOURS, key=len, reverse=True))
_THING = (
    rf"an? (?P<size{{0}}>{'|'.join(SIZES)}) (?P<colour{{0}}>{_COLOUR}) "
    rf"(?P<glyph{{0}}>{'|'.join(SHAPES)}|letter [A-Z]|digit [0-9])"
)
_FULL = re.compile(
    _THING.format(0)
    + rf" (?:(?P<place>{'|'.join(map(re.escape, _CANONICAL_PLACES.values()))})"
    + rf"|(?P<relation>{'|'.join(_CANONICAL_RELATIONS.values())}) {_THING.format(1)}) on an? "
    + rf"(?:(?P<plain>{_BEHIND_COLOUR}) background"
    + rf"|gradient background from (?P<top>{_BEHIND_COLOUR}) to (?P<bottom>{_BEHIND_COLOUR})"
    + rf"|(?P<pattern>striped|checked) background in (?P<a>{_BEHIND_COLOUR}) and "
    + rf"(?P<b>{_BEHIND_COLOUR}))"
)


def parse_caption(text: str) -> Scene | None:
    """The scene of a canonical caption, without jitter; None if it is no such caption."""
    match = _FULL.fullmatch(text.strip())
    if match is None:
        return None
    found = match.groupdict()
    if found["plain"]:
        background = Background(PLAIN, (found["plain"],))
    elif found["top"]:
        background = Background(GRADIENT, (found["top"], found["bottom"]))
    else:
        background = Background(found["pattern"], (found["a"], found["b"]))
    rng = Random(0)
    numbers = (0,) if found["place"] else (0, 1)
    glyphs, colours, sizes = (
        [found[f"{field}{index}"].split()[-1] for index in numbers]
        for field in ("glyph", "colour", "size")
    )
    if found["place"]:
        [place] = [key for key, value in _CANONICAL_PLACES.items() if value == found["place"]]
        return place_one(rng, glyphs[0], colours[0], sizes[0], place, background)
    relation = {v: k for k, v in _CANONICAL_RELATIONS.items()}[found["relation"]]
    return place_two(rng, glyphs, colours, sizes, relation, background)


_PLACE_FORMS = {
    "center": ("in the center", "in the middle", "at the center"),
    "top": ("at the top", "in the top center", "near the top"),
    "bottom": ("at the bottom", "in the bottom center", "near the bottom"),
    "left": ("on the left", "at the left", "on the left side"),
    "right": ("on the right", "at the right", "on the right side"),
}
_RELATION_FORMS = {
    "above": ("above", "over"),
    "below": ("below", "under"),
    "left of": ("to the left of", "left of"),
    "right of": ("to the right of", "right of"),
}
_OPENINGS = ("", "", "", "", "draw ", "a picture of ", "an image of ", "please draw ", "show me ")


def make_caption(rng: Random, scene: Scene, said: Said) -> str:
    """One of many ways to say these facts of a scene."""
    if rng.random() < 0.2 and said == Said.everything(scene):
        text = canonical_caption(scene)
    elif rng.random() < 0.15:
        text = _as_tags(rng, scene, said)
    else:
        text = _as_sentence(rng, scene, said)
    if rng.random() < 0.2:
        text = text[0].upper() + text[1:]
    return text + ("." if rng.random() < 0.15 else "")


def _as_sentence(rng: Random, scene: Scene, said: Said) -> str:
    things = [_thing_phrase(rng, scene, said, index) for index in range(len(scene.things))]
    main = things[0]
    if len(things) == 2:
        main = _pair_phrase(rng, things, scene.relation if said.where else None)
    where = f" {_place_phrase(rng, scene)}" if scene.place and said.where else ""
    if not said.background:
        if where and rng.random() < 0.25:
            return f"{where.strip()}, {main}"
        return rng.choice(_OPENINGS) + main + where
    behind = article(_background_form(rng, scene.background))
    form = rng.random()
    if form < 0.55:
        link = rng.choice((" on ", " on ", " on ", " with ", " against ", ", "))
        return rng.choice(_OPENINGS) + main + where + link + behind
    if form < 0.75:
        return f"on {behind}, {main}{where}"
    if form < 0.9:
        return f"on {behind} there is {main}{where}"
    return f"{where.strip()} {main} on {behind}".strip()


def _as_tags(rng: Random, scene: Scene, said: Said) -> str:
    """A list of what there is, objects in their order; a relation needs a sentence."""
    if scene.relation and said.where:
        return _as_sentence(rng, scene, said)
    tags = [
        _thing_phrase(rng, scene, said, index).removeprefix("an ").removeprefix("a ")
        for index in range(len(scene.things))
    ]
    others = []
    if scene.place and said.where:
        others.append(rng.choice((scene.place, _place_phrase(rng, scene))))
    if said.background:
        others.append(_background_form(rng, scene.background))
    for tag in others:
        tags.insert(rng.randint(0, len(tags)), tag)
    return ", ".join(tags)


def _thing_phrase(rng: Random, scene: Scene, said: Said, index: int) -> str:
    thing = scene.things[index]
    words = [thing.size] if said.sizes[index] and thing.size != "medium" else []
    if said.sizes[index] and thing.size == "medium":
        words = [rng.choice(("medium", "medium", "medium-sized"))]
    if said.sizes[index] and thing.size == "large" and rng.random() < 0.2:
        words = ["big"]
    if said.colours[index]:
        words.append(thing.colour)
        if rng.random() < 0.1:
            words.reverse()
    name = name_of(thing.glyph)
    if thing.glyph in DIGITS and rng.random() < 0.3:
        name = f"number {thing.glyph}"
    if not words and name != thing.glyph and rng.random() < 0.5:
        return f"the {name}"
    return article(" ".join([*words, name]))


def _pair_phrase(rng: Random, things: list[str], relation: str | None) -> str:
    first, second = things
    if relation is None:
        return f"{first} and {second}"
    if rng.random() < 0.3:
        first, second, relation = second, first, INVERSE[relation]
    link = rng.choice(_RELATION_FORMS[relation])
    form = rng.random()
    if form < 0.75:
        return f"{first} {link} {second}"
    if form < 0.9:
        return f"{first} is {link} {second}"
    return f"{link} {second} is {first}"


def _place_phrase(rng: Random, scene: Scene) -> str:
    assert scene.place is not None
    forms = _PLACE_FORMS.get(scene.place)
    if forms is None:
        forms = tuple(
            f"{p} {scene.place}{q}" for p in ("in the", "at the") for q in ("", " corner")
        )
    return rng.choice(forms)


def _background_form(rng: Random, background: Background) -> str:
    first, *rest = background.colours
    if background.pattern == PLAIN:
        return rng.choice(
            (f"{first} background", f"{first} background", f"plain {first} background")
        )
    if background.pattern == GRADIENT:
        return background_phrase(background)
    pair = f"{first} and {rest[0]}"  # in this order: the first colour is at the top
    if background.pattern == STRIPED:
        forms = (f"striped background in {pair}", f"{pair} striped background")
    else:
        forms = (
            f"checked background in {pair}",
            f"{pair} checked background",
            f"{pair} checkered background",
        )
    return rng.choice(forms)


# --- rewriting ---

_FAVOURITES = {
    "star": ("yellow", "dark blue"),
    "heart": ("red", "light pink"),
    "circle": ("orange", "light blue"),
    "crescent": ("yellow", "dark purple"),
    "diamond": ("cyan", "dark purple"),
    "ring": ("purple", "light yellow"),
    "square": ("blue", "light yellow"),
    "triangle": ("green", "light yellow"),
    "cross": ("red", "white"),
    "hexagon": ("orange", "dark green"),
}
_FAVOURITE_SYMBOL = ("white", "dark blue")
_SPARE_COLOURS = ("white", "black", "yellow", "red", "blue", "green", "orange", "cyan")


def complete(scene: Scene, said: Said) -> Scene:
    """What a caption leaves open, chosen by taste instead of by chance."""
    favourites = [_FAVOURITES.get(thing.glyph, _FAVOURITE_SYMBOL) for thing in scene.things]
    background = scene.background
    if not said.background:
        own = [t.colour for t, is_said in zip(scene.things, said.colours, strict=True) if is_said]
        wanted = [favourites[0][1], *SHADES, "white", "black", "gray"]
        plain = [Background(PLAIN, (name,)) for name in wanted]
        background = next(b for b in plain if all(stands_out(c, b) for c in own))
    colours = []
    for index, thing in enumerate(scene.things):
        wanted = [favourites[index][0], *_SPARE_COLOURS, *COLOURS]
        free = [name for name in wanted if stands_out(name, background)]
        colours.append(thing.colour if said.colours[index] else (free or ["white"])[0])
    default = "large" if len(scene.things) == 1 else "medium"
    sizes = [
        thing.size if is_said else default
        for thing, is_said in zip(scene.things, said.sizes, strict=True)
    ]
    glyphs = [thing.glyph for thing in scene.things]
    rng = Random(0)
    if scene.relation is None:
        assert scene.place is not None
        place = scene.place if said.where else "center"
        return place_one(rng, glyphs[0], colours[0], sizes[0], place, background)
    relation = scene.relation if said.where else "left of"
    return place_two(rng, glyphs, colours, sizes, relation, background)


def sample_rewriting(rng: Random, scene: Scene) -> tuple[str, str]:
    """A short prompt and the full caption it becomes."""
    said = Said.sample(rng, scene)
    if rng.random() < 0.4:  # very short ones: nothing but the objects, some with one more fact
        count = len(scene.things)
        said = Said((rng.random() < 0.4,) * count, (rng.random() < 0.2,) * count, False, False)
    if len(scene.things) == 1 and rng.random() < 0.15:
        said = Said((False,), (False,), False, False)
        prompt = name_of(scene.things[0].glyph)
    else:
        prompt = make_caption(rng, scene, said)
    return prompt, canonical_caption(complete(scene, said))
