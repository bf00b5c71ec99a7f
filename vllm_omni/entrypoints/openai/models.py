"""GET /v1/models and GET /v1/queue: what this server can do, and how busy it is."""

from __future__ import annotations

import time
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel

from vllm_omni.engine.async_llm import OmniAsyncLLM
from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.entrypoints.openai.errors import ERROR_RESPONSES, APIError
from vllm_omni.entrypoints.openai.images import ImageService
from vllm_omni.params import MAX_SIDE, SIZE_MULTIPLE, DiffusionParams


class Capabilities(BaseModel):
    """What may be asked of a model here."""

    input_modalities: list[str]
    output_modalities: list[str]
    default_size: str | None = None
    default_steps: int | None = None
    size_multiple: int | None = None
    max_side: int | None = None
    max_pixels: int
    max_cost: int
    max_n: int
    can_edit: bool = False


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "vllm-omni"
    capabilities: Capabilities


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class QueueReport(BaseModel):
    running: int
    waiting: int
    max_num_queued: int
    pixel_steps_per_second: float | None  # None until it was measured
    estimated_wait_seconds: float


def describe(config: ServerConfig, llm: OmniAsyncLLM) -> Capabilities:
    """From the stages that run, and the model's own defaults."""
    made = sorted({m for stage in llm.stage_configs for m in stage.output_modalities})
    outputs: list[str] = [modality for modality in ("text", "image") if modality in made]
    first = llm.stage_configs[0]
    capabilities = Capabilities(
        input_modalities=list(first.input_modalities),
        output_modalities=outputs,
        max_pixels=config.max_pixels,
        max_cost=config.max_cost,
        max_n=config.max_n,
    )
    if "image" in outputs:
        defaults = llm.processor.complete_params(DiffusionParams())
        capabilities.default_size = f"{defaults.width}x{defaults.height}"
        capabilities.default_steps = defaults.num_inference_steps
        capabilities.size_multiple, capabilities.max_side = SIZE_MULTIPLE, MAX_SIDE
    return capabilities


def make_router(images: ImageService) -> APIRouter:
    """The routes that only tell."""
    router = APIRouter(tags=["models"], responses=ERROR_RESPONSES)
    model = Model(
        id=images.model_name,
        created=int(time.time()),
        capabilities=describe(images.config, images.llm),
    )

    @router.get("/v1/models", summary="The models, with what each can do", response_model=ModelList)
    async def list_models() -> Any:
        return ModelList(data=[model])

    @router.get("/v1/models/{model_id:path}", summary="One model", response_model=Model)
    async def get_model(model_id: str) -> Any:
        if model_id != model.id:
            raise APIError(404, f"no such model: {model_id[:200]!r}", "model", "model_not_found")
        return model

    @router.get("/v1/queue", summary="How busy the server is", response_model=QueueReport)
    async def get_queue() -> Any:
        admission = images.admission
        return QueueReport(
            running=admission.num_running,
            waiting=admission.num_waiting,
            max_num_queued=admission.max_num_queued,
            pixel_steps_per_second=admission.measured_speed,
            estimated_wait_seconds=admission.estimate(),
        )

    return router
