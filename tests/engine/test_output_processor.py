"""Outputs of stages become one answer, each by the handler of its kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from vllm import CompletionOutput, RequestOutput

from vllm_omni.engine.output_processor import (
    HiddenStateOutputProcessor,
    MultimodalOutputProcessor,
    OutputProcessor,
    to_pil,
)
from vllm_omni.errors import ConfigError, ModalityNotSupportedError
from vllm_omni.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason, OmniOutput
from vllm_omni.request import OmniRequest

REQUEST = OmniRequest(prompt="a cat", request_id="r")


def create_pixels(seed: int, channels: int = 3) -> Tensor:
    """[channels, 4, 6] uint8."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (channels, 4, 6), dtype=torch.uint8, generator=generator)


def create_output(output_type: str | None, tensor: Tensor | None, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "request_id": "r",
        "output_type": output_type,
        "pooling_output": tensor,
        "finish_reason": FinishReason.STOP,
    }
    return EngineCoreOutput(**(fields | changes))


def create_text(*texts: str, hidden_states: Tensor | None = None) -> EngineCoreOutput:
    request_output = RequestOutput(
        request_id="r",
        prompt="a cat",
        prompt_token_ids=[1],
        prompt_logprobs=None,
        outputs=[
            CompletionOutput(
                index=index, text=text, token_ids=[2], cumulative_logprob=None, logprobs=None
            )
            for index, text in enumerate(texts)
        ],
        finished=True,
    )
    output: EngineCoreOutput = create_output("text", hidden_states, request_output=request_output)
    return output


def process(*outputs: EngineCoreOutput) -> OmniOutput:
    return MultimodalOutputProcessor().process_output(
        EngineCoreOutputs(outputs=list(outputs)), REQUEST
    )


def assert_pixels(image: Image.Image, pixels: Tensor) -> None:
    assert np.array_equal(np.asarray(image), pixels.permute(1, 2, 0).numpy())


def test_picture_has_the_pixels() -> None:
    pixels = create_pixels(0)
    answer = process(create_output("image", pixels))
    [image] = answer.images
    assert (image.mode, image.size) == ("RGB", (6, 4))
    assert image.getpixel((5, 2)) == tuple(pixels[:, 2, 5].tolist())
    assert_pixels(image, pixels)
    assert (answer.request_id, answer.prompt) == ("r", "a cat")
    assert (answer.latents, answer.masks, answer.hidden_states, answer.text) == (None,) * 4


def test_picture_may_have_transparency() -> None:
    pixels = create_pixels(0, channels=4)
    image = to_pil(pixels)
    assert image.mode == "RGBA"
    assert_pixels(image, pixels)


def test_pictures_latents_and_masks_stay_in_order() -> None:
    outputs = [
        create_output(
            "image",
            create_pixels(seed),
            request_id=f"{seed}_r",
            additional_outputs={
                "latents": torch.full((2, 3), float(seed)),
                "mask": torch.full((4, 6), seed, dtype=torch.uint8),
            },
        )
        for seed in (3, 1, 2)
    ]
    answer = process(*outputs)
    for image, seed in zip(answer.images, (3, 1, 2), strict=True):
        assert_pixels(image, create_pixels(seed))
    assert answer.latents is not None and answer.masks is not None
    assert answer.latents.shape == (3, 2, 3) and answer.masks.shape == (3, 4, 6)
    assert answer.latents[:, 0, 0].tolist() == [3.0, 1.0, 2.0]
    assert answer.masks[:, 0, 0].tolist() == [3, 1, 2]


def test_latents_alone_are_stacked() -> None:
    first, second = torch.rand(2, 3), torch.rand(2, 3)
    answer = process(create_output("latents", first), create_output("latents", second))
    assert answer.latents is not None
    assert torch.equal(answer.latents, torch.stack([first, second]))
    assert answer.images == []


def test_text_is_the_first_completion_and_nothing_is_left_out() -> None:
    output = create_text("one", "two")
    answer = process(output)
    assert answer.text == "one"
    assert answer.request_output is output.request_output
    assert [completion.text for completion in answer.outputs] == ["one", "two"]


def test_text_is_not_that_of_another_completion() -> None:
    """With n > 1 vLLM's outputs take turns; each is about one completion."""
    output = create_text("one", "two")
    output.request_output.outputs = output.request_output.outputs[1:]
    answer = process(output)
    assert answer.text is None
    assert [completion.text for completion in answer.outputs] == ["two"]


def test_text_without_completions_is_none() -> None:
    answer = process(create_text())
    assert (answer.text, answer.outputs) == (None, [])
    assert process(create_output("text", None)).text is None  # aborted before its first token


def test_text_comes_with_its_hidden_states() -> None:
    rows = torch.rand(5, 8)
    answer = process(create_text("one", hidden_states=rows))
    assert answer.hidden_states is rows


def test_hidden_states_are_those_of_the_request() -> None:
    rows = torch.rand(5, 8)
    answer = process(create_output("hidden_states", rows))
    assert answer.hidden_states is not None and torch.equal(answer.hidden_states, rows)
    assert (answer.images, answer.text) == ([], None)


def test_extracted_hidden_states_are_by_request() -> None:
    rows = {"a": torch.rand(5, 8), "b": torch.rand(3, 8)}
    outputs = [create_output("hidden_states", rows[id], request_id=id) for id in rows]
    outputs.append(create_output("hidden_states", None, request_id="c"))
    extracted = HiddenStateOutputProcessor().extract_hidden_states(
        EngineCoreOutputs(outputs=outputs)
    )
    assert list(extracted) == ["a", "b"]
    assert all(torch.equal(extracted[id], rows[id]) for id in rows)


def test_hidden_states_of_nothing_are_none() -> None:
    handler = HiddenStateOutputProcessor()
    assert handler.process_output(EngineCoreOutputs(), REQUEST).hidden_states is None


def test_text_picture_and_hidden_states_make_one_answer() -> None:
    rows, pixels = torch.rand(5, 8), create_pixels(0)
    answer = process(
        create_text("a fat cat"),
        create_output("hidden_states", rows),
        create_output("image", pixels),
    )
    assert answer.text == "a fat cat"
    assert [completion.text for completion in answer.outputs] == ["a fat cat"]
    assert answer.hidden_states is rows
    assert_pixels(answer.images[0], pixels)
    assert (answer.request_id, answer.prompt, answer.finished) == ("r", "a cat", False)


def test_nothing_makes_an_empty_answer() -> None:
    assert process() == OmniOutput(request_id="r", prompt="a cat")


class LengthProcessor(OutputProcessor):
    """A kind of output that is not built in: a sound, of which the length is told."""

    def process_output(self, model_output: EngineCoreOutputs, request: OmniRequest) -> OmniOutput:
        lengths = [
            o.pooling_output.numel() for o in model_output.outputs if o.pooling_output is not None
        ]
        return OmniOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            text=f"{request.prompt}: {lengths}",
        )


def test_registered_handler_takes_outputs_of_its_kind_only() -> None:
    processor = MultimodalOutputProcessor()
    processor.register_handler("sound", LengthProcessor())
    outputs = [
        create_output("sound", torch.zeros(7)),
        create_output("image", create_pixels(0)),
        create_output("sound", torch.zeros(9)),
    ]
    answer = processor.process_output(EngineCoreOutputs(outputs=outputs), REQUEST)
    assert answer.text == "a cat: [7, 9]"
    assert_pixels(answer.images[0], create_pixels(0))


def test_registered_handler_goes_before_the_built_in_one() -> None:
    processor = MultimodalOutputProcessor()
    processor.register_handler("image", LengthProcessor())
    outputs = EngineCoreOutputs(outputs=[create_output("image", create_pixels(0))])
    answer = processor.process_output(outputs, REQUEST)
    assert (answer.text, answer.images) == ("a cat: [72]", [])
    assert MultimodalOutputProcessor().process_output(outputs, REQUEST).images != []


@pytest.mark.parametrize("output_type", ["sound", "", None])
def test_output_of_an_unknown_kind_is_refused(output_type: str | None) -> None:
    with pytest.raises(ModalityNotSupportedError) as caught:
        process(create_output(output_type, torch.zeros(7)))
    assert str(caught.value) == (
        f"output of kind {output_type or ''!r} has no handler: "
        "one of text, hidden_states, image, latents"
    )


@pytest.mark.parametrize("handler", [None, "image", print, OutputProcessor])
def test_only_a_handler_can_be_registered(handler: Any) -> None:
    processor = MultimodalOutputProcessor()
    with pytest.raises(ConfigError, match=r"handler=.* is not allowed: an OutputProcessor"):
        processor.register_handler("sound", handler)
    assert "sound" not in processor.output_handlers
