"""A request is checked when it is made, and carries each stage's output to the next."""

from typing import Any

import pytest

from vllm_omni.errors import InvalidParameterError, ModalityNotSupportedError
from vllm_omni.params import DiffusionParams
from vllm_omni.request import OmniRequest


@pytest.mark.parametrize("prompt", [None, 5, b"a cat", ["a cat"], True])
def test_refuses_a_prompt_that_is_not_text(prompt: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        OmniRequest(prompt=prompt)
    assert str(caught.value) == f"prompt={prompt!r} is not allowed: a string"


@pytest.mark.parametrize("output_format", ["video", "", "IMAGE", None])
def test_refuses_an_unknown_output_format(output_format: Any) -> None:
    with pytest.raises(ModalityNotSupportedError) as caught:
        OmniRequest(prompt="a cat", output_format=output_format)
    assert str(caught.value) == (
        f"output_format={output_format!r} is not supported: one of image, latents, hidden_states"
    )


@pytest.mark.parametrize("output_format", ["image", "latents", "hidden_states"])
def test_output_formats(output_format: str) -> None:
    assert OmniRequest(prompt="", output_format=output_format).output_format == output_format


def test_refuses_an_unknown_input_modality() -> None:
    expected = "input modality 'audio' is not supported: one of text"
    with pytest.raises(ModalityNotSupportedError) as caught:
        OmniRequest(prompt="a cat", input_modalities={"audio": b""})
    assert str(caught.value) == expected
    request = OmniRequest(prompt="a cat")
    with pytest.raises(ModalityNotSupportedError) as caught:
        request.add_input("audio", b"")
    assert str(caught.value) == expected
    assert request.input_modalities == {"text": "a cat"}


def test_prompt_is_the_text_input() -> None:
    request = OmniRequest(prompt="a cat")
    assert request.input_modalities == {"text": "a cat"}
    request.add_input("text", "a dog")
    assert request.get_stage_input(0) == {"text": "a dog"}
    assert OmniRequest(prompt="a cat", input_modalities={"text": "a cow"}).input_modalities == {
        "text": "a cow"
    }


def test_input_modalities_of_the_caller_are_left_alone() -> None:
    shared: dict[str, Any] = {}
    OmniRequest(prompt="a cat", input_modalities=shared)
    assert OmniRequest(prompt="a dog", input_modalities=shared).input_modalities["text"] == "a dog"
    assert shared == {}


def test_requests_have_ids_of_their_own() -> None:
    ids = {OmniRequest(prompt="a cat").request_id for _ in range(100)}
    assert len(ids) == 100
    assert OmniRequest(prompt="a cat", request_id="mine").request_id == "mine"


def test_requests_share_nothing() -> None:
    first, second = OmniRequest(prompt="a cat"), OmniRequest(prompt="a dog")
    first.set_stage_output(0, "hidden states")
    first.add_input("text", "a cow")
    assert second.input_modalities == {"text": "a dog"}
    assert second.get_stage_input(1) == {"text": "a dog"}
    assert first.params == second.params == DiffusionParams()


def test_each_stage_reads_the_one_before() -> None:
    request = OmniRequest(prompt="a cat")
    assert request.get_stage_input(0) == {"text": "a cat"}
    request.set_stage_output(0, "hidden states")
    assert request.get_stage_input(0) == {"text": "a cat"}
    assert request.get_stage_input(1) == "hidden states"
    assert request.get_stage_input(3) == "hidden states"  # stages 1 and 2 have not run
    request.set_stage_output(2, "image")
    assert request.get_stage_input(3) == "image"
    assert request.get_stage_input(2) == "hidden states"


def test_last_output_is_that_of_the_highest_stage() -> None:
    request = OmniRequest(prompt="a cat")
    request.set_stage_output(1, "image")
    request.set_stage_output(0, "hidden states")
    assert request.get_stage_output(0) == "hidden states"
    assert request.get_stage_output(-1) == "image"
    request.set_stage_output(1, "other image")
    assert request.get_stage_output(-1) == "other image"


def test_an_output_that_is_not_there_yet() -> None:
    request = OmniRequest(prompt="a cat")
    with pytest.raises(LookupError, match="stage -1 has no output yet"):
        request.get_stage_output(-1)
    request.set_stage_output(0, "hidden states")
    with pytest.raises(LookupError, match=r"stage 1 has no output yet: \[0\] do"):
        request.get_stage_output(1)
