"""What a process has on disk ends with it; what others have left is taken away."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from vllm_omni.run_folder import get_run_folder, sweep

_CHILD = """
import sys
from vllm_omni.run_folder import get_run_folder
(get_run_folder() / "socket").touch()
print(get_run_folder(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("signum", [None, signal.SIGTERM, signal.SIGKILL])
def test_folder_ends_with_its_process(signum: signal.Signals | None, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as child:
        assert child.stdout is not None
        path = Path(child.stdout.readline().strip())
        assert path.parent == tmp_path and path.stat().st_mode & 0o777 == 0o700
        assert (path / "socket").exists()
        if signum is not None:
            child.send_signal(signum)
        _, errors = child.communicate()
        assert errors == ""
    deadline = time.monotonic() + 10
    while any(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert list(tmp_path.iterdir()) == []  # also what Python's forkserver would have there


def test_there_is_one_for_each_process() -> None:
    assert get_run_folder() == get_run_folder()
    assert get_run_folder().is_dir()


def test_sweep_takes_away_what_nobody_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = get_run_folder()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    in_use = tmp_path / f"{used.name}x"
    pid, start = used.name.split("-")[2:4]
    left = [
        tmp_path / f"vllm-omni-{2**22 + 1}-{start}-abc",  # more processes than there can be
        tmp_path / f"vllm-omni-{pid}-another-abc",  # the number is taken by another
        tmp_path / "pymp-left",
    ]
    kept = [in_use, tmp_path / "vllm-omni-of-somebody", tmp_path / "pymp-heard"]
    for folder in (*left, *kept):
        folder.mkdir()
    (left[0] / "file").write_text("x")
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(left[2] / "listener-1"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(kept[2] / "listener-2"))
        listener.listen()
        sweep()
        assert sorted(tmp_path.iterdir()) == sorted(kept)
