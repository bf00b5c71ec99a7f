"""`QwenImageInputProcessor`: a prompt and its parameters to engine inputs, checked at the edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from PIL.Image import Image
from torch import Tensor
from transformers import AutoTokenizer

from vllm_omni.cache_dit_params import CacheDiTParams
from vllm_omni.errors import InvalidParameterError, ModelLoadError
from vllm_omni.models.qwen_image.inputs import TASK_TEXT_ENCODING, QwenImageCustomInputs
from vllm_omni.models.qwen_image.prompt import (
    EDIT,
    MAX_PROMPT_TOKENS,
    REWRITE_INSTRUCTION,
    TEXT_TO_IMAGE,
)
from vllm_omni.models.registry import read_json
from vllm_omni.params import DiffusionParams
from vllm_omni.step_cache import CacheDefaults, StepCacheParams, parse_cache_defaults

STOCK_DEFAULTS = {"height": 1024, "width": 1024, "num_inference_steps": 50}
"""What diffusers' pipeline uses; the checkpoint's generation_config.json goes before it."""


class QwenImageInputProcessor:
    """Knows the tokenizer, the prompt template and the default parameters of a checkpoint."""

    def __init__(self, model: Path) -> None:
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(
                model / "tokenizer", trust_remote_code=False
            )
            num_tokens = len(self.tokenizer(TEXT_TO_IMAGE.prefix).input_ids)
        except Exception as error:  # of whatever kind: tokenizers raises a plain one
            cause = " ".join(str(error).split())
            raise ModelLoadError(f"cannot load tokenizer from {model}: {cause}") from error
        if num_tokens != TEXT_TO_IMAGE.num_prefix_tokens:
            raise ModelLoadError(
                f"{model / 'tokenizer'} is not this model's: the template has {num_tokens} tokens, "
                f"and should have {TEXT_TO_IMAGE.num_prefix_tokens}"
            )
        self.model = model
        self.defaults, self.cache_defaults = _read_defaults(model)

    def complete_params(self, params: DiffusionParams) -> DiffusionParams:
        """Parameters with the checkpoint's defaults; raises what the model cannot do."""
        if params.guidance_scale is not None:
            raise InvalidParameterError(
                "guidance_scale",
                params.guidance_scale,
                "this model is not guidance-distilled; use true_cfg_scale with negative_prompt",
            )
        params = params.with_defaults(self.defaults)
        if isinstance(params.cache, StepCacheParams):
            params = replace(params, cache=params.cache.with_defaults(self.cache_defaults))
        if isinstance(params.cache, CacheDiTParams):
            assert params.num_inference_steps is not None
            params.cache.check_model(self._num_blocks, params.num_inference_steps)
        return params

    @cached_property
    def _num_blocks(self) -> int:
        num_layers: int = read_json(self.model, "transformer/config.json")["num_layers"]
        return num_layers

    # --- what the text encoder reads ---

    rewrite_instruction = REWRITE_INSTRUCTION
    rewrite_sampling_params: Mapping[str, Any] = MappingProxyType(
        {"temperature": 0.0, "max_tokens": 128}
    )

    def apply_template(
        self, param: str, prompt: str, images: Sequence[Image] = ()
    ) -> list[int] | str:
        """A prompt inside its template: as tokens, or as text if there is an image to put in."""
        if not images:
            return self.tokenize(param, prompt)
        if len(images) > 1:
            raise InvalidParameterError("image", f"{len(images)} images", "one image")
        self.tokenize(param, prompt)  # for its length
        return EDIT.apply(prompt)

    def get_num_prefix_tokens(self, images: Sequence[Image] = ()) -> int:
        """Tokens of the template before the user's part, which are dropped after encoding."""
        return (EDIT if images else TEXT_TO_IMAGE).num_prefix_tokens

    # --- what the transformer needs ---

    def process(self, prompt: str, params: DiffusionParams) -> QwenImageCustomInputs:
        """The inputs of one picture whose prompt is encoded by the diffusion stage itself."""
        negative = params.negative_prompt if params.do_true_cfg else None
        return self._make_inputs(
            params,
            prompt_token_ids=self.tokenize("prompt", prompt),
            negative_prompt_token_ids=(
                None if negative is None else self.tokenize("negative_prompt", negative)
            ),
            num_prefix_tokens=TEXT_TO_IMAGE.num_prefix_tokens,
        )

    def process_embeds(
        self, prompt_embeds: Tensor, negative_prompt_embeds: Tensor | None, params: DiffusionParams
    ) -> QwenImageCustomInputs:
        """The inputs of one picture whose prompt [tokens, hidden] another stage has encoded."""
        return self._make_inputs(
            params, prompt_embeds=prompt_embeds, negative_prompt_embeds=negative_prompt_embeds
        )

    def process_text(self, prompt: str) -> QwenImageCustomInputs:
        """The inputs that give the hidden states of a prompt, from the diffusion stage itself."""
        return QwenImageCustomInputs(
            task=TASK_TEXT_ENCODING,
            prompt_token_ids=self.tokenize("prompt", prompt),
            num_prefix_tokens=TEXT_TO_IMAGE.num_prefix_tokens,
        )

    def _make_inputs(self, params: DiffusionParams, **prompts: Any) -> QwenImageCustomInputs:
        params = self.complete_params(params)
        assert params.height and params.width and params.num_inference_steps
        assert params.seed is not None
        return QwenImageCustomInputs(
            **prompts,
            height=params.height,
            width=params.width,
            num_inference_steps=params.num_inference_steps,
            true_cfg_scale=params.true_cfg_scale,
            seed=params.seed,
            sigmas=params.sigmas,
            output_mode=params.output_mode,
            preview_every=params.preview_every or 0,
            cache=params.cache,
        )

    def tokenize(self, param: str, prompt: str) -> list[int]:
        """Token ids of the prompt inside its template; never cut short."""
        token_ids: list[int] = self.tokenizer(TEXT_TO_IMAGE.apply(prompt)).input_ids
        num_tokens = len(token_ids) - TEXT_TO_IMAGE.num_prefix_tokens
        if num_tokens > MAX_PROMPT_TOKENS:
            raise InvalidParameterError(
                param,
                f"{prompt[:40]}…",
                f"it has {num_tokens} tokens, the most is {MAX_PROMPT_TOKENS}",
            )
        return token_ids


def _read_defaults(model: Path) -> tuple[DiffusionParams, CacheDefaults]:
    """Of the checkpoint: parameters, and the fields of step caches."""
    path = model / "generation_config.json"
    own = read_json(model, path.name) if path.is_file() else {}
    cache = own.pop("cache", {})
    if unknown := set(own) - set(STOCK_DEFAULTS):
        allowed = ", ".join((*STOCK_DEFAULTS, "cache"))
        raise ModelLoadError(f"{path} has {unknown}: only {allowed} are allowed")
    try:
        return DiffusionParams(**(STOCK_DEFAULTS | own)), parse_cache_defaults(cache)
    except InvalidParameterError as error:
        raise ModelLoadError(f"{path}: {error}") from error
