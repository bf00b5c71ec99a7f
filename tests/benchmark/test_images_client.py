"""The client against a real server that speaks plain OpenAI, and fails in every way."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.benchmark.plain_server import KEY, PlainServer, serving
from vllm_omni.benchmark.client import Answer, Failure, ImagesClient, RequestFailed
from vllm_omni.benchmark.workload import PictureClass, PictureRequest

SMALL = PictureClass(100, 100)


@pytest.fixture(scope="module")
def server() -> Iterator[PlainServer]:
    with serving(PlainServer(seconds_per_megapixel=5.0)) as server:  # 0.05 s for a small one
        yield server


@pytest.fixture
def free_port() -> int:
    """Nobody listens there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def draw(
    url: str, prompt: str, picture: PictureClass = SMALL, timeout: float = 20.0, **body: Any
) -> Answer:
    async def send() -> Answer:
        async with ImagesClient(url, body=body, timeout=timeout) as client:
            return await client.draw(PictureRequest(0, picture, prompt))

    return asyncio.run(send())


def test_only_openais_parameters_are_sent(server: PlainServer) -> None:
    assert draw(server.url, "a cat") == Answer(num_images=1)
    assert server.bodies[-1] == {"prompt": "a cat", "size": "100x100", "n": 1}


def test_url_with_or_without_version(server: PlainServer) -> None:
    assert draw(f"{server.url}/v1/", "a cat") == Answer(num_images=1)


def test_steps_are_sent_where_the_class_has_them(server: PlainServer) -> None:
    answer = draw(server.url, "a cat", PictureClass(100, 100, num_steps=5))
    assert server.bodies[-1]["num_inference_steps"] == 5
    assert answer.failure == Failure("HTTP 400", "unknown parameter: num_inference_steps")


def test_several_pictures(server: PlainServer) -> None:
    assert draw(server.url, "a cat", n=3) == Answer(num_images=3)


@pytest.mark.parametrize(
    ("prompt", "failure"),
    [
        ("429", Failure("HTTP 429", "queue full")),
        ("500", Failure("HTTP 500", "not JSON")),
        ("garbage", Failure("bad answer", "JSON is malformed: invalid character (byte 0)")),
        ("too few", Failure("bad answer", "1 pictures instead of 2")),
    ],
)
def test_failures_say_what_happened(server: PlainServer, prompt: str, failure: Failure) -> None:
    assert draw(server.url, prompt, n=2).failure == failure


def test_a_cut_connection(server: PlainServer) -> None:
    failure = draw(server.url, "cut").failure
    assert failure is not None and failure.kind == "connection cut"


def test_a_slow_answer_times_out(server: PlainServer) -> None:
    answer = draw(server.url, "a cat", PictureClass(1000, 1000), timeout=0.2)
    assert answer.failure == Failure("timed out", "")


def test_nobody_listens(free_port: int) -> None:
    failure = draw(f"http://127.0.0.1:{free_port}", "a cat").failure
    assert failure == Failure("no connection", "Connection refused")


def test_first_preview_of_a_stream(server: PlainServer) -> None:
    start = time.perf_counter()
    answer = draw(server.url, "a cat", PictureClass(300, 300), stream=True, partial_images=2)
    assert answer.num_images == 1 and answer.failure is None
    assert answer.first_preview is not None
    # Three times 0.45 s: two previews and the picture; a busy machine sees the first one late.
    assert 0.45 <= answer.first_preview - start <= time.perf_counter() - start - 0.45


def test_a_stream_without_previews(server: PlainServer) -> None:
    assert draw(server.url, "a cat", stream=True) == Answer(num_images=1)


def test_an_error_in_a_stream(server: PlainServer) -> None:
    answer = draw(server.url, "error", stream=True, partial_images=1)
    assert answer.failure == Failure("error in stream", "the model broke")


def test_finds_the_model_and_needs_the_key() -> None:
    async def find(url: str, key: str | None) -> str | None:
        async with ImagesClient(url, key) as client:
            return await client.find_model()

    with serving(PlainServer(key=KEY)) as server:
        assert asyncio.run(find(server.url, KEY)) == "plain"
        with pytest.raises(RequestFailed, match="HTTP 401: wrong key"):
            asyncio.run(find(server.url, None))
        assert asyncio.run(find(f"{server.url}/no/such/place", KEY)) is None
