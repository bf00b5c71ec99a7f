"""The last requests' timelines, as traces that Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from vllm_omni.entrypoints.openai.errors import ERROR_RESPONSES, APIError
from vllm_omni.timeline import RequestTimeline, Span

_MAX_EVENTS = 250_000  # over all timelines: some 50 MB


class Trace(BaseModel):
    """Chrome's trace format."""

    traceEvents: list[dict[str, Any]]
    displayTimeUnit: str = "ms"
    otherData: dict[str, Any] = {}


class TimelineStore:
    """The timelines of the requests that ended last."""

    def __init__(self, max_requests: int = 1000, max_events: int = _MAX_EVENTS) -> None:
        self.max_requests = max_requests
        self.max_events = max_events
        self._timelines: OrderedDict[str, RequestTimeline] = OrderedDict()
        self._num_events = 0

    def __len__(self) -> int:
        return len(self._timelines)

    def add(self, timeline: RequestTimeline) -> None:
        """Keep a timeline; the oldest go when there are too many."""
        self._forget(timeline.request_id)
        self._timelines[timeline.request_id] = timeline
        self._num_events += timeline.num_events
        while len(self) > self.max_requests or self._num_events > self.max_events:
            self._forget(next(iter(self._timelines)))

    def get(self, request_id: str) -> RequestTimeline | None:
        """The timeline of a request that has ended, unless it is too long ago."""
        return self._timelines.get(request_id)

    def _forget(self, request_id: str) -> None:
        if (timeline := self._timelines.pop(request_id, None)) is not None:
            self._num_events -= timeline.num_events


def make_trace(timeline: RequestTimeline) -> Trace:
    """A process for each stage, in it a row for the stage's own time and one for each picture."""
    events = [
        _name("process_name", 0, 0, "request"),
        _slice(
            timeline,
            f"{timeline.output_format}: {timeline.outcome.value}",
            (timeline.start, timeline.end),
            (0, 0),
            request_id=timeline.request_id,
            **({} if timeline.error is None else {"error": timeline.error}),
        ),
    ]
    if timeline.first_preview is not None:
        moment = _microseconds(timeline, timeline.first_preview)
        events.append(
            {"name": "first preview", "ph": "i", "s": "t", "ts": moment, "pid": 0, "tid": 0}
        )
    for span in timeline.spans:
        events += _events_of(timeline, span)
    return Trace(
        traceEvents=events,
        otherData={
            "request_id": timeline.request_id,
            "outcome": timeline.outcome.value,
            "error": timeline.error,
            "start_time": timeline.wall_start,
            "duration_seconds": round(timeline.duration, 6),
        },
    )


def make_router(store: TimelineStore) -> APIRouter:
    """/v1/requests/{request_id}/timeline."""
    router = APIRouter(tags=["requests"])

    @router.get(
        "/v1/requests/{request_id}/timeline",
        summary="Where the time of a request went, as a trace for Perfetto",
        responses={404: ERROR_RESPONSES[404]},
    )
    async def get_timeline(request_id: str) -> Trace:
        if (timeline := store.get(request_id)) is None:
            message = "no such request: it has not ended yet, or it did so too long ago"
            raise APIError(404, message, "request_id", "request_not_found")
        return make_trace(timeline)

    return router


def _events_of(timeline: RequestTimeline, span: Span) -> Iterator[dict[str, Any]]:
    process = 0 if span.stage_id is None else span.stage_id + 1
    row = (process, 0 if span.output is None else span.output + 1)
    if span.makes is not None:
        yield _name("process_name", process, 0, span.name.partition(":")[0])
    elif span.output is not None and span.name == "queue":
        yield _name("thread_name", *row, f"picture {span.output}")
    yield _slice(timeline, span.name, (span.start, span.end), row, **span.attributes)
    for index, stats in enumerate(span.steps, start=1):
        # The last step ends with the decoding, which has a slice of its own.
        times = (stats.start_time, min(stats.end_time, span.end))
        yield _slice(
            timeline,
            f"step {index}",
            times,
            row,
            num_requests=stats.num_requests,
            num_rows=stats.num_rows,
            num_tokens=stats.num_tokens,
            model_ms=round(1e3 * stats.model_time, 3),
        )


def _slice(
    timeline: RequestTimeline,
    name: str,
    times: tuple[float, float],
    row: tuple[int, int],
    **args: Any,
) -> dict[str, Any]:
    start, end = (_microseconds(timeline, moment) for moment in times)
    pid, tid = row
    return {
        "name": name,
        "cat": "request",
        "ph": "X",
        "ts": start,
        "dur": end - start,
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _microseconds(timeline: RequestTimeline, moment: float) -> int:
    """Wall-clock time: traces of several requests can be laid side by side."""
    return round(1e6 * timeline.to_wall(moment))
