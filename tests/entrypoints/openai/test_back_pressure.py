"""More requests than can be drawn: who waits, who is let in, and whose turn it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.asking import make_head, talk
from tests.inner_server import InnerServer, Served
from vllm_omni.entrypoints.openai.protocol import ImageJobRequest

IMAGES, JOBS = "/v1/images/generations", "/v1/images/jobs"
SMALL: dict[str, Any] = {"prompt": "a", "size": "64x64", "num_inference_steps": 20, "seed": 1}
ENDLESS = SMALL | {"size": "128x128", "num_inference_steps": 1000}
KEYS = ("first-key", "second-key")
FIRST, SECOND = ({"authorization": f"Bearer {key}"} for key in KEYS)


@pytest.fixture
def guarded(inner: InnerServer) -> Iterator[Served]:
    """A queue of forty, of which each key has ten to itself; the engine gets one at a time."""
    with inner.serve(api_keys=KEYS, max_num_queued=40, max_num_running=1) as served:
        yield served


@pytest.fixture
def http(guarded: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, headers=FIRST, timeout=60) as http:
        yield http


def read_jobs(http: httpx.Client, headers: dict[str, str]) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = http.get(
        JOBS, params={"limit": 100, "order": "asc"}, headers=headers
    ).json()["data"]
    return listed


def test_many_of_one_key_do_not_keep_out_one_of_another(http: httpx.Client) -> None:
    first = http.post(JOBS, json=ENDLESS).json()["id"]  # while it runs, the others wait
    answers = [http.post(JOBS, json=ENDLESS) for _ in range(34)]
    assert [answer.status_code for answer in answers] == [202] * 29 + [429] * 5
    error = answers[-1].json()["error"]
    assert error["code"] == "queue_full" and "kept for other keys" in error["message"]
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 600
    other = http.post(JOBS, json=SMALL | {"priority": 5}, headers=SECOND).json()["id"]
    time.sleep(0.2)
    http.delete(f"{JOBS}/{first}")
    job: dict[str, Any] = {"completed_at": None}
    while job["completed_at"] is None:
        time.sleep(0.02)
        job = http.get(f"{JOBS}/{other}", headers=SECOND).json()
    assert job["status"] == "completed"
    assert job["result"]["metrics"]["queue_time"] >= 0.2  # from its arrival
    assert not any(job["status"] == "completed" for job in read_jobs(http, FIRST))  # it was next


def test_priority_is_among_ones_own(http: httpx.Client) -> None:
    first = http.post(JOBS, json=ENDLESS).json()["id"]  # while it runs, the others wait
    ids = {
        priority: http.post(JOBS, json=SMALL | {"priority": priority}).json()["id"]
        for priority in (3, 0, -3)
    }
    other = http.post(JOBS, json=SMALL | {"priority": 100}, headers=SECOND).json()["id"]
    positions = {job["id"]: job["queue_position"] for job in read_jobs(http, FIRST)}
    assert positions[ids[-3]] < positions[ids[0]] < positions[ids[3]]
    [job] = read_jobs(http, SECOND)
    assert job["queue_position"] == 0 and job["id"] == other
    http.delete(f"{JOBS}/{first}")
    deadline = time.monotonic() + 60
    while any(job["completed_at"] is None for job in read_jobs(http, FIRST)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("path", [IMAGES, JOBS, "/v1/chat/completions"])
def test_deadline_in_the_queue(guarded: Served, http: httpx.Client, path: str) -> None:
    """It counts from the arrival, and the place is free again."""
    running = http.post(JOBS, json=ENDLESS).json()["id"]
    body: dict[str, Any] = SMALL | {"timeout": 0.3}
    if path.startswith("/v1/chat"):
        messages = [{"role": "user", "content": "a"}]
        body = {"messages": messages, "modalities": ["text", "image"], "timeout": 0.3}
    start = time.monotonic()
    answer = http.post(path, json=body)
    if path == JOBS:
        job = answer.json()
        while job["completed_at"] is None:
            time.sleep(0.02)
            job = http.get(f"{JOBS}/{job['id']}").json()
        assert job["error"]["type"] == "timeout_error"
    else:
        assert answer.status_code == 504
    assert 0.3 <= time.monotonic() - start < 20
    queue = http.get("/v1/queue").json()
    assert queue["running"] + queue["waiting"] == 1
    http.delete(f"{JOBS}/{running}")


def test_cost_of_all_together(inner: InnerServer) -> None:
    cost = 128 * 128 * 1000
    with (
        inner.serve(max_queued_cost=3 * cost, max_num_running=1) as served,
        httpx.Client(base_url=served.url, timeout=60) as http,
    ):
        answers = [http.post(JOBS, json=ENDLESS) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [202] * 3 + [429]
        assert "costs too much together" in answers[-1].json()["error"]["message"]
        assert int(answers[-1].headers["retry-after"]) >= 1
        lines = http.get("/metrics").text.splitlines()
        assert 'vllm_omni_requests_shed_total{reason="cost"} 1.0' in lines


def test_full_queue_answers_quickly(inner: InnerServer) -> None:
    """Whatever is in it; the other key, and whoever only looks, as well."""
    limits = {"max_num_queued": 1000, "max_queued_cost": 10**12, "max_num_running": 1}
    with inner.serve(**limits) as served:
        for _ in range(1000):
            inner.call(served.app.jobs.add(ImageJobRequest(**ENDLESS), ""))
        with httpx.Client(base_url=served.url, timeout=60) as http:
            times = []
            for _ in range(60):
                answer = http.post(IMAGES, json=SMALL)
                assert answer.status_code == 429
                assert int(answer.headers["retry-after"]) >= 1
                times.append(answer.elapsed.total_seconds())
            assert sorted(times)[len(times) // 2] < 0.25  # milliseconds where nobody else works
            assert http.get(JOBS, params={"limit": 100}).elapsed.total_seconds() < 5
        start = time.monotonic()
        inner.look(served.app.jobs.shutdown)
        assert time.monotonic() - start < 5 and not served.app.images.admission.tickets


def test_body_is_not_read_for_nothing(inner: InnerServer) -> None:
    """Where there is no place the answer is there before the body is."""
    with inner.serve(max_num_queued=1) as served:
        job = httpx.post(f"{served.url}{JOBS}", json=ENDLESS, timeout=60).json()["id"]
        head = make_head("POST", IMAGES, "Content-Type: application/json", "Content-Length: 1000")
        assert talk(served.port, head).error["code"] == "queue_full"
        # With a key it may be a request that has its answer already.
        again = {"idempotency-key": "mine"}
        answer = httpx.post(f"{served.url}{IMAGES}", json={"size": "?"}, headers=again)
        assert answer.status_code == 400
        httpx.delete(f"{served.url}{JOBS}/{job}")


@pytest.fixture(autouse=True)
def idle(inner: InnerServer) -> Iterator[None]:
    """Nothing of one test is left in the engine when the next begins."""
    yield
    deadline = time.monotonic() + 30
    while inner.llm.coordinator.num_requests and time.monotonic() < deadline:
        inner.call(asyncio.sleep(0.02))
    assert inner.llm.coordinator.num_requests == 0
