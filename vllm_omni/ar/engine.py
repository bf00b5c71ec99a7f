"""`AREngine`: a vLLM engine in this process that generates text and returns hidden states.

Seams, checked against vLLM 0.32.0: `EngineArgs`; `LLMEngine` with its `renderer`,
`output_processor`, `engine_core` and `model_executor`; `OutputProcessor.process_outputs`.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from vllm import EngineArgs, RequestOutput, SamplingParams
from vllm.platforms import current_platform
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from vllm_omni.ar.worker import EXTRA_ARG, worker_class_name
from vllm_omni.errors import (
    ConfigError,
    EngineDeadError,
    InvalidParameterError,
    ModalityNotSupportedError,
    ModelLoadError,
)

DEFAULT_ENGINE_ARGS: Mapping[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,  # compiling takes more than a minute
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "disable_log_stats": True,
}
"""For a small machine without a GPU; each can be overridden."""

CUDA_ENGINE_ARGS: Mapping[str, Any] = {
    "dtype": "auto",  # the checkpoint's, usually bfloat16
    "gpu_memory_utilization": 0.35,  # of the whole GPU: other stages share it
    "max_num_seqs": 64,
    "disable_log_stats": True,
}
"""For an NVIDIA GPU, where CUDA graphs pay; each can be overridden."""

OWN_ENGINE_ARGS = ("model", "tokenizer", "worker_cls", "distributed_executor_backend")
"""What `AREngine` sets itself."""

# Folders of a checkpoint in diffusers layout that vLLM needs as one. Of two files with the same
# name the first wins.
CHECKPOINT_FOLDERS = ("text_encoder", "processor", "tokenizer")


@dataclass(frozen=True, kw_only=True)
class ARRequest:
    """Text to go on from, and whether the hidden states are wanted."""

    request_id: str
    prompt: str | Sequence[int]  # text or token ids
    sampling_params: SamplingParams
    images: Sequence[Image] = ()  # one for each image token in the prompt
    # A row for each token of the prompt, or for all that the model reads: also those it generates,
    # except the last, which is never read.
    hidden_states: Literal["prompt", "all"] | None = None


@dataclass(frozen=True, kw_only=True)
class ARStageOutput:
    """News of one request from one step."""

    request_id: str
    request_output: RequestOutput | None  # as vLLM made it; None if the request was aborted
    hidden_states: Tensor | None = None  # [tokens, hidden], once and complete
    finished: bool = False


class AREngine:
    """Not thread safe: one caller steps it, and steps the engines of a process one by one."""

    def __init__(self, model: str | Path, engine_args: Mapping[str, Any] | None = None) -> None:
        """Load the text encoder of a checkpoint in diffusers layout."""
        own = sorted(set(engine_args or ()) & set(OWN_ENGINE_ARGS))
        if own:
            raise ConfigError("engine_args", own, "the engine sets these itself")
        # vLLM reads weights, tokenizer and image settings from one folder; checkpoints have three.
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-omni-ar-")
        try:
            folder = Path(self._folder.name)
            _link_checkpoint(Path(model), folder)
            self.reads_images = (folder / "preprocessor_config.json").is_file()
            defaults = CUDA_ENGINE_ARGS if current_platform.is_cuda() else DEFAULT_ENGINE_ARGS
            args = _create_engine_args(
                folder, {**defaults, **(engine_args or {})}, self.reads_images
            )
            self._engine = _load(model, args)
        except BaseException:
            self._folder.cleanup()
            raise
        _running.append(self)
        self._outputs = HiddenStatesOutputProcessor.replace(self._engine)
        self._requests: dict[str, ARRequest] = {}  # not finished
        self._aborted: list[str] = []  # their last output is still to come

    def add_request(self, request: ARRequest) -> None:
        """Queue a request; raises an `OmniRequestError` if it can never run."""
        if request.request_id in self._requests or request.request_id in self._aborted:
            raise InvalidParameterError("request_id", request.request_id, "one that is not in use")
        if request.images and not self.reads_images:
            raise ModalityNotSupportedError(
                "images are not supported: the checkpoint has no processor/preprocessor_config.json"
            )
        params = _with_hidden_states(request)
        try:
            self._engine.add_request(request.request_id, self._render(request), params)
        # Only this request's data has been touched; what it meets on its way raises anything.
        except Exception as error:
            raise _to_request_error(request, error) from error
        self._requests[request.request_id] = request

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests before the next step; each still gets its final output."""
        aborted = [request_id for request_id in request_ids if self._requests.pop(request_id, None)]
        self._engine.abort_request(aborted)
        for request_id in aborted:
            self._outputs.take_rows(request_id)
        self._aborted += aborted

    def has_requests(self) -> bool:
        return bool(self._requests or self._aborted)

    def step(self) -> list[ARStageOutput]:
        """One step of vLLM: the news of every request that has any. Raises `EngineDeadError`."""
        if not self.has_requests():
            return []
        outputs = [
            ARStageOutput(request_id=request_id, request_output=None, finished=True)
            for request_id in self._aborted
        ]
        self._aborted = []
        # Also when all were aborted: the worker frees what it holds for them in its next step.
        try:
            request_outputs = self._engine.step()
        except Exception as error:  # whatever it is, vLLM's state is undefined now
            raise EngineDeadError(f"vLLM failed in a step: {_describe(error)}") from error
        return outputs + [self._to_stage_output(output) for output in request_outputs]

    def shutdown(self) -> None:
        """Free the weights and the cache; the engine cannot be used any more."""
        if self not in _running:
            return
        _running.remove(self)
        _ended.append(self._engine.engine_core)
        self._engine.model_executor.shutdown()
        self._folder.cleanup()
        if not _running:
            # The rest ends torch's process group, which all engines of a process share.
            while _ended:
                _ended.pop().shutdown()

    def _render(self, request: ARRequest) -> Any:
        """The prompt as vLLM's engine takes it: token ids, and what the images became."""
        prompt: dict[str, Any] = (
            {"prompt": request.prompt}
            if isinstance(request.prompt, str)
            else {"prompt_token_ids": list(request.prompt)}
        )
        if request.images:
            prompt["multi_modal_data"] = {"image": list(request.images)}
        (engine_input,) = self._engine.renderer.render_cmpl(
            [parse_model_prompt(self._engine.model_config, prompt)]
        )
        return engine_input

    def _to_stage_output(self, output: RequestOutput) -> ARStageOutput:
        request_id = output.request_id
        is_complete = self._requests[request_id].hidden_states == "prompt" or output.finished
        if output.finished:
            del self._requests[request_id]
        return ARStageOutput(
            request_id=request_id,
            request_output=output,
            hidden_states=self._outputs.take_rows(request_id) if is_complete else None,
            finished=output.finished,
        )


_running: list[AREngine] = []
_ended: list[Any] = []  # vLLM's clients of engines that were shut down while others ran


class HiddenStatesOutputProcessor(OutputProcessor):
    """Keeps hidden states aside: vLLM's takes what has a pooling output for a pooling request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rows: dict[str, list[Tensor]] = {}  # each [rows, hidden], by the caller's request id

    @classmethod
    def replace(cls, engine: LLMEngine) -> HiddenStatesOutputProcessor:
        """Give an engine that has no requests yet such an output processor."""
        stock = engine.output_processor
        own = cls(
            stock.tokenizer,
            log_stats=stock.log_stats,
            stream_interval=stock.stream_interval,
            tracing_enabled=stock.tracing_enabled,
        )
        engine.output_processor = own
        return own

    def process_outputs(
        self, engine_core_outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any
    ) -> OutputProcessorOutput:
        for output in engine_core_outputs:
            state = self.request_states.get(output.request_id)  # None: aborted
            if state is not None and output.pooling_output is not None:
                self._rows.setdefault(state.external_req_id, []).append(output.pooling_output)
                output.pooling_output = None
        return super().process_outputs(engine_core_outputs, *args, **kwargs)

    def take_rows(self, request_id: str) -> Tensor | None:
        """All rows that have come since the last call, [rows, hidden]."""
        rows = self._rows.pop(request_id, None)
        return torch.cat(rows) if rows else None


def _link_checkpoint(checkpoint: Path, target: Path) -> None:
    if not (checkpoint / CHECKPOINT_FOLDERS[0] / "config.json").is_file():
        raise ModelLoadError(
            f"{checkpoint} is not a checkpoint in diffusers layout: "
            f"{CHECKPOINT_FOLDERS[0]}/config.json is missing"
        )
    for folder in CHECKPOINT_FOLDERS:
        for file in sorted((checkpoint / folder).glob("*")):
            link = target / file.name
            if not link.is_symlink():
                link.symlink_to(file.resolve())


def _create_engine_args(
    folder: Path, engine_args: Mapping[str, Any], reads_images: bool
) -> EngineArgs:
    limits = {"video": 0} if reads_images else {"video": 0, "image": 0}
    try:
        return EngineArgs(
            model=str(folder),
            worker_cls=worker_class_name(),
            # The class's name: "uni" would become worker processes on a CPU.
            distributed_executor_backend=f"{UniProcExecutor.__module__}.{UniProcExecutor.__name__}",
            **{"limit_mm_per_prompt": limits, **engine_args},
        )
    except TypeError as error:  # an unknown name
        raise ConfigError("engine_args", sorted(engine_args), str(error)) from error


def _load(model: str | Path, args: EngineArgs) -> LLMEngine:
    try:
        with _globals_kept():
            return LLMEngine(
                args.create_engine_config(),
                executor_class=UniProcExecutor,
                log_stats=not args.disable_log_stats,
                multiprocess_mode=False,
            )
    except Exception as error:  # of whatever kind: vLLM, transformers and safetensors differ
        raise ModelLoadError(f"vLLM cannot load {model}: {_describe(error)}") from error


@contextmanager
def _globals_kept() -> Iterator[None]:
    """Undo what a CPU worker does to its process, which here is the caller's."""
    set_num_threads = torch.set_num_threads
    synchronize, empty_cache = torch.accelerator.synchronize, torch.accelerator.empty_cache
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.accelerator.synchronize, torch.accelerator.empty_cache = synchronize, empty_cache
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _with_hidden_states(request: ARRequest) -> SamplingParams:
    """The request's sampling parameters, with the sign that `vllm_omni.ar.worker` looks for."""
    if request.hidden_states not in (None, "prompt", "all"):
        raise InvalidParameterError("hidden_states", request.hidden_states, "'prompt', 'all', None")
    params = request.sampling_params.clone()
    if request.hidden_states is None:
        return params
    if params.n != 1:
        raise InvalidParameterError("n", params.n, "1 for a request with hidden states")
    params.extra_args = {**(params.extra_args or {}), EXTRA_ARG: request.hidden_states}
    params.skip_reading_prefix_cache = True  # tokens found in the cache have no rows
    return params


def _to_request_error(request: ARRequest, error: Exception) -> InvalidParameterError:
    # vLLM names the parameter if it is one of the sampling parameters; else the prompt is at fault.
    param = getattr(error, "parameter", None) or ""
    if hasattr(request.sampling_params, param):
        return InvalidParameterError(param, getattr(request.sampling_params, param), str(error))
    return InvalidParameterError("prompt", request.prompt[:40], _describe(error))


def _describe(error: BaseException) -> str:
    """An error with its causes: the outermost often says only that something failed."""
    text = f"{type(error).__name__}: {error}"
    return f"{text}, because of {_describe(error.__cause__)}" if error.__cause__ else text
