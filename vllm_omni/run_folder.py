"""Files that are there only while a process runs: whatever ends it, they go.

A folder's name tells whose it is, so that what was left by a process that is gone can be told from
what is in use. Three take it away: the process itself; when it is killed, a shell that waits for
that; and where both were killed, the next process of ours that starts (`sweep`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from multiprocessing import util
from pathlib import Path

_PREFIX = "vllm-omni"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-(\w+)-\w+")  # pid, and when it started
# Without a word, the other end of its input, which no other process has, has ended with its owner.
_SHELL = 'trap "" INT TERM HUP; read -r _ || rm -rf -- "$@"'


def get_run_folder() -> Path:
    """The folder of this process, mode 0700."""
    return _make_run_folder(os.getpid())


def sweep() -> None:
    """Take away what processes have left that are gone: folders of ours, and Python's sockets."""
    for path in Path(tempfile.gettempdir()).iterdir():
        try:
            is_ours = path.lstat().st_uid == os.getuid() and path.is_dir()
            if is_ours and (_is_left_over(path) or _is_left_by_forkserver(path)):
                shutil.rmtree(path)
        except OSError:  # it is gone meanwhile, or was never ours
            continue


@cache
def _make_run_folder(pid: int) -> Path:
    path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{pid}-{_start_time(pid)}-"))
    shell = subprocess.Popen(
        # Python's own folder has the socket of the forkserver.
        ["/bin/sh", "-c", _SHELL, "sh", str(path), str(util.get_temp_dir())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # signals to our group are not meant for it
    )
    util.Finalize(None, _remove, (path, shell), exitpriority=0)
    return path


def _remove(path: Path, shell: subprocess.Popen[bytes]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    shell.communicate(b"done\n")


def _is_left_over(path: Path) -> bool:
    if (match := _NAME.fullmatch(path.name)) is None:
        return False
    return _start_time(int(match[1])) != match[2]


def _start_time(pid: int) -> str:
    """When a process started, in a word that no other process of that number has; or "gone"."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return "gone"
    return f"{boot[:2]}{int(stat.rpartition(')')[2].split()[19]):x}"


def _is_left_by_forkserver(path: Path) -> bool:
    """Whether it holds nothing but sockets of forkservers that nobody listens on."""
    if not path.name.startswith("pymp-"):
        return False
    files = list(path.iterdir())
    heard = Path("/proc/net/unix").read_text()  # after the files: one may be just starting
    return bool(files) and all(
        file.name.startswith("listener-") and str(file) not in heard for file in files
    )
