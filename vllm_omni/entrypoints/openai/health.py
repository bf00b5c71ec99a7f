"""Is it alive, is it ready: each route means what it says."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Path as InPath
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from vllm_omni.config import StageConfig
from vllm_omni.engine.async_llm import OmniAsyncLLM
from vllm_omni.engine.stage_client import StageHealth
from vllm_omni.entrypoints.openai.errors import (
    ERROR_RESPONSES,
    APIError,
    engine_down,
    shutting_down,
)
from vllm_omni.entrypoints.openai.protocol import ErrorInfo
from vllm_omni.params import SIZE_MULTIPLE, DiffusionParams
from vllm_omni.request import OmniRequest, OutputKind

MAX_STAGE_ID = 2**31 - 1
_WARM_UP_SIDE = 8 * SIZE_MULTIPLE  # pixels

Status = Literal["ok", "starting", "stopping", "unavailable"]
StageStatus = Literal["ok", "starting", "restarting", "failed"]


class HealthReport(BaseModel):
    status: Status
    stages: dict[str, StageStatus] = {}  # by name, such as "ar:0"


class UnavailableReport(HealthReport):
    """With status 503, as every error has one."""

    error: ErrorInfo


class StageReport(BaseModel):
    """One stage."""

    name: str
    status: StageStatus  # failed: it is given up, and the server ends
    num_restarts: int
    num_replayed: int  # requests that were run again, each time counted
    num_refused: int  # requests of which the stage died
    seconds_since_beat: float | None  # its last sign of life; None: it gives none


class UnavailableStageReport(StageReport):
    """With status 503."""

    error: ErrorInfo


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

    def describe_stages(self) -> dict[int, StageReport]:
        """How each stage is, as its supervisor knows: nobody is asked, so that nobody waits."""
        return {
            client.stage.stage_id: _describe(client.stage, client.health)
            for client in self.llm.clients
        }

    async def _run(self, request: OmniRequest) -> None:
        request.output_kind = OutputKind.FINAL_ONLY
        async for _ in self.llm.generate(request):
            pass


def _describe(stage: StageConfig, health: StageHealth) -> StageReport:
    beat = health.seconds_since_beat
    return StageReport(
        name=f"{stage.engine_type}:{stage.stage_id}",
        status="ok" if health.state == "ready" else health.state,
        num_restarts=health.num_restarts,
        num_replayed=health.num_replayed,
        num_refused=health.num_refused,
        seconds_since_beat=None if beat is None else round(beat, 1),
    )


def make_router(health: Health) -> APIRouter:
    """/health, /health/live, /health/ready, /health/stages/{stage_id}."""
    router = APIRouter(tags=["health"])
    unavailable: dict[int | str, dict[str, Any]] = {
        503: {"model": UnavailableReport, "description": "Not now; see Retry-After."}
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
        return _answer("ok")

    @router.get(
        "/health/ready",
        summary="Whether requests can be sent: every stage works, and has worked once",
        response_model=HealthReport,
        responses=unavailable,
    )
    async def ready() -> Any:
        if health.is_stopping:
            return _answer("stopping")
        return _answer("ok" if health.is_warm else "starting")

    @router.get(
        "/health/stages/{stage_id}",
        summary="Whether one stage works, and what it has been through",
        response_model=StageReport,
        responses={
            404: ERROR_RESPONSES[404],
            503: {"model": UnavailableStageReport, "description": "Not now; see Retry-After."},
        },
    )
    async def stage(stage_id: Annotated[int, InPath(ge=0, le=MAX_STAGE_ID)]) -> Any:
        if (report := health.describe_stages().get(stage_id)) is None:
            raise APIError(404, f"no such stage: {stage_id}", "stage_id")
        if report.status == "ok":
            return _respond(report)
        message = f"the stage {report.name} does not work now: {report.status}"
        return _respond(report, APIError(503, message, code="engine_unavailable"))

    def _answer(status: Status) -> JSONResponse:
        stages = {stage.name: stage.status for stage in health.describe_stages().values()}
        is_up = all(state == "ok" for state in stages.values())
        report = HealthReport(status=status if is_up else "unavailable", stages=stages)
        return _respond(report, _explain(report.status))

    return router


def _explain(status: Status) -> APIError | None:
    if status == "ok":
        return None
    if status == "stopping":
        return shutting_down()
    if status == "starting":
        return APIError(503, "the server is starting", code="starting")
    return engine_down()


def _respond(report: BaseModel, error: APIError | None = None) -> JSONResponse:
    if error is None:
        return JSONResponse(report.model_dump())
    content = {**report.model_dump(), "error": error.info.model_dump()}
    return JSONResponse(content, error.status, headers=error.headers)
