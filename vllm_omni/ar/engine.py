"""`AREngine`: a vLLM engine in this process that generates text and returns hidden states.

Seams, checked against vLLM 0.32.0: `LLMEngine` with its `renderer`, `output_processor`,
`engine_core` and `model_executor`.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.abstract import Executor

from vllm_omni import envs
from vllm_omni.ar.config import ARModel
from vllm_omni.ar.messages import ARRequest
from vllm_omni.ar.output_processor import HiddenStatesOutputProcessor
from vllm_omni.ar.rendering import describe, make_params, render, to_request_error
from vllm_omni.errors import (
    EngineDeadError,
    InvalidParameterError,
    ModalityNotSupportedError,
    ModelLoadError,
)
from vllm_omni.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason


class AREngine:
    """Not thread safe: one caller steps it, and steps the engines of a process one by one."""

    def __init__(self, model: str | Path, vllm_config: Any = None) -> None:
        """Load a model; for the arguments see `ARModel`."""
        self.model = ARModel(model, vllm_config)
        self._engine = _load(self.model)
        _running.append(self)
        self._outputs = HiddenStatesOutputProcessor.replace(self._engine)
        self._requests: dict[str, ARRequest] = {}  # not finished
        self._aborted: list[str] = []  # their last output is still to come

    @property
    def scheduler(self) -> Any:
        """vLLM's own."""
        return self._engine.engine_core.engine_core.scheduler

    @property
    def executor(self) -> Any:
        """vLLM's own."""
        return self._engine.model_executor

    def add_request(self, request: ARRequest) -> None:
        """Queue a request; raises an `OmniRequestError` if it can never run."""
        if request.request_id in self._requests or request.request_id in self._aborted:
            raise InvalidParameterError("request_id", request.request_id, "one that is not in use")
        check_images(self.model, request)
        try:
            params = make_params(request, self._engine.model_config)
            prompt = render(self._engine.renderer, request)
            self._engine.add_request(request.request_id, prompt, params, priority=request.priority)
        # Only this request's data has been touched; what it meets on its way raises anything.
        except Exception as error:
            raise to_request_error(request, error) from error
        self._requests[request.request_id] = request

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests before the next step; each still gets its final output."""
        aborted = [request_id for request_id in request_ids if self._requests.pop(request_id, None)]
        self._engine.abort_request(aborted)
        for request_id in aborted:
            self._outputs.take_rows(request_id)
        self._aborted += aborted

    def has_requests(self) -> bool:
        """Whether there is anything left to do; also to let the worker free what has ended."""
        has_finished: bool = self.scheduler.has_finished_requests()
        return bool(self._requests or self._aborted) or has_finished

    def step(self) -> tuple[dict[int, EngineCoreOutputs], bool]:
        """One step of vLLM: the news by client, and whether there was any work.

        Raises `EngineDeadError`.
        """
        if not self.has_requests():
            return {}, False
        outputs = [
            EngineCoreOutput(
                request_id=request_id, finish_reason=FinishReason.ABORT, output_type="text"
            )
            for request_id in self._aborted
        ]
        self._aborted = []
        try:
            request_outputs = self._engine.step()
        except Exception as error:  # whatever it is, vLLM's state is undefined now
            raise EngineDeadError(f"vLLM failed in a step: {describe(error)}") from error
        for request_output in request_outputs:
            request = self._requests[request_output.request_id]
            if request_output.finished:
                del self._requests[request.request_id]
            outputs.append(self._outputs.convert(request, request_output))
        return {0: EngineCoreOutputs(outputs=outputs)}, True

    def shutdown(self) -> None:
        """Free the weights and the cache; the engine cannot be used any more."""
        if self not in _running:
            return
        _running.remove(self)
        _ended.append(self._engine.engine_core)
        self._engine.model_executor.shutdown()
        if not _running:
            # The rest ends torch's process group, which all engines of a process share.
            while _ended:
                _ended.pop().shutdown()


_running: list[AREngine] = []
_ended: list[Any] = []  # vLLM's clients of engines that were shut down while others ran


def check_images(model: ARModel, request: ARRequest) -> None:
    """Refuse images that the model cannot read; vLLM's own message would not say why."""
    if request.images and not model.reads_images:
        raise ModalityNotSupportedError(
            "images are not supported: the checkpoint has no processor/preprocessor_config.json"
        )


def _load(model: ARModel) -> LLMEngine:
    envs.keep_sockets_local()
    try:
        with _globals_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # vLLM's walk over torch's names
            return LLMEngine(
                model.vllm_config,
                executor_class=Executor.get_class(model.vllm_config),
                log_stats=False,
                multiprocess_mode=False,
            )
    except Exception as error:  # of whatever kind: vLLM, transformers and safetensors differ
        raise ModelLoadError(f"vLLM cannot load {model.model}: {describe(error)}") from error


@contextmanager
def _globals_kept() -> Iterator[None]:
    """Undo what a CPU worker does to its process, which here is the caller's."""
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
