"""One request's trouble is its own: preparing, stepping and decoding, alone and in a batch.

Previews come when they are due, and change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.drawing import (
    COMPANY_TOLERANCE,
    Case,
    MakeCheckpoint,
    MakeEngineCore,
    inputs_of,
    latents_of,
    load_tokenizer,
    previews_of,
    run_engine,
    watch_engine,
)
from vllm_omni.config import DiTCacheConfig, DiTConfig
from vllm_omni.diffusion.engine_core import DiffusionEngineCore
from vllm_omni.diffusion.executor import UniProcDiffusionExecutor
from vllm_omni.diffusion.messages import DiffusionRequest, RequestResult
from vllm_omni.errors import InvalidParameterError
from vllm_omni.models.qwen_image.adapter import QwenImageRunnerAdapter
from vllm_omni.models.qwen_image.inputs import QwenImageCustomInputs
from vllm_omni.models.qwen_image.state import QwenImageState
from vllm_omni.outputs import EngineCoreOutput, FinishReason
from vllm_omni.params import OutputMode

GOOD = Case("a red cat", 64, 96, 3, 4.0, seed=1)
OTHER = Case("a blue sofa", 96, 64, 4, None, seed=2)
POISON_SEED = 666


def assert_only_the_guilty_fails(
    core: DiffusionEngineCore, guilty: QwenImageCustomInputs
) -> EngineCoreOutput:
    tokenizer = load_tokenizer(core)
    good, other = inputs_of(GOOD, tokenizer), inputs_of(OTHER, tokenizer)
    expected = run_engine(core, [good, other])

    outputs = run_engine(core, [good, guilty, other])
    for output, alone in zip((outputs[0], outputs[2]), expected, strict=True):
        assert (latents_of(output) - latents_of(alone)).abs().max() <= COMPANY_TOLERANCE
    assert outputs[1].finish_reason is FinishReason.ERROR
    assert all(stats["num_requests"] == 0 for stats in core.executor.collective_rpc("get_stats"))
    return outputs[1]


def test_a_request_that_cannot_be_prepared(engine_core: MakeEngineCore) -> None:
    core = engine_core(0)
    guilty = inputs_of(GOOD, load_tokenizer(core), prompt_embeds=torch.zeros(7, 99))
    output = assert_only_the_guilty_fails(core, guilty)
    assert output.error is not None
    assert output.error.type == "InvalidParameterError"
    assert "prompt_embeds=[7, 99] is not allowed: [N, 128]" in output.error.message


def test_tensors_that_cannot_travel_are_refused_at_once(engine_core: MakeEngineCore) -> None:
    core = engine_core(0)
    inputs = inputs_of(GOOD, load_tokenizer(core), prompt_embeds=torch.zeros(7, 128).double())
    with pytest.raises(InvalidParameterError, match=r"prompt_embeds=torch.float64 is not allowed"):
        core.add_request(DiffusionRequest(request_id="a", custom_inputs=inputs))
    assert not core.has_requests()


def test_latents_that_are_not_numbers(engine_core: MakeEngineCore) -> None:
    core = engine_core(0)
    latents = torch.zeros(24, 64)
    latents[3, 5] = torch.nan
    guilty = inputs_of(GOOD, load_tokenizer(core), latents=latents)
    output = assert_only_the_guilty_fails(core, guilty)
    assert output.error is not None
    assert output.error.message == "step 1 of 3 gave latents that are not finite numbers"


def test_a_request_that_cannot_be_decoded(engine_core: MakeEngineCore) -> None:
    core = engine_core(0)
    guilty = inputs_of(
        GOOD,
        load_tokenizer(core),
        mask=torch.ones(5, 5, dtype=torch.uint8),
        output_mode=OutputMode.PIXELS_AND_MASK,
    )
    output = assert_only_the_guilty_fails(core, guilty)
    assert output.error is not None
    assert "mask=[5, 5] is not allowed: [64, 96]" in output.error.message


class FaultyAdapter(QwenImageRunnerAdapter):
    """Fails as a kernel would: the whole batch, whenever the poisoned request is in it."""

    def preview(self, states: Sequence[QwenImageState], stepped: Sequence[Tensor]) -> list[Tensor]:
        if any(s.inputs.seed == POISON_SEED for s in states):
            raise RuntimeError("preview exploded")
        return super().preview(states, stepped)

    def step(self, states: Sequence[QwenImageState]) -> list[Tensor]:
        if any(s.inputs.seed == POISON_SEED and s.num_computed_steps == 1 for s in states):
            raise RuntimeError("kernel exploded")
        return super().step(states)


def create_core(
    checkpoint: MakeCheckpoint, adapter_class: type[QwenImageRunnerAdapter]
) -> DiffusionEngineCore:
    config = DiTConfig(model=str(checkpoint(0)), device="cpu")
    executor = UniProcDiffusionExecutor(config)
    worker = executor.worker
    worker.model_runner.adapter = adapter_class(
        worker.pipeline_manager, worker.cache_manager, config
    )
    return DiffusionEngineCore(config, executor)


def test_a_step_that_fails(checkpoint: MakeCheckpoint) -> None:
    core = create_core(checkpoint, FaultyAdapter)
    guilty = inputs_of(GOOD, load_tokenizer(core), seed=POISON_SEED)
    output = assert_only_the_guilty_fails(core, guilty)
    assert output.error is not None
    assert output.error.type == "StageExecutionError"
    assert output.error.message == "RuntimeError: kernel exploded"


def test_a_preview_that_fails(checkpoint: MakeCheckpoint) -> None:
    core = create_core(checkpoint, FaultyAdapter)
    tokenizer = load_tokenizer(core)
    good = inputs_of(GOOD, tokenizer, preview_every=1)
    expected = previews_of(watch_engine(core, [good])[0])
    guilty = inputs_of(GOOD, tokenizer, preview_every=1, seed=POISON_SEED)
    output = assert_only_the_guilty_fails(core, guilty)
    assert output.error is not None
    assert output.error.message == "RuntimeError: preview exploded"

    [news, failed] = watch_engine(core, [good, guilty])
    assert [output.finish_reason for output in failed] == [FinishReason.ERROR]
    assert_same_previews(previews_of(news), expected)


def test_a_cache_too_small_for_one_more_request(checkpoint: MakeCheckpoint) -> None:
    # Room for the latents and text of GOOD and OTHER, not for a larger picture beside them.
    cache_config = DiTCacheConfig(max_cache_size=100_000)
    core = DiffusionEngineCore(
        DiTConfig(model=str(checkpoint(0)), device="cpu", cache_config=cache_config)
    )
    large = Case("a red cat", 320, 320, 2, None, seed=3)
    output = assert_only_the_guilty_fails(core, inputs_of(large, load_tokenizer(core)))
    assert output.error is not None
    assert "CacheAllocationError" in output.error.message
    assert "max_cache_size=100000" in output.error.message


# --- previews ---


def assert_same_previews(previews: dict[int, Tensor], expected: dict[int, Tensor]) -> None:
    """Up to one level: in other company, the last bits of the latents are others."""
    assert list(previews) == list(expected)
    for step, preview in previews.items():
        assert preview.dtype == torch.uint8
        assert (preview.int() - expected[step].int()).abs().max() <= 1


@pytest.mark.parametrize(
    ("num_steps", "preview_every", "expected"),
    [
        (7, 1, [1, 2, 3, 4, 5, 6]),
        (7, 3, [3, 6]),
        (6, 3, [3]),  # the last step gives the picture
        (4, 4, []),
        (4, 1000, []),
        (1, 1, []),
        (4, 0, []),
    ],
)
def test_previews_come_every_k_steps_but_not_at_the_last(
    engine_core: MakeEngineCore, num_steps: int, preview_every: int, expected: list[int]
) -> None:
    core = engine_core(0)
    case = Case("a red cat", 64, 96, num_steps, None, seed=1)
    inputs = inputs_of(case, load_tokenizer(core), preview_every=preview_every)
    [news] = watch_engine(core, [inputs])
    assert [output.output_metadata["step"] for output in news] == list(range(1, num_steps + 1))
    previews = previews_of(news)
    assert list(previews) == expected
    assert all(preview.shape == (3, 32, 48) for preview in previews.values())
    assert len({bytes(preview.numpy()) for preview in previews.values()}) == len(expected)


def test_previews_do_not_change_the_picture(engine_core: MakeEngineCore) -> None:
    core = engine_core(0)
    tokenizer = load_tokenizer(core)
    cases = [GOOD, OTHER, Case("a dog", 80, 208, 5, None, seed=3)]
    plain = run_engine(core, [inputs_of(case, tokenizer) for case in cases])
    watched = run_engine(core, [inputs_of(case, tokenizer, preview_every=1) for case in cases])
    for output, expected in zip(watched, plain, strict=True):
        assert torch.equal(latents_of(output), latents_of(expected))
        assert output.pooling_output is not None and expected.pooling_output is not None
        assert torch.equal(output.pooling_output, expected.pooling_output)
        assert set(output.additional_outputs) == {"latents"}


def test_previews_in_mixed_company(engine_core: MakeEngineCore) -> None:
    core = engine_core(0)
    tokenizer = load_tokenizer(core)
    good, often, other = (
        inputs_of(GOOD, tokenizer, preview_every=2),
        inputs_of(OTHER, tokenizer, preview_every=1, output_mode=OutputMode.LATENTS),
        inputs_of(OTHER, tokenizer, seed=3),
    )
    alone = [watch_engine(core, [inputs])[0] for inputs in (good, other, often)]
    together = watch_engine(core, [good, other, often], arrivals=[0, 0, 1])
    assert [list(previews_of(news)) for news in together] == [[2], [], [1, 2, 3]]
    for news, expected in zip(together, alone, strict=True):
        assert_same_previews(previews_of(news), previews_of(expected))


def test_previews_of_the_smallest_picture(engine_core: MakeEngineCore) -> None:
    core = engine_core(0)
    case = Case("a red cat", 16, 16, 2, None, seed=1)
    [news] = watch_engine(core, [inputs_of(case, load_tokenizer(core), preview_every=1)])
    assert {step: preview.shape for step, preview in previews_of(news).items()} == {1: (3, 8, 8)}


class CountingAdapter(QwenImageRunnerAdapter):
    """Notes the latents of every call of the VAE."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.decoded: list[tuple[int, ...]] = []
        self.decoding.manager.decode = self.decode_counted

    def decode_counted(self, latents: Tensor) -> Tensor:
        self.decoded.append(tuple(latents.shape))
        return self.decoding.decode_vae(latents)


def test_previews_of_a_step_share_a_decode_and_others_cost_nothing(
    checkpoint: MakeCheckpoint,
) -> None:
    core = create_core(checkpoint, CountingAdapter)
    assert isinstance(core.executor, UniProcDiffusionExecutor)
    adapter = core.executor.worker.model_runner.adapter
    assert isinstance(adapter, CountingAdapter)
    case = Case("a red cat", 64, 96, 4, None, seed=1)
    inputs = [
        inputs_of(case, load_tokenizer(core), preview_every=preview_every)
        for preview_every in (2, 1, 0)
    ]
    run_engine(core, inputs)
    small, large = (16, 1, 4, 6), (16, 1, 8, 12)
    assert adapter.decoded == [(1, *small), (2, *small), (1, *small), (3, *large)]


# --- ends and modes ---


def test_abort_frees_everything(engine_core: MakeEngineCore) -> None:
    core = engine_core(0)
    before = core.executor.collective_rpc("get_stats")
    inputs = inputs_of(GOOD, load_tokenizer(core))
    for name in ("running", "waiting"):
        core.add_request(DiffusionRequest(request_id=name, custom_inputs=inputs))
        if name == "running":
            core.step()
    core.abort_requests(["running", "waiting", "unknown"])
    news, _ = core.step()
    assert [(o.request_id, o.finish_reason) for o in news[0].outputs] == [
        ("running", FinishReason.ABORT),
        ("waiting", FinishReason.ABORT),
    ]
    assert not core.has_requests()
    after = core.executor.collective_rpc("get_stats")
    assert [s["num_requests"] for s in after] == [0] * len(after)
    # Prompt embeddings may stay, for the next request of the same prompt; nothing else does.
    run_engine(core, [inputs])
    assert sum(s["cache_used_bytes"] for s in core.executor.collective_rpc("get_stats")) <= (
        sum(s["cache_used_bytes"] for s in before) + 2 * 2 * 64 * 128 * 4
    )


@pytest.mark.parametrize("mode", list(OutputMode))
def test_output_modes(engine_core: MakeEngineCore, mode: OutputMode) -> None:
    core = engine_core(0)
    tokenizer = load_tokenizer(core)
    [both] = run_engine(core, [inputs_of(GOOD, tokenizer)])
    pixels, latents = both.pooling_output, both.additional_outputs["latents"]
    assert pixels is not None and pixels.shape == (3, 64, 96) and pixels.dtype == torch.uint8

    [output] = run_engine(core, [inputs_of(GOOD, tokenizer, output_mode=mode)])
    assert output.pooling_output is not None
    expected: dict[OutputMode, tuple[str, Tensor, set[str]]] = {
        OutputMode.PIXELS: ("image", pixels, set()),
        OutputMode.LATENTS: ("latents", latents, set()),
        OutputMode.PIXELS_AND_LATENTS: ("image", pixels, {"latents"}),
        OutputMode.PIXELS_AND_MASK: (
            "image",
            torch.cat((pixels, torch.full((1, 64, 96), 255, dtype=torch.uint8))),
            {"mask"},
        ),
    }
    output_type, main, additional = expected[mode]
    assert output.output_type == output_type
    assert torch.equal(output.pooling_output, main)
    assert set(output.additional_outputs) == additional


def test_generate_alone_equals_the_engine(checkpoint: MakeCheckpoint) -> None:
    core = DiffusionEngineCore(DiTConfig(model=str(checkpoint(0)), device="cpu"))
    assert isinstance(core.executor, UniProcDiffusionExecutor)
    worker: Any = core.executor.worker
    inputs = inputs_of(GOOD, load_tokenizer(core))
    [output] = run_engine(core, [inputs])
    used = worker.cache_manager.used_bytes
    result: RequestResult = worker.get_qwen_image_adapter().generate(inputs)
    assert torch.equal(result.additional_outputs["latents"], latents_of(output))
    assert worker.cache_manager.used_bytes == used
