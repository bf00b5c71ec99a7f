"""Every environment variable the package reads or sets."""

from __future__ import annotations

import os
from pathlib import Path


def set_log_level(level: str) -> None:
    """How much the libraries say, and in all processes that start after this; on stderr only."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", level.upper())
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", level)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", level.upper())


def api_key() -> str | None:
    """VLLM_OMNI_API_KEY: what a client of a server that has keys sends."""
    return os.environ.get("VLLM_OMNI_API_KEY") or None


def cache_dir() -> Path:
    """VLLM_OMNI_CACHE: where files made at run time are kept between runs."""
    if value := os.environ.get("VLLM_OMNI_CACHE"):
        return Path(value)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm-omni"


def api_keys() -> tuple[str, ...]:
    """VLLM_OMNI_API_KEYS: keys of the server, separated by commas; not to be seen in `ps`."""
    keys = os.environ.get("VLLM_OMNI_API_KEYS", "").split(",")
    return tuple(key.strip() for key in keys if key.strip())
