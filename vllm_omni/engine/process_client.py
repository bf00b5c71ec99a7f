"""Clients of stages in processes of their own, which a supervisor keeps running.

Seams, checked against vLLM 0.32.0: `AsyncMPClient` with `client_addresses`, `AsyncLLM` likewise,
with `stat_loggers`, its `_run_output_handler` and its `engine_core`;
`ObservabilityConfig.otlp_traces_endpoint`.
"""

from __future__ import annotations

import asyncio
import copy
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError
from vllm.v1.executor.abstract import Executor
from vllm.v1.serial_utils import MsgpackDecoder

from vllm_omni.ar.config import ARModel
from vllm_omni.ar.engine import check_images
from vllm_omni.ar.messages import ARRequest
from vllm_omni.ar.output_processor import HiddenStatesOutputProcessor
from vllm_omni.ar.rendering import describe, make_params, render_async, to_request_error
from vllm_omni.ar.stat_logger import make_stat_logger
from vllm_omni.config import OmniConfig, StageConfig
from vllm_omni.diffusion.messages import DiffusionRequest
from vllm_omni.engine.core_proc import (
    ARCoreProc,
    OmniEngineCoreOutputs,
    OmniEngineCoreProc,
    from_wire,
    make_core_config,
)
from vllm_omni.engine.forkserver import start_forkserver
from vllm_omni.engine.journal import DrawingEntry
from vllm_omni.engine.stage_client import StageClient, StageHealth
from vllm_omni.engine.stage_process import StageProcess
from vllm_omni.engine.stages import make_dit_config
from vllm_omni.engine.supervised_core import SupervisedCore
from vllm_omni.engine.supervisor import Supervisor
from vllm_omni.errors import EngineDeadError, EngineError
from vllm_omni.outputs import EngineCoreOutput, FinishReason, RequestError
from vllm_omni.run_folder import get_run_folder, sweep


def start_stages(config: OmniConfig) -> list[StageClient]:
    """Start a process for each stage, all at once, and wait until each has loaded its model."""
    sweep()
    get_run_folder()  # with who takes it away, before there is anything in it
    start_forkserver()
    clients: list[ProcStageClient] = []
    try:
        for stage in config.stage_configs:
            kind = ARProcClient if stage.engine_type == "ar" else DiffusionProcClient
            clients.append(kind(stage, config))
        for client in clients:
            client.supervisor.wait_until_ready()
    except BaseException:
        for client in clients:
            client.shutdown()
        raise
    return list(clients)


class ProcStageClient(StageClient):
    """A stage in a process of its own, which starts when the client is made."""

    def __init__(self, stage: StageConfig, config: OmniConfig) -> None:
        """To be called last: the supervisor begins at once."""
        super().__init__(stage)
        self.name = f"stage {stage.stage_id} ({stage.engine_type})"
        self.core = SupervisedCore(
            self.name, self._note_news, self._note_answer, self._report_garbage
        )
        self.supervisor = Supervisor(
            self.name,
            config,
            self._start,
            self._connect,
            self.core.detach,
            self._give_up,
        )

    @abstractmethod
    def _start(self) -> StageProcess:
        """Start the stage's process."""

    @abstractmethod
    def _make_client(self, process: StageProcess) -> AsyncMPClient:
        """Open the way to a process that is ready."""

    @property
    def health(self) -> StageHealth:
        supervisor = self.supervisor
        return StageHealth(
            state=supervisor.state,
            num_restarts=supervisor.num_restarts,
            pid=supervisor.pid,
            seconds_since_beat=supervisor.seconds_since_beat,
            cause=supervisor.cause,
            num_replayed=self.core.num_replayed,
            num_refused=self.core.num_refused,
        )

    async def check_health(self) -> None:
        async with self._translated():
            self.core.ensure_alive()

    async def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        try:
            async with self._translated():
                results: list[Any] = await self.core.collective_rpc_async(method, args=args)
                return results
        except EngineError:
            raise
        except Exception as error:  # a worker's, of any kind
            raise EngineError(f"{method} failed in stage {self.stage.stage_id}: {error}") from error

    def shutdown(self) -> None:
        self.fail(EngineDeadError("the engine was shut down"))
        self.core.shutdown()
        self.supervisor.shutdown()

    @asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        """vLLM's error for a process that is gone becomes ours."""
        try:
            yield
        except VllmEngineDeadError as error:
            raise self._dead_error() from error

    def _dead_error(self) -> EngineDeadError:
        if self.core.error is not None:
            return EngineDeadError(str(self.core.error))
        return EngineDeadError(f"{self.name} restarts: {self.supervisor.cause}")

    # --- called by the supervisor, in its thread ---

    def _connect(self, process: StageProcess) -> None:
        self.core.attach(self._make_client(process))

    def _give_up(self, error: EngineDeadError) -> None:
        self.failure = error
        self.core.fail(error)

    # --- called by the core, in the event loop ---

    def _note_news(self) -> None:
        if (process := self.supervisor.process) is not None:
            process.sockets.remove()  # both ends are connected: nobody else is to come

    def _note_answer(self) -> None:
        self.supervisor.note_answer()

    def _report_garbage(self, cause: str) -> None:
        self.supervisor.condemn(cause)


class ARAsyncLLM(AsyncLLM):
    """vLLM's own, with hidden states kept apart from the text."""

    def _run_output_handler(self) -> None:
        # The last moment: the handler takes the output processor it finds.
        if not isinstance(self.output_processor, HiddenStatesOutputProcessor):
            HiddenStatesOutputProcessor.replace(self)
        super()._run_output_handler()


class CoreClient(AsyncMPClient):
    """vLLM's client of an engine core that somebody else has started."""

    outputs_type: type[EngineCoreOutputs] = EngineCoreOutputs

    def __init__(self, process: StageProcess) -> None:
        super().__init__(
            process.vllm_config,
            Executor,  # not used: the engine runs already
            log_stats=False,
            client_addresses=process.client_addresses,
        )

    def _apply_ready_response(self, payload: bytes) -> None:
        return  # it is about a language model, and was read when that started for the first time

    def _ensure_output_queue_task(self) -> None:
        self.decoder = MsgpackDecoder(self.outputs_type)
        super()._ensure_output_queue_task()


class DiffusionCoreClient(CoreClient):
    """The same, that reads our outputs."""

    outputs_type = OmniEngineCoreOutputs


class ARProcClient(ProcStageClient):
    """A vLLM engine, behind vLLM's own `AsyncLLM`, which stays when the process changes."""

    def __init__(self, stage: StageConfig, config: OmniConfig) -> None:
        self.model = ARModel(stage.model_path, stage.vllm_config)
        vllm_config = self.model.vllm_config
        observability = vllm_config.observability_config
        observability.otlp_traces_endpoint = (
            config.otlp_traces_endpoint or observability.otlp_traces_endpoint
        )
        self._is_traced = observability.otlp_traces_endpoint is not None
        self._log_stats = config.log_stats or self._is_traced  # vLLM makes its spans of its stats
        if (images := vllm_config.model_config.multimodal_config) is not None:
            # A request must hold its pictures, not the names of those that a process has seen.
            images.mm_processor_cache_gb = 0
        self._process_config = copy.deepcopy(vllm_config)  # what a process says changes the other
        self._executor_class = Executor.get_class(vllm_config)
        self.llm: ARAsyncLLM | None = None
        self._readers: dict[str, asyncio.Task[None]] = {}  # by request id
        super().__init__(stage, config)

    async def add_request(self, request: ARRequest) -> None:
        llm = self._get_llm()
        check_images(self.model, request)
        async with self._translated():
            try:
                params = make_params(request, llm.model_config)
                prompt = await render_async(llm.renderer, request)
                collector = await llm.add_request(
                    request.request_id,
                    prompt,
                    params,
                    priority=request.priority,
                    trace_headers=request.trace_headers if self._is_traced else None,
                )
            except VllmEngineDeadError:
                raise
            # Only this request's data has been touched; what it meets on its way raises anything.
            except Exception as error:
                await llm.abort(request.request_id)  # vLLM may have noted it already
                raise to_request_error(request, error) from error
        self._readers[request.request_id] = asyncio.create_task(self._read(request, collector))

    async def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in list(request_ids):
            reader = self._readers.pop(request_id, None)
            if reader is None or self.llm is None:
                continue
            reader.cancel()
            await self._take_out(self.llm, request_id, FinishReason.ABORT)

    def shutdown(self) -> None:
        for reader in self._readers.values():
            reader.cancel()
        super().shutdown()
        if self.llm is not None:
            self.llm.shutdown()
            self.llm = None  # or it would shut down again when the interpreter ends

    async def _read(self, request: ARRequest, collector: Any) -> None:
        """Pass on what comes for one request."""
        llm = self._get_llm()
        outputs = _output_processor(llm)
        try:
            finished = False
            while not finished:
                request_output = collector.get_nowait() or await collector.get()
                finished = request_output.finished
                self.deliver(outputs.convert(request, request_output))
        except VllmEngineDeadError:
            self.fail(self._dead_error())
        except Exception as error:  # vLLM's output handler failed, and hands its error to everybody
            if llm.output_handler is not None and llm.output_handler.done():
                llm.output_handler = None  # the next request starts another
            failure = RequestError("StageExecutionError", f"vLLM failed: {describe(error)}")
            await self._take_out(llm, request.request_id, FinishReason.ERROR, failure)
        finally:
            self._readers.pop(request.request_id, None)

    async def _take_out(
        self,
        llm: ARAsyncLLM,
        request_id: str,
        reason: FinishReason,
        error: RequestError | None = None,
    ) -> None:
        """End a request that vLLM has not ended."""
        self.deliver(
            EngineCoreOutput(
                request_id=request_id, finish_reason=reason, error=error, output_type="text"
            )
        )
        await llm.abort(request_id)
        _output_processor(llm).take_rows(request_id)

    def _get_llm(self) -> ARAsyncLLM:
        if self.llm is None:
            raise EngineDeadError("the engine was shut down: make a new one")
        return self.llm

    def _start(self) -> StageProcess:
        config = copy.deepcopy(self._process_config)
        return StageProcess(self.stage, ARCoreProc, config, self._executor_class, self._log_stats)

    def _make_client(self, process: StageProcess) -> AsyncMPClient:
        if self.llm is not None:
            return CoreClient(process)
        self.llm = ARAsyncLLM(
            self.model.vllm_config,
            self._executor_class,
            log_stats=self._log_stats,
            log_requests=False,
            stat_loggers=[make_stat_logger(self.stage.stage_id)] if self._log_stats else None,
            client_addresses=process.client_addresses,
        )
        client, self.llm.engine_core = self.llm.engine_core, self.core
        return client


class DiffusionProcClient(ProcStageClient):
    """A diffusion engine core, behind vLLM's client of engine cores."""

    def __init__(self, stage: StageConfig, config: OmniConfig) -> None:
        self._dit_config = replace(make_dit_config(stage), snapshot_steps=config.snapshot_every)
        self._reader: asyncio.Task[None] | None = None
        super().__init__(stage, config)

    async def add_request(self, request: DiffusionRequest[Any]) -> None:
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())
        async with self._translated():
            await self.core.add(DrawingEntry(request))

    async def abort(self, request_ids: Iterable[str]) -> None:
        await self.core.abort_requests_async(list(request_ids))

    def shutdown(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        super().shutdown()

    async def _read(self) -> None:
        """Pass on what comes from the process."""
        try:
            while True:
                outputs = await self.core.get_output_async()
                assert isinstance(outputs, OmniEngineCoreOutputs)
                self.deliver_step(map(from_wire, outputs.outputs), outputs.step_stats)
        except VllmEngineDeadError:
            self.fail(self._dead_error())

    def _start(self) -> StageProcess:
        config = make_core_config(self._dit_config)
        return StageProcess(self.stage, OmniEngineCoreProc, config, Executor)

    def _make_client(self, process: StageProcess) -> AsyncMPClient:
        return DiffusionCoreClient(process)


def _output_processor(llm: AsyncLLM) -> HiddenStatesOutputProcessor:
    assert isinstance(llm.output_processor, HiddenStatesOutputProcessor)
    return llm.output_processor
