"""One engine for all tests of this folder: starting one takes longer than using it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.drawing import MakeCheckpoint
from vllm_omni.ar.engine import AREngine

# Less than the longer prompts of the tests have, so that they are read in chunks.
MAX_NUM_BATCHED_TOKENS = 64
MAX_MODEL_LEN = 1024


@pytest.fixture(scope="session")
def shared_engine(checkpoint: MakeCheckpoint) -> Iterator[AREngine]:
    engine = AREngine(
        checkpoint(0),
        {"max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS, "max_model_len": MAX_MODEL_LEN},
    )
    yield engine
    engine.shutdown()


@pytest.fixture
def engine(shared_engine: AREngine) -> Iterator[AREngine]:
    """The one engine, without requests of an earlier test."""
    yield shared_engine
    shared_engine.abort_requests(list(shared_engine._requests))
    shared_engine.step()
