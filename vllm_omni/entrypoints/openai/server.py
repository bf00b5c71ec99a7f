"""The server as a process: how it starts, and how signals end it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from vllm_omni.config import DEMO, OmniConfig
from vllm_omni.engine.async_llm import OmniAsyncLLM
from vllm_omni.entrypoints.openai.app import OmniApp
from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.entrypoints.openai.connection import Connection
from vllm_omni.entrypoints.openai.report import make_report

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_KEEP_ALIVE = 75  # seconds; longer than common proxies wait between two requests
_LAST_WORDS = 2  # seconds for answers to go out once nothing more is waited for
_PERIOD = 0.05  # seconds between looks at what is still under way


async def run_server(config: ServerConfig, omni_config: OmniConfig, listener: socket.socket) -> int:
    """Load, serve until a signal comes, and let go; the answer is the exit code.

    Raises `EngineDeadError` where a stage was given up.
    """
    llm = OmniAsyncLLM(omni_config)
    try:
        app = OmniApp(config, llm, get_model_name(config, omni_config))
        try:
            await _serve(app, listener)
        finally:
            app.shutdown()
        if llm.failure is not None:
            raise llm.failure
    finally:
        llm.shutdown()
    return 0


def get_model_name(config: ServerConfig, omni_config: OmniConfig) -> str:
    """The name that was given, "demo", or that of the checkpoint's folder."""
    if config.served_model_name:
        return config.served_model_name
    return DEMO if omni_config.model == DEMO else Path(omni_config.model).resolve().name


async def _serve(app: OmniApp, listener: socket.socket) -> None:
    server = _Server(app)
    app.jobs.resume()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    ending = asyncio.create_task(server.end_when_told())
    warming_up = asyncio.create_task(app.health.warm_up())
    try:
        _say(await make_report(app, listener))
        await asyncio.wait({serving, warming_up}, return_when=asyncio.FIRST_COMPLETED)
        if warming_up.done():
            warming_up.result()  # a model that cannot draw once cannot serve
            if not app.health.is_stopping:
                logger.info("ready")
        await serving
    finally:
        warming_up.cancel()
        ending.cancel()
        server.should_exit = True
        await asyncio.gather(serving, warming_up, ending, return_exceptions=True)


def _say(report: str) -> None:
    """On stdout, past its buffer: a full disk, or nobody who reads, is no reason not to serve."""
    try:
        os.write(sys.stdout.fileno(), f"{report}\n".encode())
    except OSError as error:
        logger.warning("stdout takes nothing: %s", error)


def make_uvicorn_config(app: OmniApp) -> uvicorn.Config:
    """With our connections, our log and nothing that could be reached beside the door."""
    return uvicorn.Config(
        app.door,
        http=partial(Connection, app.config),  # type: ignore[arg-type]
        ws="none",
        h11_max_incomplete_event_size=2 * app.config.max_header_bytes,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=_LAST_WORDS,
    )


class _Server(uvicorn.Server):
    """uvicorn's, that ends in the way of `end_when_told`."""

    def __init__(self, app: OmniApp) -> None:
        super().__init__(make_uvicorn_config(app))
        self.app = app
        self.num_signals = 0

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Count them; uvicorn would also send them to itself again when all is done."""
        loop = asyncio.get_running_loop()
        for one in _SIGNALS:
            loop.add_signal_handler(one, self._count_signal)
        yield  # and go on counting: letting go is not to be disturbed

    def _count_signal(self) -> None:
        self.num_signals += 1

    @property
    def is_busy(self) -> bool:
        """Whether somebody waits for an answer or has not read all of it, or a job runs."""
        if self.app.door.num_working > 0 or self.app.images.admission.tickets:
            return True
        return any(_has_unsent(connection) for connection in self.server_state.connections)

    async def end_when_told(self) -> None:
        """At a signal, let what runs finish, for a while; at the second, for no longer.

        Where a stage is given up it is the same, without a signal: those who do not need it finish.
        """
        while self.num_signals == 0 and self.app.llm.failure is None:
            await asyncio.sleep(_PERIOD)
        if self.app.llm.failure is not None:
            logger.error("giving up: %s", self.app.llm.failure)
        logger.info("shutting down")
        self.app.health.is_stopping = True
        self.app.door.is_closing = True
        self.app.jobs.suspend()
        deadline = time.monotonic() + self.app.config.shutdown_timeout
        while self.is_busy and self.num_signals < 2 and time.monotonic() < deadline:
            await asyncio.sleep(_PERIOD)
        self.app.door.answer_all()
        self.should_exit = True


def _has_unsent(connection: Any) -> bool:
    return isinstance(connection, Connection) and connection.has_unsent
