"""Which stages a model has, and how each is configured."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm_omni.config import DiTConfig, OmniConfig, StageConfig
from vllm_omni.errors import ConfigError
from vllm_omni.models.demo import find_model

logger = logging.getLogger(__name__)


def get_stage_configs(config: OmniConfig) -> tuple[StageConfig, ...]:
    """The stages that a config names; where it names none, those of its checkpoint."""
    stages = config.stage_configs or derive_stage_configs(config.model)
    return complete_stage_configs(stages, config.vllm_config)


def derive_stage_configs(
    model: str, dit_config: DiTConfig | None = None
) -> tuple[StageConfig, ...]:
    """The two stages of a checkpoint in diffusers layout: its text encoder, then the rest.

    Where vLLM is not installed, the second alone, which then encodes prompts itself.
    """
    path = str(find_model(model))
    drawing = StageConfig(
        stage_id=1, engine_type="diffusion", model_path=path, dit_config=dit_config
    )
    if importlib.util.find_spec("vllm") is None:
        logger.warning("vLLM is not installed: there is no text, only pictures")
        return complete_stage_configs([drawing])
    text = StageConfig(stage_id=0, engine_type="ar", model_path=path)
    return complete_stage_configs([text, drawing])


def complete_stage_configs(
    stages: Sequence[StageConfig], vllm_config: Any = None
) -> tuple[StageConfig, ...]:
    """Stages as a user gives them, with what was left out filled in, in the order of their ids.

    An AR stage without `vllm_config` takes the one given here.
    """
    if not stages:
        raise ConfigError("stage_configs", [], "at least one stage")
    ordered = sorted(stages, key=lambda stage: stage.stage_id)
    return tuple(_complete(stage, ordered, vllm_config) for stage in ordered)


def make_dit_config(stage: StageConfig) -> DiTConfig:
    """The settings of a diffusion stage's engine core."""
    config = stage.dit_config or DiTConfig()
    return replace(
        config,
        model=str(find_model(stage.model_path)),
        stage_id=stage.stage_id,
        cache_config=stage.cache_config or config.cache_config,
        # Where no stage before it gives hidden states, it encodes prompts itself.
        load_text_encoder="text" in stage.input_modalities,
    )


def _complete(stage: StageConfig, stages: Sequence[StageConfig], vllm_config: Any) -> StageConfig:
    is_ar = stage.engine_type == "ar"
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    if is_ar:
        # The last AR stage is the one that encodes; those before it write.
        is_last = all(s.engine_type != "ar" or s.stage_id <= stage.stage_id for s in stages)
        inputs, outputs = ("text", "image"), ("text", "hidden_states") if is_last else ("text",)
    elif any(other.engine_type == "ar" for other in stages):
        inputs, outputs = ("hidden_states",), ("image", "latents")
    else:
        inputs, outputs = ("text",), ("image", "latents", "hidden_states")
    return replace(
        stage,
        model_path=str(find_model(stage.model_path)),
        input_modalities=stage.input_modalities or inputs,
        output_modalities=stage.output_modalities or outputs,
        vllm_config=vllm_config if is_ar and stage.vllm_config is None else stage.vllm_config,
    )
