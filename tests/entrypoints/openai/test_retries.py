"""Requests that are sent again: one execution for one `Idempotency-Key`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from tests.inner_server import InnerServer, Served
from vllm_omni.entrypoints.openai import retries as module
from vllm_omni.entrypoints.openai.errors import APIError
from vllm_omni.entrypoints.openai.retries import Retries

IMAGES, JOBS = "/v1/images/generations", "/v1/images/jobs"
SMALL: dict[str, Any] = {"prompt": "a", "size": "64x64", "num_inference_steps": 2}
LONG = SMALL | {"num_inference_steps": 60}
KEYS = ("first-key", "second-key")


class Body(BaseModel):
    prompt: str


class Work:
    """Something to do that counts how often it is done."""

    def __init__(self, answer: bytes = b"answer", error: Exception | None = None) -> None:
        self.answer, self.error = answer, error
        self.num_runs = 0
        self.may_end = asyncio.Event()

    async def __call__(self) -> bytes:
        self.num_runs += 1
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return self.answer


def test_one_execution_for_all_who_ask() -> None:
    async def main() -> None:
        retries, work = Retries(60), Work()
        ask = [asyncio.create_task(retries.run("a", "k", Body(prompt="x"), work)) for _ in range(3)]
        await asyncio.sleep(0)
        ask[0].cancel()  # who leaves does not take it along
        await asyncio.sleep(0)
        work.may_end.set()
        assert await ask[1] == (b"answer", True) and await ask[2] == (b"answer", True)
        assert await retries.run("a", "k", Body(prompt="x"), work) == (b"answer", True)
        assert await retries.run("b", "k", Body(prompt="y"), work) == (b"answer", False)
        assert work.num_runs == 2  # of two owners
        with pytest.raises(APIError) as caught:
            await retries.run("a", "k", Body(prompt="y"), work)
        assert (caught.value.status, caught.value.code) == (400, "idempotency_key_reused")

    asyncio.run(main())


def test_what_fails_may_be_tried_again() -> None:
    async def main() -> None:
        retries, work = Retries(60), Work(error=APIError(503, "no"))
        work.may_end.set()
        for _ in range(2):
            with pytest.raises(APIError, match="no"):
                await retries.run("", "k", Body(prompt="x"), work)
        work.error = None
        assert await retries.run("", "k", Body(prompt="x"), work) == (b"answer", False)
        assert work.num_runs == 3

    asyncio.run(main())


def test_answers_are_kept_for_a_while_and_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 1000)

    async def main() -> None:
        now = 0.0
        retries = Retries(60, lambda: now)
        work = Work(b"x" * 400)
        work.may_end.set()

        async def is_known(key: str) -> bool:
            return (await retries.run("", key, Body(prompt="x"), work))[1]

        assert [await is_known(key) for key in "aabb"] == [False, True, False, True]
        assert not await is_known("c")  # the third: the first gives way
        assert [await is_known(key) for key in "bc"] == [True, True]
        assert not await is_known("a")
        now = 61.0
        assert not await is_known("a")

    asyncio.run(main())


@pytest.fixture(scope="module")
def guarded(inner: InnerServer) -> Iterator[Served]:
    with inner.serve(api_keys=KEYS) as served:
        yield served


@pytest.fixture
def http(guarded: Served) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    with httpx.Client(base_url=guarded.url, headers=headers, timeout=60) as http:
        yield http


def count_pictures(http: httpx.Client) -> float:
    lines = http.get("/metrics").text.splitlines()
    return float(
        next(line for line in lines if line.startswith("vllm_omni_images_total")).split()[1]
    )


def test_pictures(http: httpx.Client) -> None:
    key = {"idempotency-key": uuid.uuid4().hex}
    before = count_pictures(http)
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(http.post, IMAGES, json=LONG, headers=key) for _ in range(4)]
        got = [one.result() for one in asked]
    got.append(http.post(IMAGES, json=LONG, headers=key))
    assert [answer.status_code for answer in got] == [200] * 5
    assert len({answer.content for answer in got}) == 1  # though nobody gave a seed
    assert len({answer.headers["x-request-id"] for answer in got}) == 5
    assert sum("idempotency-replayed" in answer.headers for answer in got) == 4
    assert count_pictures(http) == before + 1
    other = {"idempotency-key": uuid.uuid4().hex}
    assert http.post(IMAGES, json=SMALL, headers=other).content != got[0].content


def test_who_left_finds_the_picture(http: httpx.Client) -> None:
    """The time of a client was over, not that of the picture: it asks again."""
    key, body = {"idempotency-key": uuid.uuid4().hex}, LONG | {"num_inference_steps": 300}
    before = count_pictures(http)
    with pytest.raises(httpx.ReadTimeout):
        http.post(IMAGES, json=body, headers=key, timeout=httpx.Timeout(60, read=0.1))
    assert http.post(IMAGES, json=body, headers=key).status_code == 200
    assert count_pictures(http) == before + 1


def test_jobs_are_made_once(http: httpx.Client) -> None:
    key = {"idempotency-key": uuid.uuid4().hex}
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(http.post, JOBS, json=SMALL, headers=key) for _ in range(4)]
        got = [one.result() for one in asked]
    assert [answer.status_code for answer in got] == [202] * 4
    [job_id] = {answer.json()["id"] for answer in got}
    assert [job["id"] for job in http.get(JOBS).json()["data"]] == [job_id]
    response = http.post(JOBS, json=SMALL | {"n": 2}, headers=key)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "idempotency_key_reused"
    other = key | {"authorization": f"Bearer {KEYS[1]}"}
    assert http.post(JOBS, json=SMALL, headers=other).json()["id"] != job_id


@pytest.mark.parametrize(
    ("key", "more"), [("x", {"stream": True}), ("a b", {}), ("", {}), ("x" * 256, {})]
)
def test_keys_that_cannot_be(http: httpx.Client, key: str, more: dict[str, Any]) -> None:
    response = http.post(IMAGES, json=SMALL | more, headers={"idempotency-key": key})
    assert response.status_code == 400
    assert response.json()["error"]["param"].lower() == "idempotency-key"


def test_equal_request_ids_are_nothing(http: httpx.Client) -> None:
    """What a client calls its requests does not make them one."""
    name = {"x-request-id": "mine"}
    with ThreadPoolExecutor(8) as pool:
        bodies = [SMALL | {"seed": seed} for seed in range(8)]
        got = list(pool.map(lambda body: http.post(IMAGES, json=body, headers=name), bodies))
    assert [answer.status_code for answer in got] == [200] * 8
    assert [answer.json()["data"][0]["seed"] for answer in got] == list(range(8))
    assert len({answer.json()["data"][0]["b64_json"] for answer in got}) == 8
    assert len({answer.headers["x-request-id"] for answer in got}) == 8
