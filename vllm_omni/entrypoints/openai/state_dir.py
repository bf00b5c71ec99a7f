"""`--state-dir`: the folder of what outlives a server. One server at a time, and nobody else's."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_omni.errors import ConfigError

JOBS = "jobs"
PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
_TEMPORARY = ".tmp"


@contextmanager
def hold_state_dir(state_dir: str) -> Iterator[None]:
    """Make the folder if it is not there, and keep other servers out of it; empty: no folder."""
    if not state_dir:
        yield
        return
    try:
        folder = make_folder(Path(state_dir), JOBS).parent
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, PRIVATE_FILE)
    except OSError as error:
        allowed = f"a folder that this user can write to: {error.strerror}"
        raise ConfigError("state_dir", state_dir, allowed) from error
    try:
        _lock(descriptor, state_dir)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, state_dir: str) -> None:
    """The system lets go of it when this process ends, in whatever way."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        allowed = "one that no other server is using"
        raise ConfigError("state_dir", state_dir, allowed) from error


def make_folder(state_dir: Path, name: str) -> Path:
    """A folder in there that only this user can look into.

    What was there before is left as it is: it may be everybody's.
    """
    state_dir.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    folder = state_dir / name
    folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"{name} in it is not a folder of this user")
    folder.chmod(PRIVATE_FOLDER)
    return folder


def write_whole(path: Path, data: bytes, is_durable: bool = True) -> None:
    """Write a file that is there as a whole or not at all, whatever ends this process.

    Args:
        is_durable: also when the machine stops; that takes the time of a disk.
    """
    temporary = path.with_suffix(_TEMPORARY)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(temporary, flags, PRIVATE_FILE), "wb") as file:
            file.write(data)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if is_durable:
            _sync_folder(path.parent)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def sweep(folder: Path) -> None:
    """Take away what was only half written when a server ended."""
    for path in folder.glob(f"*{_TEMPORARY}"):
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
