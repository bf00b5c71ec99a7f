"""From the stages' outputs to what the user sees: one handler for each kind of output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields

import torch
from PIL import Image
from torch import Tensor

from vllm_omni.errors import ConfigError, ModalityNotSupportedError
from vllm_omni.outputs import EngineCoreOutput, EngineCoreOutputs, OmniOutput
from vllm_omni.request import OmniRequest


class OutputProcessor(ABC):
    """Turns outputs of one kind, of one request, into an answer."""

    @abstractmethod
    def process_output(self, model_output: EngineCoreOutputs, request: OmniRequest) -> OmniOutput:
        """The answer that holds these outputs, one for each output of the prompt."""


class MultimodalOutputProcessor(OutputProcessor):
    """Hands outputs to the handlers of their kinds, and puts the answers together."""

    def __init__(self) -> None:
        self.output_handlers: dict[str, OutputProcessor] = {
            "text": TextOutputProcessor(),
            "hidden_states": HiddenStateOutputProcessor(),
            "image": ImageOutputProcessor(),
            "latents": LatentsOutputProcessor(),
        }

    def register_handler(self, modality: str, handler: OutputProcessor) -> None:
        """Let a kind of output, as its `output_type` says, be handled in a new way."""
        if not isinstance(handler, OutputProcessor):
            raise ConfigError("handler", handler, "an OutputProcessor")
        self.output_handlers[modality] = handler

    def process_output(self, model_output: EngineCoreOutputs, request: OmniRequest) -> OmniOutput:
        answer = OmniOutput(request_id=request.request_id, prompt=request.prompt)
        by_type: dict[str, list[EngineCoreOutput]] = {}
        for output in model_output.outputs:
            by_type.setdefault(output.output_type or "", []).append(output)
        for output_type, outputs in by_type.items():
            handler = self.output_handlers.get(output_type)
            if handler is None:
                raise ModalityNotSupportedError(
                    f"output of kind {output_type!r} has no handler: "
                    f"one of {', '.join(self.output_handlers)}"
                )
            part = handler.process_output(EngineCoreOutputs(outputs=outputs), request)
            _add(answer, part)
        return answer


class TextOutputProcessor(OutputProcessor):
    def process_output(self, model_output: EngineCoreOutputs, request: OmniRequest) -> OmniOutput:
        answer = OmniOutput(request_id=request.request_id, prompt=request.prompt)
        for output in model_output.outputs:
            answer.request_output = output.request_output
            # With n > 1 each of vLLM's outputs on the way is about one completion.
            first = [one.text for one in answer.outputs if one.index == 0]
            answer.text = first[0] if first else answer.text
            answer.hidden_states = output.pooling_output
        return answer


class HiddenStateOutputProcessor(OutputProcessor):
    """Hidden states of a prompt."""

    def process_output(self, model_output: EngineCoreOutputs, request: OmniRequest) -> OmniOutput:
        hidden_states = self.extract_hidden_states(model_output)
        return OmniOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            hidden_states=next(iter(hidden_states.values()), None),
        )

    def extract_hidden_states(self, model_output: EngineCoreOutputs) -> dict[str, Tensor]:
        """By request id, each [tokens, hidden]."""
        return {
            output.request_id: output.pooling_output
            for output in model_output.outputs
            if output.pooling_output is not None
        }


class ImageOutputProcessor(OutputProcessor):
    """Pictures, and what was asked for beside them."""

    def process_output(self, model_output: EngineCoreOutputs, request: OmniRequest) -> OmniOutput:
        outputs = model_output.outputs
        return OmniOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            images=[to_pil(o.pooling_output) for o in outputs if o.pooling_output is not None],
            latents=_stack(outputs, "latents"),
            masks=_stack(outputs, "mask"),
        )


class LatentsOutputProcessor(OutputProcessor):
    def process_output(self, model_output: EngineCoreOutputs, request: OmniRequest) -> OmniOutput:
        latents = [o.pooling_output for o in model_output.outputs if o.pooling_output is not None]
        return OmniOutput(
            request_id=request.request_id, prompt=request.prompt, latents=torch.stack(latents)
        )


def to_pil(image: Tensor) -> Image.Image:
    """[3 or 4, H, W] uint8 to a PIL image, RGB or RGBA."""
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def _stack(outputs: Sequence[EngineCoreOutput], name: str) -> Tensor | None:
    tensors = [o.additional_outputs[name] for o in outputs if name in o.additional_outputs]
    return torch.stack(tensors) if tensors else None


def _add(answer: OmniOutput, part: OmniOutput) -> None:
    """Take over from a handler's answer what the handler has set."""
    default = OmniOutput(request_id=answer.request_id, prompt=answer.prompt)
    for field in fields(OmniOutput):
        value = getattr(part, field.name)
        if isinstance(value, Tensor) or value != getattr(default, field.name):
            setattr(answer, field.name, value)
