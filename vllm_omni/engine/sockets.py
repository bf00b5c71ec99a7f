"""Where a stage's process and its client meet: sockets that nobody else can reach."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm_omni.run_folder import get_run_folder


class SocketFolder:
    """A folder for the sockets of one process, which only this user can look into.

    Once both ends are connected it goes away: nobody can come after that.
    """

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(dir=get_run_folder())  # mode 0700
        self._descriptor = os.open(self._folder.name, os.O_RDONLY | os.O_DIRECTORY)
        # As long as somebody may close a socket: that takes its file away by its name.
        weakref.finalize(self, os.close, self._descriptor)
        self.is_removed = False

    @property
    def path(self) -> Path:
        return Path(self._folder.name)

    def make_address(self, name: str) -> str:
        """A ZMQ address that no socket has yet.

        By the number of the open folder: a socket's name may have 107 bytes, a path has more.
        """
        return f"ipc:///proc/{os.getpid()}/fd/{self._descriptor}/{name}"

    def remove(self) -> None:
        """Connections stay. May be called twice."""
        if not self.is_removed:
            self.is_removed = True
            self._folder.cleanup()
