"""Imports of large libraries, without the price that Python's garbage collector puts on them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def fast_imports() -> Iterator[None]:
    """Import without looking for garbage, and never look for it among what was imported.

    With vLLM that is a third of the time; later collections, of which vLLM asks for several when
    it starts, take a hundredth of theirs.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
