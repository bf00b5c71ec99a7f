"""Stages working as one: from a request to the stages' engines, here or in other processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_omni.engine.async_llm import OmniAsyncLLM
    from vllm_omni.engine.coordinator import CrossEngineCoordinator, ParentRequest
    from vllm_omni.engine.core import OmniEngineCore, OmniExecutor, OmniScheduler
    from vllm_omni.engine.core_proc import OmniEngineCoreProc
    from vllm_omni.engine.output_processor import (
        HiddenStateOutputProcessor,
        MultimodalOutputProcessor,
        OutputProcessor,
    )
    from vllm_omni.engine.processor import (
        MultimodalInputProcessor,
        OmniProcessor,
        ProcessedInput,
        TokenizedData,
    )
    from vllm_omni.engine.stage_client import StageClient

# Imported on first use: vLLM, which some of them need, takes seconds.
_EXPORTS = {
    "CrossEngineCoordinator": "coordinator",
    "HiddenStateOutputProcessor": "output_processor",
    "MultimodalInputProcessor": "processor",
    "MultimodalOutputProcessor": "output_processor",
    "OmniAsyncLLM": "async_llm",
    "OmniEngineCore": "core",
    "OmniEngineCoreProc": "core_proc",
    "OmniExecutor": "core",
    "OmniProcessor": "processor",
    "OmniScheduler": "core",
    "OutputProcessor": "output_processor",
    "ParentRequest": "coordinator",
    "ProcessedInput": "processor",
    "StageClient": "stage_client",
    "TokenizedData": "processor",
}

__all__ = [
    "CrossEngineCoordinator",
    "HiddenStateOutputProcessor",
    "MultimodalInputProcessor",
    "MultimodalOutputProcessor",
    "OmniAsyncLLM",
    "OmniEngineCore",
    "OmniEngineCoreProc",
    "OmniExecutor",
    "OmniProcessor",
    "OmniScheduler",
    "OutputProcessor",
    "ParentRequest",
    "ProcessedInput",
    "StageClient",
    "TokenizedData",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
