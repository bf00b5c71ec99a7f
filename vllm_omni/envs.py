"""Every environment variable the package reads."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """VLLM_OMNI_CACHE: where files made at run time are kept between runs."""
    if value := os.environ.get("VLLM_OMNI_CACHE"):
        return Path(value)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm-omni"
