"""Where stage processes come from: a server that has imported what they need, and forks."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

PRELOAD = "vllm_omni.engine.preload"


def start_forkserver() -> ForkServerContext:
    """Start the server, if it does not run: it imports while the caller goes on with its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    # Ctrl-C, which reaches all processes, is the caller's: it would end the server's imports.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context
