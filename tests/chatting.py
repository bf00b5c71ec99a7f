"""Chats for tests: what is said, and OpenAI's client to say it with."""

from __future__ import annotations

import base64
import io
from typing import Any

import openai
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from PIL import Image, ImageDraw

from vllm_omni.models.qwen_image.prompt import REWRITE_INSTRUCTION

REWRITE = {"role": "system", "content": REWRITE_INSTRUCTION}
STAR = "a large yellow star in the center on a dark blue background"
SHAPES = {
    "type": "object",
    "properties": {"shape": {"enum": ["star", "circle"]}, "size": {"enum": [1, 2, 3]}},
    "required": ["shape", "size"],
    "additionalProperties": False,
}
DRAW: dict[str, Any] = {
    "type": "function",
    "function": {"name": "draw", "strict": True, "parameters": SHAPES},
}
SAID: list[dict[str, Any]] = [{"role": "user", "content": "a star"}]
ENDLESS = {"messages": SAID, "max_tokens": 900, "ignore_eos": True, "skip_special_tokens": False}


PICTURE: dict[str, Any] = {
    "modalities": ["text", "image"],
    "size": "256x256",
    "num_inference_steps": 10,
    "true_cfg_scale": 3,
    "seed": 1,
}


def say(*contents: Any) -> list[Any]:
    return [{"role": "user", "content": content} for content in contents]


def chat(client: openai.OpenAI, messages: list[Any], **parameters: Any) -> ChatCompletion:
    """One whole answer; parameters that are not OpenAI's go beside them."""
    answer: ChatCompletion = _create(client, messages, parameters)
    return answer


def stream(
    client: openai.OpenAI, messages: list[Any], **parameters: Any
) -> list[ChatCompletionChunk]:
    """An answer piece by piece, with its usage at the end."""
    parameters |= {"stream": True, "stream_options": {"include_usage": True}}
    return list(_create(client, messages, parameters))


def _create(client: openai.OpenAI, messages: list[Any], parameters: dict[str, Any]) -> Any:
    create: Any = client.chat.completions.create
    parameters = {"temperature": 0, "max_tokens": 30, **parameters}
    known = {name: parameters.pop(name) for name in list(parameters) if name in _OPENAI}
    return create(model="demo", messages=messages, extra_body=parameters, **known)


_OPENAI = {
    *("temperature", "max_tokens", "n", "stop", "logprobs", "top_logprobs", "tools", "tool_choice"),
    *("response_format", "logit_bias", "seed", "modalities", "stream", "stream_options"),
}


def make_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def make_picture(shape: str, colour: str) -> str:
    image = Image.new("RGB", (256, 256), "white")
    draw = ImageDraw.Draw(image)
    {"circle": draw.ellipse, "square": draw.rectangle}[shape]((50, 50, 206, 206), fill=colour)
    return make_url(image)


def show(url: str, text: str = "What is in the picture?") -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
