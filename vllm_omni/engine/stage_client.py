"""`StageClient`: one contract for every kind of stage, wherever it runs."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from vllm_omni.config import StageConfig
from vllm_omni.engine.core import OmniEngineCore
from vllm_omni.errors import DeadlineExceededError, EngineDeadError, InvalidParameterError
from vllm_omni.outputs import EngineCoreOutput

logger = logging.getLogger(__name__)

R = TypeVar("R")


class StageClient(ABC):
    """The way to one stage, for one event loop. Requests are the stage's own: AR or diffusion."""

    def __init__(self, stage: StageConfig) -> None:
        self.stage = stage
        self._queues: dict[str, asyncio.Queue[EngineCoreOutput | Exception]] = {}

    async def outputs(
        self, requests: Sequence[Any], expires_at: float | None = None
    ) -> AsyncGenerator[EngineCoreOutput, None]:
        """Add requests and yield the news of all, until each has ended.

        Whoever leaves early, for whatever reason, takes the requests out of the stage.

        Args:
            expires_at: `time.monotonic()` at which to give up with `DeadlineExceededError`.
        """
        queue: asyncio.Queue[EngineCoreOutput | Exception] = asyncio.Queue()
        unfinished: set[str] = set()
        try:
            for request in requests:
                if request.request_id in self._queues:
                    raise InvalidParameterError(
                        "request_id", request.request_id, "one that is not in use"
                    )
                self._queues[request.request_id] = queue
                unfinished.add(request.request_id)
                await self.add_request(request)
            while unfinished:
                output = await self._get(queue, expires_at)
                if output.finished:
                    unfinished.remove(output.request_id)
                yield output
        finally:
            for request_id in unfinished:
                self._queues.pop(request_id, None)
            if unfinished:
                await self.abort(unfinished)

    @abstractmethod
    async def add_request(self, request: Any) -> None:
        """Queue a request; raises an `OmniRequestError` if it can never run."""

    @abstractmethod
    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests before the next step; each gets a final output. Others are passed over."""

    @abstractmethod
    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the stage cannot work any more."""

    @abstractmethod
    async def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker of the stage."""

    @abstractmethod
    def shutdown(self) -> None:
        """Let go of the stage. May be called twice."""

    def deliver(self, output: EngineCoreOutput) -> None:
        """Pass on news; nobody waits any more for that of a request that was left."""
        if (queue := self._queues.get(output.request_id)) is not None:
            if output.finished:
                del self._queues[output.request_id]
            queue.put_nowait(output)

    def fail(self, error: Exception) -> None:
        """End every request of the stage with an error."""
        for queue in self._queues.values():
            queue.put_nowait(error)
        self._queues.clear()

    async def _get(
        self, queue: asyncio.Queue[EngineCoreOutput | Exception], expires_at: float | None
    ) -> EngineCoreOutput:
        timeout = None if expires_at is None else max(0.0, expires_at - time.monotonic())
        try:
            async with asyncio.timeout(timeout):
                output = await queue.get()
        except TimeoutError:
            raise DeadlineExceededError(
                f"the deadline passed in stage {self.stage.stage_id} ({self.stage.engine_type})"
            ) from None
        if isinstance(output, Exception):
            raise output
        return output


class EmbeddedCore:
    """An `OmniEngineCore` in a thread of its own, which is stepped while it has work."""

    def __init__(self, engine_core: OmniEngineCore) -> None:
        self.engine_core = engine_core
        self.clients = {
            stage_id: EmbeddedStageClient(stage, self)
            for stage_id, stage in engine_core.stage_configs.items()
        }
        # The one thread is also the lock: between two steps it does what else is asked of it.
        self._thread = ThreadPoolExecutor(1, "vllm-omni-core", _take_over_thread_count)
        self._stepping: asyncio.Task[None] | None = None
        self.is_shut_down = False

    async def call(self, function: Callable[..., R], *args: Any) -> R:
        """Run a function of the core in its thread, after the step that is under way."""
        if self.is_shut_down:
            raise EngineDeadError("the engine was shut down: make a new one")
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def wake(self) -> None:
        """Step until there is nothing left to do."""
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_while_busy())

    def shutdown(self) -> None:
        if self.is_shut_down:
            return
        self.is_shut_down = True
        if self._stepping is not None:
            self._stepping.cancel()
        for client in self.clients.values():
            client.fail(EngineDeadError("the engine was shut down"))
        self._thread.submit(self.engine_core.shutdown).result()
        self._thread.shutdown()

    async def _step_while_busy(self) -> None:
        try:
            while self.engine_core.has_requests():
                news, _ = await self.call(self.engine_core.step)
                for stage_id, outputs in news.items():
                    for output in outputs.outputs:
                        self.clients[stage_id].deliver(output)
                for stage_id, error in self.engine_core.dead_stages.items():
                    self.clients[stage_id].fail(error)
        except Exception as error:  # a mistake of ours, and nobody knows what state it left
            logger.exception("the engine failed")
            for client in self.clients.values():
                client.fail(EngineDeadError(f"the engine failed: {type(error).__name__}: {error}"))


def _take_over_thread_count() -> None:
    """OpenMP has a thread count for each thread that uses it; vLLM's kernels insist on torch's."""
    torch.set_num_threads(torch.get_num_threads())


class EmbeddedStageClient(StageClient):
    """A stage inside an `OmniEngineCore` of this process."""

    def __init__(self, stage: StageConfig, embedded: EmbeddedCore) -> None:
        super().__init__(stage)
        self.embedded = embedded

    async def add_request(self, request: Any) -> None:
        await self.embedded.call(
            self.embedded.engine_core.add_request, self.stage.stage_id, request
        )
        self.embedded.wake()

    async def abort(self, request_ids: Iterable[str]) -> None:
        if not self.embedded.is_shut_down:
            await self.embedded.call(
                self.embedded.engine_core.abort_requests, self.stage.stage_id, list(request_ids)
            )
            self.embedded.wake()

    async def check_health(self) -> None:
        await self.embedded.call(self.embedded.engine_core.check_health, self.stage.stage_id)

    async def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        executor = self.embedded.engine_core.executor
        return await self.embedded.call(executor.collective_rpc, self.stage.stage_id, method, *args)

    def shutdown(self) -> None:
        self.embedded.shutdown()
