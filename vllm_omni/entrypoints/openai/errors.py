"""What goes wrong, as OpenAI's error object: one place where our errors and others' become HTTP.

400  the request itself: a value, an unknown parameter, a modality the model does not have
401  no key, or a wrong one                 403  a Host or Origin that is not answered
404  no such route, model, job or picture   405  no such method
413  body too large                         431  headers too large
429  queue full, with Retry-After           503  engine down or not ready, with Retry-After
504  the request's time is over             500  a stage failed on this request
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from vllm_omni.entrypoints.openai.protocol import ErrorInfo, ErrorResponse
from vllm_omni.errors import (
    DeadlineExceededError,
    EngineError,
    OmniRequestError,
    StageExecutionError,
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
}
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": description}
    for status, description in {
        400: "The request is not right: `param` says where.",
        401: "No key, or a wrong one.",
        403: "The Host or Origin is not one this server answers to.",
        404: "No such model, job, request or picture.",
        413: "The body is too large.",
        429: "The queue is full; see Retry-After.",
        431: "The headers are too large.",
        500: "The model failed on this request.",
        503: "The engine is not available; see Retry-After.",
        504: "The request's own time is over.",
    }.items()
}
"""What every route may answer with, for the OpenAPI document."""

_MAX_SHOWN = 200  # characters of a value that is said back


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
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

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
    if isinstance(error, EngineError):
        logger.error("the engine is down: %s", error)
        return engine_down()
    logger.error("unexpected error", exc_info=error)
    return APIError(500, "internal error", code="internal_error")


def engine_down() -> APIError:
    """The answer while a stage that is needed does not work."""
    return APIError(
        503,
        "the engine is not available",
        code="engine_unavailable",
        headers={"Retry-After": str(RETRY_AFTER)},
    )


def from_validation_errors(errors: Sequence[Mapping[str, Any]]) -> APIError:
    """pydantic's findings: the first one, with the parameter, the value and what is allowed."""
    first = errors[0]
    path = [str(part) for part in first["loc"] if part not in ("body", "query", "path", "header")]
    param = ".".join(path) or None
    if first["type"] == "json_invalid":
        return APIError(400, "the body is not valid JSON", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return APIError(400, f"unknown parameter: {param}", param, "unknown_parameter")
    if first["type"] == "missing":
        what = f"missing parameter: {param}" if param else "the body is missing"
        return APIError(400, what, param, "missing_parameter")
    shown = _show(first.get("input"))
    name = param or "the body"
    return APIError(400, f"{name}={shown} is not allowed: {first['msg']}", param, "invalid_value")


def install(app: FastAPI) -> None:
    """Let every error of an app be answered in OpenAI's shape."""

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> JSONResponse:
        return from_validation_errors(error.errors()).to_response()

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> JSONResponse:
        message = {
            404: f"no such route: {request.method} {request.url.path[:_MAX_SHOWN]}",
            405: f"{request.method} is not allowed here",
        }.get(error.status_code, str(error.detail))
        return APIError(error.status_code, message, headers=error.headers).to_response()

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return to_api_error(error).to_response()

    for kind in (APIError, OmniRequestError, EngineError):
        app.add_exception_handler(kind, answer)


def _show(value: object) -> str:
    try:
        shown = repr(value)
    except ValueError:  # a whole number too long to write down
        return "a number too long to show"
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}…"
