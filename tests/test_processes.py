"""Child processes: they end with their parent, however early that is."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.ending import wait_until_gone

PARENT = """
import multiprocessing, os, time
from vllm_omni.processes import run_child

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=run_child, args=(os.getpid(), "slow:main", "a word"))
    child.start()
    print(child.pid, flush=True)
    time.sleep(600)
"""

# A module that takes long to import, as torch does.
SLOW = """
import pathlib, time

pathlib.Path("importing").touch()
time.sleep(600)
"""


@pytest.mark.parametrize("is_importing", [False, True], ids=["at once", "while it imports"])
def test_a_spawned_child_ends_with_a_killed_parent(tmp_path: Path, is_importing: bool) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, str(tmp_path / "parent.py")]
    deadline = time.monotonic() + 120
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        while is_importing and not (tmp_path / "importing").exists():
            assert time.monotonic() < deadline, "the child imports nothing"
            time.sleep(0.02)
        parent.kill()
    wait_until_gone(child)


def test_a_child_runs_the_function_that_is_named() -> None:
    command = [sys.executable, "-c", "import vllm_omni.processes as p, sys; " + _CALL]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed == "a word\nFalse\n"


_CALL = "p.run_child(None, 'builtins:print', 'a word'); print('torch' in sys.modules)"
