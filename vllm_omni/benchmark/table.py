"""A report as text to read on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_omni.benchmark.client import Failure
from vllm_omni.benchmark.report import (
    Arrivals,
    ClassReport,
    LoadReport,
    Percentiles,
    Throughput,
)

_PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "max")  # fields of Percentiles
_NOTHING = "-"


def to_text(report: LoadReport) -> str:
    """Totals first, then a row for each class of pictures."""
    lines = [*_totals(report), "", *_latency_rows(report.classes)]
    if any(row.first_preview is not None for row in report.classes):
        lines += ["", *_preview_rows(report.classes)]
    return "\n".join(lines)


def _totals(report: LoadReport) -> list[str]:
    rows = [
        ("requests", _counts(report)),
        ("duration", f"{report.duration:.2f} s"),
        ("throughput", _throughput(report.throughput)),
        ("arrivals", _arrivals(report.arrivals)),
    ]
    lines = [f"{name:<12}{text}" for name, text in rows]
    for kind, message in report.failure_examples.items():
        failure = str(Failure(kind, message))
        lines.append(f"{'':<12}{report.failures[kind]} x {failure}")
    return lines


def _throughput(throughput: Throughput) -> str:
    parts = [
        f"{throughput.requests:.3f} requests/s",
        f"{throughput.images:.3f} images/s",
        f"{throughput.megapixels:.4f} megapixels/s",
    ]
    if throughput.megapixel_steps is not None:
        parts.append(f"{throughput.megapixel_steps:.3f} megapixel-steps/s")
    return ", ".join(parts)


def _arrivals(arrivals: Arrivals) -> str:
    parts = []
    if arrivals.actual_rate is not None:
        rate = arrivals.requested_rate
        parts.append(
            f"{arrivals.actual_rate:.3f} requests/s" + (f" (asked: {rate:g})" if rate else "")
        )
    parts.append(f"in flight {arrivals.mean_in_flight:.1f} on average")
    parts.append(f"{arrivals.max_in_flight} at most")
    parts.append(f"sent late by {1e3 * arrivals.late_p99_seconds:.0f} ms (P99)")
    return ", ".join(parts)


def _counts(report: LoadReport) -> str:
    text = f"{report.num_ok} ok, {report.num_failed} failed"
    return text + (f", {report.num_unfinished} unfinished" if report.num_unfinished else "")


def _latency_rows(classes: Sequence[ClassReport]) -> list[str]:
    def rest(row: ClassReport) -> list[str]:
        attainment = row.slo_attainment
        within = _NOTHING if attainment is None else f"{100 * attainment:.1f} %"
        return [_seconds(row.alone_seconds), _seconds(row.slo_seconds), within]

    return _rows(
        "latency in s", classes, lambda row: row.latency, ("alone", "SLO", "in time"), rest
    )


def _preview_rows(classes: Sequence[ClassReport]) -> list[str]:
    return _rows("first preview", classes, lambda row: row.first_preview, (), lambda _: [])


def _rows(
    title: str,
    classes: Sequence[ClassReport],
    percentiles_of: Callable[[ClassReport], Percentiles | None],
    more_titles: Sequence[str],
    more_cells: Callable[[ClassReport], list[str]],
) -> list[str]:
    cells = [[title, "ok", "failed", *_PERCENTILES, *more_titles]]
    for row in classes:
        percentiles = percentiles_of(row)
        numbers = [_seconds(getattr(percentiles, name, None)) for name in _PERCENTILES]
        cells.append([row.name, str(row.num_ok), str(row.num_failed), *numbers, *more_cells(row)])
    width = max(len(row[0]) for row in cells)
    return [
        f"{first:<{width}}" + "".join(f"{cell:>9}" for cell in others) for first, *others in cells
    ]


def _seconds(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.3f}"
