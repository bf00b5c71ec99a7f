"""vLLM's serving layer over an AR stage: its chat templates, tool parsers, logprobs and streams.

Seams, checked against vLLM 0.32.0: `OpenAIServingModels`, `OnlineRenderer`, `OpenAIServingChat`
and `OpenAIServingCompletion` with the arguments given here, their `create_chat_completion` and
`create_completion` without a raw request (its headers would choose ids, ranks and priorities) and
`override_max_tokens`, the requests' `request_id`, the shape of an error in a stream,
`create_error_response`, which says what an exception means to a client, the loggers of both, and
`ToolParserManager`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.chat_completion.serving import logger as chat_logger
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.completion.serving import logger as completion_logger
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMClientError
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from vllm_omni.entrypoints.openai.errors import APIError, engine_down, to_api_error
from vllm_omni.errors import ConfigError

_ERROR_EVENT = 'data: {"error"'
# Of an answer: what a client did not ask for and cannot.
_LEFT_OUT = {
    "prompt_logprobs",
    "prompt_token_ids",
    "prompt_text",
    "kv_transfer_params",
    "ec_transfer_params",
    "metrics",
}
_CHOICES_LEFT_OUT = {"token_ids", "routed_experts", "prompt_logprobs", "prompt_token_ids"}
_ABOUT_GRAMMAR = re.compile("grammar|JSON schema|regex", re.IGNORECASE)
_PARAMS = {"input_tokens": "prompt", "input_text": "prompt"}  # vLLM's names -> ours


class _NotTheClients(logging.Filter):
    """Leaves out what a client got wrong: of a stream, vLLM logs it with its traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, VLLMClientError)


class TextServing:
    """vLLM's chats and completions over one engine.

    Args:
        tool_call_parser: name of the parser in vLLM that finds tool calls in the text; empty: none.
        max_tokens: most that one answer may have, also where the request does not say.
    """

    def __init__(
        self, llm: AsyncLLM, model_name: str, tool_call_parser: str, max_tokens: int
    ) -> None:
        self.llm = llm
        tools = {"enable_auto_tools": bool(tool_call_parser), "tool_parser": tool_call_parser}
        template = {"chat_template": None, "chat_template_content_format": "auto"}
        if tool_call_parser and tool_call_parser not in ToolParserManager.list_registered():
            known = ", ".join(sorted(ToolParserManager.list_registered()))
            raise ConfigError("tool_call_parser", tool_call_parser, f"one of {known}")
        models = OpenAIServingModels(llm, [BaseModelPath(name=model_name, model_path=model_name)])
        renderer = OnlineRenderer(
            llm.model_config, llm.renderer, request_logger=None, **template, **tools
        )
        self._chat = OpenAIServingChat(
            llm,
            models,
            "assistant",
            online_renderer=renderer,
            request_logger=None,
            **template,
            **tools,
        )
        self._completion = OpenAIServingCompletion(
            llm, models, online_renderer=renderer, request_logger=None
        )
        for logger in (chat_logger, completion_logger):
            logger.addFilter(_NOT_THE_CLIENTS)  # once, however often it is added
        # As `--override-generation-config` would: the rest of the context could be a long way.
        self._chat.override_max_tokens = max_tokens
        self._completion.override_max_tokens = max_tokens

    async def chat(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a chat, from the fields of vLLM's `ChatCompletionRequest`."""
        return await self._answer(ChatCompletionRequest, self._chat.create_chat_completion, request)

    async def complete(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a completion, from the fields of vLLM's `CompletionRequest`."""
        return await self._answer(CompletionRequest, self._completion.create_completion, request)

    def stream_chat(self, request: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        """The events of a chat; an error that comes before the first is raised."""
        return self._stream(ChatCompletionRequest, self._chat.create_chat_completion, request)

    def stream_completion(self, request: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        """The events of a completion; an error that comes before the first is raised."""
        return self._stream(CompletionRequest, self._completion.create_completion, request)

    async def _answer(self, kind: Any, create: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
        try:
            answer = await create(kind(**fields))
        except Exception as error:  # of any kind: the request's data has been everywhere
            raise self._translate(error, fields) from error
        if isinstance(answer, ErrorResponse):
            raise self._to_api_error(answer, fields)
        content: dict[str, Any] = answer.model_dump(
            mode="json",
            exclude={**dict.fromkeys(_LEFT_OUT, True), "choices": {"__all__": _CHOICES_LEFT_OUT}},
        )
        return content

    async def _stream(
        self, kind: Any, create: Any, fields: Mapping[str, Any]
    ) -> AsyncGenerator[str, None]:
        try:
            events = await create(kind(**fields))
        except Exception as error:  # as above
            raise self._translate(error, fields) from error
        if isinstance(events, ErrorResponse):
            raise self._to_api_error(events, fields)
        async with aclosing(events):
            async for event in events:
                if event.startswith(_ERROR_EVENT):
                    found = ErrorResponse(**json.loads(event.removeprefix("data: ")))
                    raise self._to_api_error(found, fields)
                yield event

    # --- errors ---

    def _translate(self, error: Exception, fields: Mapping[str, Any]) -> APIError:
        if isinstance(error, APIError):
            return error
        if isinstance(error, EngineDeadError):
            return engine_down()
        cause = error.__cause__
        if isinstance(error, EngineGenerateError) and isinstance(cause, Exception):
            error = cause
        response = create_error_response(error)
        # What vLLM takes for its own fault and nobody expected is for the log.
        is_unknown = response.error.code == 500 and not hasattr(error, "status_code")
        return to_api_error(error) if is_unknown else self._to_api_error(response, fields)

    def _to_api_error(self, response: ErrorResponse, fields: Mapping[str, Any]) -> APIError:
        error = response.error
        if self.llm.errored or error.code == 503:
            return engine_down()
        param = _PARAMS.get(error.param, error.param)
        if param == "prompt" and "messages" in fields:
            param = "messages"
        is_refused = error.code < 500 or error.code == 501  # what it cannot do, it was asked for
        constraint = _find_constraint(fields)
        # What the engine gives up on after all, with a constraint, is the constraint.
        if constraint is not None and (not is_refused or _ABOUT_GRAMMAR.search(error.message)):
            message = f"{constraint} cannot be used: vLLM finds no text that follows it"
            return APIError(400, message, constraint, "invalid_schema")
        if not is_refused:
            return APIError(500, "the model failed on this request", code="stage_execution_error")
        message = re.sub(r" \(parameter=.*\)$", "", error.message, flags=re.DOTALL)
        return APIError(400, message, param, "invalid_value")


_NOT_THE_CLIENTS = _NotTheClients()


def _find_constraint(fields: Mapping[str, Any]) -> str | None:
    """The parameter that constrains the text, if one does."""
    for name in ("response_format", "structured_outputs", "tools"):
        if fields.get(name) is not None:
            return name
    return None
