"""Where stage processes come from: a server that has imported what they need, and forks."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from concurrent.futures import Future
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from queue import SimpleQueue

PRELOAD = "vllm_omni.engine.preload"


def start_forkserver() -> ForkServerContext:
    """Start the server, if it does not run: it imports while the caller goes on with its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    _Keeper.get().ensure_running()
    return context


class _Keeper:
    """A thread that starts the server, and lives as long as this process.

    The kernel kills the server when the thread ends that has started it (`preload`): that must not
    be one of the caller's.
    """

    _only: _Keeper | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._calls: SimpleQueue[Future[None]] = SimpleQueue()
        threading.Thread(target=self._run, name="forkserver-keeper", daemon=True).start()

    @classmethod
    def get(cls) -> _Keeper:
        with cls._lock:
            if cls._only is None:
                cls._only = cls()
            return cls._only

    def ensure_running(self) -> None:
        done: Future[None] = Future()
        self._calls.put(done)
        done.result()

    def _run(self) -> None:
        # Ctrl-C, which reaches all processes, is the caller's: it would end the server's imports.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        while True:
            done = self._calls.get()
            try:
                forkserver.ensure_running()
            except Exception as error:  # the caller's to handle
                done.set_exception(error)
            else:
                done.set_result(None)
