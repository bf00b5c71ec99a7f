"""A report as a picture: percentiles by class, every request, and arrivals beside completions."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni.benchmark.load import Outcome
from vllm_omni.benchmark.report import ALL, LoadReport
from vllm_omni.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE_SUFFIXES = (".png", ".svg", ".pdf")

# Okabe and Ito's colours, which colour-blind people can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_FAILED = "#C1121F"
_INK, _GRID = "#333333", "#E5E5E5"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#999999",
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.constrained_layout.use": True,
}


def check_plot(path: Path) -> None:
    """Before any work: whether a plot can be made, and of this kind."""
    if path.suffix.lower() not in FILE_SUFFIXES:
        raise ConfigError("--plot", str(path), f"one of {', '.join(FILE_SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot", str(path), "matplotlib is not installed: pip install 'vllm-omni[bench]'"
        )


def write_plot(path: Path, title: str, report: LoadReport, outcomes: Sequence[Outcome]) -> None:
    """Write the picture; its format is the suffix's."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 7.5), dpi=120)  # not pyplot: no display, no global state
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        axes = figure.subplot_mosaic(
            [["percentiles", "requests"], ["timeline", "timeline"]], height_ratios=(1.15, 1)
        )
        colours = {
            row.name: COLOURS[index % len(COLOURS)]
            for index, row in enumerate(row for row in report.classes if row.name != ALL)
        }
        _draw_percentiles(axes["percentiles"], report)
        _draw_requests(axes["requests"], outcomes, colours)
        _draw_timeline(axes["timeline"], outcomes)
        figure.savefig(path)


def _draw_percentiles(axes: Axes, report: LoadReport) -> None:
    rows = [row for row in report.classes if row.latency is not None]
    names = ("p50", "p90", "p95", "p99")
    shades = ("#9ECAE1", "#6BAED6", "#3182BD", "#08519C")
    width = 0.8 / len(names)
    for offset, (name, shade) in enumerate(zip(names, shades, strict=True)):
        places = [index + (offset - 1.5) * width for index in range(len(rows))]
        heights = [getattr(row.latency, name) for row in rows]
        axes.bar(places, heights, width * 0.92, color=shade, label=name.upper())
    goals = [(index, row.slo_seconds) for index, row in enumerate(rows) if row.slo_seconds]
    if goals:
        places, heights = [index for index, _ in goals], [seconds for _, seconds in goals]
        axes.errorbar(places, heights, xerr=0.45, color=_FAILED, fmt="none", lw=1.6, label="SLO")
    labels = [row.name if "/" not in row.name else f"{row.name} steps" for row in rows]
    axes.set_xticks(range(len(rows)), [label.replace("/", "\n") for label in labels])
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("seconds")
    axes.set_title("Latency")
    if rows:
        _add_legend(axes, num_columns=5, room=0.12)


def _draw_requests(axes: Axes, outcomes: Sequence[Outcome], colours: dict[str, str]) -> None:
    for name, colour in colours.items():
        of_class = [o for o in outcomes if o.request.picture.name == name and o.failure is None]
        axes.scatter(
            [outcome.end for outcome in of_class],
            [outcome.latency for outcome in of_class],
            s=22,
            color=colour,
            alpha=0.75,
            linewidths=0,
            label=name,
        )
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    if failed:
        ends, latencies = [o.end for o in failed], [o.latency for o in failed]
        axes.scatter(
            ends, latencies, s=30, marker="x", color=_FAILED, label="failed", clip_on=False
        )
    axes.set_xlabel("completed, seconds after the start")
    axes.set_ylabel("latency, seconds")
    axes.set_xlim(left=0)
    axes.set_title("Every request")
    if outcomes:
        _add_legend(axes, num_columns=3, room=0.22)


def _draw_timeline(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    arrivals = sorted(outcome.arrival for outcome in outcomes)
    ends = sorted(outcome.end for outcome in outcomes)
    times = sorted({0.0, *arrivals, *ends})
    arrived, completed = _counts_at(times, arrivals), _counts_at(times, ends)
    options: dict[str, Any] = {"where": "post", "lw": 1.8}
    axes.fill_between(
        times, completed, arrived, step="post", color="#9ECAE1", alpha=0.35, label="in flight"
    )
    axes.step(times, arrived, color=COLOURS[1], label="arrived", **options)
    axes.step(times, completed, color=COLOURS[0], label="completed", **options)
    axes.set_xlabel("seconds after the start")
    axes.set_ylabel("requests")
    axes.set_xlim(left=0)
    axes.set_title("Arrivals and completions")
    _add_legend(axes, num_columns=3, room=0.15)


def _add_legend(axes: Axes, num_columns: int, room: float) -> None:
    """Above the data, for which the axis is made longer by a share of it."""
    axes.set_ylim(0, axes.get_ylim()[1] * (1 + room))
    axes.legend(loc="upper left", ncols=num_columns, columnspacing=1.2, handlelength=1.4)


def _counts_at(times: Sequence[float], events: Sequence[float]) -> list[int]:
    """How many of the sorted `events` had happened at each of the sorted `times`."""
    counts, done = [], 0
    for moment in times:
        while done < len(events) and events[done] <= moment:
            done += 1
        counts.append(done)
    return counts
