"""`DiffusionExecutor`: hands a step to the workers, here or in other processes."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import msgspec

from vllm_omni.config import DiTConfig
from vllm_omni.diffusion.messages import DiffusionModelRunnerOutput, DiffusionSchedulerOutput
from vllm_omni.diffusion.worker import WorkerCall, WorkerReply, make_worker
from vllm_omni.errors import (
    EngineDeadError,
    EngineError,
    ModelLoadError,
    StageExecutionError,
    WorkerDeadError,
)
from vllm_omni.outputs import RequestError
from vllm_omni.processes import run_child
from vllm_omni.serial import MessageDecoder, encode

logger = logging.getLogger(__name__)

_RUN_WORKER = "vllm_omni.diffusion.worker:run_worker"


class DiffusionExecutor(ABC):
    """One contract for every way of running workers."""

    # Whether somebody starts the whole engine again when a worker dies, and runs its requests
    # again; otherwise those of that worker end with an error.
    is_supervised = False

    @staticmethod
    def from_config(config: DiTConfig) -> DiffusionExecutor:
        if config.worker_processes == 0:
            return UniProcDiffusionExecutor(config)
        return MultiProcDiffusionExecutor(config)

    @abstractmethod
    def wait_until_ready(self) -> None:
        """Return when all workers have loaded the model.

        Raises `ModelLoadError`, or `WorkerDeadError` if one has ended without a word.
        """

    @abstractmethod
    def execute_model(
        self, scheduler_output: DiffusionSchedulerOutput[Any]
    ) -> DiffusionModelRunnerOutput:
        """Take one step; what goes wrong with a request is in the output, not raised."""

    @abstractmethod
    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker."""

    @abstractmethod
    def check_workers(self) -> None:
        """Raise `WorkerDeadError` if a worker process has ended; from any thread."""

    @abstractmethod
    def shutdown(self) -> None:
        """Let go of workers and weights. May be called twice."""


class UniProcDiffusionExecutor(DiffusionExecutor):
    """One worker in this process."""

    def __init__(self, config: DiTConfig) -> None:
        self.worker = make_worker(config)

    def wait_until_ready(self) -> None:
        return  # as soon as it is made

    def execute_model(
        self, scheduler_output: DiffusionSchedulerOutput[Any]
    ) -> DiffusionModelRunnerOutput:
        return self.worker.execute_model(scheduler_output)

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        return [self.worker.call(method, args)]

    def check_workers(self) -> None:
        return  # it is this process

    def shutdown(self) -> None:
        self.worker.sleep(level=2)


@dataclass(eq=False)
class WorkerHandle:
    """The executor's end of a worker process."""

    rank: int
    process: SpawnProcess
    connection: Connection
    request_tokens: dict[str, int] = field(default_factory=dict)  # what it works on
    num_decoding: int = 0  # of these, those whose results come with a later step
    max_num_tokens: int | None = None  # most of one step that fit into its memory, once it told

    def send(self, call: WorkerCall[Any]) -> None:
        """Send a call; a dead worker is found out when its reply is awaited."""
        try:
            self.connection.send_bytes(encode(call))
        except (BrokenPipeError, ConnectionResetError):
            logger.warning("diffusion worker %d does not take calls any more", self.rank)

    def receive(self) -> WorkerReply:
        wait([self.connection, self.process.sentinel])
        try:
            if self.connection.poll():
                return _reply_decoder.decode(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            logger.warning("diffusion worker %d closed its pipe", self.rank)
        except msgspec.DecodeError as error:
            logger.error("diffusion worker %d: a reply cannot be read: %s", self.rank, error)
            self.process.kill()  # nobody knows what it thinks it was told
        self.process.join(timeout=5)
        raise WorkerDeadError(self.rank, self.process.exitcode)


_reply_decoder = MessageDecoder(WorkerReply)


class MultiProcDiffusionExecutor(DiffusionExecutor):
    """A worker process per device. A request stays with the worker it started on.

    When a worker dies, the requests it held end with an error and the others go on.
    """

    def __init__(self, config: DiTConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self.workers: list[WorkerHandle] = []
        # The kernel takes the end of the thread that starts a process for that of its parent.
        is_main_thread = threading.current_thread() is threading.main_thread()
        parent_pid = os.getpid() if is_main_thread else None
        for rank in range(config.worker_processes):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=run_child,
                args=(parent_pid, _RUN_WORKER, theirs, config, rank, config.worker_processes),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.workers.append(WorkerHandle(rank, process, ours))
        self._finalizer = weakref.finalize(self, _stop_workers, self.workers)

    def wait_until_ready(self) -> None:
        try:
            for worker in self.workers:
                if (error := worker.receive().error) is not None:
                    raise ModelLoadError(f"diffusion worker {worker.rank} cannot start: {error}")
        except EngineError:
            self.shutdown()
            raise

    def execute_model(
        self, scheduler_output: DiffusionSchedulerOutput[Any]
    ) -> DiffusionModelRunnerOutput:
        output = DiffusionModelRunnerOutput()
        calls = self._split(scheduler_output)
        replies = _exchange(
            {
                worker: WorkerCall(method="execute_model", scheduler_output=step)
                for worker, step in calls.items()
            }
        )
        for worker, reply in replies.items():
            if isinstance(reply, EngineDeadError):
                if self.is_supervised:
                    raise reply
                self._bury(worker, reply, output)
            elif reply.model_output is not None:
                worker.num_decoding = reply.model_output.num_decoding
                worker.max_num_tokens = reply.model_output.max_num_tokens
                for request_id in reply.model_output.deferred_req_ids:
                    del worker.request_tokens[request_id]  # any worker may have room for it first
                output.merge(reply.model_output)
            else:
                failure = StageExecutionError(f"worker {worker.rank}: {reply.error}")
                _fail(calls[worker].num_scheduled_steps, failure, output)
        output.max_num_tokens = self._add_limits()
        return output

    def _add_limits(self) -> int | None:
        """What fits into all workers together, those that had nothing to do in this step too."""
        limits = [worker.max_num_tokens for worker in self.workers]
        known = [limit for limit in limits if limit is not None]
        return sum(known) if len(known) == len(limits) else None

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        call: WorkerCall[Any] = WorkerCall(method=method, args=list(args))
        results = []
        for worker, reply in _exchange(dict.fromkeys(self.workers, call)).items():
            if isinstance(reply, EngineDeadError):
                raise reply
            if reply.error is not None:
                raise EngineError(f"{method} failed in worker {worker.rank}: {reply.error}")
            results.append(reply.result)
        return results

    def check_workers(self) -> None:
        ended = set(wait([worker.process.sentinel for worker in self.workers], timeout=0))
        for worker in self.workers:
            if worker.process.sentinel in ended and self._finalizer.alive:
                worker.process.join(timeout=1)
                raise WorkerDeadError(worker.rank, worker.process.exitcode)

    def shutdown(self) -> None:
        self._finalizer()

    def _split(
        self, scheduler_output: DiffusionSchedulerOutput[Any]
    ) -> dict[WorkerHandle, DiffusionSchedulerOutput[Any]]:
        """Each worker's part of the step: its own requests; new ones to the least loaded."""
        if not self.workers and scheduler_output.num_scheduled_steps:
            raise EngineDeadError("no diffusion worker is left")
        parts: dict[WorkerHandle, DiffusionSchedulerOutput[Any]] = {
            worker: DiffusionSchedulerOutput() for worker in self.workers
        }
        for request_id in scheduler_output.finished_req_ids:
            if (owner := self._owner(request_id)) is not None:
                del owner.request_tokens[request_id]
                parts[owner].finished_req_ids.append(request_id)
        for new_request in scheduler_output.scheduled_new_reqs:
            worker = min(self.workers, key=lambda worker: sum(worker.request_tokens.values()))
            worker.request_tokens[new_request.request_id] = new_request.custom_inputs.num_tokens
            parts[worker].scheduled_new_reqs.append(new_request)
        for request_id, num_steps in scheduler_output.num_scheduled_steps.items():
            owner = self._owner(request_id)
            assert owner is not None
            parts[owner].num_scheduled_steps[request_id] = num_steps
        return {
            worker: part
            for worker, part in parts.items()
            if part.num_scheduled_steps or part.finished_req_ids or worker.num_decoding
        }

    def _owner(self, request_id: str) -> WorkerHandle | None:
        return next((w for w in self.workers if request_id in w.request_tokens), None)

    def _bury(
        self, worker: WorkerHandle, error: EngineDeadError, output: DiffusionModelRunnerOutput
    ) -> None:
        logger.error("%s", error)
        self.workers.remove(worker)
        worker.connection.close()
        _fail(worker.request_tokens, error, output)


def _exchange(
    calls: Mapping[WorkerHandle, WorkerCall[Any]],
) -> dict[WorkerHandle, WorkerReply | EngineDeadError]:
    """Call all workers, and read every reply whatever the others say: none is left in a pipe."""
    for worker, call in calls.items():
        worker.send(call)
    replies: dict[WorkerHandle, WorkerReply | EngineDeadError] = {}
    for worker in calls:
        try:
            replies[worker] = worker.receive()
        except EngineDeadError as error:
            replies[worker] = error
    return replies


def _fail(request_ids: Iterable[str], error: Exception, output: DiffusionModelRunnerOutput) -> None:
    for request_id in request_ids:
        output.errors[request_id] = RequestError.from_exception(error)


def _stop_workers(workers: list[WorkerHandle]) -> None:
    for worker in workers:
        worker.connection.close()  # the worker reads this as the end
    for worker in workers:
        worker.process.join(timeout=5)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
