"""`OmniProcessor`: from what a user asks for to the requests of the stages."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from PIL import Image
from torch import Tensor

from vllm_omni.ar.messages import ARRequest
from vllm_omni.diffusion.messages import DiffusionRequest
from vllm_omni.errors import (
    ConfigError,
    InvalidParameterError,
    ModalityNotSupportedError,
    OmniRequestError,
    StageExecutionError,
)
from vllm_omni.models.demo import find_model
from vllm_omni.models.registry import get_model_spec, load_class
from vllm_omni.params import DiffusionParams
from vllm_omni.request import OmniRequest, OutputKind

MAX_PIXELS = 89_478_485
"""Of a picture in a file: what PIL calls safe."""


@dataclass(frozen=True, kw_only=True)
class TokenizedData:
    """Tokens that a modality became."""

    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProcessedInput:
    """What the first stage reads."""

    prompt: str = ""
    prompt_token_ids: tuple[int, ...] | None = None  # instead of the prompt
    messages: Sequence[Mapping[str, Any]] | None = None  # instead of the prompt
    images: tuple[Image.Image, ...] = ()


class MultimodalInputProcessor:
    """Turns the data of one modality into what the first stage reads.

    A subclass implements `process`, and `tokenize` if the first stage is to read tokens.
    """

    def __init__(self, modality: str = "", config: Mapping[str, Any] | None = None) -> None:
        self.modality = modality
        self.config = dict(config or {})

    def process(self, data: Any) -> ProcessedInput:
        """The text, images or tokens that stand for the data."""
        return ProcessedInput(prompt_token_ids=self.tokenize(data).token_ids)

    def tokenize(self, data: Any) -> TokenizedData:
        """The tokens that stand for the data."""
        raise ModalityNotSupportedError(
            f"{type(self).__name__} makes no tokens: it has to implement process or tokenize"
        )


class ModalityProcessor(Protocol):
    def process(self, data: Any) -> ProcessedInput: ...


class TextProcessor(MultimodalInputProcessor):
    def process(self, data: Any) -> ProcessedInput:
        if not isinstance(data, str):
            raise InvalidParameterError("text", data, "a string")
        return ProcessedInput(prompt=data)


class ImageProcessor(MultimodalInputProcessor):
    """Pictures: PIL images, or files of them as bytes."""

    def process(self, data: Any) -> ProcessedInput:
        images = data if isinstance(data, (list, tuple)) else [data]
        return ProcessedInput(images=tuple(self._read(image) for image in images))

    def _read(self, image: Any) -> Image.Image:
        given = "bytes" if isinstance(image, bytes) else image
        try:
            if isinstance(image, bytes):
                image = Image.open(io.BytesIO(image))
                if image.width * image.height > MAX_PIXELS:  # PIL itself only warns
                    raise Image.DecompressionBombError(f"more than {MAX_PIXELS} pixels")
            if isinstance(image, Image.Image):
                return image.convert("RGB")
        except Exception as error:  # a broken file makes PIL raise anything
            raise InvalidParameterError(
                "image", given, f"a picture: {type(error).__name__}: {error}"
            ) from error
        raise InvalidParameterError("image", given, "a PIL image, or a file of one as bytes")


class OmniProcessor:
    """Knows the modalities of the input, and through the model's own code its prompt template.

    Args:
        vllm_config: the model's folder, or vLLM's config or engine arguments that name it.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.modality_processors: dict[str, ModalityProcessor] = {
            "text": TextProcessor("text"),
            "image": ImageProcessor("image"),
        }
        model = _find_folder(vllm_config)
        self._model = None  # of a model that draws; others only take text and images
        if (model / "model_index.json").is_file() or not (model / "config.json").is_file():
            self._model = load_class(get_model_spec(model).input_processor)(model)

    def register_modality_processor(self, modality: str, processor: ModalityProcessor) -> None:
        """Let requests have inputs of a modality, or read one in another way."""
        if not callable(getattr(processor, "process", None)):
            raise ConfigError("processor", processor, "an object with a process method")
        self.modality_processors[modality] = processor

    def process_input(self, request: OmniRequest) -> ProcessedInput:
        """All inputs of a request together, in the order they were given."""
        prompts: list[str] = []
        images: list[Image.Image] = []
        token_ids = None if request.prompt_token_ids is None else tuple(request.prompt_token_ids)
        for modality, data in request.input_modalities.items():
            processed = self._process(modality, data)
            prompts.append(processed.prompt)
            images += processed.images
            if processed.prompt_token_ids is not None:
                token_ids = (*(token_ids or ()), *processed.prompt_token_ids)
        return ProcessedInput(
            prompt=" ".join(prompt for prompt in prompts if prompt),
            prompt_token_ids=token_ids,
            messages=request.messages,
            images=tuple(images),
        )

    def complete_params(self, params: DiffusionParams) -> DiffusionParams:
        """Parameters with the model's defaults filled in; raises what the model cannot do."""
        completed: DiffusionParams = self._drawing_model.complete_params(params)
        return completed

    # --- requests of AR stages ---

    def make_text_request(self, request: OmniRequest, inputs: ProcessedInput) -> ARRequest:
        """What makes the text that the user asked for."""
        messages = inputs.messages
        if messages is None and inputs.images:
            messages = [{"role": "user", "content": _content(inputs)}]
        return ARRequest(
            request_id=request.request_id,
            prompt=inputs.prompt if inputs.prompt_token_ids is None else inputs.prompt_token_ids,
            messages=messages,
            sampling_params=_with_kind(request.sampling_params, request.output_kind),
            hidden_states="all" if request.hidden_state_output else None,
            priority=request.params.priority,
            trace_headers=request.trace_headers,
        )

    def make_rewrite_request(self, request: OmniRequest, inputs: ProcessedInput) -> ARRequest:
        """What writes a fuller prompt for the picture, in the place of the user's."""
        messages = inputs.messages
        if messages is None:
            messages = [{"role": "user", "content": _content(inputs)}]
        if all(message.get("role") != "system" for message in messages):
            instruction = {"role": "system", "content": self._drawing_model.rewrite_instruction}
            messages = [instruction, *messages]
        params = request.sampling_params or {}
        if isinstance(params, Mapping):
            params = {**self._drawing_model.rewrite_sampling_params, **params}
        n = params.get("n", 1) if isinstance(params, Mapping) else getattr(params, "n", 1)
        if n != 1:
            raise InvalidParameterError("n", n, "1 where a picture is made of the text")
        return ARRequest(
            request_id=request.request_id,
            messages=messages,
            sampling_params=_with_kind(params, request.output_kind),
            priority=request.params.priority,
            trace_headers=request.trace_headers,
        )

    def make_encode_requests(
        self, request: OmniRequest, inputs: ProcessedInput, with_negative: bool
    ) -> list[ARRequest]:
        """What gives the hidden states of the prompt, and those of the negative prompt."""
        prompts = {"prompt": inputs.prompt}
        if with_negative and request.params.do_true_cfg:
            prompts["negative_prompt"] = request.params.negative_prompt or ""
        return [
            ARRequest(
                request_id=request.request_id
                if name == "prompt"
                else f"{request.request_id}-{name}",
                prompt=self._drawing_model.apply_template(name, prompt, inputs.images),
                images=inputs.images,
                sampling_params={"max_tokens": 1, "temperature": 0.0, "detokenize": False},
                hidden_states="prompt",
                priority=request.params.priority,
                trace_headers=request.trace_headers,
            )
            for name, prompt in prompts.items()
        ]

    def drop_prefix(self, hidden_states: Tensor, inputs: ProcessedInput) -> Tensor:
        """The rows that condition the picture: those of the template's prefix say nothing."""
        return hidden_states[self._drawing_model.get_num_prefix_tokens(inputs.images) :]

    # --- requests of diffusion stages ---

    def make_diffusion_request(
        self,
        request_id: str,
        prompt: str | Tensor,
        negative_prompt: Tensor | None,
        params: DiffusionParams,
        arrival_time: float,
    ) -> DiffusionRequest[Any]:
        """What draws one picture, from the prompt or from what an AR stage made of it."""
        if isinstance(prompt, str):
            inputs = self._drawing_model.process(prompt, params)
        else:
            inputs = self._drawing_model.process_embeds(prompt, negative_prompt, params)
        return DiffusionRequest(
            request_id=request_id,
            custom_inputs=inputs,
            priority=params.priority,
            deadline=params.deadline,
            arrival_time=arrival_time,
        )

    def make_text_encoding_request(
        self, request: OmniRequest, inputs: ProcessedInput
    ) -> DiffusionRequest[Any]:
        """What gives the hidden states of the prompt where no AR stage does."""
        return DiffusionRequest(
            request_id=request.request_id,
            custom_inputs=self._drawing_model.process_text(inputs.prompt),
            priority=request.params.priority,
            deadline=request.params.deadline,
        )

    @property
    def _drawing_model(self) -> Any:
        if self._model is None:
            raise ModalityNotSupportedError("pictures are not supported: the model makes text only")
        return self._model

    def _process(self, modality: str, data: Any) -> ProcessedInput:
        processor = self.modality_processors.get(modality)
        if processor is None:
            raise ModalityNotSupportedError(
                f"input modality {modality!r} is not supported: "
                f"one of {', '.join(self.modality_processors)}"
            )
        try:
            processed = processor.process(data)
            if not isinstance(processed, ProcessedInput):
                raise TypeError(f"process gave {processed!r:.200}, which is no ProcessedInput")
            return processed
        except OmniRequestError:
            raise
        except Exception as error:  # of a processor that somebody else wrote
            raise StageExecutionError(
                f"the processor of {modality!r} failed: {type(error).__name__}: {error}"
            ) from error


def _content(inputs: ProcessedInput) -> list[dict[str, Any]]:
    """The user's turn of a chat, pictures first, in vLLM's form of OpenAI's."""
    images = [{"type": "image_pil", "image_pil": image} for image in inputs.images]
    return [*images, {"type": "text", "text": inputs.prompt}]


def _with_kind(params: Any, kind: OutputKind | None) -> Any:
    """Sampling parameters that give the outputs which were asked for."""
    if kind is None:
        return params
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    vllm_kind = RequestOutputKind[OutputKind(kind).name]
    if isinstance(params, SamplingParams):
        params = params.clone()
        params.output_kind = vllm_kind
        return params
    return {**(params or {}), "output_kind": vllm_kind}


def _find_folder(vllm_config: Any) -> Path:
    if isinstance(vllm_config, (str, Path)):
        return find_model(str(vllm_config))
    if isinstance(vllm_config, Mapping):
        model = vllm_config.get("model")
    else:
        model = getattr(getattr(vllm_config, "model_config", vllm_config), "model", None)
    if not isinstance(model, (str, Path)):
        raise ConfigError("vllm_config", vllm_config, "a model's folder, or a config that names it")
    return find_model(str(model))
