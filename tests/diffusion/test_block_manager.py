"""Timesteps of a request, and guidance folded into a packed batch."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from vllm_omni.diffusion.block_manager import DiffusionBlockManager
from vllm_omni.diffusion.sampling import guide

CONFIG = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift_terminal": 0.02,
    "use_dynamic_shifting": True,
}


def create_block_manager(num_train_timesteps: int = 1000) -> DiffusionBlockManager:
    return DiffusionBlockManager(CONFIG | {"num_train_timesteps": num_train_timesteps})


def draw_tokens(num_tokens: int, seed: int) -> Tensor:
    return torch.randn(num_tokens, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_train_timesteps", [1000, 250])
def test_timesteps_equal_stock(num_train_timesteps: int) -> None:
    stock = FlowMatchEulerDiscreteScheduler.from_config(
        CONFIG | {"num_train_timesteps": num_train_timesteps}
    )
    stock.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25], mu=0.5)  # the shift at 256 tokens
    timesteps = create_block_manager(num_train_timesteps).get_timesteps(4, "cpu")
    assert timesteps[0] == num_train_timesteps
    assert torch.equal(timesteps, stock.timesteps)


def test_timesteps_follow_size_and_custom_sigmas() -> None:
    manager = create_block_manager()
    custom = (1.0, 0.9, 0.1)
    timesteps = manager.get_timesteps(3, "cpu", num_image_tokens=4096, sigmas=custom)
    assert torch.equal(timesteps, manager.get_sigmas(3, 4096, custom)[:-1] * 1000)
    assert not torch.equal(timesteps, manager.get_timesteps(3, "cpu", 4096))
    assert not torch.equal(timesteps, manager.get_timesteps(3, "cpu", 256, custom))


def test_single_step_is_finite() -> None:
    assert create_block_manager().get_timesteps(1, "cpu").tolist() == [1000.0]


def test_number_of_training_timesteps_defaults_to_1000() -> None:
    assert DiffusionBlockManager({}).num_train_timesteps == 1000


@pytest.mark.parametrize(
    ("num_computed_steps", "expected"), [(0, [0, 1, 2, 3]), (3, [3]), (4, []), (5, [])]
)
def test_steps_still_to_take(num_computed_steps: int, expected: list[int]) -> None:
    assert create_block_manager().schedule_denoising_steps(num_computed_steps, 4) == expected


def test_guidance_folds_each_request_in_packed_order() -> None:
    """Two guided requests of 3 and 5 tokens, then two unguided ones of 4 and 2."""
    cond = [draw_tokens(num_tokens, seed) for seed, num_tokens in enumerate((3, 5, 4, 2))]
    uncond = [draw_tokens(3, 10), draw_tokens(5, 11)]
    scale = torch.tensor([2.0] * 3 + [6.0] * 5).unsqueeze(1)
    folded = create_block_manager().apply_classifier_free_guidance(
        torch.cat([*cond, *uncond]), scale
    )
    first, second, *unguided = folded.split([3, 5, 4, 2])
    assert torch.equal(first, guide(cond[0], uncond[0], torch.full((3, 1), 2.0)))
    assert torch.equal(second, guide(cond[1], uncond[1], torch.full((5, 1), 6.0)))
    assert torch.equal(torch.cat(unguided), torch.cat(cond[2:]))


def test_guidance_with_guided_requests_only() -> None:
    cond, uncond = draw_tokens(4, 0), draw_tokens(4, 1)
    scale = torch.full((4, 1), 3.0)
    folded = create_block_manager().apply_classifier_free_guidance(torch.cat((cond, uncond)), scale)
    assert torch.equal(folded, guide(cond, uncond, scale))


def test_guidance_without_guided_requests() -> None:
    velocity = draw_tokens(4, 0)
    folded = create_block_manager().apply_classifier_free_guidance(velocity, torch.zeros(0, 1))
    assert torch.equal(folded, velocity)
