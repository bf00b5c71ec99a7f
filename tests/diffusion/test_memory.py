"""Nobody runs out of memory: steps in parts, requests that wait for room, limits from measures."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.drawing import (
    COMPANY_TOLERANCE,
    Case,
    MakeCheckpoint,
    inputs_of,
    latents_of,
    load_tokenizer,
    pixels_of,
    run_engine,
)
from tests.scheduling import StubModel, add_requests, create_request, create_scheduler, take_step
from vllm_omni.config import DiTCacheConfig, DiTConfig
from vllm_omni.diffusion.engine_core import DiffusionEngineCore
from vllm_omni.diffusion.executor import UniProcDiffusionExecutor
from vllm_omni.diffusion.isolation import call_isolated, is_out_of_memory
from vllm_omni.diffusion.memory import MemoryUse, derive_limits
from vllm_omni.diffusion.messages import DiffusionModelRunnerOutput
from vllm_omni.diffusion.model_runner import DiffusionModelRunner
from vllm_omni.models.qwen_image.adapter import QwenImageRunnerAdapter
from vllm_omni.models.qwen_image.state import QwenImageState
from vllm_omni.outputs import FinishReason

SMALL = [Case("a red cat", 64, 64, 3, 4.0, seed=seed) for seed in range(5)]
LARGE = Case("a blue sofa", 256, 256, 2, None, seed=9)


class ScarceAdapter(QwenImageRunnerAdapter):
    """A device with room for so many tokens in a step, and so many latents in a decode."""

    max_tokens = max_latents = 10**9

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stepped: list[int] = []  # requests in each step that was tried
        self.decoded: list[int] = []
        self.decoding.manager.decode = self.decode_scarce

    def step(self, states: Sequence[QwenImageState]) -> list[Tensor]:
        self.stepped.append(len(states))
        if sum(state.num_tokens for state in states) > self.max_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return super().step(states)

    def decode_scarce(self, latents: Tensor) -> Tensor:
        self.decoded.append(latents.shape[0])
        if latents[:, 0].numel() > self.max_latents:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return self.decoding.decode_vae(latents)


def create_core(
    checkpoint: MakeCheckpoint, **settings: Any
) -> tuple[DiffusionEngineCore, ScarceAdapter, DiffusionModelRunner]:
    config = DiTConfig(model=str(checkpoint(0)), device="cpu", **settings)
    executor = UniProcDiffusionExecutor(config)
    worker = executor.worker
    adapter = ScarceAdapter(worker.pipeline_manager, worker.cache_manager, config)
    worker.adapter = worker.model_runner.adapter = adapter
    return DiffusionEngineCore(config, executor), adapter, worker.model_runner


def draw(core: DiffusionEngineCore, cases: Sequence[Case]) -> list[Any]:
    tokenizer = load_tokenizer(core)
    return run_engine(core, [inputs_of(case, tokenizer) for case in cases])


def assert_same(outputs: Sequence[Any], expected: Sequence[Any]) -> None:
    for output, alone in zip(outputs, expected, strict=True):
        assert (latents_of(output) - latents_of(alone)).abs().max() <= COMPANY_TOLERANCE
        assert abs(pixels_of(output) - pixels_of(alone)).max() <= 1


# --- running out ---


def test_a_step_that_does_not_fit_is_taken_in_halves(checkpoint: MakeCheckpoint) -> None:
    core, adapter, runner = create_core(checkpoint)
    expected = draw(core, SMALL)
    of_one = sum(inputs_of(SMALL[0], load_tokenizer(core)).num_text_tokens) + 2 * 16
    adapter.max_tokens = 2 * of_one
    adapter.stepped.clear()
    outputs = draw(core, SMALL)
    assert_same(outputs, expected)
    # The first step finds it out; from then on steps are no larger than what was seen to fit.
    assert adapter.stepped[:5] == [5, 3, 2, 1, 2]
    assert runner.max_num_tokens == 3 * of_one - 1
    assert max(adapter.stepped[5:]) <= 2


def test_only_who_does_not_fit_alone_fails(checkpoint: MakeCheckpoint) -> None:
    core, adapter, runner = create_core(checkpoint)
    expected = draw(core, SMALL[:2])
    adapter.max_tokens = 200
    outputs = draw(core, [SMALL[0], LARGE, SMALL[1]])
    assert_same([outputs[0], outputs[2]], expected)
    assert outputs[1].finish_reason is FinishReason.ERROR
    assert outputs[1].error.type == "StageExecutionError"
    assert outputs[1].error.message.startswith(
        "out of memory: this request does not fit alone (step of 26"
    )
    assert outputs[1].error.message.endswith(
        "tokens on cpu); ask for a smaller picture, or set cpu_offload in the server's settings"
    )
    assert runner.states == {}


def test_a_decode_that_does_not_fit_is_done_in_halves(checkpoint: MakeCheckpoint) -> None:
    core, adapter, _ = create_core(checkpoint, decode_batch_size=8)
    expected = draw(core, SMALL)
    adapter.max_latents = 2 * 8 * 8
    adapter.decoded.clear()
    outputs = draw(core, SMALL)
    assert_same(outputs, expected)
    assert adapter.decoded == [5, 3, 2, 1, 2]
    adapter.max_latents = 8 * 8
    [output] = draw(core, [LARGE])
    assert output.error is not None and "set vae_tile_size" in output.error.message


def test_a_limited_decode_is_cut_before_it_runs_out(checkpoint: MakeCheckpoint) -> None:
    core, adapter, _ = create_core(checkpoint, decode_batch_size=8)
    adapter.limit_decode(2 * 8 * 8)
    draw(core, [*SMALL, LARGE])
    assert sorted(adapter.decoded) == [1, 1, 2, 2]  # the large one alone, though it is too large


def test_what_is_held_by_a_failed_call_is_free_before_the_next() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def call(batch: list[int]) -> list[int]:
        assert all(ref() is None for ref in alive)
        taken = torch.ones(len(batch))
        alive.append(weakref.ref(taken))
        if len(batch) > 1:
            raise torch.OutOfMemoryError("no more")
        return batch

    column = {str(index): index for index in range(4)}
    done = call_isolated(
        call, list(column), [column], lambda *_: pytest.fail(), on_out_of_memory=lambda _: None
    )
    assert done == column
    assert len(alive) == 7


def test_one_alone_is_tried_again_with_what_could_be_freed() -> None:
    decodes_beside = [torch.ones(1)]

    def call(batch: list[int]) -> list[int]:
        if decodes_beside:
            raise torch.OutOfMemoryError("no more")
        return batch

    done = call_isolated(
        call, ["a"], [{"a": 1}], lambda *_: pytest.fail(), lambda _: decodes_beside.clear()
    )
    assert done == {"a": 1}


def test_what_counts_as_running_out() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"))
    of_cudnn = "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
    assert is_out_of_memory(RuntimeError(of_cudnn))
    with pytest.raises(RuntimeError) as of_the_host:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(of_the_host.value)
    assert not is_out_of_memory(RuntimeError("kernel exploded"))
    assert not is_out_of_memory(ValueError("out of memory"))


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    room=st.integers(1, 30),
    guilty=st.sets(st.integers(0, 11)),
)
def test_whatever_runs_out_or_fails_the_others_are_done(
    sizes: list[int], room: int, guilty: set[int]
) -> None:
    def call(batch: list[tuple[int, int]]) -> list[int]:
        if sum(size for _, size in batch) > room:
            raise torch.OutOfMemoryError("no more")
        if any(index in guilty for index, _ in batch):
            raise RuntimeError("a kernel fails")
        return [index for index, _ in batch]

    column = {str(index): (index, size) for index, size in enumerate(sizes)}
    failed: list[str] = []
    done = call_isolated(
        call, list(column), [column], lambda id, _: failed.append(id), lambda _: None
    )
    expected = {i for i, size in enumerate(sizes) if size <= room and i not in guilty}
    assert done == {str(index): index for index in expected}
    assert sorted(failed) == sorted(set(column) - set(done))


# --- room for new requests ---


def test_who_has_no_room_waits_for_one_to_end(checkpoint: MakeCheckpoint) -> None:
    cases = [Case("a red cat", 128, 128, steps, None, seed=steps) for steps in (2, 3, 4, 5)]
    roomy, _, _ = create_core(checkpoint)
    expected = draw(roomy, cases)
    # 16 KiB of latents and 4 or 5 of text each: two of them fit, not three.
    cache_config = DiTCacheConfig(max_cache_size=50_000)
    core, adapter, _ = create_core(checkpoint, cache_config=cache_config)
    outputs = draw(core, cases)
    assert_same(outputs, expected)
    assert max(adapter.stepped) == 2


def test_a_deferred_request_starts_when_another_has_ended() -> None:
    scheduler, model = create_scheduler(), StubModel()
    add_requests(scheduler, [create_request(id, num_steps=2) for id in "abc"])
    step = scheduler.schedule()
    assert list(step.num_scheduled_steps) == ["a", "b", "c"]
    step.scheduled_new_reqs.pop()
    del step.num_scheduled_steps["c"]
    output = model.execute_model(step)
    output.deferred_req_ids.append("c")
    scheduler.update_from_output(step, output)
    assert scheduler.get_request_counts() == (2, 1)
    scheduler.add_request(create_request("d", num_steps=1))
    assert take_step(scheduler, model)[0] == ["a", "b"]  # the last of both
    assert take_step(scheduler, model)[0] == ["c", "d"]


def test_a_deferred_request_starts_when_those_before_it_were_aborted_meanwhile() -> None:
    scheduler = create_scheduler()
    add_requests(scheduler, [create_request(id) for id in "ab"])
    step = scheduler.schedule()
    scheduler.finish_requests(["a"], FinishReason.ABORT)
    scheduler.update_from_output(step, DiffusionModelRunnerOutput(deferred_req_ids=["b"]))
    assert list(scheduler.schedule().num_scheduled_steps) == ["b"]


def test_steps_are_as_large_as_the_memory_says() -> None:
    scheduler, model = create_scheduler(max_num_batched_tokens=100), StubModel()
    add_requests(scheduler, [create_request(id, num_tokens=30) for id in "abc"])
    scheduler.add_request(create_request("large", num_tokens=90, num_steps=1))
    step = scheduler.schedule()
    assert list(step.num_scheduled_steps) == ["a", "b", "c"]
    output = model.execute_model(step)
    output.max_num_tokens = 70
    scheduler.update_from_output(step, output)
    assert take_step(scheduler, model)[0] == ["a", "b"]
    scheduler.finish_requests(["a", "b", "c"], FinishReason.ABORT)
    assert take_step(scheduler, model)[0] == ["large"]  # alone, whatever was measured


# --- limits ---


def test_limits_share_the_room() -> None:
    step, decode = MemoryUse(1000, 100), MemoryUse(600, 60)  # 10 bytes each
    assert vars(derive_limits(3000, step, decode, 200)) == {
        "max_num_tokens": 200,
        "max_decode_latents": 100,
    }
    # The measured decode first, then the step, then larger decodes.
    assert vars(derive_limits(1600, step, decode, 200)) == {
        "max_num_tokens": 100,
        "max_decode_latents": 60,
    }
    assert vars(derive_limits(10, step, decode, 200)) == {
        "max_num_tokens": 1,
        "max_decode_latents": 1,
    }
