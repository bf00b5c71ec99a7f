"""The picture of a run."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.benchmark.test_benchmark_report import BUSY, LARGE, create_outcome
from vllm_omni.benchmark.plot import check_plot, write_plot
from vllm_omni.benchmark.report import Slo, make_report
from vllm_omni.errors import ConfigError

OUTCOMES = [
    create_outcome(0.0, 1.0),
    create_outcome(1.0, 3.0, LARGE),
    create_outcome(2.0, 0.5, failure=BUSY),
]


def test_writes_a_picture_with_something_in_it(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    report = make_report(OUTCOMES, {}, Slo(seconds=2.0))
    write_plot(path, "a title", report, OUTCOMES)
    with Image.open(path) as image:
        assert image.size == (1320, 900)
        colours = image.convert("RGB").getcolors(maxcolors=2**20)
    assert colours is not None
    assert {(0x08, 0x51, 0x9C), (0xC1, 0x12, 0x1F)} <= {colour for _, colour in colours}


def test_a_run_without_outcomes_can_be_plotted(tmp_path: Path) -> None:
    write_plot(tmp_path / "plot.svg", "nothing", make_report([], {}, Slo()), [])
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")


def test_other_suffixes_are_refused() -> None:
    check_plot(Path("plot.PNG"))
    with pytest.raises(ConfigError, match=r"--plot='plot.gif' is not allowed: one of .png"):
        check_plot(Path("plot.gif"))


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hidden:
        """Finds matplotlib nowhere."""

        @staticmethod
        def find_spec(name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
            return None if name == "matplotlib" else importlib.machinery.PathFinder.find_spec(name)

    monkeypatch.setattr(sys, "meta_path", [Hidden])
    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'vllm-omni\[bench\]'"):
        check_plot(Path("plot.png"))
