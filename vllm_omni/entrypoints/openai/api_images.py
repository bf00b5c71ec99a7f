"""Routes: POST /v1/images/generations, POST /v1/images/edits."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Request, Response, UploadFile
from pydantic import BaseModel

from vllm_omni.entrypoints.openai.disconnect import run_until_disconnect
from vllm_omni.entrypoints.openai.errors import ERROR_RESPONSES, APIError
from vllm_omni.entrypoints.openai.event_stream import describe_events, start_stream
from vllm_omni.entrypoints.openai.images import ImageService, ImageTask, StepsDone
from vllm_omni.entrypoints.openai.protocol import (
    CompletedEvent,
    ImageGenerationRequest,
    ImagesResponse,
    PartialImageEvent,
)
from vllm_omni.entrypoints.openai.retries import HEADER, REPLAYED, Retries, RetryKey


def make_router(images: ImageService, retries: Retries) -> APIRouter:
    """The routes of pictures that are waited for."""
    router = APIRouter(tags=["images"], responses=ERROR_RESPONSES)

    @router.post(
        "/v1/images/generations",
        summary="Draw pictures",
        response_model=ImagesResponse,
        responses={200: describe_events(PartialImageEvent, CompletedEvent)},
    )
    async def generate(
        body: ImageGenerationRequest, request: Request, idempotency_key: RetryKey = None
    ) -> Any:
        url = get_base_url(request)
        state = request.state
        task = images.make_task(body, state.request_id, url, request.headers, state.owner)
        if idempotency_key is not None:
            return await generate_once(body, task, request, idempotency_key)
        if body.stream:
            return await start_stream(request, to_events(images, task))
        return to_response(await run_until_disconnect(request, images.generate(task)))

    async def generate_once(
        body: ImageGenerationRequest, task: ImageTask, request: Request, key: str
    ) -> Response:
        if body.stream:
            message = f"{HEADER} is for answers that come at once: not with stream=true"
            raise APIError(400, message, HEADER, "invalid_value")

        async def draw() -> bytes:
            return (await images.generate(task)).model_dump_json().encode()

        work = retries.run(task.owner, key, body, draw)
        answer, is_known = await run_until_disconnect(request, work)
        headers = {REPLAYED: "true"} if is_known else None
        return Response(answer, media_type="application/json", headers=headers)

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


def to_response(answer: BaseModel) -> Response:
    """An answer that may have megabytes: FastAPI's own way would go over them several times."""
    return Response(answer.model_dump_json(), media_type="application/json")


async def to_events(images: ImageService, task: ImageTask) -> AsyncGenerator[str, None]:
    """Server-sent events, each a name and one line of JSON; steps are comments between them."""
    async with aclosing(images.stream(task)) as events:
        async for event in events:
            if isinstance(event, StepsDone):
                yield f": step {event.step} of {event.num_steps}\n\n"
            else:
                yield f"event: {event.type}\ndata: {event.model_dump_json(exclude_none=True)}\n\n"


def get_base_url(request: Request) -> str:
    """As the client knows this server."""
    return str(request.base_url).rstrip("/")
