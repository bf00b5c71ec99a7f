"""Keeps the libraries' own progress bars off the user's terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging


@contextmanager
def progress_bars_off() -> Iterator[None]:
    """Stop transformers' bar for each file it reads or writes; its switch is process-wide."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
