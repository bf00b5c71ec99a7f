"""Routes: POST /v1/images/generations, POST /v1/images/edits."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Request, UploadFile
from fastapi.responses import JSONResponse, StreamingResponse

from vllm_omni.entrypoints.openai.disconnect import run_until_disconnect
from vllm_omni.entrypoints.openai.errors import (
    ERROR_RESPONSES,
    APIError,
    to_api_error,
)
from vllm_omni.entrypoints.openai.images import ImageService, ImageTask
from vllm_omni.entrypoints.openai.protocol import (
    ErrorResponse,
    ImageGenerationRequest,
    ImagesResponse,
)

EVENT_STREAM = "text/event-stream"


def make_router(images: ImageService) -> APIRouter:
    """The routes of pictures that are waited for."""
    router = APIRouter(tags=["images"], responses=ERROR_RESPONSES)

    @router.post(
        "/v1/images/generations",
        summary="Draw pictures",
        response_model=ImagesResponse,
        response_model_exclude_none=False,
        responses={200: {"content": {EVENT_STREAM: {"schema": {"type": "string"}}}}},
    )
    async def generate(body: ImageGenerationRequest, request: Request) -> Any:
        task = images.make_task(body, request.state.request_id, get_base_url(request))
        if body.stream:
            return await start_stream(request, to_events(images, task))
        response = await run_until_disconnect(request, images.generate(task))
        # Not through FastAPI's own check: it would go over megabytes of base64 in the event loop.
        return JSONResponse(response.model_dump(mode="json"))

    @router.post("/v1/images/edits", summary="Edit pictures", response_model=ImagesResponse)
    async def edit(
        prompt: Annotated[str, Form(min_length=1)],
        image: Annotated[list[UploadFile], File(description="One picture.")] = [],  # noqa: B006
        images_: Annotated[  # clients send lists under this name
            list[UploadFile], File(alias="image[]", description="Several pictures.")
        ] = [],  # noqa: B006
        model: Annotated[str | None, Form()] = None,
    ) -> Any:
        images.check_model(model)
        raise APIError(
            400,
            f"the model {images.model_name!r} does not edit pictures: it draws from a prompt "
            "(/v1/images/generations)",
            "model",
            "unsupported_operation",
        )

    return router


async def to_events(images: ImageService, task: ImageTask) -> AsyncGenerator[str, None]:
    """Server-sent events; one that goes wrong after the first ends with an `error` event."""
    async with aclosing(images.stream(task)) as events:
        async for event in events:
            yield f"event: {event.type}\ndata: {event.model_dump_json(exclude_none=True)}\n\n"


async def start_stream(request: Request, events: AsyncGenerator[str, None]) -> StreamingResponse:
    """Answer with a stream once its first event is there: until then an error has its status."""
    first = await run_until_disconnect(request, anext(events))

    async def with_first() -> AsyncGenerator[str, None]:
        async with aclosing(events):
            yield first
            try:
                async for event in events:
                    yield event
            except Exception as error:  # it is told, whatever it is: the status is sent already
                info = to_api_error(error).info
                yield f"event: error\ndata: {ErrorResponse(error=info).model_dump_json()}\n\n"

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(with_first(), media_type=EVENT_STREAM, headers=headers)


def get_base_url(request: Request) -> str:
    """As the client knows this server."""
    return str(request.base_url).rstrip("/")
