"""Where stage processes come from: a server that has imported what they need, and forks."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

PRELOAD = "vllm_omni.engine.preload"


def start_forkserver() -> ForkServerContext:
    """Start the server, if it does not run: it imports while the caller goes on with its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    forkserver.ensure_running()
    return context
