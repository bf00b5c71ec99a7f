"""From an `ARRequest` to what vLLM's engines take: a rendered prompt, and its parameters.

Seams, checked against vLLM 0.32.0: the renderer's `render_cmpl` and `render_chat` with their async
twins, `parse_model_prompt`, `ChatParams`, `ModelConfig.get_diff_sampling_param`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm import PoolingParams, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.renderers.params import ChatParams

from vllm_omni.ar.messages import ARRequest
from vllm_omni.ar.worker import EXTRA_ARG
from vllm_omni.errors import InvalidParameterError, ModalityNotSupportedError, OmniRequestError

_CHAT_PARAMS = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False})


def render(renderer: Any, request: ARRequest) -> Any:
    """The prompt as vLLM's engine takes it: token ids, and what the images became."""
    if request.messages is not None:
        _, (engine_input,) = renderer.render_chat(
            [_as_list(request)], _CHAT_PARAMS, _chat_tokenization(renderer)
        )
    else:
        (engine_input,) = renderer.render_cmpl([_parse(renderer, request)])
    return engine_input


async def render_async(renderer: Any, request: ARRequest) -> Any:
    """The same, off the event loop where it takes long."""
    if request.messages is not None:
        _, (engine_input,) = await renderer.render_chat_async(
            [_as_list(request)], _CHAT_PARAMS, _chat_tokenization(renderer)
        )
    else:
        (engine_input,) = await renderer.render_cmpl_async([_parse(renderer, request)])
    return engine_input


def make_params(request: ARRequest, model_config: Any) -> SamplingParams | PoolingParams:
    """How to sample, or how to pool, with the sign that `vllm_omni.ar.worker` looks for."""
    if request.hidden_states not in (None, "prompt", "all"):
        raise InvalidParameterError("hidden_states", request.hidden_states, "'prompt', 'all', None")
    if model_config.runner_type == "pooling":
        if request.hidden_states != "prompt":
            raise ModalityNotSupportedError(
                "text is not supported: this stage runs with runner='pooling', which gives only "
                "the hidden states of prompts"
            )
        # Without the activation: it would normalise each row.
        return PoolingParams(task="token_embed", use_activation=False)
    params = make_sampling_params(request.sampling_params, model_config)
    if request.hidden_states is None:
        return params
    if params.n != 1:
        raise InvalidParameterError("n", params.n, "1 for a request with hidden states")
    params.extra_args = {**(params.extra_args or {}), EXTRA_ARG: request.hidden_states}
    params.skip_reading_prefix_cache = True  # tokens found in the cache have no rows
    return params


def make_sampling_params(
    params: SamplingParams | Mapping[str, Any] | None, model_config: Any
) -> SamplingParams:
    """A copy of a request's sampling parameters, or the model's own."""
    if isinstance(params, SamplingParams):
        return params.clone()
    if params is None:
        return SamplingParams.from_optional(**model_config.get_diff_sampling_param())
    try:
        return SamplingParams(**params)
    # An unknown name, an impossible value.
    except (TypeError, ValueError, VLLMValidationError) as error:
        raise InvalidParameterError("sampling_params", params, str(error)) from error


def to_request_error(request: ARRequest, error: Exception) -> OmniRequestError:
    """What vLLM raises when it is given a request, as one of our errors."""
    if isinstance(error, OmniRequestError):
        return error
    # vLLM names the parameter if it is one of the sampling parameters; else the prompt is at fault.
    param = getattr(error, "parameter", None) or ""
    if hasattr(request.sampling_params, param):
        return InvalidParameterError(param, getattr(request.sampling_params, param), str(error))
    if request.messages is not None:
        return InvalidParameterError("messages", request.messages, describe(error))
    return InvalidParameterError("prompt", request.prompt[:40], describe(error))


def describe(error: BaseException) -> str:
    """An error with its causes: the outermost often says only that something failed."""
    text = f"{type(error).__name__}: {error}"
    return f"{text}, because of {describe(error.__cause__)}" if error.__cause__ else text


def _parse(renderer: Any, request: ARRequest) -> Any:
    prompt: dict[str, Any] = (
        {"prompt": request.prompt}
        if isinstance(request.prompt, str)
        else {"prompt_token_ids": list(request.prompt)}
    )
    if request.images:
        prompt["multi_modal_data"] = {"image": list(request.images)}
    return parse_model_prompt(renderer.model_config, prompt)


def _as_list(request: ARRequest) -> list[Any]:
    assert request.messages is not None
    return [dict(message) for message in request.messages]


def _chat_tokenization(renderer: Any) -> Any:
    # The template writes the special tokens itself.
    return renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False)
