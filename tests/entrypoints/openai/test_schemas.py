"""What a text may be held to: bounds that keep a small body from costing much."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni.entrypoints.openai import schemas
from vllm_omni.entrypoints.openai.errors import APIError
from vllm_omni.entrypoints.openai.schemas import check_pattern, check_schema, check_size

STRING = {"type": "string"}
NODE = {"$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}}}

GOOD: list[dict[str, Any]] = [
    {},
    {"type": "object", "properties": {"a": STRING, "b": {"type": "integer"}}, "required": ["a"]},
    {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 1, "maxItems": 3},
    {"type": ["string", "null"], "maxLength": 100},
    {"type": "array", "prefixItems": [{"const": 1}, {"type": "boolean"}]},
    {"anyOf": [STRING, {"type": "number", "minimum": 0, "exclusiveMaximum": 1.5}]},
    {"type": "string", "format": "date"},
    {"type": "string", "pattern": r"^(red|green)-\d{1,3}[a-z]?$"},
    {"type": "object", "additionalProperties": STRING, "maxProperties": 4},
    {"title": "t", "description": "d", "default": {"any": ["thing"]}, "type": "object"},
    {**NODE, "$ref": "#/$defs/node"},
    {
        "definitions": {"x": STRING},
        "type": "object",
        "properties": {"x": {"$ref": "#/definitions/x"}},
    },
]


def nest(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = STRING
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


BAD: list[tuple[dict[str, Any], str, str]] = [
    # (schema, what the parameter ends with, a part of the message)
    ({"$ref": "#"}, "schema", "does not name one of its own"),
    ({"$ref": "#/$defs/a"}, "schema", "does not name one of its own"),
    ({"$ref": "http://127.0.0.1/schema.json"}, "schema", "does not name one of its own"),
    ({"$ref": 3}, "schema.$ref", "a string"),
    ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "schema", "leads to itself"),
    (
        {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [STRING, {"$ref": "#/$defs/a"}]}},
            "$ref": "#/$defs/a",
        },
        "schema",
        "leads to itself",
    ),
    (nest(50), "schema", "nested deeper"),
    (nest(50_000), "schema", "nested deeper"),
    ({"enum": ["x" * 40_000]}, "schema", "bytes"),
    ({"properties": {str(i): {} for i in range(600)}}, "schema", "more than 500 schemas"),
    ({"enum": list(range(1001))}, "schema", "more than 1000 values"),
    ({"type": "string", "maxLength": 1001}, "maxLength", "from 0 to 1000"),
    ({"type": "array", "minItems": 10**9}, "minItems", "from 0 to 1000"),
    ({"type": "array", "minItems": True}, "minItems", "from 0 to 1000"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems", "more than maxItems"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum", "more than maximum"),
    ({"type": "integer", "minimum": "3"}, "minimum", "a number"),
    ({"type": "number", "minimum": float("nan")}, "schema", "cannot be read"),
    ({"type": "number", "minimum": float("inf")}, "schema", "cannot be read"),
    (
        {"properties": {str(i): {"type": "string", "maxLength": 500} for i in range(3)}},
        "schema",
        "more than 1024 characters",
    ),
    ({"properties": {str(i): {"format": "uri"} for i in range(100)}}, "schema", "more than 1024"),
    ({"type": "string", "pattern": "(a{1,99}){1,99}"}, "pattern", "multiply to 9801"),
    ({"type": "string", "pattern": "a", "maxLength": 3}, "pattern", "excludes"),
    ({"type": "string", "pattern": 3}, "pattern", "a string"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems", "not supported"),
    ({"patternProperties": {"a": {}}}, "patternProperties", "not supported"),
    ({"not": {}}, "not", "not supported"),
    ({"type": "colour"}, "type", "one or several of"),
    ({"type": []}, "type", "one or several of"),
    ({"enum": []}, "enum", "a list"),
    ({"anyOf": []}, "anyOf", "a list"),
    ({"properties": []}, "properties", "by their names"),
    ({"items": True}, "items", "an object"),
    ({"properties": {"a": {"items": {"anyOf": [3]}}}}, "properties.a.items.anyOf.0", "an object"),
    ({"required": "a"}, "required", "a list"),
]


@pytest.mark.parametrize("schema", GOOD, ids=json.dumps)
def test_schemas_that_can_be_used(schema: dict[str, Any]) -> None:
    check_schema(schema, "schema")
    xgrammar.Grammar.from_json_schema(json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "param", "message"), BAD, ids=[f"{param}: {message}" for _, param, message in BAD]
)
def test_schemas_that_are_refused(schema: dict[str, Any], param: str, message: str) -> None:
    start = time.perf_counter()
    with pytest.raises(APIError) as caught:
        check_schema(schema, "schema")
    assert time.perf_counter() - start < 1
    assert (caught.value.status, caught.value.code) == (400, "invalid_schema")
    assert caught.value.param is not None and caught.value.param.endswith(param)
    assert message in caught.value.message


def test_a_schema_that_is_only_shown_may_have_any_keyword() -> None:
    check_size({"type": "array", "uniqueItems": True, "x-mine": {"$ref": "#"}}, "schema")
    with pytest.raises(APIError, match="nested deeper"):
        check_size(nest(50), "schema")


@pytest.mark.parametrize(
    "pattern", ["abc", "[a-z]+", r"\d{4}-\d\d", "(?:red|blue)?", "a*b+c?", r"\{x\}", "", "^.$"]
)
def test_patterns_that_can_be_used(pattern: str) -> None:
    assert 1 <= check_pattern(pattern, "pattern") <= schemas.MAX_REPETITIONS
    xgrammar.Grammar.from_regex(pattern)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(a{1,999}){1,999}", "multiply to 998001"),
        ("a{65}", "multiply to 65"),
        ("(a{8}){9}", "multiply to 72"),
        ("a{5,}b{20,}", "multiply to 100"),
        ("a{1000}", "may have"),
        ("(?=a)b", "may have"),
        (r"(a)\1", "may have"),
        (r"\bword", "may have"),
        (r"\p{L}", "may have"),
        ("(?P<name>a)", "may have"),
        ("é", "may have"),
        ("a\x00", "may have"),
        ("(", "not valid"),
        ("[z-a]", "not valid"),
        ("a**", "not valid"),
        ("a" * 129, "129 characters"),
    ],
)
def test_patterns_that_are_refused(pattern: str, message: str) -> None:
    with pytest.raises(APIError, match="pattern") as caught:
        check_pattern(pattern, "pattern")
    assert message in caught.value.message


# --- whatever gets through is read at once ---

LEAVES: list[dict[str, Any]] = [
    STRING,
    {"type": "integer", "minimum": -5, "maximum": 10**9},
    {"type": "number", "exclusiveMinimum": 0.5},
    {"enum": ["a", 1, None, {"b": []}]},
    {"type": "string", "maxLength": 64},
    {"type": "string", "format": "uri-template"},
    {"type": "string", "pattern": r"(\w{1,8}){1,8}"},
    {"$ref": "#/$defs/d"},
    {},
]


def grow(children: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from(["a", "b", "c d", 'e"f', "\\"])
    counts = st.integers(0, schemas.MAX_COUNT)
    return st.one_of(
        st.builds(
            lambda p, r: {"type": "object", "properties": p, "required": [*p][:r]},
            st.dictionaries(names, children, max_size=5),
            st.integers(0, 5),
        ),
        st.builds(lambda i, n: {"type": "array", "items": i, "maxItems": n}, children, counts),
        st.builds(lambda i, n: {"type": "array", "items": i, "minItems": n}, children, counts),
        st.builds(lambda o: {"anyOf": o}, st.lists(children, min_size=1, max_size=4)),
        st.builds(lambda i: {"type": "object", "additionalProperties": i}, children),
    )


@given(st.recursive(st.sampled_from(LEAVES), grow, max_leaves=40))
def test_what_gets_through_is_read_at_once(schema: dict[str, Any]) -> None:
    whole = {**schema, "$defs": {"d": {"type": "object", "properties": {"d": schema}}}}
    try:
        check_schema(whole, "schema")
    except APIError as error:
        assert error.code == "invalid_schema"
        return
    start = time.perf_counter()
    xgrammar.Grammar.from_json_schema(json.dumps(whole))
    assert time.perf_counter() - start < 1
