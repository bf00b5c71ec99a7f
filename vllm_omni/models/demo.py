"""Where the model named `demo` is."""

from __future__ import annotations

from pathlib import Path

from vllm_omni.config import DEMO

_SHIPPED = Path(__file__).parent.parent / "demo"


def find_model(model: str) -> Path:
    """The checkpoint folder for a model name or path."""
    return _SHIPPED if model == DEMO else Path(model)
