"""Scenes in words.

A caption says all of a scene or leaves things out, in many word orders. `canonical_caption` is the
one full form: what the language model writes, and what `parse_caption` reads back.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from training.glyphs import DIGITS, LETTERS, SHAPES
from training.world import (
    BACKGROUND_COLOURS,
    COLOURS,
    GRADIENT,
    INVERSE,
    PLACES,
    PLAIN,
    SHADES,
    SIZES,
    STRIPED,
    Background,
    Said,
    Scene,
    place_one,
    place_two,
    sample_background,
    stands_out,
)


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


_PLACE_FORMS: dict[str, tuple[str, ...]] = {
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
        forms: tuple[str, ...] = (
            f"striped background in {pair}",
            f"{pair} striped background",
        )
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


def settle(rng: Random, scene: Scene, said: Said) -> Scene:
    """The scene a picture shows for a caption: what is left open varies, but within good taste.

    Objects are not small then, mostly in the middle, on a plain background or a gradient. So a
    short prompt has few kinds of pictures to choose from, and each of them comes out clear.
    """
    if said == Said.everything(scene):
        return scene
    background = scene.background
    if not said.background:
        own = [t.colour for t, is_said in zip(scene.things, said.colours, strict=True) if is_said]
        background = sample_quiet_background(rng, own)
    colours, sizes = [], []
    for index, thing in enumerate(scene.things):
        free = [name for name in COLOURS if stands_out(name, background)]
        keeps = said.colours[index] or not free
        colours.append(thing.colour if keeps else rng.choice(free))
        sizes.append(thing.size if said.sizes[index] else rng.choice(("medium", "large")))
    glyphs = [thing.glyph for thing in scene.things]
    if scene.relation is None:
        assert scene.place is not None
        is_free = not said.where and rng.random() < 0.7
        place = "center" if is_free else scene.place
        return place_one(rng, glyphs[0], colours[0], sizes[0], place, background)
    relation = scene.relation if said.where else rng.choice(("left of", "above"))
    return place_two(rng, glyphs, colours, sizes, relation, background)


def sample_quiet_background(rng: Random, colours: Sequence[str]) -> Background:
    """Plain, one in six a gradient; objects of these colours can be seen on it."""
    while True:
        background = sample_background(rng)
        if rng.random() < 0.75:
            background = Background(PLAIN, background.colours[:1])
        is_quiet = background.pattern in (PLAIN, GRADIENT)
        if is_quiet and all(stands_out(colour, background) for colour in colours):
            return background


def sample_rewriting(rng: Random, scene: Scene) -> tuple[str, str]:
    """A short prompt and the full caption it becomes."""
    said = Said.sample(rng, scene)
    if rng.random() < 0.4:  # very short ones: nothing but the objects, some with one more fact
        count = len(scene.things)
        said = Said((rng.random() < 0.4,) * count, (rng.random() < 0.2,) * count, False, False)
    if len(scene.things) == 1 and rng.random() < 0.15:
        said = Said.nothing(scene)
        prompt = name_of(scene.things[0].glyph)
    else:
        prompt = make_caption(rng, scene, said)
    return prompt, canonical_caption(complete(scene, said))
