"""`build_app`: all routes over one `OmniAsyncLLM`, behind the one door of `access.py`."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import vllm_omni
from vllm_omni.apps.gradio import mount_page
from vllm_omni.engine.async_llm import OmniAsyncLLM
from vllm_omni.entrypoints.openai import api_images, chat, errors, files, health, jobs, models
from vllm_omni.entrypoints.openai.access import REQUEST_ID, AccessMiddleware
from vllm_omni.entrypoints.openai.chat import TextService
from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.entrypoints.openai.encoding import ImageEncoder
from vllm_omni.entrypoints.openai.files import FileStore
from vllm_omni.entrypoints.openai.health import Health
from vllm_omni.entrypoints.openai.images import ImageService
from vllm_omni.entrypoints.openai.jobs import JobStore
from vllm_omni.entrypoints.openai.limits import Admission
from vllm_omni.params import DiffusionParams


class OmniApp:
    """The parts of a server, and the ASGI application made of them."""

    def __init__(self, config: ServerConfig, llm: OmniAsyncLLM, model_name: str) -> None:
        if any("image" in stage.output_modalities for stage in llm.stage_configs):
            config = config.with_defaults(llm.processor.complete_params(DiffusionParams()))
        self.config = config
        self.llm = llm
        self.health = Health(llm)
        self.images = ImageService(
            config,
            llm,
            model_name,
            Admission(config.max_num_queued),
            ImageEncoder(),
            FileStore(config.url_ttl, config.max_files_bytes),
        )
        self.text = TextService(config, llm, self.images, model_name)
        self.jobs = JobStore(self.images)
        self.api = self._make_api()
        self.page = mount_page(self.api) if config.ui else None
        self.asgi = self._close_door()

    def _make_api(self) -> FastAPI:
        api = FastAPI(
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
        api.include_router(api_images.make_router(self.images))
        api.include_router(jobs.make_router(self.jobs))
        api.include_router(files.make_router(self.images.files))
        api.include_router(chat.make_router(self.text))
        return api

    def _close_door(self) -> ASGIApp:
        asgi: ASGIApp = AccessMiddleware(self.api, self.config)
        if self.config.allowed_origins:
            # Outside the door: a browser asks first, without a key, whether it may ask.
            asgi = CORSMiddleware(
                asgi,
                allow_origins=self.config.allowed_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["Authorization", "Content-Type"],
                expose_headers=[REQUEST_ID, "Retry-After"],
            )
        return asgi

    def shutdown(self) -> None:
        """End what nobody waits for any more."""
        self.jobs.shutdown()
        self.text.shutdown()
        self.images.encoder.shutdown()
