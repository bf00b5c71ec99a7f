"""`OmniEngineCoreProc`: a diffusion engine core in its own process, inside vLLM's machinery.

`EngineCoreProc` brings the handshake, the socket threads, aborts, utility calls and shutdown; the
engine core that it would make is replaced by ours through the order of its bases. A request rides
in vLLM's `EngineCoreRequest` as the bytes of our own message; an output is vLLM's
`EngineCoreOutput` with more fields.

Seams, checked against vLLM 0.32.0: `EngineCoreProc` and what it calls of `EngineCore`;
`EngineCoreRequest`, `EngineCoreOutput` and `EngineCoreOutputs`, extended at their ends.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import msgspec
import setproctitle
import torch
from vllm import PoolingParams
from vllm.config import DeviceConfig, VllmConfig
from vllm.logger import configure_logging_if_needed
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
)
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.engine.utils import SignalCallback

import vllm_omni.outputs as omni
from vllm_omni import envs, logs
from vllm_omni.ar.rendering import describe
from vllm_omni.config import DiTConfig
from vllm_omni.diffusion.engine_core import DiffusionEngineCore
from vllm_omni.diffusion.messages import DiffusionRequest
from vllm_omni.engine.black_box import BlackBox
from vllm_omni.errors import OmniRequestError, WorkerDeadError
from vllm_omni.models.registry import get_model_spec, load_class
from vllm_omni.processes import end_with_parent, show_stacks_when_asked, watch_parent
from vllm_omni.serial import MessageDecoder, encode

logger = logging.getLogger(__name__)

_DIT_CONFIG = "dit_config"  # key in `VllmConfig.additional_config`
_BEAT_PERIOD = 0.5  # seconds
_REQUEST = "request"  # key in `PoolingParams.extra_kwargs`


class OmniEngineCoreOutput(EngineCoreOutput):
    """vLLM's output with what pictures need; the order of fields is the format on the wire."""

    error: omni.RequestError | None = None
    output_type: str | None = None
    output_metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    additional_outputs: dict[str, torch.Tensor] = msgspec.field(default_factory=dict)


class OmniEngineCoreOutputs(EngineCoreOutputs):
    """Reads also what vLLM itself sends: fields at the end that are not there have defaults."""

    outputs: list[OmniEngineCoreOutput] = msgspec.field(default_factory=list)
    step_stats: omni.StepStats | None = None


_TO_VLLM = {
    omni.FinishReason.STOP: VllmFinishReason.STOP,
    omni.FinishReason.ABORT: VllmFinishReason.ABORT,
    omni.FinishReason.ERROR: VllmFinishReason.ERROR,
}
_FROM_VLLM = {reason: ours for ours, reason in _TO_VLLM.items()}
# vLLM's own, without a word, of a request that could not be decoded.
_UNREADABLE = omni.RequestError("StageExecutionError", "the stage could not read this request")


def to_wire(output: omni.EngineCoreOutput) -> OmniEngineCoreOutput:
    reason = output.finish_reason
    return OmniEngineCoreOutput(
        request_id=output.request_id,
        new_token_ids=output.new_token_ids,
        pooling_output=output.pooling_output,
        finish_reason=None if reason is None else _TO_VLLM[reason],
        error=output.error,
        output_type=output.output_type,
        output_metadata=output.output_metadata,
        additional_outputs=output.additional_outputs,
    )


def from_wire(output: OmniEngineCoreOutput) -> omni.EngineCoreOutput:
    reason = output.finish_reason
    error = output.error
    if error is None and reason is VllmFinishReason.ERROR:
        error = _UNREADABLE
    return omni.EngineCoreOutput(
        request_id=output.request_id,
        new_token_ids=output.new_token_ids,
        pooling_output=output.pooling_output,
        finish_reason=None if reason is None else _FROM_VLLM[reason],
        error=error,
        output_type=output.output_type,
        output_metadata=output.output_metadata,
        additional_outputs=output.additional_outputs,
    )


def make_core_request(request: DiffusionRequest[Any]) -> EngineCoreRequest:
    """A request in vLLM's envelope."""
    return EngineCoreRequest(
        request_id=request.request_id,
        prompt_token_ids=None,
        mm_features=None,
        sampling_params=None,
        # Bytes: tensors would not survive in a field without a type.
        pooling_params=PoolingParams(task="plugin", extra_kwargs={_REQUEST: encode(request)}),
        arrival_time=0.0,  # ours is in the message
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def make_core_config(dit_config: DiTConfig) -> VllmConfig:
    """A config without a language model, that carries ours to the engine's process."""
    return VllmConfig(
        device_config=DeviceConfig(device="cpu"),  # the diffusion worker picks its device itself
        additional_config={_DIT_CONFIG: dit_config},
    )


class DiffusionCoreInVllm(EngineCore):
    """Our engine core, with the methods and attributes that `EngineCoreProc` uses of vLLM's."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        # Not super(): vLLM's would look for a language model and make a KV cache for it.
        self.vllm_config = vllm_config
        dit_config = vllm_config.additional_config[_DIT_CONFIG]
        assert isinstance(dit_config, DiTConfig)
        self.core = DiffusionEngineCore(dit_config)
        self.core.executor.is_supervised = True
        self.scheduler = self.core.scheduler
        self.step_fn = self.step
        self.aborts_queue: queue.Queue[list[str]] = queue.Queue()
        self.batch_queue = None
        self.check_for_draft_tokens = False
        self._idle_state_callbacks: list[Any] = []
        inputs_class = load_class(get_model_spec(dit_config.model).inputs)
        self._decoder: MessageDecoder[DiffusionRequest[Any]] = MessageDecoder(
            DiffusionRequest[inputs_class]  # type: ignore[valid-type]
        )

    def get_supported_tasks(self) -> tuple[Any, ...]:
        return ("plugin",)

    def preprocess_add_request(self, request: EngineCoreRequest) -> tuple[Any, int]:
        assert request.pooling_params is not None and request.pooling_params.extra_kwargs
        omni_request = self._decoder.decode(request.pooling_params.extra_kwargs[_REQUEST])
        omni_request.client_index = request.client_index
        return omni_request, request.current_wave

    def step(self) -> tuple[dict[int, EngineCoreOutputs], bool]:
        self._process_aborts_queue()
        news, did_work = self.core.step()
        return {
            client: OmniEngineCoreOutputs(
                outputs=[to_wire(output) for output in of_client.outputs],
                step_stats=of_client.step_stats,
            )
            for client, of_client in news.items()
        }, did_work

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self.core.abort_requests(request_ids)

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        return self.core.executor.collective_rpc(method, *args)

    def shutdown(self) -> None:
        self.core.shutdown()


class WatchedCoreProc(EngineCoreProc):
    """An engine core that writes down what it is about, for its supervisor."""

    black_box: BlackBox | None = None  # given to it when it is made

    def get_scheduled_ids(self) -> list[str]:
        """The requests that the next step may be about."""
        raise NotImplementedError

    def check_workers(self) -> None:
        """Called with every beat, from another thread; raises `WorkerDeadError`."""

    def _process_engine_step(self) -> bool:
        if self.black_box is None:
            return bool(super()._process_engine_step())
        with self.black_box.work(self.get_scheduled_ids()):
            return bool(super()._process_engine_step())

    def _handle_client_request(self, request_type: EngineCoreRequestType, request: Any) -> None:
        if self.black_box is None:
            super()._handle_client_request(request_type, request)
            return
        with self.black_box.work():
            super()._handle_client_request(request_type, request)


class ARCoreProc(WatchedCoreProc):
    """vLLM's own."""

    def get_scheduled_ids(self) -> list[str]:
        # vLLM picks within the step; beyond what runs, only the first that wait can be picked.
        waiting = islice(self.scheduler.waiting, self.vllm_config.scheduler_config.max_num_seqs)
        return [request.request_id for request in (*self.scheduler.running, *waiting)]


class OmniEngineCoreProc(WatchedCoreProc, DiffusionCoreInVllm):
    """A diffusion engine core behind vLLM's sockets.

    The order of the bases makes `EngineCoreProc.__init__` build our core, not a language model's.
    """

    shutdown_state: EngineShutdownState  # set by vLLM, and by a signal

    def get_scheduled_ids(self) -> list[str]:
        self.core.on_schedule = self._name_scheduled  # once they are known
        return []

    def _name_scheduled(self, request_ids: Iterable[str]) -> None:
        assert self.black_box is not None
        self.black_box.name_requests(request_ids)

    def check_workers(self) -> None:
        self.core.executor.check_workers()

    def add_request(self, request: DiffusionRequest[Any], request_wave: int = 0) -> None:
        try:
            self.core.add_request(request)
        except Exception as error:  # of whatever kind: only this request has been touched
            if not isinstance(error, OmniRequestError):
                logger.exception("request %s cannot be taken in", request.request_id)
            output = OmniEngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=VllmFinishReason.ERROR,
                error=omni.RequestError.from_exception(error),
            )
            self.output_queue.put_nowait(
                (request.client_index, OmniEngineCoreOutputs(outputs=[output]))
            )

    def _make_ready_response(self) -> EngineCoreReadyResponse:
        # Of a language model, all of it; our client does not read it.
        return EngineCoreReadyResponse(
            max_model_len=0,
            num_gpu_blocks=0,
            block_size=0,
            dp_stats_address=None,
            dtype="",
            vllm_version="",
            world_size=1,
            data_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_rank=0,
            max_num_seqs=0,
            max_num_batched_tokens=0,
            instance_id="",
            supports_lora=False,
            max_loras=0,
        )

    def _handle_shutdown(self) -> bool:
        """Whether to go on; requests that are left are aborted, which takes one more step."""
        if self.shutdown_state == EngineShutdownState.REQUESTED:
            self.core.abort_requests(list(self.core.scheduler.requests))
            self.shutdown_state = EngineShutdownState.SHUTTING_DOWN
        return self.is_running() or self.core.has_requests()


def run_core_proc(
    core_class: type[WatchedCoreProc],
    title: str,
    lifeline: Connection,
    black_box: BlackBox,
    run_folder: str,
    **kwargs: Any,
) -> None:
    """The main function of a stage's process, AR or diffusion.

    vLLM's own, `run_engine_core`, makes no other class than its own, and does not say why a start
    failed; otherwise the two do the same.

    Args:
        lifeline: takes what went wrong, in words, if the core cannot start.
        run_folder: where whatever it writes may be taken away when its parent has ended.
        kwargs: of the core class.
    """
    setproctitle.setproctitle(title)
    envs.set_temporary_folder(run_folder)
    envs.set_supervised()
    envs.keep_sockets_local()
    end_with_parent()  # the forkserver, which ends with the process that has started it
    watch_parent()
    show_stacks_when_asked()
    core: WatchedCoreProc | None = None
    wake_up: SignalCallback | None = None

    def stop(signum: int, frame: Any) -> None:
        if core is None or wake_up is None:
            raise SystemExit(0)  # nobody waits for a core that is still being made
        core.shutdown_state = EngineShutdownState.REQUESTED
        wake_up.trigger()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    configure_logging_if_needed(kwargs["vllm_config"].logging_config)
    logs.configure_child()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # vLLM's walk over torch's names
            core = core_class(**kwargs)
    except WorkerDeadError as error:
        _die_like(error)
    except Exception as error:
        lifeline.send_bytes(describe(error).encode())  # whoever started this process tells it
        logger.debug("cannot start", exc_info=True)
        raise SystemExit(1) from None
    core.black_box = black_box
    _beat(black_box, core.check_workers)
    queue_of_core = core.input_queue
    wake_up = SignalCallback(lambda: queue_of_core.put_nowait((EngineCoreRequestType.WAKEUP, None)))
    try:
        core.run_busy_loop()
    except WorkerDeadError as error:
        _die_like(error)
    except Exception:
        logger.exception("the engine failed")
        os._exit(1)  # at once: whoever waits for it is told by its death
    finally:
        wake_up.stop()
        core.shutdown()


def _beat(black_box: BlackBox, check_workers: Callable[[], None]) -> None:
    """Show again and again that the interpreter runs, and look after the workers."""

    def beat() -> None:
        while True:
            black_box.beat()
            try:
                check_workers()
            except WorkerDeadError as error:
                _die_like(error)
            time.sleep(_BEAT_PERIOD)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


def _die_like(error: WorkerDeadError) -> NoReturn:
    """End as a worker has: what killed it is for the supervisor to judge."""
    logger.error("%s", error)
    if error.exit_code is not None and error.exit_code < 0:
        os.kill(os.getpid(), -error.exit_code)
    os._exit(1)
