"""What a Qwen-Image request costs a step, and which requests are refused."""

import pytest
import torch

from vllm_omni.config import DiTConfig
from vllm_omni.diffusion.messages import DiffusionRequest
from vllm_omni.errors import InvalidParameterError, OmniRequestError
from vllm_omni.models.qwen_image.inputs import QwenImageCustomInputs
from vllm_omni.models.qwen_image.scheduler import QwenImageScheduler
from vllm_omni.params import OutputMode

PREFIX = 34


def create_scheduler(max_num_batched_tokens: int = 1000) -> QwenImageScheduler:
    return QwenImageScheduler(DiTConfig(max_num_batched_tokens=max_num_batched_tokens))


def create_inputs(
    num_text_tokens: int = 7,
    num_negative_tokens: int | None = None,
    *,
    height: int = 64,
    width: int = 96,
    num_inference_steps: int = 5,
    true_cfg_scale: float = 4.0,
) -> QwenImageCustomInputs:
    """A picture of 4 x 6 tokens with prompts as token ids, template prefix included."""
    return QwenImageCustomInputs(
        prompt_token_ids=[0] * (PREFIX + num_text_tokens),
        negative_prompt_token_ids=(
            None if num_negative_tokens is None else [0] * (PREFIX + num_negative_tokens)
        ),
        num_prefix_tokens=PREFIX,
        height=height,
        width=width,
        num_inference_steps=num_inference_steps,
        true_cfg_scale=true_cfg_scale,
    )


def create_request(inputs: QwenImageCustomInputs) -> DiffusionRequest[QwenImageCustomInputs]:
    return DiffusionRequest(request_id="a", custom_inputs=inputs)


EMBEDS = torch.zeros(7, 16)
NEGATIVE_EMBEDS = torch.zeros(3, 16)


@pytest.mark.parametrize(
    ("inputs", "num_tokens"),
    [
        pytest.param(create_inputs(7), 24 + 7, id="unguided"),
        pytest.param(create_inputs(7, 3), 2 * 24 + 7 + 3, id="guided"),
        pytest.param(create_inputs(7, 3, true_cfg_scale=1.0), 24 + 7, id="scale of one"),
        pytest.param(create_inputs(1, 1), 2 * 24 + 2, id="shortest prompts"),
        pytest.param(
            QwenImageCustomInputs(
                prompt_embeds=EMBEDS,
                num_prefix_tokens=PREFIX,
                height=64,
                width=96,
                num_inference_steps=5,
            ),
            24 + 7,
            id="embeds have no prefix",
        ),
        pytest.param(
            QwenImageCustomInputs(
                prompt_embeds=EMBEDS,
                negative_prompt_embeds=NEGATIVE_EMBEDS,
                height=64,
                width=96,
                num_inference_steps=5,
            ),
            2 * 24 + 7 + 3,
            id="guided embeds",
        ),
        pytest.param(
            QwenImageCustomInputs(
                prompt_embeds=EMBEDS,
                negative_prompt_token_ids=[0] * (PREFIX + 2),
                num_prefix_tokens=PREFIX,
                height=64,
                width=96,
                num_inference_steps=5,
            ),
            2 * 24 + 7 + 2,
            id="embeds and token ids",
        ),
        pytest.param(
            QwenImageCustomInputs(
                task="text_encoding", prompt_token_ids=[0] * (PREFIX + 7), num_prefix_tokens=PREFIX
            ),
            7,
            id="text encoding",
        ),
    ],
)
def test_step_costs_its_image_and_text_tokens(
    inputs: QwenImageCustomInputs, num_tokens: int
) -> None:
    scheduler = create_scheduler()
    scheduler.add_request(create_request(inputs))
    assert scheduler.schedule().total_num_scheduled_tokens == num_tokens


def test_grid_is_height_by_width() -> None:
    assert create_inputs(height=64, width=96).grid == (4, 6)


@pytest.mark.parametrize(
    ("output_mode", "output_type"),
    [
        (OutputMode.PIXELS, "image"),
        (OutputMode.LATENTS, "latents"),
        (OutputMode.PIXELS_AND_LATENTS, "image"),
        (OutputMode.PIXELS_AND_MASK, "image"),
    ],
)
def test_output_type_of_a_picture(output_mode: OutputMode, output_type: str) -> None:
    inputs = QwenImageCustomInputs(prompt_token_ids=[1], output_mode=output_mode)
    assert inputs.output_type == output_type


def test_text_encoding_takes_no_denoising_steps() -> None:
    inputs = QwenImageCustomInputs(
        task="text_encoding", prompt_token_ids=[1], num_inference_steps=5
    )
    assert inputs.num_steps == 0
    assert inputs.output_type == "hidden_states"


def test_refuses_a_request_without_a_prompt() -> None:
    scheduler = create_scheduler()
    inputs = QwenImageCustomInputs(height=64, width=64, num_inference_steps=5)
    with pytest.raises(InvalidParameterError, match="prompt=None is not allowed: token ids or"):
        scheduler.add_request(create_request(inputs))
    assert not scheduler.has_requests()


@pytest.mark.parametrize("missing", ["height", "width", "num_inference_steps"])
def test_refuses_a_picture_without_size_or_steps(missing: str) -> None:
    values = {"height": 64, "width": 96, "num_inference_steps": 5, missing: 0}
    scheduler = create_scheduler()
    with pytest.raises(InvalidParameterError) as caught:
        scheduler.add_request(create_request(create_inputs(**values)))
    assert str(caught.value) == (
        f"height, width, num_inference_steps={tuple(values.values())} is not allowed: "
        "an image needs all three"
    )


def test_refuses_more_tokens_than_a_step_may_have() -> None:
    guided = create_inputs(7, 3)  # 58 tokens
    create_scheduler(max_num_batched_tokens=58).add_request(create_request(guided))
    with pytest.raises(OmniRequestError, match=r"needs 58 tokens.*max_num_batched_tokens=57"):
        create_scheduler(max_num_batched_tokens=57).add_request(create_request(guided))


@pytest.mark.parametrize(
    ("inputs", "num_tokens"),
    [
        pytest.param(create_inputs(0), [0], id="nothing behind the prefix"),
        pytest.param(create_inputs(-1), [-1], id="shorter than the prefix"),
        pytest.param(create_inputs(1025), [1025], id="too long"),
        pytest.param(create_inputs(7, 0), [7, 0], id="no negative prompt"),
        pytest.param(create_inputs(7, 1025), [7, 1025], id="negative prompt too long"),
        pytest.param(
            QwenImageCustomInputs(task="text_encoding", prompt_token_ids=[]), [0], id="encoding"
        ),
        pytest.param(
            QwenImageCustomInputs(task="text_encoding", prompt_embeds=torch.zeros(0, 16)),
            [0],
            id="empty embeds",
        ),
    ],
)
def test_refuses_a_prompt_of_a_length_that_no_model_takes(
    inputs: QwenImageCustomInputs, num_tokens: list[int]
) -> None:
    scheduler = create_scheduler(max_num_batched_tokens=10_000)
    with pytest.raises(InvalidParameterError) as caught:
        scheduler.add_request(create_request(inputs))
    assert str(caught.value) == (
        f"prompt='{num_tokens} tokens' is not allowed: "
        "from 1 to 1024 tokens in each guidance branch"
    )
    assert not scheduler.has_requests()


def test_negative_prompt_of_an_unguided_request_does_not_matter() -> None:
    scheduler = create_scheduler()
    scheduler.add_request(create_request(create_inputs(7, 1025, true_cfg_scale=1.0)))
    assert scheduler.schedule().total_num_scheduled_tokens == 24 + 7
