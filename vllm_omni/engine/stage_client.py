"""`StageClient`: one contract for every kind of stage, wherever it runs."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

import torch

from vllm_omni.config import StageConfig
from vllm_omni.engine.core import OmniEngineCore
from vllm_omni.errors import DeadlineExceededError, EngineDeadError, InvalidParameterError
from vllm_omni.outputs import EngineCoreOutput, EngineCoreOutputs, StepStats

logger = logging.getLogger(__name__)

R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class StageHealth:
    """How a stage is, and what it has been through."""

    state: Literal["starting", "ready", "restarting", "failed"]
    num_restarts: int = 0
    pid: int | None = None  # of its process, if it has one of its own
    seconds_since_beat: float | None = None
    cause: str = ""  # of its last death
    num_replayed: int = 0  # requests that were run again, each time counted
    num_refused: int = 0  # because the stage died of them


class StageClient(ABC):
    """The way to one stage, for one event loop. Requests are the stage's own: AR or diffusion."""

    def __init__(self, stage: StageConfig) -> None:
        self.stage = stage
        self.failure: EngineDeadError | None = None  # why it will never work again
        # Called after every step of a diffusion stage, in the event loop's thread. (What an AR
        # stage does, vLLM's own metrics say.)
        self.on_step: Callable[[StepStats], None] | None = None
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

    @property
    @abstractmethod
    def health(self) -> StageHealth:
        """How the stage is; asks nobody."""

    @abstractmethod
    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the stage does not work now; see `failure` for ever."""

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

    def deliver_step(self, outputs: Iterable[EngineCoreOutput], stats: StepStats | None) -> None:
        """Pass on all news of one step."""
        if stats is not None:
            notify(self.on_step, stats)
        for output in outputs:
            output.step_stats = stats
            self.deliver(output)

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


def notify(listener: Callable[[T], None] | None, news: T) -> None:
    """Tell a listener; whoever only watches must not hurt what it watches."""
    if listener is None:
        return
    try:
        listener(news)
    except Exception:
        logger.exception("a listener failed")


@dataclass(frozen=True, eq=False)
class Call:
    """A function that the core's thread is to call between two steps."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    future: asyncio.Future[Any]

    def run(self) -> None:
        try:
            result = self.function(*self.args)
        except Exception as error:  # goes to whoever called
            self.fail(error)
        else:
            self._settle(lambda: self.future.set_result(result))

    def fail(self, error: Exception) -> None:
        self._settle(lambda: self.future.set_exception(error))

    def _settle(self, settle: Callable[[], None]) -> None:
        """In the caller's thread, unless the caller has been cancelled."""
        loop = self.future.get_loop()
        _post(loop, lambda: None if self.future.done() else settle())


class EmbeddedCore:
    """An `OmniEngineCore` in a thread of its own, which steps it while it has work.

    The thread does not wait for the event loop: news are posted, and the next step begins.
    """

    def __init__(self, engine_core: OmniEngineCore) -> None:
        self.engine_core = engine_core
        self.clients = {
            stage_id: EmbeddedStageClient(stage, self)
            for stage_id, stage in engine_core.stage_configs.items()
        }
        self.is_shut_down = False
        self._calls: SimpleQueue[Call | None] = SimpleQueue()  # None: the end
        self._loop: asyncio.AbstractEventLoop | None = None  # of the last call
        self._thread = threading.Thread(target=self._run, name="vllm-omni-core", daemon=True)
        self._thread.start()

    async def call(self, function: Callable[..., R], *args: Any) -> R:
        """Run a function of the core in its thread, after the step that is under way."""
        if self.is_shut_down:
            raise EngineDeadError("the engine was shut down: make a new one")
        self._loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = self._loop.create_future()
        self._calls.put(Call(function, args, future))
        return await future

    def shutdown(self) -> None:
        if self.is_shut_down:
            return
        self.is_shut_down = True
        self._calls.put(None)
        self._thread.join()
        for client in self.clients.values():
            client.fail(EngineDeadError("the engine was shut down"))

    def _run(self) -> None:
        _take_over_thread_count()
        while True:
            # 1. What is asked for between two steps; while there is nothing to step, wait for it.
            while not self._calls.empty() or not self.engine_core.has_requests():
                call = self._calls.get()
                if call is None:
                    self._end()
                    return
                call.run()
            # 2. One step.
            assert self._loop is not None  # whoever added the request has called
            try:
                news, _ = self.engine_core.step()
            except Exception as error:  # a mistake of ours, and nobody knows what state it left
                logger.exception("the engine failed")
                dead = EngineDeadError(f"the engine failed: {type(error).__name__}: {error}")
                self.engine_core.dead_stages.update(dict.fromkeys(self.clients, dead))
                news = {}
            _post(self._loop, partial(self._deliver, news))

    def _end(self) -> None:
        self.engine_core.shutdown()
        while not self._calls.empty():
            if (call := self._calls.get()) is not None:
                call.fail(EngineDeadError("the engine was shut down"))

    def _deliver(self, news: Mapping[int, EngineCoreOutputs]) -> None:
        for stage_id, outputs in news.items():
            self.clients[stage_id].deliver_step(outputs.outputs, outputs.step_stats)
        for stage_id, error in self.engine_core.dead_stages.items():
            self.clients[stage_id].failure = error
            self.clients[stage_id].fail(error)


def _post(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Call a function in a loop's thread; of a loop that is closed nobody waits for anything."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        if not loop.is_closed():
            raise


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

    async def abort(self, request_ids: Iterable[str]) -> None:
        if not self.embedded.is_shut_down:
            await self.embedded.call(
                self.embedded.engine_core.abort_requests, self.stage.stage_id, list(request_ids)
            )

    @property
    def health(self) -> StageHealth:
        dead = self.embedded.engine_core.dead_stages.get(self.stage.stage_id)
        return StageHealth("ready") if dead is None else StageHealth("failed", cause=str(dead))

    async def check_health(self) -> None:
        await self.embedded.call(self.embedded.engine_core.check_health, self.stage.stage_id)

    async def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        executor = self.embedded.engine_core.executor
        return await self.embedded.call(executor.collective_rpc, self.stage.stage_id, method, *args)

    def shutdown(self) -> None:
        self.embedded.shutdown()
