"""Scheduling of Qwen-Image requests. Imports no torch."""

from __future__ import annotations

from vllm_omni.diffusion.messages import DiffusionRequest
from vllm_omni.diffusion.scheduler import DiffusionScheduler
from vllm_omni.errors import InvalidParameterError
from vllm_omni.models.qwen_image.inputs import TASK_IMAGE_GENERATION, QwenImageCustomInputs
from vllm_omni.models.qwen_image.prompt import MAX_PROMPT_TOKENS
from vllm_omni.outputs import TENSOR_DTYPES


class QwenImageScheduler(DiffusionScheduler):
    """A step of a Qwen-Image request costs its image and text tokens, once per guidance branch."""

    def add_request(self, request: DiffusionRequest[QwenImageCustomInputs]) -> None:
        inputs = request.custom_inputs
        if inputs.prompt_token_ids is None and inputs.prompt_embeds is None:
            raise InvalidParameterError("prompt", None, "token ids or embeddings are needed")
        if inputs.task == TASK_IMAGE_GENERATION and not (
            inputs.num_image_tokens and inputs.num_inference_steps
        ):
            raise InvalidParameterError(
                "height, width, num_inference_steps",
                (inputs.height, inputs.width, inputs.num_inference_steps),
                "an image needs all three",
            )
        if not all(1 <= num_tokens <= MAX_PROMPT_TOKENS for num_tokens in inputs.num_text_tokens):
            raise InvalidParameterError(
                "prompt",
                f"{inputs.num_text_tokens} tokens",
                f"from 1 to {MAX_PROMPT_TOKENS} tokens in each guidance branch",
            )
        for name in ("prompt_embeds", "negative_prompt_embeds", "latents", "mask"):
            tensor = getattr(inputs, name)
            if tensor is not None and str(tensor.dtype).removeprefix("torch.") not in TENSOR_DTYPES:
                raise InvalidParameterError(name, tensor.dtype, f"one of {TENSOR_DTYPES}")
        super().add_request(request)
