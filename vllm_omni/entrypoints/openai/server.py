"""The server as a process: its socket, its signals, and what it says when it starts."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import setproctitle
import uvicorn

import vllm_omni
from vllm_omni.config import DEMO, DiTConfig, OmniConfig, StageConfig
from vllm_omni.engine.async_llm import OmniAsyncLLM
from vllm_omni.entrypoints.openai.access import check_exposure, is_loopback
from vllm_omni.entrypoints.openai.app import OmniApp
from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_KEEP_ALIVE = 75  # seconds; longer than common proxies wait between two requests


def open_socket(config: ServerConfig) -> socket.socket:
    """Listen at once, so that a port in use is known before any model is loaded."""
    if (problem := check_exposure(config)) is not None:
        raise ConfigError("host", config.host, problem)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # TCP by name: asyncio switches Nagle's algorithm off only where it knows that it is TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise EngineError(f"cannot listen on {config.host}:{config.port}: {reason}") from error
    listener.listen(_BACKLOG)
    return listener


async def run_server(config: ServerConfig, omni_config: OmniConfig) -> int:
    """Load, serve until a signal comes, and let go; the answer is the exit code."""
    listener = open_socket(config)
    setproctitle.setproctitle("vllm-omni api")
    llm = OmniAsyncLLM(omni_config)
    try:
        model_name = get_model_name(config, omni_config)
        app = OmniApp(config, llm, model_name)
        try:
            return await _serve(app, listener)
        finally:
            app.shutdown()
    finally:
        llm.shutdown()


async def _serve(app: OmniApp, listener: socket.socket) -> int:
    server = _Server(app)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    warming_up = asyncio.create_task(app.health.warm_up())
    try:
        with server.handling_signals():
            print_report(app, listener)
            await asyncio.wait({serving, warming_up}, return_when=asyncio.FIRST_COMPLETED)
            if warming_up.done():
                warming_up.result()  # a model that cannot draw once cannot serve
                logger.info("ready")
            await serving
    finally:
        warming_up.cancel()
        server.should_exit = True
        await serving
    return 0


class _Server(uvicorn.Server):
    """uvicorn's, with signals that end the server instead of the process."""

    def __init__(self, app: OmniApp) -> None:
        config = uvicorn.Config(
            app.asgi,
            http="h11",  # the one that bounds headers while it reads them
            h11_max_incomplete_event_size=2 * app.config.max_header_bytes,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=round(app.config.shutdown_timeout),
        )
        super().__init__(config)
        self.page = app.page

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let go of the page's visitors while requests end: each tab holds a connection open."""
        stopping = asyncio.ensure_future(self.page.stop() if self.page else asyncio.sleep(0))
        try:
            await super().shutdown(sockets)
        finally:
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # uvicorn would send itself the signal again when all is done

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C let running requests finish; a second one does not."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for one in signals:
            loop.add_signal_handler(one, self.handle_exit, one, None)
        try:
            yield
        finally:
            for one in signals:
                loop.remove_signal_handler(one)


def get_model_name(config: ServerConfig, omni_config: OmniConfig) -> str:
    """The name that was given, "demo", or that of the checkpoint's folder."""
    if config.served_model_name:
        return config.served_model_name
    return DEMO if omni_config.model == DEMO else Path(omni_config.model).resolve().name


def print_report(app: OmniApp, listener: socket.socket) -> None:
    """A dozen lines on what runs here and how to use it."""
    config = app.config
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    key = ' -H "Authorization: Bearer $KEY"' if config.api_keys else ""
    keys = f"{len(config.api_keys)} API keys" if config.api_keys else "no API key"
    reach = "this machine only" if is_loopback(host) else "everybody who reaches it"
    rows = {
        "model": app.images.model_name,
        **{
            f"stage {client.stage.stage_id}": _describe_stage(client.stage)
            for client in app.llm.clients
        },
        "limits": (
            f"cost {config.max_cost:.3g} pixel-steps, {config.max_n} pictures a request, "
            f"{config.max_num_queued} requests at once"
        ),
        "access": f"{reach}, {keys}",
        "url": url,
        **({"page": f"{url}/ui"} if config.ui else {}),
        "try": (
            f"curl {url}/v1/images/generations{key} -H 'Content-Type: application/json' "
            """-d '{"prompt": "a red circle", "response_format": "url"}'"""
        ),
    }
    lines = [f"vLLM-omni {vllm_omni.__version__}"]
    lines += [f"  {name:<8} {value}" for name, value in rows.items()]
    print("\n".join(lines), flush=True)


def _describe_stage(stage: StageConfig) -> str:
    made = ", ".join(stage.output_modalities)
    if stage.engine_type == "ar":
        return f"vLLM: {made}"
    config = stage.dit_config or DiTConfig()
    where = f"device {config.device}, dtype {config.dtype}, at most {config.max_num_seqs} in a step"
    return f"diffusion: {made}; {where}"
