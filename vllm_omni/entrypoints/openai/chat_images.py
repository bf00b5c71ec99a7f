"""Chats that are answered with a text and the picture of it.

The model's own instruction for a fuller prompt goes before a chat that has no system message, so
that "star" becomes a picture's description and not an answer to the word.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_omni.entrypoints.openai.encoding import MEDIA_TYPES
from vllm_omni.entrypoints.openai.errors import APIError
from vllm_omni.entrypoints.openai.images import ImageService, ImageTask
from vllm_omni.entrypoints.openai.protocol import ImageParameters, PictureParameters
from vllm_omni.entrypoints.openai.text_protocol import ChatRequest
from vllm_omni.outputs import OmniOutput
from vllm_omni.params import SIZE_MULTIPLE
from vllm_omni.request import OmniRequest, OutputKind

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop",
)
"""Parameters of the text that may be given with a picture; the model has its own for the rest."""

_CHUNK = "chat.completion.chunk"
_ALLOWED = {
    *_SAMPLING,
    *PictureParameters.model_fields,
    *("messages", "modalities", "model", "stream", "stream_options", "timeout", "user"),
    *("max_tokens", "max_completion_tokens"),
}


def make_task(
    images: ImageService,
    body: ChatRequest,
    messages: Sequence[dict[str, Any]],
    request_id: str,
    owner: str = "",
) -> ImageTask:
    """What to ask the engine for; refuses what cannot be had together with a picture."""
    for name in sorted(body.model_fields_set - _ALLOWED):
        if getattr(body, name) not in (None, type(body).model_fields[name].default):
            message = f"{name} cannot be used where a picture is made of the text"
            raise APIError(400, message, name, "invalid_value")
    picture = {name: getattr(body, name) for name in PictureParameters.model_fields}
    asked = ImageParameters(
        prompt="a chat", seed=body.seed, timeout=body.timeout, rewrite_prompt=True, **picture
    )
    task = images.make_task(asked, request_id, owner=owner)
    request = OmniRequest(
        messages=messages,
        output_format="text+image",
        params=task.params,
        sampling_params=_get_sampling_params(body),
        output_kind=OutputKind.DELTA,
        request_id=request_id,
        arrival_time=task.request.arrival_time,
    )
    return replace(task, request=request)


async def answer(images: ImageService, task: ImageTask) -> dict[str, Any]:
    """A `chat.completion` with the picture in `message.images`."""
    told = _Told(images.model_name, task.request.request_id)
    with images.admit(task) as ticket:
        async with aclosing(images.outputs(task, ticket)) as outputs:
            async for output in outputs:
                told.take(output)
        pictures = await _make_pictures(images, task, output)
    message = {"role": "assistant", "content": output.text, "images": pictures}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": told.finish_reason,
    }
    usage = told.get_usage(task, len(pictures))
    return told.make("chat.completion", choices=[choice], usage=usage)


async def stream(
    images: ImageService, task: ImageTask, has_usage: bool
) -> AsyncGenerator[str, None]:
    """The same as events: the text as it is written, then the picture, then the end."""
    told = _Told(images.model_name, task.request.request_id)
    with images.admit(task) as ticket:
        async with aclosing(images.outputs(task, ticket)) as outputs:
            delta: dict[str, Any] = {"role": "assistant"}
            async for output in outputs:
                if text := told.take(output):
                    yield told.make_event({**delta, "content": text})
                    delta = {}
        pictures = await _make_pictures(images, task, output)
    yield told.make_event({**delta, "images": pictures})
    yield told.make_event({}, told.finish_reason)
    if has_usage:
        yield _to_event(told.make(_CHUNK, choices=[], usage=told.get_usage(task, len(pictures))))
    yield "data: [DONE]\n\n"


@dataclass
class _Told:
    """What an answer says of itself, and what was counted on the way."""

    model: str
    request_id: str
    created: int = field(default_factory=lambda: int(time.time()))
    num_read: int = 0  # tokens
    num_written: int = 0  # tokens
    finish_reason: str = "stop"

    def take(self, output: OmniOutput) -> str:
        """Note an output on the way; the answer is the text that is new in it."""
        if output.finished or output.request_output is None:
            return ""
        self.num_read = self.num_read or len(output.request_output.prompt_token_ids or ())
        for completion in output.outputs:
            self.num_written += len(completion.token_ids)
            self.finish_reason = completion.finish_reason or self.finish_reason
        return output.text or ""

    def make(self, kind: str, **fields: Any) -> dict[str, Any]:
        about = {"object": kind, "created": self.created, "model": self.model}
        return {"id": f"chatcmpl-{self.request_id}", **about, **fields}

    def make_event(self, delta: dict[str, Any], finish_reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _to_event(self.make(_CHUNK, choices=[choice]))

    def get_usage(self, task: ImageTask, num_pictures: int) -> dict[str, Any]:
        params = task.params
        assert params.height and params.width
        tokens = (params.height // SIZE_MULTIPLE) * (params.width // SIZE_MULTIPLE) * num_pictures
        num_made = self.num_written + tokens
        return {
            "prompt_tokens": self.num_read,
            "completion_tokens": num_made,
            "total_tokens": self.num_read + num_made,
            "completion_tokens_details": {"text_tokens": self.num_written, "image_tokens": tokens},
        }


async def _make_pictures(
    images: ImageService, task: ImageTask, output: OmniOutput
) -> list[dict[str, Any]]:
    made = []
    for image, seed in zip(output.images, output.seeds, strict=True):
        data = await images.encode(task.body, task.params, image, seed, output.text)
        encoded = await images.encoder.to_base64(data)
        url = f"data:{MEDIA_TYPES[task.body.output_format]};base64,{encoded}"
        made.append({"type": "image_url", "image_url": {"url": url}, "seed": seed})
    return made


def _get_sampling_params(body: ChatRequest) -> dict[str, Any] | None:
    given = {name: getattr(body, name) for name in _SAMPLING if name in body.model_fields_set}
    max_tokens = body.max_completion_tokens or body.max_tokens
    if max_tokens is not None:
        given["max_tokens"] = max_tokens
    return given or None


def _to_event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
