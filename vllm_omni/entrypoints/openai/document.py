"""`DocumentedAPI`: serves an OpenAPI document that says what the door in front of it does, too.

FastAPI documents the routes. Here comes what it cannot know: the key, events of streams, what
`access.py` may answer in the place of any route, and that bad parameters are answered with 400 and
not with its own 422.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from vllm_omni.entrypoints.openai.access import OPEN_PATHS, REQUEST_ID
from vllm_omni.entrypoints.openai.errors import ERROR_RESPONSES
from vllm_omni.entrypoints.openai.protocol import (
    CompletedEvent,
    ErrorResponse,
    PartialImageEvent,
)
from vllm_omni.entrypoints.openai.text_protocol import ChatChunk, CompletionChunk

_METHODS = ("get", "post", "delete")
_UNUSED_SCHEMAS = ("HTTPValidationError", "ValidationError")
_EVENTS = (PartialImageEvent, CompletedEvent, ChatChunk, CompletionChunk)
_AT_THE_DOOR = (400, 403, 408, 413, 431)  # answers to any request
_KEY = "key"
_WITH_RETRY_AFTER = ("429", "503")
_REQUEST_ID_HEADER = {
    "description": "The request's own id, as in the log and in /v1/requests/{request_id}/timeline.",
    "required": True,
    "schema": {"type": "string"},
}
_RETRY_AFTER_HEADER = {
    "description": "Seconds until it may be worth another try.",
    "required": True,
    "schema": {"type": "integer", "minimum": 1},
}


class DocumentedAPI(FastAPI):
    """FastAPI with the document of a server.

    Args:
        needs_key: whether clients must send one.
    """

    def __init__(self, *, needs_key: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self.needs_key = needs_key

    def openapi(self) -> dict[str, Any]:
        """The document, made once."""
        if self.openapi_schema is None:
            self.openapi_schema = self._complete(super().openapi())
        return self.openapi_schema

    def _complete(self, document: dict[str, Any]) -> dict[str, Any]:
        schemas = document["components"]["schemas"]
        for name in _UNUSED_SCHEMAS:
            schemas.pop(name, None)
        for name, schema in _make_event_schemas().items():
            schemas.setdefault(name, schema)
        if self.needs_key:
            document["components"]["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
        for path, operation in _get_operations(document):
            self._complete_operation(operation, needs_key=self.needs_key and path not in OPEN_PATHS)
        return document

    @staticmethod
    def _complete_operation(operation: dict[str, Any], needs_key: bool) -> None:
        responses = operation["responses"]
        responses.pop("422", None)
        for status in _AT_THE_DOOR:
            responses.setdefault(str(status), _describe(status))
        if needs_key:
            responses.setdefault("401", _describe(401))
            operation["security"] = [{_KEY: []}]
        else:
            responses.pop("401", None)
        for status, response in responses.items():
            response["headers"] = {REQUEST_ID: _REQUEST_ID_HEADER}
            if status in _WITH_RETRY_AFTER:
                response["headers"]["Retry-After"] = _RETRY_AFTER_HEADER
        operation["responses"] = dict(sorted(responses.items()))


def _make_event_schemas() -> dict[str, Any]:
    """Of events and what is in them: FastAPI looks only at answers that come in one piece."""
    _, made = models_json_schema(
        [(model, "serialization") for model in _EVENTS],
        ref_template="#/components/schemas/{model}",
    )
    schemas: dict[str, Any] = made["$defs"]
    return schemas


def _get_operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method in _METHODS:
            if method in item:
                yield path, item[method]


def _describe(status: int) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{ErrorResponse.__name__}"}
    content = {"application/json": {"schema": schema}}
    return {"description": ERROR_RESPONSES[status]["description"], "content": content}
