"""What goes wrong, as OpenAI's error object: one place where our errors and others' become HTTP.

400  the request itself: a value, an unknown parameter, a modality the model does not have
401  no key, or a wrong one                 403  a Host or Origin that is not answered
404  no such route, model, job or picture   405  no such method
408  the body did not arrive in time        413  body too large
431  headers too large
429  queue full, with Retry-After           503  engine given up, shutting down, too many
                                                 connections; with Retry-After
504  the request's time is over             500  a stage failed on this request
507  a job cannot be written to the disk
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from vllm_omni.entrypoints.openai.protocol import ErrorInfo, ErrorResponse
from vllm_omni.errors import (
    DeadlineExceededError,
    EngineError,
    OmniRequestError,
    StageExecutionError,
    show_value,
)

logger = logging.getLogger(__name__)

RETRY_AFTER = 5  # seconds to wait for an engine that is down or not ready

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
    507: "server_error",
}
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": description}
    for status, description in {
        400: "The request is not right: `param` says where.",
        401: "No key, or a wrong one.",
        403: "The Host or Origin is not one this server answers to.",
        404: "No such model, job, request or picture.",
        408: "The body did not arrive in time.",
        413: "The body is too large.",
        429: "The queue is full; see Retry-After.",
        431: "The headers are too large.",
        500: "The model failed on this request.",
        503: "The engine is not available; see Retry-After.",
        504: "The request's own time is over.",
        507: "The job cannot be written to the server's disk.",
    }.items()
}
"""What every route may answer with, for the OpenAPI document."""

_MAX_SHOWN = 200  # characters of a name that is said back

# pydantic's words for a body that is no object: of another content type, or another kind of JSON.
_NO_OBJECT = ("model_attributes_type", "model_type", "dict_type")


class APIError(Exception):
    """An answer other than success.

    Args:
        param: the parameter at fault, if one is.
        code: a word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _make_sayable(message)
        self.param = None if param is None else _make_sayable(param)
        self.code = code
        self.headers = dict(headers or {})
        if status == 503:
            self.headers.setdefault("Retry-After", str(RETRY_AFTER))

    @property
    def info(self) -> ErrorInfo:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return ErrorInfo(message=self.message, type=kind, param=self.param, code=self.code)

    def to_response(self) -> JSONResponse:
        body = ErrorResponse(error=self.info).model_dump()
        return JSONResponse(body, self.status, headers=self.headers)


def to_api_error(error: Exception) -> APIError:
    """Any error as an answer; what nobody expected is logged, and not told."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, DeadlineExceededError):
        return APIError(504, "the request's time is over: allow more with timeout", "timeout")
    if isinstance(error, StageExecutionError):
        logger.error("a stage failed: %s", error)
        return APIError(500, "the model failed on this request", code="stage_execution_error")
    if isinstance(error, OmniRequestError):
        return APIError(400, str(error), getattr(error, "param", None) or None)
    if isinstance(error, RecursionError):  # nothing of ours is deep
        return APIError(400, "the body is nested too deeply", code="invalid_json")
    if isinstance(error, EngineError):
        logger.error("the engine is down: %s", error)
        return engine_down()
    logger.error("unexpected error", exc_info=error)
    return APIError(500, "internal error", code="internal_error")


def engine_down() -> APIError:
    """The answer while a stage that is needed does not work."""
    return APIError(503, "the engine is not available", code="engine_unavailable")


def shutting_down() -> APIError:
    """The answer to whoever comes, or is still there, when the server ends."""
    return APIError(503, "the server is shutting down", code="shutting_down")


def storage_full() -> APIError:
    """The answer to a job that would not outlive the server, as it should."""
    return APIError(507, "the job cannot be kept: the server's disk is full", code="storage_full")


def from_validation_errors(errors: Sequence[Mapping[str, Any]]) -> APIError:
    """pydantic's findings: the first one, with the parameter, the value and what is allowed."""
    first = errors[0]
    kind, (where, *path) = first["type"], first["loc"]
    param = ".".join(str(part) for part in path)[:_MAX_SHOWN] or None
    if kind == "json_invalid":
        return APIError(400, "the body is not valid JSON", code="invalid_json")
    if where == "body" and param is None and kind in _NO_OBJECT:
        message = "the body is no JSON object: send one, with Content-Type: application/json"
        return APIError(400, message, code="invalid_json")
    if kind == "extra_forbidden":
        return APIError(400, f"unknown parameter: {param}", param, "unknown_parameter")
    if kind == "missing":
        what = f"missing parameter: {param}" if param else "the body is missing"
        return APIError(400, what, param, "missing_parameter")
    value = first.get("input")
    is_plain = value is None or isinstance(value, (str, int, float, list, dict))
    shown = f"={show_value(value)}" if is_plain else ""
    message = f"{param or 'the body'}{shown} is not allowed: {first['msg']}"
    return APIError(400, message, param, "invalid_value")


def install(app: FastAPI) -> None:
    """Let every error of an app be answered in OpenAI's shape."""

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> JSONResponse:
        return from_validation_errors(error.errors()).to_response()

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> JSONResponse:
        methods = _get_methods(request)
        message = {
            404: f"no such route: {request.method} {request.scope['path'][:_MAX_SHOWN]}",
            405: f"{request.method} is not allowed here: {methods}",
        }.get(error.status_code, str(error.detail))
        headers = {"Allow": methods} if error.status_code == 405 else error.headers
        return APIError(error.status_code, message, headers=headers).to_response()

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return to_api_error(error).to_response()

    # `Exception`, what nobody expected, is raised again by Starlette once it is answered.
    for kind in (APIError, OmniRequestError, EngineError, RecursionError, Exception):
        app.add_exception_handler(kind, answer)


def _get_methods(request: Request) -> str:
    """All that a path answers to; Starlette names those of the first of its routes."""
    methods: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    if "GET" in methods:
        methods.add("HEAD")
    return ", ".join(sorted(methods))


def _make_sayable(text: str) -> str:
    """Without the halves of characters that JSON can name and UTF-8 cannot write."""
    return text.encode("utf-8", "backslashreplace").decode()
