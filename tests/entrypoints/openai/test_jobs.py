"""Jobs: pictures that nobody holds a connection for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.inner_server import InnerServer, Served
from tests.pictures import get_difference, open_picture, read_pixels
from tests.serving import ServerProcess
from vllm_omni.entrypoints.openai.admission import Admission
from vllm_omni.entrypoints.openai.errors import APIError
from vllm_omni.entrypoints.openai.images import ImageService
from vllm_omni.entrypoints.openai.jobs import JobRecord, JobStore
from vllm_omni.entrypoints.openai.protocol import ImageJobRequest

SHORT: dict[str, Any] = {"prompt": "a", "size": "64x64", "num_inference_steps": 2, "seed": 1}
LONG = SHORT | {"size": "128x128", "num_inference_steps": 1000}  # nobody waits for its end
PATH = "/v1/images/jobs"
ENDED = ("completed", "failed", "cancelled")


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    """A client of the inner server, whose jobs end with the test."""
    with httpx.Client(base_url=served.url, timeout=60) as http:
        yield http
        for job in http.get(PATH, params={"limit": 100}).json()["data"]:
            while http.delete(f"{PATH}/{job['id']}").status_code == 200:
                pass  # once to end it, once to forget it


def create(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    response = http.post(PATH, json=body)
    assert response.status_code == 202, response.text
    job: dict[str, Any] = response.json()
    return job


def wait_for(
    http: httpx.Client, job_id: str, is_there: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        job: dict[str, Any] = http.get(f"{PATH}/{job_id}").json()
        if is_there(job):
            return job
        time.sleep(0.02)
    raise AssertionError(job)


def wait_for_status(http: httpx.Client, job_id: str, *statuses: str) -> dict[str, Any]:
    return wait_for(http, job_id, lambda job: job["status"] in statuses)


def wait_until_idle(inner: InnerServer, http: httpx.Client) -> None:
    """Until nothing is in the queue, and the engine's worker holds nothing."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        [stats] = inner.call(inner.llm.collective_rpc(1, "get_stats"))
        queue = http.get("/v1/queue").json()
        if (stats["num_requests"], queue["running"], queue["waiting"]) == (0, 0, 0):
            return
        time.sleep(0.02)
    raise AssertionError((stats, queue))


# --- from beginning to end ---


def test_a_job_and_its_picture(server: ServerProcess) -> None:
    body = SHORT | {"prompt": "a red circle", "n": 2, "output_format": "webp"}
    before = int(time.time())
    with httpx.Client(base_url=server.url, timeout=60) as http:
        job = create(http, body)
        assert job["id"].startswith("job_") and job["object"] == "image.job"
        assert (job["status"], job["progress"], job["queue_position"]) == ("queued", 0, 0)
        assert 0 <= job["estimated_seconds"] < 600
        assert job["result"] is None and job["error"] is None and job["expires_at"] is None
        done = wait_for_status(http, job["id"], *ENDED)
        assert (done["status"], done["progress"]) == ("completed", 100)
        assert done["queue_position"] is None and done["estimated_seconds"] is None
        assert before <= done["created_at"] <= done["completed_at"] <= time.time()
        assert done["expires_at"] - done["completed_at"] in (3600, 3601)
        result = done["result"]
        assert [image["seed"] for image in result["data"]] == [1, 2]
        assert open_picture(result["data"][0]["b64_json"]).format == "WEBP"
        body = body | {"n": 1}
        alone = http.post("/v1/images/generations", json=body).json()
        difference = get_difference(
            *(read_pixels(answer["data"][0]["b64_json"]) for answer in (result, alone))
        )
        assert difference <= 8  # webp at full quality: 1 in the picture may be more in the file
        assert set(alone) == set(result)
        forgotten = http.delete(f"{PATH}/{job['id']}").json()
        assert (forgotten["status"], forgotten["result"]) == ("completed", None)
        assert http.get(f"{PATH}/{job['id']}").status_code == 404


def test_urls_name_the_server_as_the_client_knows_it(http: httpx.Client, served: Served) -> None:
    job = create(http, SHORT | {"response_format": "url"})
    [image] = wait_for_status(http, job["id"], *ENDED)["result"]["data"]
    assert image["url"].startswith(f"{served.url}/v1/images/files/")
    assert open_picture(http.get(image["url"]).content).size == (64, 64)


def test_progress_and_position(http: httpx.Client) -> None:
    first, second, third = (create(http, LONG)["id"] for _ in range(3))
    running = wait_for(http, first, lambda job: job["progress"] >= 2)
    assert running["status"] == "in_progress" and running["queue_position"] is None
    waiting = [http.get(f"{PATH}/{job_id}").json() for job_id in (second, third)]
    assert [job["status"] for job in waiting] == ["queued", "queued"]
    assert [job["queue_position"] for job in waiting] == [0, 1]
    # One after the other: each of three equal jobs takes as long.
    left, second_ends, third_ends = (job["estimated_seconds"] for job in (running, *waiting))
    assert 0 < left < second_ends < third_ends
    assert second_ends - left == pytest.approx(third_ends - second_ends, rel=0.25, abs=0.3)
    later = wait_for(http, first, lambda job: job["progress"] > running["progress"] + 1)
    assert later["progress"] <= 99


def test_list(http: httpx.Client) -> None:
    ids = [create(http, SHORT)["id"] for _ in range(5)]
    for job_id in ids:
        wait_for_status(http, job_id, "completed")

    def get_page(**parameters: Any) -> tuple[list[str], bool]:
        page = http.get(PATH, params=parameters).json()
        assert page["object"] == "list"
        assert all(job["result"] is None for job in page["data"])
        return [job["id"] for job in page["data"]], page["has_more"]

    assert get_page() == (ids[::-1], False)
    assert get_page(order="asc") == (ids, False)
    assert get_page(limit=2) == ([ids[4], ids[3]], True)
    assert get_page(limit=2, after=ids[3]) == ([ids[2], ids[1]], True)
    assert get_page(limit=2, after=ids[1]) == ([ids[0]], False)
    assert get_page(limit=2, after=ids[2], order="asc") == ([ids[3], ids[4]], False)
    assert get_page(after=ids[0]) == ([], False)


@pytest.mark.parametrize(
    "query", [{"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "job_nothing"}]
)
def test_a_list_that_cannot_be(http: httpx.Client, query: dict[str, str]) -> None:
    response = http.get(PATH, params=query)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(query))


# --- the end of a job ---


def test_cancel_while_it_waits(http: httpx.Client) -> None:
    running, waiting = create(http, LONG)["id"], create(http, LONG)["id"]
    wait_for_status(http, running, "in_progress")
    job = http.delete(f"{PATH}/{waiting}").json()
    assert (job["status"], job["queue_position"], job["error"]) == ("cancelled", None, None)
    assert http.get("/v1/queue").json()["waiting"] == 0
    assert http.get(f"{PATH}/{running}").json()["status"] == "in_progress"


def test_cancel_while_it_runs(http: httpx.Client, inner: InnerServer) -> None:
    job_id, after = create(http, LONG)["id"], create(http, SHORT)["id"]
    wait_for_status(http, job_id, "in_progress")
    assert http.delete(f"{PATH}/{job_id}").json()["status"] == "cancelled"
    wait_for_status(http, after, "completed")  # it had to wait for the first
    job = http.get(f"{PATH}/{job_id}").json()
    assert job["status"] == "cancelled" and job["progress"] < 99 and job["result"] is None
    wait_until_idle(inner, http)


def test_cancel_what_has_ended(http: httpx.Client) -> None:
    job_id = create(http, LONG)["id"]
    assert http.delete(f"{PATH}/{job_id}").json()["status"] == "cancelled"
    assert http.delete(f"{PATH}/{job_id}").json()["status"] == "cancelled"
    assert http.delete(f"{PATH}/{job_id}").status_code == 404


def test_a_job_that_fails_says_why(http: httpx.Client, inner: InnerServer) -> None:
    job_id = create(http, LONG | {"timeout": 0.5})["id"]
    job = wait_for_status(http, job_id, *ENDED)
    assert job["status"] == "failed"
    assert (job["error"]["type"], job["error"]["param"]) == ("timeout_error", "timeout")
    wait_until_idle(inner, http)


def test_no_such_job(http: httpx.Client) -> None:
    for response in (http.get(f"{PATH}/job_none"), http.delete(f"{PATH}/job_none")):
        assert response.status_code == 404
        assert response.json()["error"]["param"] == "job_id"
        assert response.json()["error"]["code"] == "job_not_found"


@pytest.mark.parametrize(
    ("change", "param"),
    [({"stream": True}, "stream"), ({"partial_images": 1}, "partial_images"), ({"n": 11}, "n")],
)
def test_what_can_never_run_is_refused_at_once(
    http: httpx.Client, change: dict[str, Any], param: str
) -> None:
    response = http.post(PATH, json=SHORT | change)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert http.get(PATH).json()["data"] == []


# --- how many, and how long ---


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Stores:
    """Job stores with limits of their own, over the engine that is there."""

    def __init__(self, inner: InnerServer, served: Served) -> None:
        self.inner = inner
        self.app = served.app
        self.clock = Clock()
        self.store: JobStore

    def make(self, **limits: Any) -> None:
        images, config = self.app.images, replace(self.app.config, **limits)
        admission = Admission(config.max_num_queued)
        service = ImageService(
            config, images.llm, images.model_name, admission, images.encoder, images.files
        )
        self.store = JobStore(service, self.clock)

    def add(self, body: dict[str, Any]) -> JobRecord:
        return self.inner.call(self.store.add(ImageJobRequest(**body), ""))

    def finish(self, body: dict[str, Any] = SHORT) -> JobRecord:
        job = self.add(body)
        assert job.runner is not None
        self.inner.call(asyncio.wait_for(job.runner, 60))
        assert job.status == "completed"
        return job

    def get_ids(self) -> list[str]:
        return self.inner.look(lambda: [job.job_id for job in self.store.list()])


@pytest.fixture
def stores(inner: InnerServer, served: Served) -> Iterator[Stores]:
    stores = Stores(inner, served)
    yield stores
    inner.look(stores.store.shutdown)


def test_a_job_is_forgotten_after_a_while(stores: Stores) -> None:
    stores.make(job_ttl=100.0)
    first = stores.finish()
    assert (first.created_at, first.completed_at, first.expires_at) == (1000, 1000, 1100.0)
    stores.clock.now += 50
    second, running = stores.finish(), stores.add(LONG)
    stores.clock.now += 49
    assert stores.get_ids() == [first.job_id, second.job_id, running.job_id]
    stores.clock.now += 1
    assert stores.get_ids() == [second.job_id, running.job_id]
    stores.clock.now += 1000  # one that runs is kept, however long it takes
    assert stores.get_ids() == [running.job_id]


def test_the_end_comes_after_one_has_expired(stores: Stores) -> None:
    stores.make(job_ttl=100.0)
    stores.finish()
    running = stores.add(LONG)
    stores.clock.now += 1000  # and nobody has looked since
    stores.inner.look(stores.store.shutdown)
    assert running.status == "cancelled" and stores.get_ids() == [running.job_id]


def test_those_that_have_ended_make_room(stores: Stores) -> None:
    stores.make(max_jobs=2)
    stores.finish()
    second = stores.finish()
    running = stores.add(LONG)
    assert stores.get_ids() == [second.job_id, running.job_id]
    waiting = stores.add(LONG)
    assert stores.get_ids() == [running.job_id, waiting.job_id]
    with pytest.raises(APIError, match="too many jobs: 2 are under way") as caught:
        stores.add(SHORT)
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    assert int(caught.value.headers["Retry-After"]) >= 1
    assert stores.get_ids() == [running.job_id, waiting.job_id]


def test_a_full_queue_forgets_no_job(stores: Stores) -> None:
    stores.make(max_jobs=2, max_num_queued=1)
    done, running = stores.finish(), stores.add(LONG)
    with pytest.raises(APIError, match="the queue is full"):
        stores.add(SHORT)
    assert stores.get_ids() == [done.job_id, running.job_id]


def test_pictures_are_kept_within_a_budget_of_bytes(stores: Stores) -> None:
    stores.make()
    num_bytes = stores.finish().num_bytes
    assert num_bytes > 10_000
    stores.make(max_files_bytes=2 * num_bytes)
    jobs = [stores.finish() for _ in range(3)]
    assert stores.get_ids() == [job.job_id for job in jobs[1:]]
