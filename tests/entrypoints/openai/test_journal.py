"""Jobs that outlive the server."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.inner_server import InnerServer, Served
from tests.pictures import open_picture
from vllm_omni.entrypoints.openai import journal as module
from vllm_omni.entrypoints.openai.jobs import MAX_STARTS
from vllm_omni.entrypoints.openai.state_dir import hold_state_dir, write_whole
from vllm_omni.errors import ConfigError

PATH = "/v1/images/jobs"
SHORT: dict[str, Any] = {"prompt": "a", "size": "64x64", "num_inference_steps": 2, "seed": 1}
LONG = SHORT | {"size": "128x128", "num_inference_steps": 1000}  # nobody waits for its end
KEYS = ("first-key", "second-key")

Serve = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def serve(inner: InnerServer, folder: Path) -> Serve:
    @contextmanager
    def serve(**config: Any) -> Iterator[Served]:
        with inner.serve(state_dir=str(folder), **config) as served:
            yield served
        wait_until_idle(inner)  # its engine ends with a server; this one has to forget

    return serve


def wait_until_idle(inner: InnerServer) -> None:
    """A job that goes on has the name it had: what the engine says must not be of the first."""
    deadline = time.monotonic() + 30
    while inner.call(inner.llm.collective_rpc(1, "get_stats"))[0]["num_requests"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def post(served: Served, body: dict[str, Any], **headers: str) -> str:
    response = httpx.post(f"{served.url}{PATH}", json=body, headers=headers, timeout=60)
    assert response.status_code == 202, response.text
    job_id: str = response.json()["id"]
    return job_id


def get(served: Served, job_id: str, **headers: str) -> dict[str, Any]:
    response = httpx.get(f"{served.url}{PATH}/{job_id}", headers=headers, timeout=60)
    job: dict[str, Any] = response.json()
    return job


def wait_for(served: Served, job_id: str, *statuses: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while (job := get(served, job_id))["status"] not in statuses:
        assert job["completed_at"] is None and time.monotonic() < deadline, job
        time.sleep(0.02)
    return job


def read_files(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_bytes()) for path in (folder / "jobs").glob("*.json")}


def test_what_waits_and_runs_goes_on(serve: Serve, folder: Path) -> None:
    with serve() as served:
        done = post(served, SHORT | {"response_format": "url", "n": 2})
        first = wait_for(served, done, "completed")
        running, waiting = post(served, SHORT | {"num_inference_steps": 400}), post(served, SHORT)
        wait_for(served, running, "in_progress")
    # As they were left: nothing was cancelled.
    assert {job: entry["status"] for job, entry in read_files(folder).items()} == {
        done: "completed",
        running: "queued",
        waiting: "queued",
    }
    with serve() as served:
        again = get(served, done)
        assert again == first
        for image in again["result"]["data"]:
            url = f"{served.url}/v1/images/files/{image['url'].rpartition('/')[2]}"
            assert open_picture(httpx.get(url).content).size == (64, 64)
        assert wait_for(served, running, "completed")["result"]["data"][0]["seed"] == 1
        assert wait_for(served, waiting, "completed")["progress"] == 100
        listed = httpx.get(f"{served.url}{PATH}").json()["data"]
        assert {job["id"] for job in listed} == {done, running, waiting}
        httpx.delete(f"{served.url}{PATH}/{waiting}")
    assert set(read_files(folder)) == {done, running}


def test_who_is_killed_leaves_them_as_they_are(serve: Serve, folder: Path) -> None:
    """No word of farewell: what the next server finds is what was on disk."""
    with serve() as served:
        running = post(served, LONG, **{"idempotency-key": "mine"})
        wait_for(served, running, "in_progress")
        deadline = time.monotonic() + 10
        while read_files(folder)[running]["status"] != "in_progress":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        left = (folder / "jobs" / f"{running}.json").read_bytes()
        assert httpx.delete(f"{served.url}{PATH}/{running}").json()["status"] == "cancelled"
    assert read_files(folder) == {}
    for num_starts in range(1, MAX_STARTS):
        (folder / "jobs" / f"{running}.json").write_bytes(left)
        (folder / "jobs" / "job_half.tmp").write_bytes(b"{")
        (folder / "jobs" / "job_broken.json").write_bytes(b"{")
        with serve() as served:
            assert post(served, LONG, **{"idempotency-key": "mine"}) == running
            wait_for(served, running, "in_progress")
        entry = json.loads((folder / "jobs" / f"{running}.json").read_bytes())
        assert (entry["status"], entry["num_starts"]) == ("queued", num_starts)
        left = json.dumps(entry | {"status": "in_progress"}).encode()
    assert set(os.listdir(folder / "jobs")) == {"job_broken.json", f"{running}.json"}
    (folder / "jobs" / f"{running}.json").write_bytes(left)
    with serve() as served:  # it has seen enough servers die
        job = get(served, running)
        assert (job["status"], job["error"]["code"]) == ("failed", "too_many_attempts")


def test_time_goes_on_while_there_is_no_server(serve: Serve, folder: Path) -> None:
    with serve() as served:
        job_id = post(served, LONG | {"timeout": 600})
    [path] = (folder / "jobs").glob("*.json")
    entry = json.loads(path.read_bytes())
    path.write_text(json.dumps(entry | {"created_at": entry["created_at"] - 700}))
    with serve() as served:
        job = wait_for(served, job_id, "failed")
        assert job["error"]["type"] == "timeout_error"
    entry = json.loads(path.read_bytes())
    path.write_text(json.dumps(entry | {"expires_at": time.time() - 1}))
    with serve() as served:
        assert httpx.get(f"{served.url}{PATH}").json()["data"] == []
    assert not path.exists()


def test_settings_may_be_others_then(serve: Serve) -> None:
    with serve() as served:
        job_id = post(served, LONG | {"n": 4})
    with serve(max_n=3) as served:
        job = get(served, job_id)
        assert (job["status"], job["error"]["param"]) == ("failed", "n")


def test_jobs_belong_to_a_key(serve: Serve) -> None:
    keys = [{"authorization": f"Bearer {key}"} for key in KEYS]
    with serve(api_keys=KEYS) as served:
        job_id = post(served, LONG, **keys[0])
    with serve(api_keys=KEYS[::-1]) as served:
        url = f"{served.url}{PATH}"
        assert get(served, job_id, **keys[0])["id"] == job_id
        for response in (
            httpx.get(f"{url}/{job_id}", headers=keys[1]),
            httpx.delete(f"{url}/{job_id}", headers=keys[1]),
        ):
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "job_not_found"
        assert httpx.get(url, headers=keys[1]).json()["data"] == []
        assert [job["id"] for job in httpx.get(url, headers=keys[0]).json()["data"]] == [job_id]
        assert httpx.get(url, params={"after": job_id}, headers=keys[1]).status_code == 400


def test_a_full_disk(serve: Serve, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That one job is refused; pictures go on, and jobs, when there is room again."""

    def write(path: Path, data: bytes, is_durable: bool = True) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with serve() as served:
        running = post(served, SHORT | {"num_inference_steps": 400})
        with monkeypatch.context() as patch:
            patch.setattr(module, "write_whole", write)
            for _ in range(3):
                response = httpx.post(f"{served.url}{PATH}", json=SHORT, timeout=60)
                assert response.status_code == 507
                error = response.json()["error"]
                assert (error["type"], error["code"]) == ("server_error", "storage_full")
                assert str(folder) not in response.text
            # A result that cannot be written is still given.
            assert wait_for(served, running, "completed")["result"] is not None
            images = f"{served.url}/v1/images/generations"
            assert httpx.post(images, json=SHORT, timeout=60).status_code == 200
            assert httpx.get(f"{served.url}{PATH}").json()["data"][0]["id"] == running
        wait_for(served, post(served, SHORT), "completed")
        queue = httpx.get(f"{served.url}/v1/queue").json()
        assert queue["running"] == queue["waiting"] == 0


# --- the folder ---


def test_nobody_else_reads_it(serve: Serve, folder: Path) -> None:
    with serve() as served:
        job_id = post(served, SHORT)
        wait_for(served, job_id, "completed")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "jobs")]
    assert modes == [0o700, 0o700]
    assert stat.S_IMODE((folder / "jobs" / f"{job_id}.json").stat().st_mode) == 0o600


def test_one_server_at_a_time(folder: Path) -> None:
    one, other = hold_state_dir(str(folder)), hold_state_dir(str(folder))
    with one, pytest.raises(ConfigError, match="no other server"), other:
        pass
    with hold_state_dir(str(folder)), hold_state_dir(""):
        pass
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_of_everybodys_stays_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with hold_state_dir(str(tmp_path)):
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path, tmp_path / "jobs")]
        assert modes == [0o777, 0o700]


@pytest.mark.parametrize("name", ["file/inside", "file", "trap"])
def test_folder_that_cannot_be(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "trap").mkdir()
    (tmp_path / "trap" / "jobs").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="state_dir"), hold_state_dir(str(tmp_path / name)):
        pass


def test_a_file_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "job_1.json"
    write_whole(path, b"first")
    (tmp_path / "job_1.tmp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        write_whole(path, b"second")
    assert path.read_bytes() == b"first" and os.listdir(tmp_path) == ["job_1.json"]
    write_whole(path, b"third", is_durable=False)
    assert path.read_bytes() == b"third"
