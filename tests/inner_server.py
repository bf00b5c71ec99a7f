"""The server inside the test's own process, behind a real socket: its inside can be looked at."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import SO_SNDBUF, SOL_SOCKET, create_server
from typing import Any, TypeVar

import uvicorn

from vllm_omni.engine.async_llm import OmniAsyncLLM
from vllm_omni.entrypoints.openai.app import OmniApp
from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.entrypoints.openai.server import make_uvicorn_config

MODEL = "tiny"
TIMEOUT = 120.0  # seconds, of anything that is called

T = TypeVar("T")


class InnerServer:
    """One `OmniAsyncLLM` in an event loop of its own thread, and servers over it."""

    def __init__(self, model: Path, **settings: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="inner server")
        self._thread.start()
        self.llm = self.call(self._start(model, settings))

    async def _start(self, model: Path, settings: dict[str, Any]) -> OmniAsyncLLM:
        return OmniAsyncLLM.from_pretrained(str(model), mode="process", device="cpu", **settings)

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float = TIMEOUT) -> T:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def look(self, function: Callable[[], T]) -> T:
        """What a function gives when no other code of the loop is running."""

        async def call() -> T:
            return function()

        return self.call(call())

    @contextmanager
    def serve(self, **config: Any) -> Iterator[Served]:
        """A server over the engine, with settings of its own."""
        served = self.call(self._serve(ServerConfig(**config)))
        try:
            yield served
        finally:
            self.call(self._stop(served))

    async def _serve(self, config: ServerConfig) -> Served:
        app = OmniApp(config, self.llm, MODEL)
        app.jobs.resume()
        listener = create_server((config.host, 0))
        listener.setsockopt(SOL_SOCKET, SO_SNDBUF, 16 * 2**10)  # what is not read waits in the app
        server = uvicorn.Server(make_uvicorn_config(app))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        return Served(app, server, serving, listener.getsockname()[1])

    async def _stop(self, served: Served) -> None:
        served.server.should_exit = True
        await served.serving
        served.app.shutdown()

    def shutdown(self) -> None:
        self.look(self.llm.shutdown)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(TIMEOUT)
        self.loop.close()


class Served:
    """An app on a port."""

    def __init__(
        self, app: OmniApp, server: uvicorn.Server, serving: asyncio.Task[None], port: int
    ) -> None:
        self.app = app
        self.server = server
        self.serving = serving
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
