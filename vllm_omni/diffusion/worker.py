"""`DiffusionWorker`: one device, one copy of the weights, in this process or its own."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Generic

import msgspec
import psutil
import setproctitle
import torch

from vllm_omni import envs, logs
from vllm_omni.config import DiTConfig, WarmupSize
from vllm_omni.diffusion.cache_manager import DiTCacheManager
from vllm_omni.diffusion.messages import (
    DiffusionModelRunnerOutput,
    DiffusionSchedulerOutput,
    InputsT,
)
from vllm_omni.diffusion.model_runner import DiffusionModelRunner
from vllm_omni.diffusion.pipeline_manager import PipelineManager
from vllm_omni.diffusion.warmup import DummyRequests
from vllm_omni.errors import EngineError
from vllm_omni.importing import fast_imports
from vllm_omni.models.interface import RunnerAdapter
from vllm_omni.models.registry import get_model_spec, load_class
from vllm_omni.processes import show_stacks_when_asked
from vllm_omni.serial import MessageDecoder, encode

logger = logging.getLogger(__name__)


REMOTE_METHODS = ("sleep", "wake", "get_stats")

_MEMORY_PERIOD = 1.0  # seconds between looks at the memory: one takes as long as the rest of a step


class DiffusionWorker:
    """Builds the model and its managers, and takes steps with them."""

    def __init__(self, config: DiTConfig, rank: int = 0) -> None:
        self.config = config
        self.rank = rank
        self.pipeline_manager = PipelineManager(config, rank)
        self.cache_manager = DiTCacheManager(config.cache_config, self.pipeline_manager.device)
        self._memory_due = 0.0  # time.monotonic() of the next look at the memory

    def load_model(self) -> None:
        """Load the weights, warm up, and find out what fits beside them."""
        device = self.pipeline_manager.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
            # The allocator gives back what it only keeps before it takes more than this.
            share = self.config.gpu_memory_utilization
            torch.cuda.set_per_process_memory_fraction(share, device)
            if not self.config.enforce_eager:
                envs.keep_compiled_code()
        self.pipeline_manager.load()
        adapter_class = load_class(self.pipeline_manager.spec.adapter)
        self.adapter: RunnerAdapter[Any] = adapter_class(
            self.pipeline_manager, self.cache_manager, self.config
        )
        self.model_runner = DiffusionModelRunner(
            self.adapter, self.cache_manager, self.config.snapshot_steps
        )
        self._dummies = DummyRequests(self.adapter, self.cache_manager, self.config)
        if device.type == "cuda":
            # Before anything is warm: a decode that is not compiled takes more memory.
            limits = self._dummies.measure_limits()
            self.model_runner.max_num_tokens = limits.max_num_tokens
            self.adapter.limit_decode(limits.max_decode_latents)
        self._warm_up()

    def _warm_up(self) -> None:
        self._dummies.warm_up(WarmupSize.parse(size) for size in self.config.warmup_sizes)

    def get_pipeline_manager(self) -> PipelineManager:
        return self.pipeline_manager

    def execute_model(
        self, scheduler_output: DiffusionSchedulerOutput[Any]
    ) -> DiffusionModelRunnerOutput:
        evictions = self.cache_manager.get_evictions()
        output = self.model_runner.execute_model(scheduler_output)
        output.cache_bytes = {self.rank: self.cache_manager.get_bytes()}
        output.num_evictions = {
            kind: num - evictions[kind]
            for kind, num in self.cache_manager.get_evictions().items()
            if num > evictions[kind]
        }
        if (now := time.monotonic()) >= self._memory_due:
            self._memory_due = now + _MEMORY_PERIOD
            output.memory_bytes = {self.rank: self._read_memory()}
        return output

    def _read_memory(self) -> int:
        """Bytes that this worker takes: of its GPU, or of the machine."""
        device = self.pipeline_manager.device
        if device.type == "cuda":
            return torch.cuda.memory_reserved(device)
        return psutil.Process().memory_info().rss

    def call(self, method: str, args: Sequence[Any]) -> Any:
        """A method by name, if it is one that may be called from outside."""
        if method not in REMOTE_METHODS:
            raise EngineError(f"unknown method {method!r}: one of {', '.join(REMOTE_METHODS)}")
        return getattr(self, method)(*args)

    def sleep(self, level: int = 1) -> None:
        self.adapter.sleep()
        self.pipeline_manager.sleep(level)

    def wake(self) -> None:
        self.pipeline_manager.wake()
        self._warm_up()

    def get_stats(self) -> dict[str, int]:
        return {
            "num_requests": len(self.model_runner.states),
            "cache_used_bytes": self.cache_manager.used_bytes,
            "cache_request_bytes": self.cache_manager.request_bytes,
            "cache_evictions": self.cache_manager.num_evictions,
            "memory_bytes": self._read_memory(),
        }


def make_worker(config: DiTConfig, rank: int = 0) -> DiffusionWorker:
    """The worker that the checkpoint's model asks for, loaded."""
    worker_class = load_class(get_model_spec(config.model).worker)
    worker: DiffusionWorker = worker_class(config, rank)
    worker.load_model()
    return worker


class WorkerCall(msgspec.Struct, Generic[InputsT], kw_only=True):
    """Executor to worker: a step, or any other method by name."""

    method: str
    scheduler_output: DiffusionSchedulerOutput[InputsT] | None = None  # for "execute_model"
    args: list[Any] = []


class WorkerReply(msgspec.Struct, kw_only=True):
    """Worker to executor, one for each call, and one when it is ready."""

    model_output: DiffusionModelRunnerOutput | None = None
    result: Any = None
    error: str | None = None


def run_worker(connection: Connection, config: DiTConfig, rank: int, num_workers: int) -> None:
    """The main function of a worker process. Ends when the executor's end of the pipe closes."""
    show_stacks_when_asked()
    setproctitle.setproctitle(f"vllm-omni diffusion:{config.stage_id} worker {rank}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    logs.configure_child()
    is_on_cpu = config.device == "cpu" or not torch.cuda.is_available()
    if is_on_cpu and "OMP_NUM_THREADS" not in os.environ:  # else the operator has said it
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_workers))
    try:
        with fast_imports():
            worker = make_worker(config, rank)
    except Exception as error:
        # What we raise on purpose says it all; the executor tells it.
        level = logging.DEBUG if isinstance(error, EngineError) else logging.ERROR
        logger.log(level, "worker %d cannot start", rank, exc_info=True)
        connection.send_bytes(encode(WorkerReply(error=f"{type(error).__name__}: {error}")))
        return
    connection.send_bytes(encode(WorkerReply()))

    inputs_class = load_class(worker.pipeline_manager.spec.inputs)
    call_decoder = MessageDecoder(WorkerCall[inputs_class])  # type: ignore[valid-type]
    while True:
        try:
            call = call_decoder.decode(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            os._exit(0)  # at once: nothing is left to save, and taking torch apart lasts a while
        except msgspec.DecodeError as error:
            logger.error("worker %d: a call cannot be read: %s", rank, error)
            connection.send_bytes(encode(WorkerReply(error=f"the call cannot be read: {error}")))
            continue
        try:
            if call.scheduler_output is not None:
                reply = WorkerReply(model_output=worker.execute_model(call.scheduler_output))
            else:
                reply = WorkerReply(result=worker.call(call.method, call.args))
        except Exception as error:
            logger.exception("worker %d: %s failed", rank, call.method)
            reply = WorkerReply(error=f"{type(error).__name__}: {error}")
        connection.send_bytes(encode(reply))
