"""What benchmarks share: a clock, and a report that is written anew after every part."""

from __future__ import annotations

import datetime
import importlib.metadata
import inspect
import json
import platform
import shlex
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Figures = dict[str, Any]
Call = Callable[[], object]
B = TypeVar("B")


class Clock:
    """Of a device; on a CPU it is that of the host."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"

    def time(self, call: Call, rounds: int = 7, warm_up: int = 2) -> float:
        """Median milliseconds until the device is done."""
        times = [self._time_once(call) for _ in range(warm_up + rounds)]
        return statistics.median(times[warm_up:])

    def _time_once(self, call: Call) -> float:
        if not self.is_cuda:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


class Report(Generic[B]):
    """A JSON and a Markdown file. A part that fails costs only itself: its traceback is in both."""

    def __init__(self, out: Path, name: str, title: str, about: Figures) -> None:
        self.path = out / name
        self.figures: Figures = {**get_header(), **about}
        self.markdown = [f"# {title}\n"]
        self.markdown += [f"- {name}: {value}\n" for name, value in self.figures.items()]
        self.has_failed = False

    def run(self, bench: B, part: Callable[[B], tuple[Figures, str]]) -> None:
        """Add the figures of a part, and a table of them; its docstring says what they are."""
        start = time.perf_counter()
        try:
            self.figures[part.__name__], text = part(bench)
        except Exception:
            self.has_failed = True
            self.figures[part.__name__] = {"failed": traceback.format_exc()}
            text = f"```\n{traceback.format_exc()}```\n"
        seconds = time.perf_counter() - start
        section = f"\n## {part.__name__}\n{inspect.getdoc(part)}\n\n{text}\n{seconds:.0f} s.\n"
        self.markdown.append(section)
        print(section, flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.with_suffix(".json").write_text(json.dumps(self.figures, indent=2) + "\n")
        self.path.with_suffix(".md").write_text("".join(self.markdown))


def get_header() -> Figures:
    """The command, when and where it ran."""
    has_cuda = torch.cuda.is_available()
    return {
        "command": shlex.join(["python3", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if has_cuda else "cpu",
        "versions": get_versions(),
    }


def get_versions() -> dict[str, str]:
    """Of Python, and of the packages that decide how long something takes."""
    packages = ("torch", "diffusers", "transformers")
    return {
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
    }


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """||ours - reference|| / ||reference||"""
    return float((ours.double() - reference.double()).norm() / reference.double().norm())


def table(headers: Sequence[str], body: Sequence[Sequence[object]]) -> str:
    """In Markdown."""
    lines = [headers, ["---"] * len(headers), *body]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def number(value: float | None, digits: int = 1) -> str:
    """Of a table; nothing where there is none."""
    return "" if value is None else f"{value:.{digits}f}"
