"""Timelines are kept for a while, and come back as traces that Perfetto opens."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from fastapi import FastAPI

from tests.timelines import WALL_ARRIVAL, create_span, create_step, create_timeline
from vllm_omni.entrypoints.openai import errors
from vllm_omni.entrypoints.openai.timeline import TimelineStore, make_router, make_trace
from vllm_omni.outputs import FinishReason
from vllm_omni.timeline import RequestTimeline

MICROSECONDS = round(1e6 * WALL_ARRIVAL)


def fetch(store: TimelineStore, request_id: str) -> httpx.Response:
    app = FastAPI()
    errors.install(app)
    app.include_router(make_router(store))

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(f"/v1/requests/{request_id}/timeline")

    return asyncio.run(main())


def slices_of(trace: dict[str, Any]) -> list[tuple[str, int, int, float, float]]:
    """(name, process, row, seconds from arrival, seconds) of each."""
    return [
        (
            event["name"],
            event["pid"],
            event["tid"],
            (event["ts"] - MICROSECONDS) / 1e6,
            event["dur"] / 1e6,
        )
        for event in trace["traceEvents"]
        if event["ph"] == "X"
    ]


def test_a_timeline_comes_back_as_a_trace() -> None:
    store = TimelineStore()
    store.add(create_timeline("a"))
    response = fetch(store, "a")
    assert response.status_code == 200
    trace = response.json()
    assert slices_of(trace) == [
        ("image: stop", 0, 0, 0.0, 4.5),
        ("stage 0 ar: hidden_states", 1, 0, 0.0, 0.5),
        ("stage 1 diffusion: image", 2, 0, 0.5, 3.875),
        ("queue", 2, 1, 0.5, 1.5),
        ("denoise", 2, 1, 2.0, 2.0),
        ("step 1", 2, 1, 2.0, 1.0),
        ("step 2", 2, 1, 3.0, 1.0),  # without its decoding
        ("decode", 2, 1, 4.0, 0.25),
    ]
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M"
    }
    assert names == {
        ("process_name", 0, 0): "request",
        ("process_name", 1, 0): "stage 0 ar",
        ("process_name", 2, 0): "stage 1 diffusion",
        ("thread_name", 2, 1): "picture 0",
    }
    [preview] = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert preview["ts"] - MICROSECONDS == 3_250_000
    step = next(event for event in trace["traceEvents"] if event["name"] == "step 1")
    assert step["args"] == {"num_requests": 1, "num_rows": 2, "num_tokens": 600, "model_ms": 0.0}
    assert trace["displayTimeUnit"] == "ms"
    assert trace["otherData"] == {
        "request_id": "a",
        "outcome": "stop",
        "error": None,
        "start_time": WALL_ARRIVAL,
        "duration_seconds": 4.5,
    }


def test_a_request_that_failed() -> None:
    timeline = create_timeline(
        outcome=FinishReason.ERROR, error="DeadlineExceededError", first_preview=None, spans=[]
    )
    trace = make_trace(timeline).model_dump()
    [_, whole] = trace["traceEvents"]
    assert whole["name"] == "image: error"
    assert whole["args"] == {"request_id": "a", "error": "DeadlineExceededError"}
    assert trace["otherData"]["error"] == "DeadlineExceededError"


def test_slices_of_a_row_lie_one_in_another_whatever_is_rounded() -> None:
    steps = [create_step(index / 3, 1 / 3) for index in range(9)]
    spans = [
        create_span("denoise", 0.0, 3.0 - 1e-7, stage_id=1, output=0, steps=steps),
        create_span("decode", 3.0 - 1e-7, 3.1, stage_id=1, output=0),
    ]
    denoise, *inner, decode = [
        event
        for event in make_trace(create_timeline(spans=spans)).traceEvents
        if event["pid"] == 2 and event["ph"] == "X"
    ]
    ends = [event["ts"] + event["dur"] for event in inner]
    assert [event["ts"] for event in inner[1:]] == ends[:-1]
    assert ends[-1] == denoise["ts"] + denoise["dur"] == decode["ts"]


def test_unknown_request_is_404_in_openais_shape() -> None:
    response = fetch(TimelineStore(), "nobody")
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["type"] == "not_found_error"
    assert (error["param"], error["code"]) == ("request_id", "request_not_found")
    assert "nobody" not in json.dumps(error)


def test_the_oldest_go_first() -> None:
    store = TimelineStore(max_requests=2)
    for request_id in ("a", "b", "c"):
        store.add(create_timeline(request_id))
    assert [store.get(request_id) is not None for request_id in "abc"] == [False, True, True]
    store.add(create_timeline("b"))  # again, and now the newest
    store.add(create_timeline("d"))
    assert [store.get(request_id) is not None for request_id in "bcd"] == [True, False, True]
    assert len(store) == 2


def test_long_ones_count_for_more() -> None:
    def create_long(request_id: str, num_steps: int) -> RequestTimeline:
        steps = [create_step(index) for index in range(num_steps)]
        span = create_span("denoise", 0, num_steps, stage_id=1, output=0, steps=steps)
        return create_timeline(request_id, spans=[span])

    store = TimelineStore(max_events=100)
    store.add(create_long("a", 40))
    store.add(create_long("b", 40))
    assert len(store) == 2
    store.add(create_long("c", 40))
    assert [store.get(request_id) is not None for request_id in "abc"] == [False, True, True]
    store.add(create_long("d", 1000))  # too long to be kept at all
    assert len(store) == 0
    store.add(create_long("e", 40))
    assert len(store) == 1
