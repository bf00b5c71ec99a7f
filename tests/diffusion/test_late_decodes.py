"""Results that come steps after the last step, as on a GPU: nobody waits for them, none is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.drawing import (
    COMPANY_TOLERANCE,
    Case,
    MakeCheckpoint,
    inputs_of,
    latents_of,
    load_tokenizer,
    run_engine,
    watch_engine,
)
from vllm_omni.config import DiTConfig
from vllm_omni.diffusion.engine_core import DiffusionEngineCore
from vllm_omni.diffusion.executor import (
    MultiProcDiffusionExecutor,
    UniProcDiffusionExecutor,
    WorkerHandle,
)
from vllm_omni.diffusion.messages import (
    DiffusionRequest,
    DiffusionSchedulerOutput,
    RequestResult,
)
from vllm_omni.diffusion.model_runner import DiffusionModelRunner
from vllm_omni.models.interface import PendingResult
from vllm_omni.models.qwen_image.adapter import QwenImageRunnerAdapter
from vllm_omni.models.qwen_image.state import QwenImageState
from vllm_omni.outputs import FinishReason

SHORT = Case("a red cat", 64, 96, 2, 4.0, seed=1)
LONG = Case("a blue sofa", 96, 64, 7, None, seed=2)
BROKEN_SEED = 666


@dataclass
class LateResult:
    """There after it was asked for so often; or never, if the device fails meanwhile."""

    result: PendingResult
    num_asked_before: int
    is_broken: bool
    has_waited: bool = False

    def is_ready(self) -> bool:
        self.num_asked_before -= 1
        return self.num_asked_before < 0

    def wait(self) -> RequestResult:
        self.has_waited = self.num_asked_before >= 0
        if self.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.result.wait()


class LateAdapter(QwenImageRunnerAdapter):
    """Decodes as a GPU does in a stream of its own."""

    num_asked_before = 3

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.late: list[LateResult] = []

    def start_decode(self, states: Sequence[QwenImageState]) -> list[Any]:
        late = [
            LateResult(result, self.num_asked_before, state.inputs.seed == BROKEN_SEED)
            for state, result in zip(states, super().start_decode(states), strict=True)
        ]
        self.late += late
        return late


def create_core(
    checkpoint: MakeCheckpoint,
) -> tuple[DiffusionEngineCore, LateAdapter, DiffusionModelRunner]:
    config = DiTConfig(model=str(checkpoint(0)), device="cpu")
    executor = UniProcDiffusionExecutor(config)
    worker = executor.worker
    adapter = LateAdapter(worker.pipeline_manager, worker.cache_manager, config)
    worker.adapter = worker.model_runner.adapter = adapter
    return DiffusionEngineCore(config, executor), adapter, worker.model_runner


@pytest.fixture(scope="module")
def expected(checkpoint: MakeCheckpoint) -> list[Any]:
    """SHORT and LONG, decoded at once."""
    core = DiffusionEngineCore(DiTConfig(model=str(checkpoint(0)), device="cpu"))
    tokenizer = load_tokenizer(core)
    return run_engine(core, [inputs_of(case, tokenizer) for case in (SHORT, LONG)])


def test_others_step_while_a_picture_is_decoded(
    checkpoint: MakeCheckpoint, expected: list[Any]
) -> None:
    core, adapter, runner = create_core(checkpoint)
    tokenizer = load_tokenizer(core)
    short, long = watch_engine(core, [inputs_of(case, tokenizer) for case in (SHORT, LONG)])
    # Two steps, told of both; the result comes with the fifth step of the other one.
    assert [output.output_metadata["step"] for output in short] == [1, 2, 2]
    assert [output.output_metadata["step"] for output in long] == [*range(1, 8), 7]
    first, last = adapter.late
    assert not first.has_waited
    assert last.has_waited  # nobody stepped any more
    assert runner.states == {}
    for outputs, alone in zip((short, long), expected, strict=True):
        assert (latents_of(outputs[-1]) - latents_of(alone)).abs().max() <= COMPANY_TOLERANCE
        pixels, of_alone = outputs[-1].pooling_output, alone.pooling_output
        assert pixels is not None
        assert (pixels.int() - of_alone.int()).abs().max() <= 1


def test_the_result_of_one_alone_takes_one_more_step(checkpoint: MakeCheckpoint) -> None:
    core, _, _ = create_core(checkpoint)
    core.add_request(
        DiffusionRequest(request_id="a", custom_inputs=inputs_of(SHORT, load_tokenizer(core)))
    )
    finished = []
    for _ in range(3):
        news, _ = core.step()
        finished.append([output.finished for output in news[0].outputs])
    assert finished == [[False], [False], [True]]
    core.step()  # the worker is told
    assert not core.has_requests()


def test_an_abort_while_it_is_decoded(checkpoint: MakeCheckpoint) -> None:
    core, _, runner = create_core(checkpoint)
    inputs = inputs_of(SHORT, load_tokenizer(core))
    core.add_request(DiffusionRequest(request_id="a", custom_inputs=inputs))
    core.step()
    core.step()
    assert list(runner.states) == ["a"]
    core.abort_requests(["a"])
    news, _ = core.step()
    assert [output.finish_reason for output in news[0].outputs] == [FinishReason.ABORT]
    assert runner.states == {}
    assert not core.has_requests()


def test_a_decode_that_fails_later(checkpoint: MakeCheckpoint, expected: list[Any]) -> None:
    core, _, runner = create_core(checkpoint)
    tokenizer = load_tokenizer(core)
    broken = inputs_of(SHORT, tokenizer, seed=BROKEN_SEED)
    outputs = run_engine(core, [broken, inputs_of(LONG, tokenizer)])
    assert outputs[0].finish_reason is FinishReason.ERROR
    assert outputs[0].error is not None and "illegal memory" in outputs[0].error.message
    assert (latents_of(outputs[1]) - latents_of(expected[1])).abs().max() <= COMPANY_TOLERANCE
    assert runner.states == {}


def test_a_worker_that_only_decodes_is_asked_for_its_results() -> None:
    executor = MultiProcDiffusionExecutor.__new__(MultiProcDiffusionExecutor)
    process: Any = None
    busy, idle = (WorkerHandle(rank, process, process) for rank in range(2))
    executor.workers = [busy, idle]
    busy.request_tokens["a"] = 1
    assert executor._split(DiffusionSchedulerOutput()) == {}
    busy.num_decoding = 1
    assert list(executor._split(DiffusionSchedulerOutput())) == [busy]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_decodes_in_a_stream_of_their_own_give_the_same_pixels(checkpoint: MakeCheckpoint) -> None:
    core = DiffusionEngineCore(
        DiTConfig(model=str(checkpoint(0)), device="cuda", dtype="float32", enforce_eager=True)
    )
    tokenizer = load_tokenizer(core)
    inputs = [inputs_of(case, tokenizer) for case in (SHORT, LONG)]
    together = run_engine(core, inputs)
    for one, output in zip(inputs, together, strict=True):
        [alone] = run_engine(core, [one])
        assert output.pooling_output is not None and alone.pooling_output is not None
        assert (output.pooling_output.int() - alone.pooling_output.int()).abs().max() <= 1
