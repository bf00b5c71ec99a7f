"""Stages in processes of their own, and the clients that talk to them.

Seams, checked against vLLM 0.32.0: `CoreEngineProcManager` apart from its `__init__`,
`wait_for_engine_startup`, `AsyncMPClient` with `client_addresses`, `AsyncLLM` likewise, with
`stat_loggers`, and its `_run_output_handler`; `ObservabilityConfig.otlp_traces_endpoint`.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from multiprocessing.context import ForkServerContext
from typing import Any, TypeVar

import zmq
from vllm.config import VllmConfig
from vllm.utils.network_utils import make_zmq_socket
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError
from vllm.v1.engine.utils import (
    CoreEngine,
    CoreEngineLaunch,
    CoreEngineProcManager,
    EngineZmqAddresses,
    wait_for_engine_startup,
)
from vllm.v1.executor.abstract import Executor
from vllm.v1.serial_utils import MsgpackDecoder
from vllm.v1.utils import shutdown as shutdown_processes

from vllm_omni.ar.config import ARModel
from vllm_omni.ar.engine import check_images
from vllm_omni.ar.messages import ARRequest
from vllm_omni.ar.output_processor import HiddenStatesOutputProcessor
from vllm_omni.ar.rendering import describe, make_params, render_async, to_request_error
from vllm_omni.ar.stat_logger import make_stat_logger
from vllm_omni.config import StageConfig
from vllm_omni.diffusion.messages import DiffusionRequest
from vllm_omni.engine.core_proc import (
    OmniEngineCoreOutputs,
    OmniEngineCoreProc,
    from_wire,
    make_core_config,
    make_core_request,
    run_core_proc,
)
from vllm_omni.engine.forkserver import start_forkserver
from vllm_omni.engine.sockets import SocketFolder
from vllm_omni.engine.stage_client import StageClient
from vllm_omni.engine.stages import make_dit_config
from vllm_omni.errors import EngineDeadError, EngineError, ModelLoadError
from vllm_omni.outputs import EngineCoreOutput, FinishReason

R = TypeVar("R")

_HEALTH_PERIOD = 1.0  # seconds between looks at the process while a call to it is under way


def start_stages(
    stages: Sequence[StageConfig], log_stats: bool = False, otlp_traces_endpoint: str = ""
) -> list[StageClient]:
    """Start a process for each stage, all at once, and wait until each has loaded its model.

    Args:
        log_stats: of AR stages, in `vllm_omni.ar.stat_logger.VLLM_REGISTRY`.
        otlp_traces_endpoint: of AR stages; empty: what their `vllm_config` says.
    """
    context = start_forkserver()
    clients: list[ProcStageClient] = []
    try:
        for stage in stages:
            if stage.engine_type == "ar":
                clients.append(ARProcClient(stage, context, log_stats, otlp_traces_endpoint))
            else:
                clients.append(DiffusionProcClient(stage, context))
        for client in clients:
            client.connect()
    except BaseException:
        for client in clients:
            client.shutdown()
        raise
    return list(clients)


class StageProcess(CoreEngineProcManager):
    """The process of one engine core. vLLM's manager, apart from what it starts and how."""

    def __init__(
        self,
        stage: StageConfig,
        context: ForkServerContext,
        core_class: type[EngineCoreProc],
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool = False,
    ) -> None:
        self._request_shutdown_timeout = 0
        self.manager_stopped = threading.Event()
        self.failed_proc_name: str | None = None
        self.stage = stage
        self.vllm_config = vllm_config
        self.sockets = SocketFolder()
        self.addresses = EngineZmqAddresses(
            inputs=[self.sockets.make_address("input")],
            outputs=[self.sockets.make_address("output")],
        )
        self._context = zmq.Context()
        handshake_address = self.sockets.make_address("handshake")
        self._handshake = make_zmq_socket(self._context, handshake_address, zmq.ROUTER, bind=True)
        self._failure, theirs = context.Pipe(duplex=False)
        title = f"vllm-omni {stage.engine_type}:{stage.stage_id}"
        process = context.Process(
            target=run_core_proc,
            name=title,
            args=(core_class, title, theirs),
            kwargs={
                "vllm_config": vllm_config,
                "local_client": True,
                "handshake_address": handshake_address,
                "executor_class": executor_class,
                "log_stats": log_stats,
            },
        )
        self.processes = [process]
        self._finalizer = weakref.finalize(self, shutdown_processes, self.processes)
        process.start()
        theirs.close()

    @property
    def client_addresses(self) -> dict[str, Any]:
        return {
            "input_address": self.addresses.inputs[0],
            "output_address": self.addresses.outputs[0],
        }

    def wait_until_ready(self) -> None:
        try:
            wait_for_engine_startup(
                self._handshake,
                [CoreEngine(0, True)],
                self.vllm_config.parallel_config,
                False,
                self.vllm_config.cache_config,
                CoreEngineLaunch(self, None, self.addresses, None),
            )
        except RuntimeError as error:
            self.processes[0].join(timeout=5)
            cause = f"exit code {self.processes[0].exitcode}"
            if self._failure.poll():
                cause = self._failure.recv_bytes().decode()
            raise ModelLoadError(
                f"stage {self.stage.stage_id} ({self.stage.engine_type}) cannot start with "
                f"{self.stage.model_path}: {cause}"
            ) from error
        finally:
            self._close_handshake()

    def shutdown(self, timeout: float | None = None) -> None:
        self._close_handshake()
        super().shutdown(timeout)
        self.sockets.remove()

    def _close_handshake(self) -> None:
        self._failure.close()
        self._handshake.close(linger=0)
        self._context.term()


class ProcStageClient(StageClient):
    """A stage in a process of its own, which starts when the client is made."""

    process: StageProcess

    @abstractmethod
    def connect(self) -> None:
        """Wait until the process is ready, and open the way to it; raises `ModelLoadError`."""

    @abstractmethod
    async def _call_workers(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """vLLM's own way to call a method of every worker."""

    async def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        try:
            return await self._call(self._call_workers(method, args))
        except EngineError:
            raise
        except Exception as error:  # a worker's, of any kind
            raise EngineError(f"{method} failed in stage {self.stage.stage_id}: {error}") from error

    @asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        """vLLM's error for a process that is gone becomes ours."""
        try:
            yield
        except VllmEngineDeadError as error:
            raise self._dead_error() from error

    async def _call(self, call: Awaitable[R]) -> R:
        """Wait for a call into the process; vLLM's would wait on when the process has died."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({task}, timeout=_HEALTH_PERIOD))[0]:
                await self.check_health()
            async with self._translated():
                return task.result()
        finally:
            task.cancel()

    def _dead_error(self) -> EngineDeadError:
        exit_code = self.process.processes[0].exitcode
        return EngineDeadError(
            f"the process of stage {self.stage.stage_id} ({self.stage.engine_type}) has ended"
            + ("" if exit_code is None else f" with exit code {exit_code}")
        )


class ARAsyncLLM(AsyncLLM):
    """vLLM's own, with hidden states kept apart from the text."""

    def _run_output_handler(self) -> None:
        # The last moment: the handler takes the output processor it finds.
        if self.output_handler is None:
            HiddenStatesOutputProcessor.replace(self)
        super()._run_output_handler()


class ARProcClient(ProcStageClient):
    """A vLLM engine, behind vLLM's own `AsyncLLM`."""

    def __init__(
        self,
        stage: StageConfig,
        context: ForkServerContext,
        log_stats: bool = False,
        otlp_traces_endpoint: str = "",
    ) -> None:
        super().__init__(stage)
        self.model = ARModel(stage.model_path, stage.vllm_config)
        observability = self.model.vllm_config.observability_config
        observability.otlp_traces_endpoint = (
            otlp_traces_endpoint or observability.otlp_traces_endpoint
        )
        self._is_traced = observability.otlp_traces_endpoint is not None
        self._log_stats = log_stats or self._is_traced  # vLLM makes its spans of its stats
        self._executor_class = Executor.get_class(self.model.vllm_config)
        self.process = StageProcess(
            stage,
            context,
            EngineCoreProc,
            self.model.vllm_config,
            self._executor_class,
            self._log_stats,
        )
        self.llm: ARAsyncLLM | None = None
        self._readers: dict[str, asyncio.Task[None]] = {}  # by request id

    def connect(self) -> None:
        self.process.wait_until_ready()
        self.llm = ARAsyncLLM(
            self.model.vllm_config,
            self._executor_class,
            log_stats=self._log_stats,
            log_requests=False,
            stat_loggers=[make_stat_logger(self.stage.stage_id)] if self._log_stats else None,
            client_addresses=self.process.client_addresses,
        )
        _watch(self.llm.engine_core, self.process)

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
                raise to_request_error(request, error) from error
        self._readers[request.request_id] = asyncio.create_task(self._read(request, collector))

    async def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in list(request_ids):
            reader = self._readers.pop(request_id, None)
            if reader is None or self.llm is None:
                continue
            reader.cancel()
            await self.llm.abort(request_id)
            _output_processor(self.llm).take_rows(request_id)
            self.deliver(
                EngineCoreOutput(
                    request_id=request_id, finish_reason=FinishReason.ABORT, output_type="text"
                )
            )

    async def check_health(self) -> None:
        async with self._translated():
            await self._get_llm().check_health()

    async def _call_workers(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        results: list[Any] = await self._get_llm().collective_rpc(method, args=args)
        return results

    def shutdown(self) -> None:
        for reader in self._readers.values():
            reader.cancel()
        self.fail(EngineDeadError("the engine was shut down"))
        if self.llm is not None:
            self.llm.shutdown()
            _close_context(self.llm.engine_core)
            self.llm = None  # or it would shut down again when the interpreter ends
        self.process.shutdown()

    async def _read(self, request: ARRequest, collector: Any) -> None:
        """Pass on what comes for one request."""
        outputs = _output_processor(self._get_llm())
        try:
            finished = False
            while not finished:
                request_output = collector.get_nowait() or await collector.get()
                self.process.sockets.remove()  # both ends are connected
                finished = request_output.finished
                self.deliver(outputs.convert(request, request_output))
        except VllmEngineDeadError:
            self.fail(self._dead_error())
        except Exception as error:  # vLLM's output handler failed, and hands its error to everybody
            self.fail(EngineDeadError(f"vLLM failed: {describe(error)}"))
        finally:
            self._readers.pop(request.request_id, None)

    def _get_llm(self) -> ARAsyncLLM:
        if self.llm is None:
            raise EngineDeadError("the engine was shut down: make a new one")
        return self.llm


class DiffusionCoreClient(AsyncMPClient):
    """vLLM's client of an engine core, that reads our outputs."""

    def __init__(self, process: StageProcess) -> None:
        super().__init__(
            process.vllm_config,
            Executor,  # not used: the engine runs already
            log_stats=False,
            client_addresses=process.client_addresses,
        )
        _watch(self, process)

    def _apply_ready_response(self, payload: bytes) -> None:
        return  # it is about a language model

    def _ensure_output_queue_task(self) -> None:
        self.decoder = MsgpackDecoder(OmniEngineCoreOutputs)
        super()._ensure_output_queue_task()


class DiffusionProcClient(ProcStageClient):
    """A diffusion engine core, behind vLLM's client of engine cores."""

    def __init__(self, stage: StageConfig, context: ForkServerContext) -> None:
        super().__init__(stage)
        config = make_core_config(make_dit_config(stage))
        self.process = StageProcess(stage, context, OmniEngineCoreProc, config, Executor)
        self.core: DiffusionCoreClient | None = None
        self._reader: asyncio.Task[None] | None = None

    def connect(self) -> None:
        self.process.wait_until_ready()
        self.core = DiffusionCoreClient(self.process)

    async def add_request(self, request: DiffusionRequest[Any]) -> None:
        core = self._get_core()
        if self._reader is None:
            self._reader = asyncio.create_task(self._read(core))
        async with self._translated():
            await core.add_request_async(make_core_request(request))

    async def abort(self, request_ids: Iterable[str]) -> None:
        if self.core is not None:
            await self.core.abort_requests_async(list(request_ids))

    async def check_health(self) -> None:
        async with self._translated():
            self._get_core().ensure_alive()

    async def _call_workers(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        results: list[Any] = await self._get_core().collective_rpc_async(method, args=args)
        return results

    def shutdown(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        self.fail(EngineDeadError("the engine was shut down"))
        if self.core is not None:
            self.core.shutdown()
            _close_context(self.core)
            self.core = None
        self.process.shutdown()

    async def _read(self, core: DiffusionCoreClient) -> None:
        """Pass on what comes from the process."""
        try:
            while True:
                outputs = await core.get_output_async()
                self.process.sockets.remove()  # both ends are connected
                self.deliver_step(map(from_wire, outputs.outputs), outputs.step_stats)
        except VllmEngineDeadError:
            self.fail(self._dead_error())
        except Exception as error:  # a message that cannot be read
            self.fail(EngineDeadError(f"{type(error).__name__}: {error}"))
            raise

    def _get_core(self) -> DiffusionCoreClient:
        if self.core is None:
            raise EngineDeadError("the engine was shut down: make a new one")
        return self.core


def _watch(client: Any, process: StageProcess) -> None:
    """Let vLLM's client notice when a process ends that it has not started itself."""
    client.resources.engine_manager = process
    client.start_engine_core_monitor()


def _close_context(client: Any) -> None:
    """Let go of ZMQ, which vLLM leaves to the garbage collector."""
    sockets = (client.resources.input_socket, client.resources.output_socket)
    # In another thread than the event loop's vLLM only asks for them to be closed.
    if all(socket.closed for socket in sockets):
        client.resources.ctx.term()


def _output_processor(llm: AsyncLLM) -> HiddenStatesOutputProcessor:
    assert isinstance(llm.output_processor, HiddenStatesOutputProcessor)
    return llm.output_processor
