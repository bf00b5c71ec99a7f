"""Chats and completions: `TextService`, and the routes POST /v1/chat/completions, /v1/completions.

Text comes through vLLM's own serving layer (`text.py`); a text with its picture walks through all
stages (`chat_images.py`).
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from vllm_omni.engine.async_llm import OmniAsyncLLM
from vllm_omni.entrypoints.openai import chat_images, schemas
from vllm_omni.entrypoints.openai.admission import Admission
from vllm_omni.entrypoints.openai.config import DEFAULT_RUNNING, ServerConfig
from vllm_omni.entrypoints.openai.disconnect import run_until_disconnect
from vllm_omni.entrypoints.openai.errors import ERROR_RESPONSES, APIError, engine_down
from vllm_omni.entrypoints.openai.event_stream import DONE, describe_events, start_stream
from vllm_omni.entrypoints.openai.images import ImageService
from vllm_omni.entrypoints.openai.input_images import ImageReader, InputImage
from vllm_omni.entrypoints.openai.limits import check_length, check_prompt
from vllm_omni.entrypoints.openai.protocol import PictureParameters
from vllm_omni.entrypoints.openai.streams import run_ahead
from vllm_omni.entrypoints.openai.text_protocol import (
    MAX_PROMPTS,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionChunk,
    CompletionRequest,
    Message,
    TextParameters,
    Tool,
)

if TYPE_CHECKING:
    from vllm_omni.entrypoints.openai.text import TextServing

MAX_TOOL_BYTES = 128 * 2**10  # all tools together
_OURS = {"model", "user", "timeout", "messages", "modalities", *PictureParameters.model_fields}
"""Parameters that vLLM does not get, or not as they are."""


class TextService:
    """Writes for clients: checks, reads pictures, and lets vLLM answer."""

    def __init__(
        self, config: ServerConfig, llm: OmniAsyncLLM, images: ImageService, model_name: str
    ) -> None:
        self.config = config
        self.images = images
        self.model_name = model_name
        self.reader = ImageReader(config)
        # The last one that writes: those before it rewrite prompts for it.
        writers = [client for client in llm.clients if "text" in client.stage.output_modalities]
        self._client: Any = next(reversed(writers), None)
        self._serving: TextServing | None = None
        max_num_running = math.inf
        if self._client is not None:
            serving = self._get_serving()  # a parser that is not there is known at once
            max_num_seqs = serving.llm.vllm_config.scheduler_config.max_num_seqs
            max_num_running = DEFAULT_RUNNING * max_num_seqs
        self.admission = Admission(
            config.max_num_queued, max_num_running=max_num_running, owners=config.owners
        )

    def shutdown(self) -> None:
        self.reader.shutdown()

    # --- chats ---

    async def chat(self, body: ChatRequest, request_id: str, owner: str = "") -> dict[str, Any]:
        """The whole answer at once."""
        messages = await self._check_chat(body)
        if body.wants_image:
            task = chat_images.make_task(self.images, body, messages, request_id, owner)
            return await chat_images.answer(self.images, task)
        fields = _to_fields(body, request_id, messages=messages)
        return await self._answer(body, owner, lambda: self._get_serving().chat(fields))

    async def stream_chat(
        self, body: ChatRequest, request_id: str, owner: str = ""
    ) -> AsyncGenerator[str, None]:
        """Its events."""
        messages = await self._check_chat(body)
        if body.wants_image:
            task = chat_images.make_task(self.images, body, messages, request_id, owner)
            options = body.stream_options
            has_usage = options is not None and options.include_usage
            events = run_ahead(chat_images.stream(self.images, task, has_usage))
        else:
            fields = _to_fields(body, request_id, messages=messages)
            written = self._stream(body, owner, lambda: self._get_serving().stream_chat(fields))
            events = run_ahead(written)
        async with aclosing(events):
            async for event in events:
                yield event

    # --- completions ---

    async def complete(
        self, body: CompletionRequest, request_id: str, owner: str = ""
    ) -> dict[str, Any]:
        """The whole answer at once."""
        fields = self._check_completion(body, request_id)
        return await self._answer(body, owner, lambda: self._get_serving().complete(fields))

    async def stream_completion(
        self, body: CompletionRequest, request_id: str, owner: str = ""
    ) -> AsyncGenerator[str, None]:
        """Its events."""
        fields = self._check_completion(body, request_id)
        written = self._stream(body, owner, lambda: self._get_serving().stream_completion(fields))
        async with aclosing(run_ahead(written)) as events:
            async for event in events:
                yield event

    # --- the way to vLLM ---

    def _get_serving(self) -> TextServing:
        """vLLM's serving objects, over the engine that runs now."""
        from vllm_omni.entrypoints.openai.text import TextServing

        llm = self._client.llm
        if llm is None:
            raise engine_down()
        if self._serving is None or self._serving.llm is not llm:
            config = self.config
            self._serving = TextServing(
                llm, self.model_name, config.tool_call_parser, config.max_tokens
            )
        return self._serving

    async def _answer(
        self, body: TextParameters, owner: str, ask: Callable[[], Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        try:
            async with asyncio.timeout(self._get_timeout(body)) as limit:
                with self.admission.admit(0, owner) as ticket:
                    await self.admission.wait_turn(ticket)
                    answer = await ask()
        except (TimeoutError, APIError):
            if not limit.expired():
                raise
        if limit.expired():  # vLLM turns the end of a task into an answer of its own
            raise _time_is_over()
        return answer

    async def _stream(
        self, body: TextParameters, owner: str, ask: Callable[[], AsyncGenerator[str, None]]
    ) -> AsyncGenerator[str, None]:
        try:
            async with asyncio.timeout(self._get_timeout(body)):
                with self.admission.admit(0, owner) as ticket:
                    await self.admission.wait_turn(ticket)
                    async with aclosing(ask()) as events:
                        async for event in events:
                            yield event
        except TimeoutError as error:
            raise _time_is_over() from error

    def _get_timeout(self, body: TextParameters) -> float:
        return min(body.timeout or math.inf, self.config.request_timeout)

    # --- checks ---

    async def _check_chat(self, body: ChatRequest) -> list[dict[str, Any]]:
        """Refuse what can be refused now; the answer is the messages as vLLM takes them."""
        self._check(body)
        if not body.wants_image:
            for name in sorted(body.model_fields_set & set(PictureParameters.model_fields)):
                raise APIError(
                    400,
                    f'{name} is about a picture: ask for one with modalities=["text", "image"]',
                    name,
                    "invalid_value",
                )
        for name in ("max_tokens", "max_completion_tokens"):
            self._check_most(name, getattr(body, name) or 0, self.config.max_tokens)
        self._check_tools(body)
        check_prompt("messages", _get_text(body.messages), self.config)
        _check_calls(body.messages)
        urls = await self.reader.read(_find_images(body.messages))
        return _to_messages(body.messages, iter(urls))

    def _check_completion(self, body: CompletionRequest, request_id: str) -> dict[str, Any]:
        self._check(body)
        if body.max_tokens == 0 and not body.echo:
            raise APIError(400, "max_tokens=0 needs echo=true", "max_tokens", "invalid_value")
        if "max_tokens" in body.model_fields_set:
            self._check_most("max_tokens", body.max_tokens, self.config.max_tokens)
        if (num_texts := body.n * len(body.prompt)) > MAX_PROMPTS:
            message = f"n={body.n} makes {num_texts} texts of these prompts: at most {MAX_PROMPTS}"
            raise APIError(400, message, "n", "invalid_value")
        num_chars = sum(len(prompt) for prompt in body.prompt)  # or tokens, which have one at least
        check_length("prompt", num_chars, self.config)
        prompt = body.prompt if len(body.prompt) > 1 else body.prompt[0]
        return _to_fields(body, request_id, prompt=prompt)

    def _check(self, body: TextParameters) -> None:
        if self._client is None:
            message = "this server has no model that writes text"
            raise APIError(400, message, "model", "unsupported_operation")
        self.images.check_model(body.model)
        self._check_most("n", body.n, self.config.max_n)
        self._check_most("min_tokens", body.min_tokens or 0, self.config.max_tokens)
        if body.stream_options is not None and not body.stream:
            message = "stream_options needs stream=true"
            raise APIError(400, message, "stream_options", "invalid_value")
        _check_constraints(body)

    def _check_tools(self, body: ChatRequest) -> None:
        choice = body.tool_choice
        if choice not in (None, "none") and body.tools is None:
            raise APIError(400, "tool_choice needs tools", "tool_choice", "invalid_value")
        if body.tools is None:
            return
        if choice != "none" and not self.config.tool_call_parser:
            message = "tools cannot be called here: the server was started without a parser of them"
            raise APIError(400, message, "tools", "unsupported_operation")
        names = [tool.function.name for tool in body.tools]
        if len(set(names)) < len(names):
            raise APIError(400, "tools: two have the same name", "tools", "invalid_value")
        if isinstance(choice, dict) and choice["function"]["name"] not in names:
            message = f"tool_choice: no tool has the name {choice['function']['name']!r}"
            raise APIError(400, message, "tool_choice", "invalid_value")
        _check_functions(body.tools)

    @staticmethod
    def _check_most(name: str, value: int, most: int) -> None:
        if value > most:
            message = f"{name}={value} is too large: at most {most}"
            raise APIError(400, message, name, "invalid_value")


def _check_constraints(body: TextParameters) -> None:
    asked, wanted = body.response_format, body.structured_outputs
    if asked is not None and asked.json_schema is not None:
        schemas.check_schema(asked.json_schema.schema_, "response_format.json_schema.schema")
    if wanted is None:
        return
    if asked is not None and asked.type != "text":
        message = "structured_outputs and response_format exclude each other"
        raise APIError(400, message, "structured_outputs", "invalid_value")
    if wanted.json_ is not None:
        schemas.check_schema(wanted.json_, "structured_outputs.json")
    if wanted.regex is not None:
        schemas.check_pattern(wanted.regex, "structured_outputs.regex")


def _check_functions(tools: Sequence[Tool]) -> None:
    for index, tool in enumerate(tools):
        if (schema := tool.function.parameters) is not None:
            param = f"tools.{index}.function.parameters"
            # Only a strict one becomes a grammar; others are words for the model.
            check = schemas.check_schema if tool.function.strict else schemas.check_size
            check(schema, param)
    num_bytes = len(json.dumps([tool.model_dump() for tool in tools]))
    if num_bytes > MAX_TOOL_BYTES:
        message = f"tools have {num_bytes} bytes together: at most {MAX_TOOL_BYTES}"
        raise APIError(400, message, "tools", "invalid_value")


def _check_calls(messages: Sequence[Message]) -> None:
    """vLLM reads the arguments of calls, and templates write them: each level is a call."""
    for i, turn in enumerate(messages):
        for j, call in enumerate(turn.tool_calls or ()):
            param = f"messages.{i}.tool_calls.{j}.function.arguments"
            try:
                arguments = json.loads(call.function.arguments)
            except json.JSONDecodeError:
                continue  # what a model wrote may be no JSON; vLLM takes it as words
            except (RecursionError, ValueError) as error:
                message = f"{param}: it is nested too deeply, or a number in it is too long"
                raise APIError(400, message, param, "invalid_value") from error
            if isinstance(arguments, dict | list):
                schemas.check_size(arguments, param)


def _to_fields(body: TextParameters, request_id: str, **more: Any) -> dict[str, Any]:
    """What vLLM's requests are made of: what the client said, and nothing it did not."""
    given = body.model_dump(by_alias=True, exclude_unset=True, exclude=_OURS)
    fields = {name: value for name, value in given.items() if value is not None}
    return {**fields, **more, "request_id": request_id}


# --- messages ---


def _get_text(messages: Sequence[Message]) -> str:
    """All words that the model will read."""
    words: list[str] = []
    for message in messages:
        words += [part.text or "" for part in message.content or ()]
        for call in message.tool_calls or ():
            words += [call.function.name, call.function.arguments]
    return "".join(words)


def _find_images(messages: Sequence[Message]) -> list[InputImage]:
    """All pictures, in the order in which `_to_messages` takes them."""
    found = []
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content or ()):
            if part.image_url is not None:
                param = f"messages.{i}.content.{j}.image_url"
                found.append(InputImage(part.image_url.url, param))
        for j, image in enumerate(message.images or ()):
            found.append(InputImage(image.image_url.url, f"messages.{i}.images.{j}.image_url"))
    return found


def _to_messages(messages: Sequence[Message], urls: Any) -> list[dict[str, Any]]:
    return [_to_message(message, urls) for message in messages]


def _to_message(message: Message, urls: Any) -> dict[str, Any]:
    # The newer name of the same role; templates know the older one.
    made: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    parts: list[dict[str, Any]] = []
    for part in [*(message.content or ()), *(message.images or ())]:
        if part.type == "text":
            parts.append({"type": "text", "text": part.text})
        else:
            parts.append({"type": "image_url", "image_url": {"url": next(urls)}})
    is_plain = len(parts) == 1 and parts[0]["type"] == "text"
    made["content"] = parts[0]["text"] if is_plain else parts or None
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            made[name] = getattr(message, name)
    if message.tool_calls:
        made["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    return made


def _time_is_over() -> APIError:
    return APIError(504, "the request's time is over: allow more with timeout", "timeout")


# --- routes ---


def make_router(text: TextService) -> APIRouter:
    """The routes that write."""
    router = APIRouter(tags=["text"], responses=ERROR_RESPONSES)

    @router.post(
        "/v1/chat/completions",
        summary="Answer a chat, with words or with words and a picture",
        response_model=ChatCompletion,
        responses={200: describe_events(ChatChunk, last=DONE)},
    )
    async def chat(body: ChatRequest, request: Request) -> Any:
        whose = (request.state.request_id, request.state.owner)
        if body.stream:
            events = text.stream_chat(body, *whose)
            return await start_stream(request, events, error_event=None)
        return JSONResponse(await run_until_disconnect(request, text.chat(body, *whose)))

    @router.post(
        "/v1/completions",
        summary="Go on with a text",
        response_model=Completion,
        responses={200: describe_events(CompletionChunk, last=DONE)},
    )
    async def complete(body: CompletionRequest, request: Request) -> Any:
        whose = (request.state.request_id, request.state.owner)
        if body.stream:
            events = text.stream_completion(body, *whose)
            return await start_stream(request, events, error_event=None)
        return JSONResponse(await run_until_disconnect(request, text.complete(body, *whose)))

    return router
