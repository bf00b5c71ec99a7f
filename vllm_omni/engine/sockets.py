"""Where a stage's process and its client meet: sockets that nobody else can reach."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from vllm_omni.run_folder import get_run_folder


class SocketFolder:
    """A folder for the sockets of one process, which only this user can look into.

    Once both ends are connected it goes away: nobody can come after that.
    """

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(dir=get_run_folder())  # mode 0700
        self.is_removed = False

    @property
    def path(self) -> Path:
        return Path(self._folder.name)

    def make_address(self, name: str) -> str:
        """A ZMQ address that no socket has yet."""
        return f"ipc://{self.path / name}"

    def remove(self) -> None:
        """Connections stay. May be called twice."""
        if not self.is_removed:
            self.is_removed = True
            self._folder.cleanup()
