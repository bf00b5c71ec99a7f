"""Is it alive, is it ready: each route means what it says."""

from __future__ import annotations

import logging
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from vllm_omni.engine.async_llm import OmniAsyncLLM
from vllm_omni.entrypoints.openai.errors import RETRY_AFTER
from vllm_omni.errors import EngineError
from vllm_omni.params import SIZE_MULTIPLE, DiffusionParams
from vllm_omni.request import OmniRequest, OutputKind

logger = logging.getLogger(__name__)

_WARM_UP_SIDE = 8 * SIZE_MULTIPLE  # pixels


Status = Literal["ok", "starting", "stopping", "unavailable"]


class HealthReport(BaseModel):
    status: Status
    stages: dict[str, str] = {}  # "ar:0" -> "ok", or what is wrong


class Health:
    """What the probes ask."""

    def __init__(self, llm: OmniAsyncLLM) -> None:
        self.llm = llm
        self.is_warm = False
        self.is_stopping = False

    async def warm_up(self) -> None:
        """One small request of each kind, so that every stage has worked once."""
        made = {m for stage in self.llm.stage_configs for m in stage.output_modalities}
        if "image" in made:
            side = _WARM_UP_SIDE
            params = DiffusionParams(height=side, width=side, num_inference_steps=1, seed=0)
            await self._run(OmniRequest(prompt="a circle", params=params))
        if "text" in made:
            await self._run(
                OmniRequest(
                    prompt="a circle", output_format="text", sampling_params={"max_tokens": 2}
                )
            )
        self.is_warm = True

    async def check_stages(self) -> dict[str, str]:
        """What each stage says; "ok" of those that work."""
        report = {}
        for client in self.llm.clients:
            name = f"{client.stage.engine_type}:{client.stage.stage_id}"
            try:
                await client.check_health()
                report[name] = "ok"
            except EngineError:
                report[name] = "unavailable"
        return report

    async def _run(self, request: OmniRequest) -> None:
        request.output_kind = OutputKind.FINAL_ONLY
        async for _ in self.llm.generate(request):
            pass


def make_router(health: Health) -> APIRouter:
    """/health, /health/live, /health/ready."""
    router = APIRouter(tags=["health"])
    unavailable: dict[int | str, dict[str, Any]] = {
        503: {"model": HealthReport, "description": "Not now; see Retry-After."}
    }

    @router.get("/health/live", summary="Whether this process answers", response_model=HealthReport)
    async def live() -> Any:
        return HealthReport(status="ok")

    @router.get(
        "/health",
        summary="Whether every stage works",
        response_model=HealthReport,
        responses=unavailable,
    )
    async def alive() -> Any:
        return await _answer("ok")

    @router.get(
        "/health/ready",
        summary="Whether requests can be sent: every stage works, and has worked once",
        response_model=HealthReport,
        responses=unavailable,
    )
    async def ready() -> Any:
        if health.is_stopping:
            return await _answer("stopping")
        return await _answer("ok" if health.is_warm else "starting")

    async def _answer(status: Status) -> JSONResponse:
        stages = await health.check_stages()
        is_up = all(state == "ok" for state in stages.values())
        report = HealthReport(status=status if is_up else "unavailable", stages=stages)
        if report.status == "ok":
            return JSONResponse(report.model_dump())
        return JSONResponse(report.model_dump(), 503, headers={"Retry-After": str(RETRY_AFTER)})

    return router
