"""`OmniRequest`: what a user asks for, and what each stage has made of it so far."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_omni.config import DiTCacheConfig, StageConfig
from vllm_omni.errors import InvalidParameterError, ModalityNotSupportedError
from vllm_omni.params import DiffusionParams

INPUT_MODALITIES = ("text",)
OUTPUT_FORMATS = ("image", "latents", "hidden_states")


@dataclass(kw_only=True)
class OmniRequest:
    """A request on its way through the stages."""

    prompt: str
    input_modalities: dict[str, Any] = field(default_factory=dict)  # modality -> data
    output_format: str = "image"
    stage_configs: Sequence[StageConfig] = ()  # empty: as derived from the checkpoint
    hidden_state_output: bool = False  # also return what conditions the diffusion stage
    dit_cache_config: DiTCacheConfig | None = None
    params: DiffusionParams = field(default_factory=DiffusionParams)
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _stage_outputs: dict[int, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            raise InvalidParameterError("prompt", self.prompt, "a string")
        if self.output_format not in OUTPUT_FORMATS:
            raise ModalityNotSupportedError(
                f"output_format={self.output_format!r} is not supported: "
                f"one of {', '.join(OUTPUT_FORMATS)}"
            )
        for modality in self.input_modalities:
            _check_modality(modality)
        self.input_modalities = {"text": self.prompt, **self.input_modalities}

    def add_input(self, modality: str, data: Any) -> None:
        """Add, or replace, the input of one modality."""
        _check_modality(modality)
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


def _check_modality(modality: str) -> None:
    if modality not in INPUT_MODALITIES:
        raise ModalityNotSupportedError(
            f"input modality {modality!r} is not supported: one of {', '.join(INPUT_MODALITIES)}"
        )
