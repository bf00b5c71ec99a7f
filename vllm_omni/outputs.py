"""What comes back: from an engine core (msgspec, crosses processes) and to the user."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

import vllm_omni.errors
from vllm_omni.errors import InvalidParameterError, OmniRequestError, StageExecutionError

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor
    from vllm import CompletionOutput, RequestOutput

    from vllm_omni.timeline import RequestTimeline
else:
    # Messages name tensors without importing torch; `vllm_omni.serial` carries them.
    Tensor = Any


# What a tensor in a message may be, by the name of its torch dtype.
TENSOR_DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")


class FinishReason(StrEnum):
    STOP = "stop"
    ABORT = "abort"
    ERROR = "error"


class RequestError(msgspec.Struct, frozen=True):
    """An `OmniRequestError` that can cross a process."""

    type: str
    message: str
    param: str | None = None  # the parameter at fault, if one is

    @classmethod
    def from_exception(cls, error: Exception) -> RequestError:
        if isinstance(error, OmniRequestError):
            return cls(type(error).__name__, str(error), getattr(error, "param", None))
        return cls(StageExecutionError.__name__, f"{type(error).__name__}: {error}")

    def to_exception(self) -> OmniRequestError:
        error_class = getattr(vllm_omni.errors, self.type, None)
        if not (isinstance(error_class, type) and issubclass(error_class, OmniRequestError)):
            error_class = StageExecutionError
        error = error_class.__new__(error_class)
        error.args = (self.message,)
        if isinstance(error, InvalidParameterError):
            error.param = self.param or ""
        return error


class StepStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step of a diffusion engine core did, and where its time went, in seconds."""

    start_time: float  # time.monotonic(), which all processes of a machine share
    step_time: float  # scheduling, execution and update
    model_time: float = 0.0  # inside text encoder, transformer and VAE
    prepare_time: float = 0.0  # of the slowest worker, as the next two
    denoise_time: float = 0.0  # previews included
    decode_time: float = 0.0

    num_requests: int = 0  # in the step
    num_rows: int = 0  # of them, one for each guidance branch
    num_tokens: int = 0  # over all rows, text included
    max_num_tokens: int = 0  # the budget
    num_running: int = 0  # requests that workers hold when the step is over
    num_waiting: int = 0  # and those that have not started
    num_computed_steps: int = 0  # denoising steps of requests
    num_cached_rows: int = 0  # of the rows, those of requests with a step cache
    num_skipped_rows: int = 0  # of these, taken by it
    num_skipped_blocks: int = 0  # of the transformer, that those rows left out
    cache_bytes: dict[int, dict[str, int]] = {}  # worker -> kind of entry -> bytes held afterwards
    num_evictions: dict[str, int] = {}  # kind of entry -> those that gave way in this step
    memory_bytes: dict[int, int] = {}  # worker -> GPU memory, or resident; told once a second

    @property
    def end_time(self) -> float:
        return self.start_time + self.step_time

    @property
    def occupancy(self) -> float:
        """The part of the token budget that was used."""
        return self.num_tokens / self.max_num_tokens if self.max_num_tokens else 0.0


class EngineCoreOutput(msgspec.Struct, omit_defaults=True):
    """News of one request from one step: its progress, or its end."""

    request_id: str
    new_token_ids: list[int] = []
    pooling_output: Tensor | None = None  # the main tensor, as `output_type` says
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    output_type: str | None = None  # "text", "hidden_states", "image", "latents"
    output_metadata: dict[str, Any] = {}  # step, num_steps, queue_time
    additional_outputs: dict[str, Tensor] = {}  # "latents", "mask"; "preview" with progress
    request_output: Any = None  # vLLM's, of text; made on the client's side, crosses no process
    step_stats: StepStats | None = None  # of the step it comes from; set on the client's side

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class EngineCoreOutputs(msgspec.Struct, omit_defaults=True):
    """All news of one step for one client."""

    outputs: list[EngineCoreOutput] = []
    step_stats: StepStats | None = None  # of a diffusion engine core; for one of the clients


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """What a request took; times in seconds."""

    num_steps: int = 0
    num_rows: int = 0  # of these steps, one for each guidance branch
    num_skipped_rows: int = 0  # of the rows, taken by the step cache
    num_prompt_tokens: int = 0  # that condition the picture, over both prompts
    queue_time: float = 0.0  # arrival to the first step
    total_time: float = 0.0  # arrival to the final output


@dataclass(kw_only=True)
class OmniOutput:
    """The answer to one request, or what there is of it so far.

    Lists have one entry per output of the prompt.
    """

    request_id: str
    prompt: str
    finished: bool = False
    finish_reason: FinishReason | None = None
    error: OmniRequestError | None = None

    # on the way
    step: int = 0  # denoising steps done, over all outputs of the prompt
    num_steps: int = 0  # of how many
    preview: Image | None = None  # a small picture of how output `preview_index` looks now
    preview_index: int = 0

    # the answer
    images: list[Image] = field(default_factory=list)
    latents: Tensor | None = None  # [outputs, tokens, 64] float32, as "latent" in diffusers
    masks: Tensor | None = None  # [outputs, H, W] uint8, 255 where the picture was drawn
    hidden_states: Tensor | None = None  # [tokens, hidden]
    text: str | None = None  # of the first completion
    request_output: RequestOutput | None = None  # text as vLLM gives it, nothing left out
    seeds: list[int] = field(default_factory=list)
    metrics: RequestMetrics = RequestMetrics()
    timeline: RequestTimeline | None = None  # with the last output: where the time went

    @property
    def outputs(self) -> list[CompletionOutput]:
        """vLLM's completions, as in its own outputs; none where no text was asked for."""
        return [] if self.request_output is None else self.request_output.outputs
