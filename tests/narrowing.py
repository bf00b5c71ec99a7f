"""The served OpenAPI document, narrowed to requests that a small server answers.

A document says what may be sent to any server: a prompt of any length, pictures of any size, ids of
any kind, parameters of which some exclude each other. Hardly any request that is drawn from it asks
for something that can be had. Here each schema becomes a few, of bodies that are to be accepted.
"""

from __future__ import annotations

import base64
import copy
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

Schema = dict[str, Any]

_NULL: Schema = {"type": "null"}
_TRUE: Schema = {"const": True}
_LONG_TIME: Schema = {"type": "number", "minimum": 300, "maximum": 1e9}  # seconds
_NUM_TOKENS = 552  # that the tiny checkpoints know


@dataclass(frozen=True)
class Known:
    """What is there to be asked for."""

    model: str
    job_ids: Sequence[str]
    deleted_ids: Sequence[str]  # of jobs that may go
    file_names: Sequence[str]
    request_ids: Sequence[str]


def narrow(document: Mapping[str, Any], known: Known) -> dict[str, Any]:
    """A document of which nearly everything that is drawn from it is accepted."""
    narrowed: dict[str, Any] = copy.deepcopy(dict(document))
    for item in narrowed["paths"].values():
        for method, operation in item.items():
            job_ids = known.deleted_ids if method == "delete" else known.job_ids
            ids = {
                "model_id": [known.model],
                "job_id": job_ids,
                "after": job_ids,
                "name": known.file_names,
                "request_id": known.request_ids,
            }
            # A key that was drawn before, with another body, is refused.
            drawn = [each for each in operation.get("parameters", ()) if each["in"] != "header"]
            operation["parameters"] = drawn
            for parameter in drawn:
                if parameter["name"] in ids:
                    parameter["schema"] = {"enum": [*ids[parameter["name"]]]}
    schemas = narrowed["components"]["schemas"]
    always = {"model": {"enum": [known.model, None]}, "seed": _whole(0, 2**53)}
    for name, variants in _VARIANTS.items():
        schemas[name] = {"anyOf": [_vary(schemas[name], {**always, **each}) for each in variants]}
    return narrowed


def _vary(schema: Mapping[str, Any], variant: Mapping[str, Any]) -> Schema:
    """The schema with some properties replaced; those that are None are left out.

    Those that can only be one thing are required, and so are those under `required`.
    """
    varied: Schema = copy.deepcopy(dict(schema))
    for name, value in variant.items():
        if value is None:
            varied["properties"].pop(name, None)
        elif name in varied["properties"]:
            varied["properties"][name] = value
    given = {name for name, value in variant.items() if value and "const" in value}
    needed = {*varied.get("required", ()), *variant.get("required", ()), *given}
    varied["required"] = sorted(needed & {*varied["properties"]})
    return varied


def _whole(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def _text(most: int = 64) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": most}


def _list_of(items: Schema, least: int = 1, most: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _object(needed: Mapping[str, Schema], **optional: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {**needed, **optional},
        "required": [*needed],
        "additionalProperties": False,
    }


# --- pictures ---

_PICTURE: dict[str, Any] = {
    "size": {"enum": ["auto", "16x16", "32x64", "64x64"]},
    "background": {"enum": ["auto", "opaque"]},
    "output_compression": None,
    "num_inference_steps": _whole(1, 2),
    "negative_prompt": {"anyOf": [_text(), _NULL]},
    "output_mode": None,
    "cache": _NULL,
    "lora": _NULL,
}
_IMAGE: dict[str, Any] = {
    **_PICTURE,
    "prompt": _text(),
    "n": _whole(1, 2),
    "timeout": _LONG_TIME,
    "rewrite_prompt": None,
    "stream": None,
    "partial_images": None,
}
_IMAGES: list[dict[str, Any]] = [
    _IMAGE,
    {**_IMAGE, "output_format": {"const": "webp"}, "output_compression": _whole(0, 100)},
    {**_IMAGE, "output_format": {"const": "jpeg"}, "output_compression": _whole(0, 100)},
    {**_IMAGE, "output_format": None, "output_mode": {"const": "pixels_and_mask"}},
    {**_IMAGE, "rewrite_prompt": _TRUE, "n": None},
]
_STREAMS = [
    {**_IMAGE, "stream": _TRUE, "partial_images": _whole(0, 3)},
    {**_IMAGE, "stream": _TRUE, "rewrite_prompt": _TRUE, "n": None},
]

# --- texts ---

_TOKEN_ID = _whole(0, _NUM_TOKENS - 1)
_SCHEMAS: list[Schema] = [
    {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    {"type": "array", "items": {"enum": ["red", "blue", 1, None]}, "maxItems": 2},
    {"type": "object", "additionalProperties": False},
    {"type": ["integer", "null"], "minimum": 3},
]
_PATTERNS = ["[a-z]{1,3}", "(red|blue)+", "a*", r"\d{2}:\d{2}"]
_NAME: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,16}$"}

_WORDS: dict[str, Any] = {
    "n": None,
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "max_tokens": _whole(1, 4),
    "max_completion_tokens": None,
    "min_tokens": _whole(0, 1),
    "stop": {"anyOf": [_text(), _list_of(_text(), 0, 4), _NULL]},
    "stop_token_ids": _list_of(_TOKEN_ID, 0),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"enum": [str(token) for token in range(20)]},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "response_format": {"enum": [{"type": "text"}, None]},
    "structured_outputs": None,
    "stream": None,
    "stream_options": None,
    "timeout": _LONG_TIME,
}
_FORMS: list[dict[str, Any]] = [
    _WORDS,
    {**_WORDS, "n": {"const": 2}, "temperature": {"const": 0.5}},
    {**_WORDS, "stream": _TRUE, "stream_options": _object({}, include_usage={"type": "boolean"})},
    {**_WORDS, "response_format": {"const": {"type": "json_object"}}},
    {
        **_WORDS,
        "response_format": _object(
            {
                "type": {"const": "json_schema"},
                "json_schema": _object({"name": _NAME, "schema": {"enum": _SCHEMAS}}),
            }
        ),
    },
    *(
        {**_WORDS, "stream": {"type": "boolean"}, "structured_outputs": _object(constraint)}
        for constraint in (
            {"choice": _list_of(_text(8), 1, 4)},
            {"regex": {"enum": _PATTERNS}},
            {"json": {"enum": _SCHEMAS}},
        )
    ),
]

# --- chats ---


def _make_picture() -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (32, 28), (200, 30, 30)).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


_PART = _object({"type": {"const": "text"}, "text": _text()})
_PICTURE_PART = {"type": "image_url", "image_url": {"url": _make_picture()}}
_CALL = _object(
    {
        "id": _text(16),
        "type": {"const": "function"},
        "function": _object({"name": _NAME, "arguments": {"enum": ["{}", '{"a": [1]}']}}),
    }
)
_TURNS: list[Schema] = [
    _object(
        {
            "role": {"enum": ["user", "system", "developer", "assistant"]},
            "content": {"anyOf": [_text(), _list_of(_PART)]},
        },
        name={"type": "string", "maxLength": 16},
    ),
    _object({"role": {"const": "assistant"}, "tool_calls": _list_of(_CALL, 1, 2)}),
    _object({"role": {"const": "tool"}, "tool_call_id": _text(16), "content": _text()}),
]
_SEEN = _object({"role": {"const": "user"}, "content": _list_of({"enum": [_PICTURE_PART]}, 1, 2)})
_TOOL = _object(
    {
        "type": {"const": "function"},
        "function": _object(
            {"name": _NAME},
            description=_text(),
            parameters={"enum": _SCHEMAS},
            strict={"type": "boolean"},
        ),
    }
)

_CHAT: dict[str, Any] = {
    **dict.fromkeys([*_PICTURE, "quality", "output_format", "true_cfg_scale", "priority"]),
    "messages": _list_of({"anyOf": _TURNS}),
    "modalities": {"const": ["text"]},
    "logprobs": None,
    "top_logprobs": None,
    "tools": None,
    "tool_choice": None,
    "parallel_tool_calls": None,
}
_CHATS: list[dict[str, Any]] = [
    *({**_CHAT, **form} for form in _FORMS),
    {**_CHAT, **_WORDS, "messages": _list_of(_SEEN, 1, 2)},
    {**_CHAT, **_WORDS, "logprobs": _TRUE, "top_logprobs": _whole(0, 20)},
    {
        **_CHAT,
        **_WORDS,
        "stream": {"type": "boolean"},
        "tools": _list_of(_TOOL, 1, 1),
        "tool_choice": {"enum": ["none", "auto", "required"]},
        "parallel_tool_calls": {"type": "boolean"},
        "required": ["tools"],
    },
    {
        **_WORDS,
        **_PICTURE,
        **dict.fromkeys(["logit_bias", "min_tokens", "stop_token_ids", "ignore_eos"]),
        **dict.fromkeys(["skip_special_tokens", "include_stop_str_in_output", "response_format"]),
        **dict.fromkeys([*_CHAT][-5:]),
        "stream": {"type": "boolean"},
        "modalities": {"const": ["text", "image"]},
        "messages": _list_of({"anyOf": [*_TURNS, _SEEN]}),
    },
]
_COMPLETIONS: list[dict[str, Any]] = [
    {
        **form,
        "prompt": {"anyOf": [_text(), _list_of(_text()), _list_of(_TOKEN_ID, 1, 8)]},
        "logprobs": _whole(0, 5),
    }
    for form in _FORMS
]

_VARIANTS: dict[str, list[dict[str, Any]]] = {
    "ImageGenerationRequest": [*_IMAGES, *_STREAMS],
    "ImageJobRequest": _IMAGES,
    "ChatRequest": _CHATS,
    "CompletionRequest": _COMPLETIONS,
}
