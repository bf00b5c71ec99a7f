"""What a child process owes its parent: to end with it, and to show its stacks when asked."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import threading
from collections.abc import Sequence
from importlib import import_module
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

SHOW_STACKS = signal.SIGUSR1
"""A child writes the stacks of all its threads to stderr when it gets this."""

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends.

    It also reaches a process that is stopped, or whose interpreter is stuck. Only for a child of a
    thread that lives as long as its process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def run_child(parent_pid: int | None, function: str, *args: Any) -> None:
    """What a spawned process runs: it ends with its parent before it has imported anything large.

    A function of its own, because a spawned process imports the module of its target first of all.

    Args:
        parent_pid: None: it need not end with it.
        function: to call, as "module:function".
    """
    if parent_pid is not None:
        end_with_parent()
        if os.getppid() != parent_pid:  # it died before the kernel was told
            os._exit(1)
    module, _, name = function.partition(":")
    getattr(import_module(module), name)(*args)


def watch_parent() -> None:
    """End when the process that asked for this one ends, which need not have started it.

    That of a forkserver's children is at the other end of a pipe.
    """
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def show_stacks_when_asked() -> None:
    """See `SHOW_STACKS`, and in a crash; also while the interpreter is stuck, not while stopped."""
    faulthandler.enable()
    faulthandler.register(SHOW_STACKS, all_threads=True, chain=False)


def find_tree(pid: int) -> list[psutil.Process]:
    """A process and all below it; empty if it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def is_stopped(processes: Sequence[psutil.Process]) -> bool:
    """Whether somebody has stopped one of them (SIGSTOP, a debugger)."""
    return any(_status(process) in _STOPPED for process in processes)


def waits_for_disk(processes: Sequence[psutil.Process]) -> bool:
    """Whether one of them waits for a disk, or for memory that was moved there."""
    return any(_status(process) == psutil.STATUS_DISK_SLEEP for process in processes)


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """What they have used of the processor so far."""
    return sum(_cpu_seconds(process) for process in processes)


def kill_tree(process: BaseProcess) -> None:
    """Kill a child and all below it, and wait for the child."""
    tree = find_tree(process.pid) if process.pid is not None else []
    for one in tree:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    process.join(timeout=5)


_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_DEAD)


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)
