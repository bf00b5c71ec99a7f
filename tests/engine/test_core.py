"""The engines of all stages in one process: each steps when it has work, and dies alone."""

from __future__ import annotations

import multiprocessing
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import SamplingParams

import vllm_omni.ar.engine
from tests.drawing import Case, MakeCheckpoint, MakeStock, draw_stock
from vllm_omni.ar.messages import ARRequest
from vllm_omni.config import DiTConfig, StageConfig
from vllm_omni.diffusion.executor import MultiProcDiffusionExecutor
from vllm_omni.diffusion.messages import DiffusionRequest
from vllm_omni.engine.core import OmniEngineCore
from vllm_omni.engine.stages import complete_stage_configs
from vllm_omni.errors import (
    EngineDeadError,
    EngineError,
    InvalidParameterError,
    ModelLoadError,
    OmniRequestError,
)
from vllm_omni.models.qwen_image.inputs import QwenImageCustomInputs
from vllm_omni.models.qwen_image.prompt import TEXT_TO_IMAGE
from vllm_omni.outputs import EngineCoreOutput, FinishReason
from vllm_omni.params import OutputMode

AR, DIFFUSION = 0, 1
CASE = Case("a red circle", 64, 96, 4, None, seed=7)

News = dict[int, list[EngineCoreOutput]]


def create_stages(
    ar_model: Path, diffusion_model: Path, worker_processes: int = 0
) -> tuple[StageConfig, ...]:
    return complete_stage_configs(
        [
            StageConfig(
                stage_id=AR,
                engine_type="ar",
                model_path=str(ar_model),
                vllm_config={"max_num_batched_tokens": 128, "max_model_len": 512},
            ),
            StageConfig(
                stage_id=DIFFUSION,
                engine_type="diffusion",
                model_path=str(diffusion_model),
                dit_config=DiTConfig(device="cpu", worker_processes=worker_processes),
            ),
        ]
    )


@pytest.fixture(scope="module")
def shared_core(checkpoint: MakeCheckpoint) -> Iterator[OmniEngineCore]:
    core = OmniEngineCore(create_stages(checkpoint(0), checkpoint(0)))
    yield core
    core.shutdown()


@pytest.fixture
def core(shared_core: OmniEngineCore) -> Iterator[OmniEngineCore]:
    """The one core, without requests of an earlier test."""
    assert not shared_core.has_requests()
    yield shared_core
    run(shared_core)


@pytest.fixture
def one_use_core(
    checkpoint: MakeCheckpoint, request: pytest.FixtureRequest
) -> Iterator[OmniEngineCore]:
    """A core that may be broken; its parameter is the number of diffusion workers."""
    core = OmniEngineCore(create_stages(checkpoint(0), checkpoint(0), request.param))
    yield core
    core.shutdown()


def create_ar_request(request_id: str, num_tokens: int = 3, **changes: Any) -> ARRequest:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    fields: dict[str, Any] = {"prompt": "a cat", "sampling_params": params}
    return ARRequest(request_id=request_id, **(fields | changes))


def create_diffusion_request(
    request_id: str, embeds: Tensor | None = None, **changes: Any
) -> DiffusionRequest[QwenImageCustomInputs]:
    fields: dict[str, Any] = {
        "prompt_embeds": torch.zeros(5, 128) if embeds is None else embeds,
        "height": CASE.height,
        "width": CASE.width,
        "num_inference_steps": CASE.num_steps,
        "true_cfg_scale": 1.0,
        "seed": CASE.seed,
        "output_mode": OutputMode.LATENTS,
    }
    inputs = QwenImageCustomInputs(**(fields | changes))
    return DiffusionRequest(request_id=request_id, custom_inputs=inputs)


def step(core: OmniEngineCore) -> News:
    news, did_work = core.step()
    assert did_work == bool(news)
    return {stage_id: outputs.outputs for stage_id, outputs in news.items()}


def run(core: OmniEngineCore) -> News:
    """All outputs by stage until there is nothing left to do."""
    seen: News = defaultdict(list)
    while core.has_requests():
        for stage_id, outputs in step(core).items():
            seen[stage_id] += outputs
    return seen


def ends_of(outputs: list[EngineCoreOutput]) -> dict[str, FinishReason | None]:
    return {output.request_id: output.finish_reason for output in outputs if output.finished}


def tokens_of(outputs: list[EngineCoreOutput]) -> list[int]:
    return list(outputs[-1].request_output.outputs[0].token_ids)


def encode(core: OmniEngineCore, prompt: str) -> Tensor:
    """What conditions the picture of a prompt, from the AR stage."""
    core.add_request(
        AR,
        create_ar_request("e", 1, prompt=TEXT_TO_IMAGE.apply(prompt), hidden_states="prompt"),
    )
    [output] = run(core)[AR]
    assert isinstance(output.pooling_output, Tensor)
    return output.pooling_output[TEXT_TO_IMAGE.num_prefix_tokens :]


def test_stages_together_draw_what_diffusers_draws(core: OmniEngineCore, stock: MakeStock) -> None:
    embeds = encode(core, CASE.prompt)
    core.add_request(DIFFUSION, create_diffusion_request("d", embeds))
    core.add_request(AR, create_ar_request("a", 10))  # steps between the steps of the other
    final = run(core)[DIFFUSION][-1]
    expected, _ = draw_stock(stock(0), CASE)
    assert final.finish_reason is FinishReason.STOP
    assert final.pooling_output is not None
    assert (final.pooling_output - expected).abs().max() <= 1e-4


def test_step_is_one_of_every_stage_that_has_work(core: OmniEngineCore) -> None:
    core.add_request(AR, create_ar_request("a", 2))
    core.add_request(DIFFUSION, create_diffusion_request("d"))
    counts = []
    progress = []
    while core.has_requests():
        news = step(core)
        counts.append({stage_id: len(outputs) for stage_id, outputs in news.items()})
        progress += [o.output_metadata["step"] for o in news.get(DIFFUSION, [])]
    # 2 tokens, 4 steps, and each time one more, in which the workers hear that it is over.
    both = {AR: 1, DIFFUSION: 1}
    assert counts == [both, both, {AR: 0, DIFFUSION: 1}, {DIFFUSION: 1}, {DIFFUSION: 0}]
    assert progress == [1, 2, 3, 4]


def test_step_without_work_does_nothing(core: OmniEngineCore) -> None:
    assert core.step() == ({}, False)
    core.add_request(AR, create_ar_request("a", 1))
    assert core.has_requests()
    assert list(run(core)) == [AR]
    assert core.step() == ({}, False)
    assert not core.has_requests()


def test_requests_of_two_stages_may_have_one_id(core: OmniEngineCore) -> None:
    core.add_request(AR, create_ar_request("same", 2))
    core.add_request(DIFFUSION, create_diffusion_request("same"))
    seen = run(core)
    assert ends_of(seen[AR]) == {"same": FinishReason.STOP}
    assert ends_of(seen[DIFFUSION]) == {"same": FinishReason.STOP}


def test_scheduler_names_stages_with_work_in_their_order(core: OmniEngineCore) -> None:
    scheduler = core.scheduler
    assert scheduler.schedule() == []
    assert scheduler.get_request_counts() == {AR: (0, 0), DIFFUSION: (0, 0)}
    core.add_request(DIFFUSION, create_diffusion_request("d"))
    assert scheduler.schedule() == [DIFFUSION]
    core.add_request(AR, create_ar_request("a", 2))
    core.add_request(AR, create_ar_request("b", 2))
    assert scheduler.schedule() == [AR, DIFFUSION]
    assert scheduler.get_request_counts() == {AR: (0, 2), DIFFUSION: (0, 1)}
    step(core)
    assert scheduler.get_request_counts() == {AR: (2, 0), DIFFUSION: (1, 0)}
    step(core)
    assert scheduler.get_request_counts() == {AR: (0, 0), DIFFUSION: (1, 0)}
    step(core)  # in which vLLM's worker hears that it is over
    assert scheduler.schedule() == [DIFFUSION]
    run(core)
    assert scheduler.schedule() == []
    assert scheduler.get_request_counts() == {AR: (0, 0), DIFFUSION: (0, 0)}
    assert list(scheduler.stage_schedulers) == [DIFFUSION, AR]  # as they were loaded


def test_refused_request_leaves_nothing(core: OmniEngineCore) -> None:
    with pytest.raises(InvalidParameterError, match="cannot be empty"):
        core.add_request(AR, create_ar_request("a", prompt=""))
    with pytest.raises(OmniRequestError, match="tokens a step"):
        core.add_request(DIFFUSION, create_diffusion_request("d", height=8192, width=8192))
    assert not core.has_requests()


@pytest.mark.parametrize("num_steps", [0, 2])
def test_abort_ends_a_request_of_its_stage_only(core: OmniEngineCore, num_steps: int) -> None:
    for stage_id, create in ((AR, create_ar_request), (DIFFUSION, create_diffusion_request)):
        core.add_request(stage_id, create("gone"))
        core.add_request(stage_id, create("stays"))
    for _ in range(num_steps):
        step(core)
    core.abort_requests(DIFFUSION, ["gone", "never heard of"])
    seen = run(core)
    stop, abort = FinishReason.STOP, FinishReason.ABORT
    assert ends_of(seen[DIFFUSION]) == {"gone": abort, "stays": stop}
    assert ends_of(seen[AR]) == {"gone": stop, "stays": stop}

    core.add_request(AR, create_ar_request("gone"))
    core.abort_requests(AR, ["gone"])
    assert ends_of(run(core)[AR]) == {"gone": abort}


def test_worker_of_the_diffusion_stage_is_called_by_name(core: OmniEngineCore) -> None:
    [stats] = core.executor.collective_rpc(DIFFUSION, "get_stats")
    assert stats.pop("memory_bytes") > 0
    assert stats == {
        "num_requests": 0,
        "cache_used_bytes": 0,
        "cache_request_bytes": 0,
        "cache_evictions": 0,
    }
    core.add_request(DIFFUSION, create_diffusion_request("d"))
    step(core)
    [stats] = core.executor.collective_rpc(DIFFUSION, "get_stats")
    assert stats["num_requests"] == 1
    assert stats["cache_used_bytes"] == (24 * 64 + 5 * 128) * 4  # latents and prompt, float32


def test_worker_of_the_ar_stage_is_called_by_name(core: OmniEngineCore) -> None:
    assert core.executor.collective_rpc(AR, "get_supported_tasks") == [("generate",)]


@pytest.mark.parametrize("stage_id", [AR, DIFFUSION])
def test_unknown_method_is_the_callers_mistake(core: OmniEngineCore, stage_id: int) -> None:
    with pytest.raises(EngineError, match="no_such_method") as caught:
        core.executor.collective_rpc(stage_id, "no_such_method")
    assert not isinstance(caught.value, EngineDeadError)
    core.check_health(stage_id)


@pytest.mark.parametrize("stage_id", [AR, DIFFUSION])
def test_wrong_arguments_are_the_callers_mistake(core: OmniEngineCore, stage_id: int) -> None:
    method = {AR: "get_supported_tasks", DIFFUSION: "get_stats"}[stage_id]
    with pytest.raises(EngineError, match=f"{method} failed in stage {stage_id}"):
        core.executor.collective_rpc(stage_id, method, "too", "many")


# --- a stage dies ---


@pytest.mark.parametrize("one_use_core", [0], indirect=True)
def test_dead_ar_stage_leaves_the_other(one_use_core: OmniEngineCore, core: OmniEngineCore) -> None:
    core.add_request(DIFFUSION, create_diffusion_request("d"))
    expected = run(core)[DIFFUSION][-1].pooling_output
    dying = one_use_core
    dying.add_request(AR, create_ar_request("a"))
    dying.executor.stage_executors[AR].driver_worker.worker.model_runner.model = None
    dying.add_request(DIFFUSION, create_diffusion_request("d"))
    dying.check_health(AR)
    assert list(step(dying)) == [DIFFUSION]

    message = "vLLM failed in a step"
    assert message in str(dying.dead_stages[AR])
    with pytest.raises(EngineDeadError, match=message):
        dying.check_health(AR)
    with pytest.raises(EngineDeadError, match=message):
        dying.add_request(AR, create_ar_request("b"))
    dying.abort_requests(AR, ["a"])  # nothing to do
    dying.check_health(DIFFUSION)
    seen = run(dying)  # ends, although the dead stage still has its request
    assert list(seen) == [DIFFUSION]
    assert torch.equal(seen[DIFFUSION][-1].pooling_output, expected)  # type: ignore[arg-type]
    dying.add_request(DIFFUSION, create_diffusion_request("e"))
    assert ends_of(run(dying)[DIFFUSION]) == {"e": FinishReason.STOP}


@pytest.mark.slow
@pytest.mark.parametrize("one_use_core", [1], indirect=True)
def test_dead_diffusion_stage_leaves_the_other(
    one_use_core: OmniEngineCore, core: OmniEngineCore
) -> None:
    core.add_request(AR, create_ar_request("a"))
    expected = tokens_of(run(core)[AR])
    dying = one_use_core
    dying.add_request(AR, create_ar_request("a"))
    executor = dying.executor.stage_executors[DIFFUSION]
    assert isinstance(executor, MultiProcDiffusionExecutor)
    executor.workers[0].process.kill()
    dying.add_request(DIFFUSION, create_diffusion_request("first"))
    assert ends_of(step(dying)[DIFFUSION]) == {"first": FinishReason.ERROR}  # its worker is gone
    dying.add_request(DIFFUSION, create_diffusion_request("second"))
    seen = run(dying)
    assert "no diffusion worker is left" in str(dying.dead_stages[DIFFUSION])
    with pytest.raises(EngineDeadError, match="no diffusion worker is left"):
        dying.add_request(DIFFUSION, create_diffusion_request("third"))
    assert tokens_of(seen[AR]) == expected
    dying.check_health(AR)


# --- a stage cannot start ---


def break_text_encoder(model: Path) -> None:
    (model / "text_encoder" / "model.safetensors").write_bytes(b"nothing")


def break_vae(model: Path) -> None:
    shutil.rmtree(model / "vae")


def break_index(model: Path) -> None:
    (model / "model_index.json").unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage_id", "damage"),
    [(AR, break_text_encoder), (DIFFUSION, break_vae), (DIFFUSION, break_index)],
    ids=["AR", "diffusion", "diffusion index"],
)
def test_broken_stage_leaves_nothing_of_the_other(
    checkpoint: MakeCheckpoint,
    core: OmniEngineCore,
    tmp_path: Path,
    stage_id: int,
    damage: Any,
) -> None:
    """Neither a worker process nor a vLLM engine."""
    broken = shutil.copytree(checkpoint(0), tmp_path / "broken")
    damage(broken)
    models = {AR: checkpoint(0), DIFFUSION: checkpoint(0)} | {stage_id: broken}
    before = set(multiprocessing.active_children()), list(vllm_omni.ar.engine._running)
    with pytest.raises(ModelLoadError):
        OmniEngineCore(create_stages(models[AR], models[DIFFUSION], worker_processes=1))
    assert (set(multiprocessing.active_children()), vllm_omni.ar.engine._running) == before
    core.add_request(AR, create_ar_request("a"))  # one that runs already goes on
    assert ends_of(run(core)[AR]) == {"a": FinishReason.STOP}


def test_shutdown_twice(checkpoint: MakeCheckpoint) -> None:
    core = OmniEngineCore(create_stages(checkpoint(0), checkpoint(0)))
    core.shutdown()
    core.shutdown()
