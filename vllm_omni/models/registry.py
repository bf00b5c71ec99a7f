"""Which checkpoints there are code for, and where that code is. The one place that lists models."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_omni.errors import ModelLoadError


@dataclass(frozen=True)
class ModelSpec:
    """A model family. Classes are named as "module:Class" and imported when they are needed."""

    pipeline_class: str  # `_class_name` in the checkpoint's model_index.json
    components: Mapping[str, str]  # folder of the checkpoint -> class that loads it
    inputs: str  # typed request inputs
    input_processor: str  # prompt and params -> inputs, at the edge; imports no weights
    adapter: str  # prepare / step / decode over the loaded components
    scheduler: str
    worker: str


_QWEN_IMAGE = "vllm_omni.models.qwen_image"

MODELS = {
    "QwenImagePipeline": ModelSpec(
        pipeline_class="QwenImagePipeline",
        components={
            "transformer": "diffusers:QwenImageTransformer2DModel",
            "vae": "diffusers:AutoencoderKLQwenImage",
            "text_encoder": "transformers:Qwen2_5_VLForConditionalGeneration",
        },
        inputs=f"{_QWEN_IMAGE}.inputs:QwenImageCustomInputs",
        input_processor=f"{_QWEN_IMAGE}.input_processor:QwenImageInputProcessor",
        adapter=f"{_QWEN_IMAGE}.adapter:QwenImageRunnerAdapter",
        scheduler=f"{_QWEN_IMAGE}.scheduler:QwenImageScheduler",
        worker=f"{_QWEN_IMAGE}.worker:QwenImageWorker",
    )
}


def load_class(name: str) -> Any:
    """The class behind "module:Class"."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def get_model_spec(model: str | Path) -> ModelSpec:
    """The spec for a checkpoint folder in diffusers layout."""
    index = read_json(Path(model), "model_index.json")
    pipeline_class = index.get("_class_name")
    if not isinstance(pipeline_class, str) or pipeline_class not in MODELS:
        raise ModelLoadError(
            f"{model} holds a {pipeline_class!r}, for which there is no code here: "
            f"one of {', '.join(MODELS)}"
        )
    return MODELS[pipeline_class]


def read_json(model: Path, name: str) -> dict[str, Any]:
    """A JSON object from the checkpoint folder."""
    path = model / name
    if not model.is_dir():
        raise ModelLoadError(f"model {str(model)!r} is not a folder: give 'demo' or a local path")
    if not path.is_file():
        raise ModelLoadError(
            f"{model} has no {name}: is it a whole checkpoint in diffusers layout?"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds a {type(content).__name__}, not an object")
    return content
