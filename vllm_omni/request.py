"""`OmniRequest`: what a user asks for, and what each stage has made of it so far."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni.config import DiTCacheConfig, StageConfig
from vllm_omni.errors import InvalidParameterError
from vllm_omni.params import DiffusionParams

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.request import Request


class OutputKind(StrEnum):
    """Which outputs of a request are given; the names are those of vLLM's `RequestOutputKind`."""

    CUMULATIVE = "cumulative"  # all news; text from its beginning
    DELTA = "delta"  # all news; only the text that is new
    FINAL_ONLY = "final_only"


@dataclass(kw_only=True)
class OmniRequest:
    """A request on its way through the stages.

    Example:
        OmniRequest(prompt="a red circle", output_format="image", params=DiffusionParams(seed=1))
    """

    prompt: str = ""
    # Modality -> data; an "image" is a PIL image, an encoded one as bytes, or a list of them.
    input_modalities: dict[str, Any] = field(default_factory=dict)
    output_format: str = "image"  # text, image, text+image, latents, hidden_states
    stage_configs: Sequence[StageConfig] = ()  # the stages to go through; empty: all
    hidden_state_output: bool = False  # also return what conditions the diffusion stage
    dit_cache_config: DiTCacheConfig | None = None
    params: DiffusionParams = field(default_factory=DiffusionParams)
    sampling_params: SamplingParams | Mapping[str, Any] | None = None  # of text; None: the model's
    messages: Sequence[Mapping[str, Any]] | None = None  # a chat in OpenAI's form, for the prompt
    prompt_token_ids: Sequence[int] | None = None  # for the prompt, of a text request
    output_kind: OutputKind | None = None  # None: as `sampling_params` say
    trace_headers: Mapping[str, str] | None = None  # W3C's, of the span that this is a part of
    arrival_time: float | None = None  # `time.monotonic()`; None: when it is given to the engine
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _stage_outputs: dict[int, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            raise InvalidParameterError("prompt", self.prompt, "a string")
        if not isinstance(self.output_format, str):
            raise InvalidParameterError("output_format", self.output_format, "a string")
        if not isinstance(self.params, DiffusionParams):
            raise InvalidParameterError("params", self.params, "a DiffusionParams")
        if not isinstance(self.input_modalities, Mapping):
            raise InvalidParameterError(
                "input_modalities", self.input_modalities, "a mapping of modality to data"
            )
        if isinstance(self.sampling_params, (str, bytes, int, float, list, tuple)):
            raise InvalidParameterError(
                "sampling_params", self.sampling_params, "SamplingParams or a mapping of its fields"
            )
        if self.dit_cache_config is not None:
            raise InvalidParameterError(
                "dit_cache_config",
                self.dit_cache_config,
                "the budget is the stage's: dit_config.cache_config; a request's is params.cache",
            )
        if self.trace_headers is not None and not isinstance(self.trace_headers, Mapping):
            raise InvalidParameterError(
                "trace_headers", self.trace_headers, "a mapping of header to value"
            )
        _check_each("stage_configs", self.stage_configs, StageConfig)
        if self.messages is not None:
            _check_each("messages", self.messages, Mapping)
        if self.prompt_token_ids is not None:
            _check_each("prompt_token_ids", self.prompt_token_ids, int)
        if not isinstance(self.request_id, str) or not self.request_id:
            raise InvalidParameterError("request_id", self.request_id, "a string, not empty")
        if self.output_kind is not None:
            if self.output_kind not in tuple(OutputKind):
                allowed = ", ".join(repr(kind.value) for kind in OutputKind)
                raise InvalidParameterError("output_kind", self.output_kind, f"one of {allowed}")
            self.output_kind = OutputKind(self.output_kind)
        if self.prompt:
            self.input_modalities = {"text": self.prompt, **self.input_modalities}

    def add_input(self, modality: str, data: Any) -> None:
        """Add, or replace, the input of one modality."""
        self.input_modalities[modality] = data

    def get_stage_input(self, stage_id: int) -> Any:
        """The output of the stage before, or the user's inputs for the first stage."""
        earlier = [done for done in self._stage_outputs if done < stage_id]
        return self._stage_outputs[max(earlier)] if earlier else self.input_modalities

    def set_stage_output(self, stage_id: int, output: Any) -> None:
        self._stage_outputs[stage_id] = output

    def get_stage_output(self, stage_id: int) -> Any:
        """The output of a stage; -1 is the last one that has an output."""
        if stage_id == -1:
            stage_id = max(self._stage_outputs, default=-1)
        if stage_id not in self._stage_outputs:
            raise LookupError(f"stage {stage_id} has no output yet: {list(self._stage_outputs)} do")
        return self._stage_outputs[stage_id]

    def to_vllm_request(self) -> Request:
        """The request as vLLM's own scheduler knows it: tokens, and how to sample."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.request import Request

        params = self.sampling_params
        if not isinstance(params, SamplingParams):
            try:
                params = SamplingParams(**(params or {}))
            # An unknown name, an impossible value.
            except (TypeError, VLLMValidationError) as error:
                raise InvalidParameterError("sampling_params", params, str(error)) from error
        return Request(
            request_id=self.request_id,
            prompt_token_ids=self._get_token_ids(),
            sampling_params=params,
            pooling_params=None,
            priority=self.params.priority,
        )

    def _get_token_ids(self) -> list[int]:
        if self.prompt_token_ids is not None:
            return list(self.prompt_token_ids)
        if not self.stage_configs:
            raise InvalidParameterError(
                "prompt_token_ids", None, "the prompt's tokens, or stage_configs to tokenize it for"
            )
        from transformers import AutoTokenizer

        folder = Path(self.stage_configs[0].model_path)
        own = folder / "tokenizer"  # in diffusers layout
        tokenizer = AutoTokenizer.from_pretrained(own if own.is_dir() else folder)
        token_ids: list[int] = tokenizer(self.prompt).input_ids
        return token_ids


def _check_each(name: str, values: object, kind: type) -> None:
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, kind) for v in values):
        raise InvalidParameterError(name, values, f"a list of {kind.__name__}")
