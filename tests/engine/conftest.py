"""One system for each mode, shared by all tests here: starting one takes longer than using it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests.drawing import MakeCheckpoint
from vllm_omni.engine.async_llm import OmniAsyncLLM

MakeLLM = Callable[[str], OmniAsyncLLM]


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    """The event loop of all tests: a system belongs to one."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def make_llm(checkpoint: MakeCheckpoint, runner: asyncio.Runner) -> Iterator[MakeLLM]:
    """The system over checkpoint 0 in a mode."""
    made: list[OmniAsyncLLM] = []

    @cache
    def make(mode: str) -> OmniAsyncLLM:
        made.append(
            OmniAsyncLLM.from_pretrained(
                str(checkpoint(0)),
                mode=mode,  # type: ignore[arg-type]
                device="cpu",
                vllm_config={"max_num_batched_tokens": 128, "max_model_len": 1024},
            )
        )
        return made[-1]

    yield make

    async def shutdown() -> None:
        for llm in made:
            llm.shutdown()

    runner.run(shutdown())


@pytest.fixture(params=["embedded", "process"])
def llm(make_llm: MakeLLM, request: pytest.FixtureRequest) -> OmniAsyncLLM:
    """Every test runs in both modes."""
    return make_llm(request.param)


@pytest.fixture
def embedded_llm(make_llm: MakeLLM) -> OmniAsyncLLM:
    return make_llm("embedded")
