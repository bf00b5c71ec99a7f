"""Clients of the running server, and a server whose inside can be looked at."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.drawing import MakeCheckpoint
from tests.inner_server import InnerServer, Served
from tests.serving import ServerProcess


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, unchanged; it does not try again, so that a test sees what happens."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def inner(checkpoint: MakeCheckpoint) -> Iterator[InnerServer]:
    """The engine of a tiny model; one request at a time, so that the others wait."""
    inner = InnerServer(
        checkpoint(0),
        max_num_seqs=1,
        vllm_config={"max_num_seqs": 1, "max_num_batched_tokens": 512, "max_model_len": 1024},
    )
    yield inner
    inner.shutdown()


@pytest.fixture(scope="module")
def served(inner: InnerServer) -> Iterator[Served]:
    """A server over it."""
    with inner.serve(max_num_queued=24, max_num_running=24) as served:
        yield served


@pytest.fixture(scope="module")
def inner_client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client
