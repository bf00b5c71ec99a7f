"""Which batches get a CUDA graph, and for how long. What is in one needs a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_omni.models.qwen_image.fast_plan import Bucket, FastPlan
from vllm_omni.models.qwen_image.step_graphs import MAX_GRAPHS, Outputs, StepGraphs
from vllm_omni.models.qwen_image.transformer import PackPlan

NOTHING = torch.zeros(1)


class CountedGraphs(StepGraphs):
    """Captures nothing, and counts."""

    def __init__(self, max_tokens: int = 8192) -> None:
        super().__init__(torch.device("cpu"), torch.bfloat16, max_tokens)
        assert self.max_tokens == 0  # there is no kernel here that could be captured
        self.max_tokens = max_tokens
        self.captured: list[Bucket] = []
        self.failure: RuntimeError | None = None

    def _capture(self, part: Any, plan: PackPlan, bucket: Bucket, *_: Tensor) -> Any:
        if self.failure is not None:
            raise self.failure
        self.captured.append(bucket)
        return StubGraph()

    def step(self, lens: Sequence[tuple[int, int]], **more: Any) -> bool:
        """Whether a batch with rows of so many text and image tokens runs as a graph."""
        return self.run("all", part, create_plan(lens), NOTHING, NOTHING, **more) is not None


class StubGraph:
    def run(self, *_: object) -> Outputs:
        return (), ()


def part(plan: FastPlan, image: Tensor, text: Tensor) -> Outputs:
    raise AssertionError("it is run by whoever asked for a graph")


def create_plan(lens: Sequence[tuple[int, int]]) -> PackPlan:
    return PackPlan(
        image_rows=NOTHING,
        text_rows=NOTHING,
        image_rope=NOTHING,
        text_rope=NOTHING,
        to_segments=NOTHING,
        from_segments=NOTHING,
        segment_lens=[text + image for text, image in lens],
        text_lens=[text for text, _ in lens],
        image_lens=[image for _, image in lens],
    )


def test_a_batch_that_comes_back_gets_a_graph() -> None:
    graphs = CountedGraphs()
    assert [graphs.step([(64, 256)]) for _ in range(4)] == [False, True, True, True]
    assert len(graphs.captured) == 1


def test_another_mix_with_as_many_tokens_runs_in_the_same_graph() -> None:
    graphs = CountedGraphs()
    graphs.step([(64, 256), (12, 256)])
    assert graphs.step([(100, 250), (3, 100), (5, 100)])
    assert graphs.step([(70, 400), (7, 112)])
    assert graphs.captured == [Bucket(512, 128, 4, 512)]


def test_warm_up_does_not_wait_for_a_second_batch() -> None:
    assert CountedGraphs().step([(64, 256)], is_awaited=True)


@pytest.mark.parametrize("lens", [[(64, 4096)], [(64, 1024)] * 9], ids=["long", "many"])
def test_large_batches_run_without(lens: list[tuple[int, int]]) -> None:
    graphs = CountedGraphs()
    assert [graphs.step(lens) for _ in range(3)] == [False] * 3


def test_batches_that_come_once_get_none() -> None:
    graphs = CountedGraphs()
    assert not any(graphs.step([(64, 256 * count)]) for count in range(1, 5))
    assert graphs.captured == []


def test_the_same_steps_again_capture_nothing() -> None:
    random = Random(0)
    steps = [
        [(random.randint(5, 200), random.choice((256, 1024))) for _ in range(random.randint(1, 6))]
        for _ in range(200)
    ]
    graphs = CountedGraphs()
    for lens in steps:
        graphs.step(lens)
    num_captured = len(graphs.captured)
    assert 10 < num_captured <= MAX_GRAPHS
    for lens in steps:
        graphs.step(lens)
    assert len(graphs.captured) - num_captured <= 1  # what came last and first was not together yet
    for lens in steps:
        graphs.step(lens)
    assert len(graphs.captured) - num_captured <= 1


def test_the_graph_that_was_not_used_for_longest_gives_way() -> None:
    graphs = CountedGraphs(max_tokens=10**6)
    for count in range(1, MAX_GRAPHS + 2):
        graphs.step([(64, 512)] * (8 * count), is_awaited=True)
        graphs.step([(64, 512)] * 8)  # always in use
    assert len(graphs) == MAX_GRAPHS
    before = len(graphs.captured)
    assert graphs.step([(64, 512)] * 8)
    assert len(graphs.captured) == before
    graphs.step([(64, 512)] * 16, is_awaited=True)
    assert len(graphs.captured) == before + 1


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        RuntimeError("CUDA error: operation not permitted when stream is capturing"),
    ],
    ids=["torch's memory", "cuBLAS's memory", "a kernel that waits"],
)
def test_where_nothing_can_be_captured_the_step_runs_without(failure: RuntimeError) -> None:
    graphs = CountedGraphs()
    graphs.failure = failure
    assert [graphs.step([(64, 256)]) for _ in range(3)] == [False] * 3
    graphs.failure = None
    assert not graphs.step([(64, 256)])  # it does not ask again
    assert graphs.step([(64, 512)], is_awaited=True)
