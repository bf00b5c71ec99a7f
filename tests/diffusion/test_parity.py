"""The engine draws what diffusers draws: alone, and in any company."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import avg_pool2d

from tests.drawing import (
    COMPANY_TOLERANCE,
    Case,
    MakeCheckpoint,
    MakeEngineCore,
    MakeStock,
    draw_stock,
    draw_stock_steps,
    inputs_of,
    latents_of,
    load_tokenizer,
    pixels_of,
    previews_of,
    run_engine,
    watch_engine,
)
from vllm_omni.config import DiTConfig
from vllm_omni.diffusion.engine_core import DiffusionEngineCore
from vllm_omni.models.qwen_image import adapter
from vllm_omni.models.qwen_image.transformer import PackPlan, packed_forward

LATENTS_TOLERANCE = 1e-4
PIXELS_TOLERANCE = 1  # of 255

words = st.sampled_from(
    ["a", "red", "cat", "blue sofa", "star", "4K", "übergroß", "猫", "🙂", "{}"]
)
# A word has at most 12 tokens and mostly 1 or 2, the end of the template 5.
prompts = st.lists(words, max_size=20).map(" ".join)
sides = st.integers(4, 20).map(lambda tokens: tokens * 16)
cases = st.builds(
    Case,
    prompt=prompts,
    height=sides,
    width=sides,
    num_steps=st.integers(2, 12),
    true_cfg_scale=st.none() | st.floats(1.5, 7.0),
    seed=st.integers(0, 2**63 - 1),
    arrival=st.integers(0, 10),
)
numerics = settings(
    max_examples=6,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)


@cache
def reference(pipeline: Any, case: Case) -> tuple[Tensor, np.ndarray[Any, Any]]:
    return draw_stock(pipeline, case)


def assert_same_picture(output: Any, pipeline: Any, case: Case) -> None:
    latents, pixels = reference(pipeline, replace(case, arrival=0))
    assert (latents_of(output) - latents).abs().max() <= LATENTS_TOLERANCE, case
    assert np.abs(pixels_of(output) - pixels).max() <= PIXELS_TOLERANCE, case


@pytest.mark.parametrize("seed", [0, 1])
@numerics
@given(batch=st.lists(cases, min_size=4, max_size=6))
def test_pictures_equal_those_of_diffusers(
    engine_core: MakeEngineCore, stock: MakeStock, seed: int, batch: list[Case]
) -> None:
    core = engine_core(seed)
    tokenizer = load_tokenizer(core)
    inputs = [inputs_of(case, tokenizer) for case in batch]

    staggered = run_engine(core, inputs, [case.arrival for case in batch])
    for output, case in zip(staggered, batch, strict=True):
        assert_same_picture(output, stock(seed), case)

    [alone] = run_engine(core, inputs[:1])
    assert_same_picture(alone, stock(seed), batch[0])


def test_company_does_not_change_a_picture(engine_core: MakeEngineCore) -> None:
    core = engine_core(0)
    tokenizer = load_tokenizer(core)
    choose = random.Random(0)

    def any_case() -> Case:
        return Case(
            prompt=" ".join(choose.choices(["red", "cat", "on", "sofa"], k=choose.randint(0, 20))),
            height=choose.randint(4, 16) * 16,
            width=choose.randint(4, 16) * 16,
            num_steps=choose.randint(2, 8),
            true_cfg_scale=choose.choice([None, 2.0, 6.5]),
            seed=choose.randrange(2**32),
        )

    ours = inputs_of(Case("a red cat", 128, 192, 8, 4.0, seed=7), tokenizer)
    [alone] = run_engine(core, [ours])
    for _ in range(20):
        company = [inputs_of(any_case(), tokenizer) for _ in range(choose.randint(1, 7))]
        place = choose.randint(0, len(company))
        batch = [*company[:place], ours, *company[place:]]
        outputs = run_engine(core, batch, [choose.randint(0, 6) for _ in batch])
        difference = (latents_of(outputs[place]) - latents_of(alone)).abs().max()
        assert difference <= COMPANY_TOLERANCE


def test_one_step_is_one_euler_step_from_noise(
    engine_core: MakeEngineCore, stock: MakeStock
) -> None:
    """Stock diffusers gives NaN here, so the reference is its transformer, called once."""
    core, pipeline = engine_core(0), stock(0)
    case = Case("a red cat", 128, 64, 1, None, seed=3)
    [output] = run_engine(core, [inputs_of(case, load_tokenizer(core))])

    generator = torch.Generator().manual_seed(case.seed)
    noise = pipeline.prepare_latents(1, 16, 128, 64, torch.float32, "cpu", generator)
    with torch.no_grad():
        embeds, _ = pipeline.encode_prompt(case.prompt)
        velocity = pipeline.transformer(
            hidden_states=noise,
            timestep=torch.ones(1),
            encoder_hidden_states=embeds,
            img_shapes=[[(1, 8, 4)]],
            return_dict=False,
        )[0]
    assert (latents_of(output) - (noise - velocity)[0]).abs().max() <= LATENTS_TOLERANCE


def test_bfloat16_is_as_near_to_float32_as_that_of_diffusers(
    checkpoint: MakeCheckpoint, stock: MakeStock
) -> None:
    config = DiTConfig(model=str(checkpoint(0)), device="cpu", dtype="bfloat16")
    core = DiffusionEngineCore(config)
    pipeline = QwenImagePipeline.from_pretrained(checkpoint(0), dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    batch = [Case("a red cat", 64, 96, 4, 3.0, seed=1), Case("a dog", 96, 96, 4, None, seed=2)]
    # The generator gives other numbers in bfloat16, so all three start from the same tensor.
    generator = torch.Generator().manual_seed(0)
    noises = [
        torch.randn(case.height * case.width // 256, 64, generator=generator).bfloat16()
        for case in batch
    ]
    inputs = [
        inputs_of(case, load_tokenizer(core), latents=noise)
        for case, noise in zip(batch, noises, strict=True)
    ]
    for output, case, noise in zip(run_engine(core, inputs), batch, noises, strict=True):
        exact, _ = draw_stock(stock(0), case, noise.float())
        theirs, _ = draw_stock(pipeline, case, noise)
        our_error = (latents_of(output) - exact).norm()
        their_error = (theirs.float() - exact).norm()
        assert our_error <= 1.1 * their_error
        assert (latents_of(output) - theirs.float()).norm() <= 0.2 * their_error


# --- previews ---


def decode_small(pipeline: Any, latents: Tensor, case: Case) -> np.ndarray[Any, Any]:
    """Latents [tokens, channels] averaged over 2 x 2, to [3, h, w] by diffusers' own VAE."""
    unpacked = pipeline._unpack_latents(latents[None], case.height, case.width, 8)
    small = avg_pool2d(unpacked[:, :, 0], 2).unsqueeze(2)
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (pipeline.vae.config.latents_mean, pipeline.vae.config.latents_std)
    )
    with torch.no_grad():
        image = pipeline.vae.decode(small * std + mean, return_dict=False)[0][:, :, 0]
    [pixels] = pipeline.image_processor.postprocess(image, output_type="np")
    return (pixels * 255).round().astype(int).transpose(2, 0, 1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", [0, 1])
def test_previews_are_what_the_steps_of_diffusers_lead_to(
    engine_core: MakeEngineCore, stock: MakeStock, seed: int
) -> None:
    core, pipeline = engine_core(seed), stock(seed)
    batch = [Case("a red cat", 128, 96, 7, 4.0, seed=1), Case("a dog", 80, 208, 5, None, seed=2)]
    inputs = [inputs_of(case, load_tokenizer(core), preview_every=2) for case in batch]
    for outputs, case in zip(watch_engine(core, inputs), batch, strict=True):
        latents, _ = draw_stock_steps(pipeline, case)
        sigmas = pipeline.scheduler.sigmas.tolist()
        previews = previews_of(outputs)
        assert list(previews) == list(range(2, case.num_steps, 2))
        for step, preview in previews.items():
            before, after = latents[step - 2], latents[step - 1]
            num_such_steps = sigmas[step - 1] / (sigmas[step - 1] - sigmas[step])  # to level 0
            end = before + num_such_steps * (after - before)
            expected = decode_small(pipeline, end, case)
            assert np.abs(preview.numpy().astype(int) - expected).max() <= PIXELS_TOLERANCE


def test_previews_come_nearer_to_the_picture(engine_core: MakeEngineCore, stock: MakeStock) -> None:
    """Random weights do not draw the same in small and in large: compared is small with small."""
    core = engine_core(0)
    case = Case("a red cat", 80, 208, 10, 4.0, seed=1)
    [outputs] = watch_engine(core, [inputs_of(case, load_tokenizer(core), preview_every=1)])
    picture = decode_small(stock(0), latents_of(outputs[-1]), case)
    differences = [
        np.abs(preview.numpy().astype(int) - picture).mean()
        for preview in previews_of(outputs).values()
    ]
    assert len(differences) == 9
    assert differences[-1] <= 3
    assert differences[0] >= 15


# --- controls: the comparison above notices small mistakes ---


def late_by_a_bit(*args: Any) -> Tensor:
    transformer, plan, latents, text, timesteps, *rest = args
    return packed_forward(transformer, plan, latents, text, timesteps - 0.01, *rest)


def rope_of_another_row(*args: Any) -> Tensor:
    transformer, plan, *rest = args
    wrong: PackPlan = replace(plan, image_rope=plan.image_rope.flip(0))
    return packed_forward(transformer, wrong, *rest)


@pytest.mark.parametrize("mistake", [late_by_a_bit, rope_of_another_row])
def test_a_mistake_is_noticed(
    checkpoint: MakeCheckpoint, stock: MakeStock, monkeypatch: pytest.MonkeyPatch, mistake: Any
) -> None:
    core = DiffusionEngineCore(DiTConfig(model=str(checkpoint(0)), device="cpu"))
    batch = [Case("a cat", 64, 128, 3, None, seed=1), Case("a cat", 128, 64, 3, None, seed=1)]
    inputs = [inputs_of(case, load_tokenizer(core)) for case in batch]
    for output, case in zip(run_engine(core, inputs), batch, strict=True):
        assert_same_picture(output, stock(0), case)

    monkeypatch.setattr(adapter, "packed_forward", mistake)
    for output, case in zip(run_engine(core, inputs), batch, strict=True):
        latents, _ = reference(stock(0), case)
        assert (latents_of(output) - latents).abs().max() > 10 * LATENTS_TOLERANCE
