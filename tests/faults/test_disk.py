"""A disk that is full, and jobs that survive their server: cases 13 and 27."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.drawing import MakeCheckpoint
from tests.faults.conftest import MakeVictim
from tests.faults.load import (
    CONNECTED,
    NEVER,
    Answer,
    Load,
    create_asks,
    judge_all,
    learn,
    read_pixels,
)
from tests.faults.record import Record
from tests.faults.victim import API, Victim

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

NUM = 24


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB, where this user may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_no_room_for_jobs(
    start: MakeVictim, checkpoint: MakeCheckpoint, record: Record, small_disk: Path
) -> None:
    """A job that cannot be kept is refused; everything else goes on."""
    victim = start(str(checkpoint(0)), "--state-dir", str(small_disk / "state"))
    victim.wait_until_ready()
    asks = create_asks(NUM, kinds=CONNECTED)
    expected = learn(victim.url, asks)
    fill(small_disk / "filler")
    jobs = Load(victim.url, create_asks(NUM, kinds=("job",)), 4).run()
    answers = Load(victim.url, asks, 4).run()
    (small_disk / "filler").unlink()
    after = Load(victim.url, create_asks(4, kinds=("job",)), 1).run()
    missed = record.note(
        "27",
        "the disk of --state-dir is full",
        {
            **judge_all(answers, expected),
            "jobs_refused_with_507": sum(job.status == 507 for job in jobs),
            "jobs_right_after": judge_all(after, expected)["right"],
        },
        at_most={**NEVER, "failed": 0},
        at_least={"jobs_refused_with_507": NUM, "jobs_right_after": 4},
    )
    assert missed == [], jobs
    assert victim.stop() == 0


def fill(path: Path) -> None:
    """Until nothing fits any more."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def test_no_room_for_the_log(
    start: MakeVictim, checkpoint: MakeCheckpoint, record: Record, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.symlink_to("/dev/full")
    victim = start(str(checkpoint(0)), log=log)
    deadline = time.monotonic() + 300
    while not victim.is_ready and time.monotonic() < deadline:  # its log cannot be read
        assert victim.process.poll() is None
        time.sleep(0.2)
    asks = create_asks(NUM)
    answers = Load(victim.url, asks, 4).run()
    figures = judge_all(answers, learn(victim.url, asks))
    missed = record.note(
        "27", "the disk of the log is full", figures, at_most={**NEVER, "failed": 0}
    )
    assert missed == []
    assert victim.stop() == 0


@pytest.mark.parametrize("how", ["SIGTERM twice", "kill -9"])
def test_jobs_survive(
    start: MakeVictim, checkpoint: MakeCheckpoint, record: Record, tmp_path: Path, how: str
) -> None:
    """What was queued when the server ended is there, and is done, when the next one has begun."""
    arguments = (str(checkpoint(0)), "--state-dir", str(tmp_path / "state"))
    victim = start(*arguments)
    victim.wait_until_ready()
    asks = create_asks(NUM, kinds=("job",), steps=50)
    expected = learn(victim.url, asks)
    with httpx.Client(base_url=victim.url, timeout=60) as client:
        ids = [client.post("/v1/images/jobs", json=ask.body).json()["id"] for ask in asks]
    end_with(victim, how)
    victim = start(*arguments)
    victim.wait_until_ready()
    right = 0
    with httpx.Client(base_url=victim.url, timeout=60) as client:
        for job_id, ask in zip(ids, asks, strict=True):
            job = wait_for_job(client, job_id)
            if job["status"] == "completed":
                [image] = job["result"]["data"]
                answer = Answer(ask, 200, [read_pixels(image["b64_json"])], is_whole=True)
                right += answer.judge(expected) == "right"
    missed = record.note(
        "13",
        f"{how} with jobs in the queue (--state-dir), and a new start",
        {"jobs": NUM, "right_jobs": right},
        at_least={"right_jobs": NUM},
    )
    assert missed == [], victim.log.read_text()[-5000:]
    assert victim.stop() == 0
    shutil.rmtree(tmp_path / "state")


def end_with(victim: Victim, how: str) -> None:
    if how == "kill -9":
        victim.hurt(API)
    else:
        victim.process.terminate()
        time.sleep(0.2)
        victim.process.terminate()
    assert victim.wait_for_exit() is not None


def wait_for_job(client: httpx.Client, job_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        job = client.get(f"/v1/images/jobs/{job_id}").json()
        if job.get("status") not in ("queued", "in_progress"):
            break
        time.sleep(0.1)
    return {"status": "gone", **job}
