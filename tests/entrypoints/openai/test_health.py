"""Probes: each route means what it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.inner_server import InnerServer, Served
from vllm_omni.engine.stage_client import StageHealth
from vllm_omni.outputs import StepStats

STAGES = {"ar:0": "ok", "diffusion:1": "ok"}


@pytest.fixture
def cold(inner: InnerServer) -> Iterator[Served]:
    """A server that has not warmed up."""
    with inner.serve() as served:
        yield served


def create_error(message: str) -> dict[str, Any]:
    """As every answer that is no success has one."""
    kind, code = "service_unavailable_error", "engine_unavailable"
    return {"message": message, "type": kind, "param": None, "code": code}


def probe(served: Served, path: str) -> tuple[int, str]:
    response = httpx.get(f"{served.url}{path}", timeout=60)
    assert ("retry-after" in response.headers) == (response.status_code == 503)
    report = response.json()
    assert ("error" in report) == (response.status_code == 503)
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


def test_stages(cold: Served) -> None:
    for stage_id, name in enumerate(STAGES):
        response = httpx.get(f"{cold.url}/health/stages/{stage_id}", timeout=60)
        report = response.json()
        assert (response.status_code, report["name"], report["status"]) == (200, name, "ok")
        assert report["num_restarts"] == report["num_replayed"] == report["num_refused"] == 0
    for other, status in ((2, 404), (-1, 400), ("x", 400)):
        response = httpx.get(f"{cold.url}/health/stages/{other}", timeout=60)
        assert response.status_code == status and "error" in response.json()


@pytest.mark.parametrize("state", ["starting", "restarting", "failed"])
def test_stage_that_does_not_work(
    cold: Served, monkeypatch: pytest.MonkeyPatch, state: Any
) -> None:
    """What its supervisor says of it is what is told."""
    last = cold.app.llm.clients[-1]
    down = StageHealth(state, num_restarts=2, num_replayed=3, num_refused=1, cause="/a secret")
    monkeypatch.setattr(type(last), "health", property(lambda _: down))
    cold.app.health.is_warm = True
    for path in ("/health", "/health/ready"):
        response = httpx.get(f"{cold.url}{path}", timeout=60)
        assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
        assert response.json() == {
            "status": "unavailable",
            "stages": {"ar:0": "ok", "diffusion:1": state},
            "error": create_error("the engine is not available"),
        }
    response = httpx.get(f"{cold.url}/health/stages/1", timeout=60)
    assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
    assert response.json() == {
        "name": "diffusion:1",
        "status": state,
        "num_restarts": 2,
        "num_replayed": 3,
        "num_refused": 1,
        "seconds_since_beat": None,
        "error": create_error(f"the stage diffusion:1 does not work now: {state}"),
    }
    assert httpx.get(f"{cold.url}/health/live", timeout=60).status_code == 200


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
