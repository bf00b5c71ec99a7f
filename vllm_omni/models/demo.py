"""Where the model named `demo` is."""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_omni import envs
from vllm_omni.config import DEMO

_SHIPPED = Path(__file__).parent.parent / "demo"


def find_model(model: str) -> Path:
    """The checkpoint folder for a model name or path."""
    if model != DEMO:
        return Path(model)
    if (_SHIPPED / "model_index.json").is_file():
        return _SHIPPED
    return _random_demo()


def _random_demo() -> Path:
    """A checkpoint with random weights, made once: it draws, but nothing one would recognise."""
    path = envs.cache_dir() / "demo-random"
    if not (path / "model_index.json").is_file():
        from vllm_omni.models.qwen_image.checkpoint import write_checkpoint

        print(f"making a random-weight model in {path}", file=sys.stderr)
        write_checkpoint(path, size="tiny", seed=0)
    return path
