"""`build_app`: all routes over one `OmniAsyncLLM`, behind the one door of `access.py`."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

from fastapi import FastAPI

import vllm_omni
from vllm_omni.apps.gradio import mount_page
from vllm_omni.engine.async_llm import OmniAsyncLLM
from vllm_omni.engine.stages import make_dit_config
from vllm_omni.entrypoints.openai import (
    api_images,
    chat,
    errors,
    files,
    health,
    jobs,
    metrics,
    models,
    timeline,
)
from vllm_omni.entrypoints.openai.access import AccessMiddleware
from vllm_omni.entrypoints.openai.admission import Admission
from vllm_omni.entrypoints.openai.chat import TextService
from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.entrypoints.openai.document import DocumentedAPI
from vllm_omni.entrypoints.openai.encoding import ImageEncoder
from vllm_omni.entrypoints.openai.files import FileStore
from vllm_omni.entrypoints.openai.health import Health
from vllm_omni.entrypoints.openai.images import ImageService
from vllm_omni.entrypoints.openai.jobs import JobStore
from vllm_omni.entrypoints.openai.journal import JobJournal
from vllm_omni.entrypoints.openai.metrics import ServerMetrics
from vllm_omni.entrypoints.openai.retries import Retries
from vllm_omni.entrypoints.openai.timeline import TimelineStore
from vllm_omni.entrypoints.openai.tracing import Tracer
from vllm_omni.params import DiffusionParams
from vllm_omni.timeline import RequestTimeline

_DRAWING = ("/v1/images/generations", "/v1/images/jobs")


class OmniApp:
    """The parts of a server, and the ASGI application made of them."""

    def __init__(self, config: ServerConfig, llm: OmniAsyncLLM, model_name: str) -> None:
        if any("image" in stage.output_modalities for stage in llm.stage_configs):
            params = llm.processor.complete_params(DiffusionParams())
            config = config.with_defaults(params, _get_max_num_seqs(llm))
        self.config = config
        self.llm = llm
        self.health = Health(llm)
        self.metrics = ServerMetrics(llm.stage_configs)
        self.timelines = TimelineStore()
        endpoint = config.otlp_traces_endpoint
        self.tracer = Tracer(endpoint) if endpoint else None
        self._listen()
        self.images = ImageService(
            config,
            llm,
            model_name,
            self._make_admission(),
            ImageEncoder(),
            FileStore(config.url_ttl, config.max_files_bytes),
            self.tracer,
        )
        self.text = TextService(config, llm, self.images, model_name)
        self.images.admission.on_shed = self.metrics.observe_shed
        self.text.admission.on_shed = lambda _: self.metrics.observe_shed("text")
        journal = JobJournal(Path(config.state_dir)) if config.state_dir else None
        self.jobs = JobStore(self.images, journal=journal)
        self.api = self._make_api()
        self.page = mount_page(self.api) if config.ui else None
        self.door = AccessMiddleware(self.api, config, self.metrics.observe_http)
        self.door.check_place = self._check_place

    def _make_admission(self) -> Admission:
        config = self.config
        return Admission(
            config.max_num_queued,
            max_cost=config.max_queued_cost or math.inf,
            max_num_running=config.max_num_running or math.inf,
            owners=config.owners,
        )

    def _check_place(self, path: str, owner: str) -> None:
        if path in _DRAWING:
            self.images.admission.check_place(owner)

    def _listen(self) -> None:
        """Have the engine tell what it does."""
        for client in self.llm.clients:
            client.on_step = partial(self.metrics.observe_step, client.stage.stage_id)
        coordinator = self.llm.coordinator
        coordinator.on_finished = self._note_end
        self.metrics.track_requests(lambda: coordinator.num_requests)
        self.metrics.track_prompt_cache(coordinator.prompt_cache)

    def _note_end(self, ended: RequestTimeline) -> None:
        self.metrics.observe_request(ended)
        self.timelines.add(ended)
        if self.tracer is not None:
            self.tracer.finish(ended)

    def _make_api(self) -> FastAPI:
        config = self.config
        api = DocumentedAPI(
            needs_key=bool(config.api_keys),
            title="vLLM-omni",
            version=vllm_omni.__version__,
            summary="Models whose answer is more than text, in OpenAI's shapes",
            docs_url=None,  # its page would load scripts from elsewhere
            redoc_url=None,
            openapi_url="/openapi.json",
        )
        errors.install(api)
        api.include_router(health.make_router(self.health))
        api.include_router(models.make_router(self.images))
        api.include_router(api_images.make_router(self.images, Retries(config.idempotency_ttl)))
        api.include_router(jobs.make_router(self.jobs))
        api.include_router(files.make_router(self.images.files))
        api.include_router(chat.make_router(self.text))
        api.include_router(metrics.make_router(self.metrics, self.llm.clients))
        api.include_router(timeline.make_router(self.timelines))
        return api

    def shutdown(self) -> None:
        """End what nobody waits for any more."""
        self.jobs.shutdown()
        self.text.shutdown()
        self.images.encoder.shutdown()
        if self.page is not None:
            self.page.close()
        if self.tracer is not None:
            self.tracer.shutdown()


def _get_max_num_seqs(llm: OmniAsyncLLM) -> int:
    """Pictures in one step, over all stages that draw."""
    drawing = [stage for stage in llm.stage_configs if stage.engine_type == "diffusion"]
    return sum(make_dit_config(stage).max_num_seqs for stage in drawing)
