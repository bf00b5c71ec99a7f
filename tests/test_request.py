"""A request is checked when it is made, and carries each stage's output to the next."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.request import Request

from tests.drawing import MakeCheckpoint, MakeStock
from vllm_omni.config import StageConfig
from vllm_omni.errors import InvalidParameterError
from vllm_omni.params import DiffusionParams
from vllm_omni.request import OmniRequest, OutputKind


@pytest.mark.parametrize("prompt", [None, 5, b"a cat", ["a cat"], True])
def test_refuses_a_prompt_that_is_not_text(prompt: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        OmniRequest(prompt=prompt)
    assert str(caught.value) == f"prompt={prompt!r} is not allowed: a string"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("output_format", None, "a string"),
        ("output_format", 5, "a string"),
        ("params", {"seed": 1}, "a DiffusionParams"),
        ("params", None, "a DiffusionParams"),
        ("input_modalities", ["text"], "a mapping of modality to data"),
        ("input_modalities", None, "a mapping of modality to data"),
        *[
            ("sampling_params", value, "SamplingParams or a mapping of its fields")
            for value in ("hot", 5, [("n", 1)])
        ],
        ("trace_headers", "00-1-2-01", "a mapping of header to value"),
        *[("stage_configs", value, "a list of StageConfig") for value in (5, [5], None)],
        *[("messages", value, "a list of Mapping") for value in ("a cat", ["a cat"], 5)],
        *[("prompt_token_ids", value, "a list of int") for value in (5, "abc", ["a"], {1: 2})],
        *[("request_id", value, "a string, not empty") for value in (5, None, "")],
        ("output_kind", "final", "one of 'cumulative', 'delta', 'final_only'"),
        ("output_kind", 5, "one of 'cumulative', 'delta', 'final_only'"),
        ("output_kind", [], "one of 'cumulative', 'delta', 'final_only'"),
    ],
)
def test_refuses_values_of_another_kind(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        OmniRequest(**{name: value})
    assert str(caught.value) == f"{name}={value!r} is not allowed: {allowed}"
    assert caught.value.param == name


@pytest.mark.parametrize(
    "output_format", ["image", "latents", "hidden_states", "text+image", "video"]
)
def test_output_format_is_the_business_of_the_stages(output_format: str) -> None:
    """What can be made depends on the stages, which a request does not know."""
    assert OmniRequest(prompt="", output_format=output_format).output_format == output_format


def test_any_input_modality_is_carried() -> None:
    """Modalities can be registered, so only the processor knows which there are."""
    request = OmniRequest(prompt="a cat", input_modalities={"audio": b"sound"})
    assert request.input_modalities == {"text": "a cat", "audio": b"sound"}
    request.add_input("video", b"film")
    assert request.get_stage_input(0) == {"text": "a cat", "audio": b"sound", "video": b"film"}


def test_output_kind_may_be_given_by_name() -> None:
    assert OmniRequest(output_kind="final_only").output_kind is OutputKind.FINAL_ONLY  # type: ignore[arg-type]
    assert OmniRequest(output_kind=OutputKind.DELTA).output_kind is OutputKind.DELTA
    assert OmniRequest().output_kind is None


def test_output_kinds_are_vllms() -> None:
    assert [kind.name for kind in OutputKind] == [kind.name for kind in RequestOutputKind]


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


def test_vllm_request_has_the_tokens_and_the_sampling() -> None:
    params = SamplingParams(temperature=0.5, max_tokens=7)
    request = OmniRequest(
        request_id="mine",
        prompt_token_ids=(5, 6, 300),
        sampling_params=params,
        params=DiffusionParams(priority=-3),
    ).to_vllm_request()
    assert isinstance(request, Request)
    assert request.request_id == "mine"
    assert request.prompt_token_ids == [5, 6, 300]
    assert request.num_prompt_tokens == 3
    assert request.sampling_params is params
    assert request.max_tokens == 7
    assert request.priority == -3


@pytest.mark.parametrize("params", [None, {}, {"max_tokens": 3, "temperature": 0.0}])
def test_vllm_request_takes_sampling_as_a_mapping(params: dict[str, Any] | None) -> None:
    request = OmniRequest(prompt_token_ids=[5], sampling_params=params).to_vllm_request()
    assert request.sampling_params == SamplingParams(**(params or {}))


@pytest.mark.parametrize("params", [{"heat": 1}, {"temperature": -1.0}])
def test_vllm_request_refuses_impossible_sampling(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError, match=r"sampling_params=.*(heat|temperature)"):
        OmniRequest(prompt_token_ids=[5], sampling_params=params).to_vllm_request()


@pytest.mark.parametrize("layout", ["diffusers", "hugging face"])
def test_vllm_request_is_tokenized_for_its_first_stage(
    checkpoint: MakeCheckpoint, stock: MakeStock, tmp_path: Path, layout: str
) -> None:
    model = checkpoint(0)
    if layout == "hugging face":
        model = shutil.copytree(model / "tokenizer", tmp_path / "model")
    stages = [
        StageConfig(stage_id=0, engine_type="ar", model_path=str(model)),
        StageConfig(stage_id=1, engine_type="diffusion", model_path="not read"),
    ]
    request = OmniRequest(prompt="a red circle, 猫", stage_configs=stages).to_vllm_request()
    expected = stock(0).tokenizer("a red circle, 猫").input_ids
    assert request.prompt_token_ids == expected
    assert len(expected) > 3


def test_vllm_request_needs_tokens_or_stages() -> None:
    with pytest.raises(InvalidParameterError) as caught:
        OmniRequest(prompt="a cat").to_vllm_request()
    assert str(caught.value) == (
        "prompt_token_ids=None is not allowed: the prompt's tokens, or stage_configs to tokenize "
        "it for"
    )
