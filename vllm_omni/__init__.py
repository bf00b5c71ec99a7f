"""vLLM-omni: serving for models whose answer is more than text."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_omni.engine.async_llm import OmniAsyncLLM
    from vllm_omni.entrypoints.omni import Omni
    from vllm_omni.outputs import OmniOutput
    from vllm_omni.params import DiffusionParams, OutputMode
    from vllm_omni.request import OmniRequest

__version__ = "0.1.0"

# Imported on first use: `import vllm_omni.diffusion` must not pull in what it does not need.
_EXPORTS = {
    "DiffusionParams": "vllm_omni.params",
    "Omni": "vllm_omni.entrypoints.omni",
    "OmniAsyncLLM": "vllm_omni.engine.async_llm",
    "OmniOutput": "vllm_omni.outputs",
    "OmniRequest": "vllm_omni.request",
    "OutputMode": "vllm_omni.params",
}

__all__ = ["DiffusionParams", "Omni", "OmniAsyncLLM", "OmniOutput", "OmniRequest", "OutputMode"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
