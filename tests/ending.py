"""Processes that are to end by themselves."""

from __future__ import annotations

import time

import psutil


def is_gone(process: psutil.Process) -> bool:
    """Whether it has ended; an orphan may stay a zombie where nobody asks for its exit code."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(process: psutil.Process, timeout: float = 60.0) -> None:
    """timeout: in seconds, far more than it needs on a machine with other work."""
    deadline = time.monotonic() + timeout
    while not is_gone(process):
        assert time.monotonic() < deadline, f"{process} is still there"
        time.sleep(0.02)
