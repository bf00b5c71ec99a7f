"""Probes: each route means what it says."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.inner_server import InnerServer, Served
from vllm_omni.outputs import StepStats

STAGES = {"ar:0": "ok", "diffusion:1": "ok"}


@pytest.fixture
def cold(inner: InnerServer) -> Iterator[Served]:
    """A server that has not warmed up."""
    with inner.serve() as served:
        yield served


def probe(served: Served, path: str) -> tuple[int, str]:
    response = httpx.get(f"{served.url}{path}", timeout=60)
    assert ("retry-after" in response.headers) == (response.status_code == 503)
    report = response.json()
    assert report["stages"] == ({} if path.endswith("/live") else STAGES)
    return response.status_code, report["status"]


def test_from_start_to_end(inner: InnerServer, cold: Served) -> None:
    health = cold.app.health
    paths = ("/health/live", "/health", "/health/ready")
    assert [probe(cold, path) for path in paths] == [(200, "ok"), (200, "ok"), (503, "starting")]
    inner.call(health.warm_up())
    assert [probe(cold, path) for path in paths] == [(200, "ok")] * 3
    health.is_stopping = True
    assert [probe(cold, path) for path in paths] == [(200, "ok"), (200, "ok"), (503, "stopping")]


def test_warm_up_reaches_the_last_stage(inner: InnerServer, cold: Served) -> None:
    """Which needs what the first one made of the prompt."""
    steps: list[StepStats] = []
    last = cold.app.llm.clients[-1]
    before, last.on_step = last.on_step, steps.append
    try:
        inner.call(cold.app.health.warm_up())
    finally:
        last.on_step = before
    assert len(steps) == 1
