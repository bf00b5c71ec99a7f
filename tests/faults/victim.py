"""A server that things are done to: its processes by name, and what it leaves behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.serving import ServerProcess

AR, DIFFUSION, WORKER = "vllm-omni ar:0", "vllm-omni diffusion:1", "vllm-omni diffusion:1 worker 0"
API, FORKSERVER, TRACKER = "vllm-omni api", "forkserver", "resource tracker"

GONE = {"orphans": 0, "segments": 0, "files": 0}  # what may be left of a server
LET_GO = 3.0  # seconds after an exit, by which nothing of the server may be left
_PERIOD = 0.01  # seconds between two looks
_SEGMENTS = Path("/dev/shm")


@dataclass(frozen=True)
class Leftovers:
    """What is there after the end of a server."""

    processes: tuple[str, ...] = ()
    segments: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def figures(self) -> dict[str, Any]:
        """For the table; what is there is named."""
        kinds = (self.processes, self.segments, self.files)
        counts = {name: len(kind) for name, kind in zip(GONE, kinds, strict=True)}
        return {**counts, **({"left": ", ".join(sum(kinds, ()))} if any(kinds) else {})}


class Victim(ServerProcess):
    """A server in a session of its own, with a folder for all its temporary files."""

    server = "vllm-omni"  # the table's column
    starts_session = True

    def __init__(self, log: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        # Not pytest's own: the path of a socket must be short.
        self.temporary = Path(tempfile.mkdtemp(prefix="faults-"))
        self._segments: set[str] = set()  # those that were seen in use
        super().__init__(log, *arguments, env={"TMPDIR": str(self.temporary)} | (env or {}))

    # --- its processes ---

    def list_processes(self) -> dict[int, str]:
        """Names of all that are alive, by process id."""
        found = {}
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) != self.process.pid:
                    continue
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = _get_name(process)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue  # it has just ended
        return found

    def find(self, name: str, timeout: float = 120.0, other_than: int | None = None) -> int:
        """The process id of the one with this name, once it is there."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for pid, found in self.list_processes().items():
                if found == name and pid != other_than:
                    return pid
            assert self.process.poll() is None, f"{name} never came: {self.log.read_text()}"
            time.sleep(_PERIOD)
        raise AssertionError(f"no {name} in {self.list_processes()}")

    def hurt(self, name: str, signum: int = signal.SIGKILL) -> float:
        """Send a signal to the one with this name or number; the answer is when."""
        pid = int(name) if name.isdecimal() else self.find(name)
        self._segments |= {name for pid in self.list_processes() for name in _list_mapped(pid)}
        now = time.monotonic()
        os.kill(pid, signum)
        return now

    # --- its end ---

    def wait_for_exit(self, timeout: float = 60.0) -> int | None:
        """Its exit code; None if it goes on."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def find_leftovers(self) -> Leftovers:
        """What is there some seconds after the end."""
        deadline = time.monotonic() + LET_GO
        while (left := self._look()) != Leftovers() and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def destroy(self) -> None:
        """End whatever is left, and take its files away."""
        for pid in self.list_processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _look(self) -> Leftovers:
        return Leftovers(
            tuple(self.list_processes().values()),
            tuple(sorted(name for name in self._segments if (_SEGMENTS / name).exists())),
            tuple(sorted(str(p.relative_to(self.temporary)) for p in self._list_files())),
        )

    def _list_files(self) -> list[Path]:
        # The cache that torch's compiler has for all programs of a user is no leftover.
        return [p for p in self.temporary.rglob("*") if not p.name.startswith("torchinductor_")]


def _get_name(process: psutil.Process) -> str:
    line = " ".join(process.cmdline()).strip()
    for name in (FORKSERVER, TRACKER):
        if f"multiprocessing.{name.replace(' ', '_')}" in line:
            return name
    return line


def _list_mapped(pid: int) -> list[str]:
    """Shared-memory segments that a process uses."""
    try:
        paths = [Path(entry.path) for entry in psutil.Process(pid).memory_maps()]
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []
    return [path.name for path in paths if path.parent == _SEGMENTS]
