"""Bounds on what a client wants its text to look like: JSON schemas, patterns, choices.

vLLM reads them in this process's event loop and compiles them in the engine's, with xgrammar 0.2.8
in vLLM 0.32.0. Nesting costs it exponentially, repetitions and formats of strings up to seconds
each; a reference to itself gives a grammar that nothing matches. What is let through here reads in
milliseconds and compiles in a few seconds, in a thread.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_omni.entrypoints.openai.errors import APIError

MAX_SCHEMA_BYTES = 32 * 2**10
MAX_DEPTH = 32  # of objects and lists inside each other; two for a level of the data
MAX_SCHEMAS = 500  # inside one, itself included
MAX_VALUES = 1000  # of all enums
MAX_COUNT = 1000  # of items or properties
MAX_STRING_WEIGHT = 1024  # characters that bounded strings may have, all together
MAX_PATTERN_CHARS = 128
MAX_REPETITIONS = 64  # the product of all counts in a pattern
_FORMAT_WEIGHT = 16

# Keywords by what stands behind them.
_SCHEMA = ("items", "additionalProperties")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "$defs", "definitions")
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties")
_LENGTHS = ("minLength", "maxLength")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OTHER = ("type", "enum", "const", "required", "format", "pattern", "$ref")
_NOTES = ("title", "description", "default", "examples", "$schema", "$comment", "deprecated")
_KEYWORDS = {
    *(*_SCHEMA, *_SCHEMA_LISTS, *_SCHEMA_MAPS, *_COUNTS, *_LENGTHS, *_NUMBERS, *_OTHER, *_NOTES)
}
_TYPES = {"string", "number", "integer", "boolean", "null", "array", "object"}
# Through these a schema leads to another one at the same place of the data.
_SAME_PLACE = ("anyOf", "oneOf", "allOf")

# Characters, classes, groups and repetitions; xgrammar ignores or refuses the rest.
_PATTERN = re.compile(
    r"""(?: [^\\()\[\]{}*+?|^$\x00-\x1f\x7f-\U0010ffff]   # a character
          | \\[dDwWsSnrt.\-+*?()\[\]{}|^$/\\]             # an escape
          | \[\^?(?:[^\\\]\[\x00-\x1f\x7f-\U0010ffff]|\\[dDwWsSnrt.\-+*?()\[\]{}|^$/\\])+\]
          | \((?:\?:|(?!\?)) | \) | \| | \^ | \$
          | [*+?] | \{(?:\d{1,3})(?:,\d{0,3})?\} )*""",
    re.VERBOSE,
)
_COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def check_size(schema: Mapping[str, Any] | Sequence[Any], param: str) -> None:
    """Refuse a schema that is only shown to the model if it is too large to look at."""
    if _get_depth(schema) > MAX_DEPTH:
        raise _refuse(param, f"it is nested deeper than {MAX_DEPTH} levels")
    try:
        size = len(json.dumps(schema, allow_nan=False))
    except ValueError as error:  # NaN, or a number too long to write down
        raise _refuse(param, "a number in it cannot be read") from error
    if size > MAX_SCHEMA_BYTES:
        raise _refuse(param, f"it has {size} bytes, more than {MAX_SCHEMA_BYTES}")


def check_schema(schema: Mapping[str, Any], param: str) -> None:
    """Refuse a JSON schema that cannot be compiled, or only at great cost."""
    check_size(schema, param)
    _Checker(schema, param).check()


def check_pattern(pattern: str, param: str) -> int:
    """How often a pattern repeats something at most; refuse one that is too costly."""
    if len(pattern) > MAX_PATTERN_CHARS:
        message = f"the pattern has {len(pattern)} characters, more than {MAX_PATTERN_CHARS}"
        raise _refuse(param, message)
    if _PATTERN.fullmatch(pattern) is None:
        message = (
            "the pattern may have printable ASCII characters, classes such as [a-z], groups, "
            "|, *, +, ? and counts; look-around, back-references and \\b are not supported"
        )
        raise _refuse(param, message)
    try:
        re.compile(pattern)
    except re.error as error:
        raise _refuse(param, f"the pattern is not valid: {error}") from error
    counts = [int(most or least) for least, most in _COUNT.findall(pattern)]
    repetitions = math.prod(max(1, count) for count in counts)
    if repetitions > MAX_REPETITIONS:
        message = f"its counts multiply to {repetitions}, more than {MAX_REPETITIONS}"
        raise _refuse(param, message)
    return repetitions


class _Checker:
    """Walks over one schema."""

    def __init__(self, root: Mapping[str, Any], param: str) -> None:
        self.root = root
        self.param = param
        self.num_schemas = 0
        self.num_values = 0
        self.string_weight = 0
        self.refs: list[str] = []

    def check(self) -> None:
        pending: list[tuple[Any, str]] = [(self.root, self.param)]
        while pending:
            schema, path = pending.pop()
            self.num_schemas += 1
            self._limit("schemas", self.num_schemas, MAX_SCHEMAS)
            self._check_keywords(schema, path)
            pending += self._get_children(schema, path)
        self._check_references()

    def _get_children(self, schema: Any, path: str) -> Iterator[tuple[Any, str]]:
        for name, value in schema.items():
            where = f"{path}.{name}"
            if name == "additionalProperties" and isinstance(value, bool):
                continue
            if name in _SCHEMA:
                yield value, where
            elif name in _SCHEMA_LISTS:
                if not isinstance(value, list) or not value:
                    raise _refuse(where, "a list of schemas is needed")
                yield from ((each, f"{where}.{i}") for i, each in enumerate(value))
            elif name in _SCHEMA_MAPS:
                if not isinstance(value, dict):
                    raise _refuse(where, "schemas by their names are needed")
                yield from ((each, f"{where}.{key}") for key, each in value.items())

    def _check_keywords(self, schema: Any, path: str) -> None:
        if not isinstance(schema, dict):
            raise _refuse(path, "an object is needed")
        for name, value in schema.items():
            where = f"{path}.{name}"
            if name not in _KEYWORDS:
                raise _refuse(where, f"the keyword {name[:64]!r} is not supported")
            if name in (*_COUNTS, *_LENGTHS):
                _check_count(value, where)
            if name in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise _refuse(where, "a number is needed")
            if name in ("format", "pattern", "$ref") and not isinstance(value, str):
                raise _refuse(where, "a string is needed")
        self.refs += [schema["$ref"]] if "$ref" in schema else []
        self._check_values(schema, path)
        self._check_strings(schema, path)

    def _check_values(self, schema: Mapping[str, Any], path: str) -> None:
        types = schema.get("type", "object")
        types = types if isinstance(types, list) else [types]
        if not types or any(not isinstance(one, str) or one not in _TYPES for one in types):
            raise _refuse(f"{path}.type", f"one or several of {', '.join(sorted(_TYPES))}")
        values = schema.get("enum", [None])
        if not isinstance(values, list) or not values:
            raise _refuse(f"{path}.enum", "a list of values is needed")
        self.num_values += len(values)
        self._limit("values of enums", self.num_values, MAX_VALUES)
        required = schema.get("required", [])
        if not isinstance(required, list) or any(not isinstance(name, str) for name in required):
            raise _refuse(f"{path}.required", "a list of names is needed")
        for least, most in (_COUNTS[:2], _COUNTS[2:], _LENGTHS, _NUMBERS[:2]):
            if least in schema and most in schema and schema[least] > schema[most]:
                raise _refuse(f"{path}.{least}", f"it is more than {most}")

    def _check_strings(self, schema: Mapping[str, Any], path: str) -> None:
        lengths = [schema[name] for name in _LENGTHS if name in schema]
        self.string_weight += max(lengths, default=0)
        for name in ("format", "pattern"):
            if name not in schema:
                continue
            if lengths:
                raise _refuse(f"{path}.{name}", f"{name} excludes {' and '.join(_LENGTHS)}")
            self.string_weight += _FORMAT_WEIGHT
        if "pattern" in schema:
            self.string_weight += check_pattern(schema["pattern"], f"{path}.pattern")
        self._limit("characters in bounded strings", self.string_weight, MAX_STRING_WEIGHT)

    # --- references ---

    def _check_references(self) -> None:
        """Refuse a schema that leads to itself without any data in between."""
        definitions = {
            f"#/{place}/{name}": schema
            for place in ("$defs", "definitions")
            for name, schema in self.root.get(place, {}).items()
        }
        for ref in self.refs:
            if ref not in definitions:
                message = f"$ref {ref[:64]!r} does not name one of its own $defs"
                raise _refuse(self.param, message)
        leads_to = {name: set(_get_refs(schema)) for name, schema in definitions.items()}
        for name in leads_to:
            reached: set[str] = set()
            pending = {name}
            while pending:
                pending = {after for one in pending for after in leads_to[one]} - reached
                reached |= pending
            if name in reached:
                message = f"$ref {name[:64]!r} leads to itself and to nothing else"
                raise _refuse(self.param, message)

    def _limit(self, what: str, count: int, most: int) -> None:
        if count > most:
            raise _refuse(self.param, f"it has more than {most} {what}")


def _get_refs(schema: Mapping[str, Any]) -> Iterator[str]:
    """References at the same place of the data as the schema."""
    if "$ref" in schema:
        yield schema["$ref"]
    for name in _SAME_PLACE:
        for each in schema.get(name, ()):
            yield from _get_refs(each)


def _check_count(value: object, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise _refuse(where, f"a whole number from 0 to {MAX_COUNT} is needed")


def _get_depth(value: Any) -> int:
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        depth += 1
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
    return depth


def _refuse(param: str, problem: str) -> APIError:
    return APIError(400, f"{param[:200]} cannot be used: {problem}", param[:200], "invalid_schema")
