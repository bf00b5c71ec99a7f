"""The plugin steps in for torchvision, and out of its way."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_omni.ar.plugin import PIL_MODULE, TORCHVISION_MODULE, register

CODE = f"""
import sys
from vllm_omni.ar.plugin import register
register()
alias = sys.modules.get({TORCHVISION_MODULE!r})
print(alias and alias.__name__, "vllm" in sys.modules)
"""


def run(python_path: list[Path]) -> str:
    root = Path(__file__).parents[2]
    path = os.pathsep.join(str(entry) for entry in [root, *python_path])
    result = subprocess.run(
        [sys.executable, "-c", CODE],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    return result.stdout.splitlines()[-1]


def test_vllm_finds_the_plugin() -> None:
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="vllm_omni")
    assert entry.load() is register


def test_does_nothing_with_torchvision(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").touch()
    assert run([tmp_path]) == "None False"


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed"
)
def test_pil_stands_in_without_torchvision() -> None:
    assert run([]) == f"{PIL_MODULE} True"
