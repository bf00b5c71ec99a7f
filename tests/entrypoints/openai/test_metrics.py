"""What Prometheus is told: the values, that nothing grows with what clients send, and the files."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from vllm.v1.metrics import loggers

from tests.timelines import STAGES, create_span, create_step, create_timeline
from vllm_omni.engine.stage_client import StageClient, StageHealth
from vllm_omni.entrypoints.openai.metrics import ServerMetrics, make_router
from vllm_omni.outputs import FinishReason

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "deploy" / "grafana" / "vllm-omni.json"
DOCS = ROOT / "docs" / "metrics.md"
STAGE = {"stage": "diffusion:1"}


@pytest.fixture
def metrics() -> ServerMetrics:
    return ServerMetrics(STAGES)


def read(metrics: ServerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"vllm_omni_{name}", labels)


# --- steps ---


def test_a_step(metrics: ServerMetrics) -> None:
    stats = create_step(
        0.0,
        0.25,
        num_running=3,
        num_waiting=2,
        num_computed_steps=1,
        model_time=0.2,
        prepare_time=0.01,
        memory_bytes={0: 1000, 1: 2000},
        num_cached_rows=2,
        num_skipped_rows=1,
        num_skipped_blocks=5,
        cache_bytes={0: {"request": 10, "step_cache": 20, "prompt": 30}, 1: {"step_cache": 40}},
        num_evictions={"step_cache": 2},
    )
    metrics.observe_step(1, stats)
    metrics.observe_step(1, create_step(0.5, 0.75, num_computed_steps=1, num_running=1))
    expected = {
        "requests_running": 1,
        "requests_waiting": 0,
        "step_seconds_count": 2,
        "step_seconds_sum": 1.0,
        "step_rows_sum": 4,
        "step_tokens_sum": 1200,
        "batch_occupancy_ratio_sum": 1.2,
        "steps_computed_total": 2,
        "rows_total": 4,
        "rows_cached_total": 2,
        "rows_skipped_total": 1,
        "blocks_skipped_total": 5,
        "model_seconds_total": 0.2,
        "prepare_seconds_total": 0.01,
    }
    assert {name: read(metrics, name, **STAGE) for name in expected} == pytest.approx(expected)
    assert read(metrics, "step_seconds_bucket", le="0.5", **STAGE) == 1
    assert read(metrics, "memory_bytes", worker="1", **STAGE) == 2000  # from the step before
    held = {"0": 20, "1": 40}
    for worker, num_bytes in held.items():
        labels = STAGE | {"worker": worker, "kind": "step_cache"}
        assert read(metrics, "cache_bytes", **labels) == num_bytes
    assert read(metrics, "cache_evictions_total", kind="step_cache", **STAGE) == 2
    assert read(metrics, "cache_evictions_total", kind="prompt", **STAGE) == 0


def test_what_is_released_without_a_step_is_told(metrics: ServerMetrics) -> None:
    metrics.observe_step(1, create_step(0.0, cache_bytes={0: {"request": 10}}))
    metrics.observe_step(1, create_step(1.0, num_requests=0, cache_bytes={0: {"request": 0}}))
    assert read(metrics, "cache_bytes", worker="0", kind="request", **STAGE) == 0


def test_news_without_a_step_are_no_step(metrics: ServerMetrics) -> None:
    metrics.observe_step(1, create_step(0.0, num_running=1))
    metrics.observe_step(1, create_step(1.0, num_requests=0, num_rows=0, num_tokens=0))
    assert read(metrics, "step_seconds_count", **STAGE) == 1
    assert read(metrics, "requests_running", **STAGE) == 0


def test_before_the_first_request_there_are_zeros(metrics: ServerMetrics) -> None:
    assert read(metrics, "requests_running", **STAGE) == 0
    assert read(metrics, "stage_up", stage="ar:0") == 1
    assert read(metrics, "images_total") == 0
    assert read(metrics, "requests_in_progress") == 0


def test_a_step_takes_microseconds(metrics: ServerMetrics) -> None:
    stats = create_step(0.0, memory_bytes={0: 1000})
    start = time.perf_counter()
    for _ in range(1000):
        metrics.observe_step(1, stats)
    assert time.perf_counter() - start < 1.0  # 30 µs each on an idle machine


# --- requests ---


def test_a_request(metrics: ServerMetrics) -> None:
    metrics.observe_request(create_timeline())
    labels = {"output_format": "image", "outcome": "stop"}
    assert read(metrics, "requests_total", **labels) == 1
    assert read(metrics, "request_seconds_sum", **labels) == 4.5
    assert read(metrics, "time_to_first_preview_seconds_sum") == 3.25
    assert read(metrics, "images_total") == 1
    assert read(metrics, "pixels_total") == 65536
    assert read(metrics, "aborts_total") == 0
    assert read(metrics, "encode_seconds_sum", stage="ar:0") == 0.5
    assert read(metrics, "queue_wait_seconds_sum", **STAGE) == 1.5
    assert read(metrics, "denoise_seconds_sum", **STAGE) == 2.0
    assert read(metrics, "decode_seconds_sum", **STAGE) == 0.25


def test_a_text(metrics: ServerMetrics) -> None:
    span = create_span("stage 0 ar: text", 0.0, 3.0, stage_id=0, makes="text")
    metrics.observe_request(create_timeline(output_format="text", spans=[span]))
    assert read(metrics, "text_seconds_sum", stage="ar:0") == 3.0
    assert read(metrics, "encode_seconds_count", stage="ar:0") is None


def test_an_abort(metrics: ServerMetrics) -> None:
    metrics.observe_request(create_timeline(outcome=FinishReason.ABORT, num_images=0))
    assert read(metrics, "requests_total", output_format="image", outcome="abort") == 1
    assert read(metrics, "aborts_total") == 1
    assert read(metrics, "queue_wait_seconds_sum", **STAGE) == 1.5
    assert read(metrics, "denoise_seconds_count", **STAGE) is None  # it was cut short


def test_errors_by_kind(metrics: ServerMetrics) -> None:
    metrics.observe_request(
        create_timeline(outcome=FinishReason.ERROR, error="DeadlineExceededError", spans=[])
    )
    metrics.observe_request(create_timeline(error="StageExecutionError"))  # one picture of several
    assert read(metrics, "errors_total", kind="DeadlineExceededError") == 1
    assert read(metrics, "errors_total", kind="StageExecutionError") == 1
    assert read(metrics, "requests_total", output_format="image", outcome="stop") == 1


def test_requests_on_their_way(metrics: ServerMetrics) -> None:
    on_their_way = ["a", "b"]
    metrics.track_requests(lambda: len(on_their_way))
    assert read(metrics, "requests_in_progress") == 2
    on_their_way.clear()
    assert read(metrics, "requests_in_progress") == 0


# --- HTTP ---


def test_http(metrics: ServerMetrics) -> None:
    metrics.observe_http("POST", "/v1/images/generations", 200, 2.5)
    metrics.observe_http("POST", "/v1/images/generations", 400, 0.5)
    route = {"method": "POST", "route": "/v1/images/generations"}
    assert read(metrics, "http_requests_total", status="200", **route) == 1
    assert read(metrics, "http_requests_total", status="400", **route) == 1
    assert read(metrics, "http_request_seconds_sum", **route) == 3.0


def test_what_clients_choose_is_no_label(metrics: ServerMetrics) -> None:
    for index in range(100):
        metrics.observe_http(f"BREW{index}", "other", 405, 0.1)
        metrics.observe_request(create_timeline(output_format=f"format{index}"))
    num_lines = len(metrics.render().splitlines())
    for index in range(100, 200):
        metrics.observe_http(f"BREW{index}", "other", 405, 0.1)
        metrics.observe_request(create_timeline(output_format=f"format{index}"))
    assert len(metrics.render().splitlines()) == num_lines
    assert read(metrics, "http_requests_total", method="other", route="other", status="405") == 200
    assert read(metrics, "requests_total", output_format="other", outcome="stop") == 200


# --- stages ---


class StubClient(StageClient):
    """A stage that is as well as a test says."""

    health = StageHealth("ready")

    async def add_request(self, request: Any) -> None: ...

    async def abort(self, request_ids: Iterable[str]) -> None: ...

    async def check_health(self) -> None: ...

    async def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        return []

    def shutdown(self) -> None: ...


def fetch(metrics: ServerMetrics, clients: list[StubClient]) -> httpx.Response:
    app = FastAPI()
    app.include_router(make_router(metrics, clients))

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get("/metrics")

    return asyncio.run(main())


def test_stages_up_and_down(metrics: ServerMetrics) -> None:
    clients = [StubClient(stage) for stage in STAGES]
    metrics.observe_step(1, create_step(0.0, num_running=2, num_waiting=1))
    fetch(metrics, clients)
    assert read(metrics, "stage_up", **STAGE) == 1
    clients[1].health = StageHealth("restarting", num_replayed=3)
    fetch(metrics, clients)
    assert read(metrics, "stage_up", **STAGE) == 0
    assert read(metrics, "stage_up", stage="ar:0") == 1
    assert read(metrics, "requests_running", **STAGE) == 0
    assert read(metrics, "requests_waiting", **STAGE) == 0
    assert read(metrics, "stage_restarts_total", **STAGE) == 0
    clients[1].health = StageHealth("ready", num_restarts=2, num_replayed=5, num_refused=1)
    for _ in range(2):
        fetch(metrics, clients)
    assert read(metrics, "stage_up", **STAGE) == 1
    # What happened between two looks is not missed.
    assert read(metrics, "stage_restarts_total", **STAGE) == 2
    assert read(metrics, "requests_replayed_total", **STAGE) == 5
    assert read(metrics, "requests_refused_total", **STAGE) == 1


def test_requests_that_were_not_let_in(metrics: ServerMetrics) -> None:
    assert read(metrics, "requests_shed_total", reason="cost") == 0
    metrics.observe_shed("cost")
    assert read(metrics, "requests_shed_total", reason="cost") == 1


# --- the text ---


def test_text_is_what_prometheus_reads(metrics: ServerMetrics) -> None:
    metrics.observe_step(1, create_step(0.0))
    metrics.observe_request(create_timeline())
    response = fetch(metrics, [StubClient(stage) for stage in STAGES])
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(response.text))
    names = [family.name for family in families]
    assert len(set(names)) == len(names), "a metric is there twice"
    assert {"vllm_omni_step_seconds", "vllm_omni_images", "process_resident_memory"} <= {
        name.removesuffix("_bytes") for name in names
    }
    ours = [family for family in families if family.name.startswith("vllm_omni_")]
    assert all(family.documentation for family in ours)


# --- the dashboard and the page ---


def metric_names(metrics: ServerMetrics) -> set[str]:
    """As they are written in queries, histograms without their endings."""
    families = [family for family in metrics.registry.collect()]
    return {
        f"{family.name}_total" if family.type == "counter" else family.name for family in families
    }


def panels_of(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def test_every_query_of_the_dashboard_names_a_metric_that_exists(metrics: ServerMetrics) -> None:
    source = inspect.getsource(loggers)
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in panels_of(board) for target in panel["targets"]]
    queries += [v["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    used: set[str] = set()
    for query in queries:
        names = re.findall(r"\bvllm(?:_omni_|:)\w+", query)
        assert names or "process_" in query, query
        used |= {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    ours = {name for name in used if name.startswith("vllm_omni_")}
    assert ours <= metric_names(metrics)
    assert len(ours) > 20
    for name in used - ours:
        assert f'"{name.removesuffix("_total")}"' in source, f"vLLM has no {name}"


def test_every_metric_is_on_the_dashboard(metrics: ServerMetrics) -> None:
    text = DASHBOARD.read_text()
    assert [name for name in sorted(metric_names(metrics)) if name not in text] == []


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    board = json.loads(DASHBOARD.read_text())
    taken: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        position = panel["gridPos"]
        for x in range(position["x"], position["x"] + position["w"]):
            for y in range(position["y"], position["y"] + position["h"]):
                assert x < 24 and (x, y) not in taken, panel["title"]
                taken[x, y] = panel["title"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_page_lists_every_metric_and_no_other(metrics: ServerMetrics) -> None:
    page = DOCS.read_text()
    assert set(re.findall(r"^\| `(vllm_omni_\w+)`", page, flags=re.M)) == metric_names(metrics)
    named = {re.sub(r"_(bucket|sum|count)$", "", n) for n in re.findall(r"vllm_omni_\w+", page)}
    assert named - {"vllm_omni_"} == metric_names(metrics)
