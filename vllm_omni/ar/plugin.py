"""The `vllm.general_plugins` entry point: Qwen2.5-VL without torchvision.

vLLM calls `register()` in every process of an engine, before it looks at a model. The model is
registered by name: vLLM inspects it in a process of its own, but keeps the result by the file's
hash, so only the first start pays (10 s); a class would have to be imported in every process.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

# vLLM 0.32.0 takes `smart_resize` from the first module, which imports torchvision; the second has
# the same function, and an image processor that needs only PIL (transformers 5.19.0).
TORCHVISION_MODULE = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
PIL_MODULE = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"
IMAGE_ONLY_MODEL = "vllm_omni.ar.qwen2_5_vl:ImageOnlyQwen2_5_VL"


def register() -> None:
    """Make Qwen2.5-VL load, with images and without video; with torchvision there is no need."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    from vllm import ModelRegistry

    sys.modules.setdefault(TORCHVISION_MODULE, importlib.import_module(PIL_MODULE))
    ModelRegistry.register_model(ARCHITECTURE, IMAGE_ONLY_MODEL)
