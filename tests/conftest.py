"""Shared by all tests: random-weight checkpoints, stock pipelines and engines, made once."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of stage processes; see below
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from diffusers import QwenImagePipeline

from tests.drawing import MakeCheckpoint, MakeEngineCore, MakeStock
from tests.serving import ServerProcess
from vllm_omni.config import DiTConfig
from vllm_omni.diffusion.engine_core import DiffusionEngineCore
from vllm_omni.models.demo import find_model
from vllm_omni.models.progress import progress_bars_off
from vllm_omni.models.qwen_image.checkpoint import write_checkpoint

# The same examples in every run; HYPOTHESIS_PROFILE=explore looks for new ones.
hypothesis.settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# Two threads on two cores that something else is using too are many times slower than one.
torch.set_num_threads(1)

# Tight enough that large requests in a test wait for each other now and then.
MAX_NUM_BATCHED_TOKENS = 2500


@pytest.fixture(scope="session", autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing is written to the user's own."""
    os.environ["VLLM_OMNI_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def no_garbage() -> None:
    """For tests that compile: what is left of vLLM's layers ends here, not inside the compiler."""
    gc.collect()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """A tiny checkpoint by seed."""
    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def make(seed: int) -> Path:
        return write_checkpoint(root / str(seed), size="tiny", seed=seed)

    return make


@pytest.fixture(scope="session")
def stock(checkpoint: MakeCheckpoint) -> MakeStock:
    """diffusers' own pipeline over the checkpoint of a seed."""

    @cache
    def make(seed: int) -> Any:
        with progress_bars_off():
            pipeline = QwenImagePipeline.from_pretrained(checkpoint(seed))
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    return make


@pytest.fixture(scope="session")
def demo_core() -> Iterator[DiffusionEngineCore]:
    """An engine core over the trained model, for what random weights cannot show."""
    core = DiffusionEngineCore(DiTConfig(model=str(find_model("demo")), device="cpu"))
    yield core
    core.shutdown()


@pytest.fixture(scope="session")
def demo_stock() -> Any:
    """diffusers' own pipeline over it."""
    with progress_bars_off():
        pipeline = QwenImagePipeline.from_pretrained(find_model("demo"), dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="session", params=["in process", "worker processes"])
def engine_core(
    checkpoint: MakeCheckpoint, request: pytest.FixtureRequest
) -> Iterator[MakeEngineCore]:
    """An engine core over the checkpoint of a seed; every test runs with both executors."""
    worker_processes = 0 if request.param == "in process" else 2
    made: dict[int, DiffusionEngineCore] = {}

    def make(seed: int) -> DiffusionEngineCore:
        if seed not in made:
            made[seed] = DiffusionEngineCore(
                DiTConfig(
                    model=str(checkpoint(seed)),
                    device="cpu",
                    worker_processes=worker_processes,
                    max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
                )
            )
        return made[seed]

    yield make
    for core in made.values():
        core.shutdown()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The embedded model behind HTTP, with the page, as `vllm-omni serve --ui` runs it."""
    server = ServerProcess(tmp_path_factory.mktemp("server") / "log", "demo", "--ui")
    server.wait_until_ready()
    yield server
    assert server.stop() == 0
