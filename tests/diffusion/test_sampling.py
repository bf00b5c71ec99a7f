"""The schedule, guidance and Euler step are those of the stock pipeline, to the last bit.

The estimate of the end is exact where the flow is straight.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift, retrieve_timesteps
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_omni.diffusion.sampling import estimate_final, euler_step, guide, make_sigmas

# scheduler/scheduler_config.json of Qwen/Qwen-Image
QWEN_IMAGE: dict[str, Any] = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "_diffusers_version": "0.34.0.dev0",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "invert_sigmas": False,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "stochastic_sampling": False,
    "time_shift_type": "exponential",
    "use_beta_sigmas": False,
    "use_dynamic_shifting": True,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
}

STATIC_SHIFT = QWEN_IMAGE | {"use_dynamic_shifting": False, "shift": 3.0, "shift_terminal": None}


def create_stock_scheduler(
    config: dict[str, Any],
    num_steps: int,
    num_image_tokens: int,
    sigmas: Sequence[float] | None = None,
) -> Any:
    """A stock scheduler with its timesteps set, as `QwenImagePipeline.__call__` does it."""
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    mu = calculate_shift(
        num_image_tokens,
        scheduler.config.get("base_image_seq_len", 256),
        scheduler.config.get("max_image_seq_len", 4096),
        scheduler.config.get("base_shift", 0.5),
        scheduler.config.get("max_shift", 1.15),
    )
    unshifted = np.linspace(1.0, 1 / num_steps, num_steps) if sigmas is None else sigmas
    retrieve_timesteps(scheduler, num_steps, "cpu", sigmas=unshifted, mu=mu)
    return scheduler


def draw_tokens(seed: int, num_tokens: int = 12, channels: int = 64) -> Tensor:
    return torch.randn(num_tokens, channels, generator=torch.Generator().manual_seed(seed))


# --- noise levels ---


@settings(max_examples=200, deadline=None)
@given(num_steps=st.integers(2, 200), num_image_tokens=st.integers(1, 16384))
def test_sigmas_equal_stock(num_steps: int, num_image_tokens: int) -> None:
    stock = create_stock_scheduler(QWEN_IMAGE, num_steps, num_image_tokens)
    sigmas = make_sigmas(QWEN_IMAGE, num_steps, num_image_tokens)
    assert sigmas.dtype == torch.float32
    assert torch.equal(sigmas, stock.sigmas)


@settings(max_examples=100, deadline=None)
@given(
    levels=st.sets(st.integers(1, 999), min_size=1, max_size=30),
    num_image_tokens=st.integers(1, 16384),
)
def test_custom_sigmas_equal_stock(levels: set[int], num_image_tokens: int) -> None:
    custom = tuple(level / 1000 for level in sorted(levels, reverse=True))
    stock = create_stock_scheduler(QWEN_IMAGE, len(custom), num_image_tokens, list(custom))
    sigmas = make_sigmas(QWEN_IMAGE, len(custom), num_image_tokens, custom)
    assert torch.equal(sigmas, stock.sigmas)


@settings(max_examples=50, deadline=None)
@given(num_steps=st.integers(2, 50), num_image_tokens=st.integers(64, 8192))
def test_sigmas_fall_from_one_to_zero(num_steps: int, num_image_tokens: int) -> None:
    sigmas = make_sigmas(QWEN_IMAGE, num_steps, num_image_tokens)
    assert sigmas.shape == (num_steps + 1,)
    assert sigmas[0] == 1
    assert sigmas[-2] == pytest.approx(0.02, rel=1e-5)  # shift_terminal
    assert sigmas[-1] == 0
    assert torch.all(sigmas[:-1] > sigmas[1:])


def test_more_tokens_give_more_noise() -> None:
    small, large = (make_sigmas(QWEN_IMAGE, 10, num_tokens) for num_tokens in (256, 4096))
    assert torch.all(large[1:-2] > small[1:-2])


@pytest.mark.parametrize("num_image_tokens", [1, 256, 4096, 16384])
@pytest.mark.parametrize("custom", [None, (1.0,)])
def test_single_step_goes_from_one_to_zero(
    num_image_tokens: int, custom: tuple[float] | None
) -> None:
    sigmas = make_sigmas(QWEN_IMAGE, 1, num_image_tokens, custom)
    assert sigmas.tolist() == [1.0, 0.0]
    with pytest.warns(RuntimeWarning, match="invalid value encountered"):
        stock = create_stock_scheduler(QWEN_IMAGE, 1, num_image_tokens)
    assert stock.sigmas[0].isnan()


@pytest.mark.parametrize("custom", [(1 - 1e-9,), (1.0, 1 - 1e-9)])
def test_sigmas_next_to_one_are_finite(custom: tuple[float, ...]) -> None:
    assert make_sigmas(QWEN_IMAGE, len(custom), 256, custom).isfinite().all()


@pytest.mark.parametrize("num_steps", [1, 2, 7, 50])
@pytest.mark.parametrize("num_image_tokens", [256, 4096])
def test_schedule_without_dynamic_shift_equals_stock(num_steps: int, num_image_tokens: int) -> None:
    stock = create_stock_scheduler(STATIC_SHIFT, num_steps, num_image_tokens)
    sigmas = make_sigmas(STATIC_SHIFT, num_steps, num_image_tokens)
    assert torch.equal(sigmas, stock.sigmas)
    assert torch.equal(sigmas, make_sigmas(STATIC_SHIFT, num_steps, 64))


def test_anchor_points_of_the_shift_have_the_stock_defaults() -> None:
    config = {"use_dynamic_shifting": True}
    stock = create_stock_scheduler(config, 9, 1000)
    assert torch.equal(make_sigmas(config, 9, 1000), stock.sigmas)


def test_scheduler_config_is_left_as_it_was() -> None:
    config = dict(QWEN_IMAGE)
    make_sigmas(config, 1, 256)
    assert config == QWEN_IMAGE


# --- guidance ---


def guide_stock(noise_pred: Tensor, neg_noise_pred: Tensor, true_cfg_scale: float) -> Tensor:
    """The lines of `QwenImagePipeline.__call__`."""
    comb_pred = neg_noise_pred + true_cfg_scale * (noise_pred - neg_noise_pred)

    cond_norm = torch.norm(noise_pred, dim=-1, keepdim=True)
    noise_norm = torch.norm(comb_pred, dim=-1, keepdim=True)
    guided: Tensor = comb_pred * (cond_norm / noise_norm)
    return guided


@pytest.mark.parametrize("scale", [1.0, 1.5, 4.0, 7.0, 100.0])
def test_guidance_equals_stock_and_keeps_the_norm(scale: float) -> None:
    cond, uncond = draw_tokens(0), draw_tokens(1)
    guided = guide(cond, uncond, torch.full((12, 1), scale))
    assert torch.equal(guided, guide_stock(cond, uncond, scale))
    torch.testing.assert_close(guided.norm(dim=-1), cond.norm(dim=-1))


def test_every_token_has_its_own_guidance_scale() -> None:
    cond, uncond = draw_tokens(0), draw_tokens(1)
    scale = torch.tensor([2.0] * 5 + [6.0] * 7).unsqueeze(1)
    guided = guide(cond, uncond, scale)
    assert torch.equal(guided[:5], guide_stock(cond[:5], uncond[:5], 2.0))
    assert torch.equal(guided[5:], guide_stock(cond[5:], uncond[5:], 6.0))
    assert (guided - cond).abs().max() > 0.5


def test_equal_branches_are_left_alone() -> None:
    cond = draw_tokens(0)
    assert torch.equal(guide(cond, cond.clone(), torch.full((12, 1), 5.0)), cond)


# --- Euler step ---


@pytest.mark.parametrize("config", [QWEN_IMAGE, STATIC_SHIFT], ids=["dynamic", "static"])
@pytest.mark.parametrize("num_steps", [2, 5, 12])
def test_euler_steps_equal_stock(config: dict[str, Any], num_steps: int) -> None:
    stock = create_stock_scheduler(config, num_steps, 12)
    sigmas = make_sigmas(config, num_steps, 12)
    ours = expected = draw_tokens(0)
    for step in range(num_steps):
        velocity = draw_tokens(step + 1)
        expected = stock.step(velocity, stock.timesteps[step], expected, return_dict=False)[0]
        sigma, sigma_next = (sigmas[index].expand(12, 1) for index in (step, step + 1))
        ours = euler_step(ours, velocity, sigma, sigma_next)
        assert torch.equal(ours, expected)


def test_every_token_steps_between_its_own_sigmas() -> None:
    latents, velocity = draw_tokens(0), draw_tokens(1)
    sigma = torch.tensor([1.0] * 5 + [0.5] * 7).unsqueeze(1)
    sigma_next = torch.tensor([0.75] * 5 + [0.0] * 7).unsqueeze(1)
    stepped = euler_step(latents, velocity, sigma, sigma_next)
    assert torch.equal(stepped[:5], latents[:5] - 0.25 * velocity[:5])
    assert torch.equal(stepped[5:], latents[5:] - 0.5 * velocity[5:])


# --- estimate of the end ---


def test_estimate_goes_straight_on() -> None:
    before, after = torch.tensor([8.0, 1.0]), torch.tensor([6.0, 1.5])
    # From 0.75 to 0.5 the latents move by (-2, 0.5): twice as far is left to 0.
    estimate = estimate_final(before, after, 0.75, 0.5)
    assert estimate.tolist() == [2.0, 2.5]


@pytest.mark.parametrize("num_steps", [2, 5, 12, 50])
def test_estimate_of_a_straight_flow_is_its_end_at_every_step(num_steps: int) -> None:
    noise, end = draw_tokens(0), draw_tokens(1)
    sigmas = make_sigmas(QWEN_IMAGE, num_steps, 12)
    latents = noise
    for sigma, sigma_next in pairwise(sigmas):
        stepped = euler_step(latents, noise - end, sigma, sigma_next)
        estimate = estimate_final(latents, stepped, sigma.item(), sigma_next.item())
        torch.testing.assert_close(estimate, end, atol=1e-4, rtol=0)
        latents = stepped
    assert torch.equal(estimate, stepped)  # the last step arrives


def test_estimate_where_float32_cannot_tell_two_noise_levels_apart() -> None:
    sigma, sigma_next, _ = make_sigmas(QWEN_IMAGE, 2, 256, (1.0, 1 - 1e-9)).tolist()
    assert sigma == sigma_next == 1.0
    latents = draw_tokens(0)
    assert torch.equal(estimate_final(latents, latents.clone(), sigma, sigma_next), latents)
