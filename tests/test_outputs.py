"""What leaves an engine core survives the way to another process, errors included."""

import msgspec
import pytest
import torch
from vllm import CompletionOutput, RequestOutput

import vllm_omni.errors
from vllm_omni.errors import (
    CacheAllocationError,
    DeadlineExceededError,
    InvalidParameterError,
    ModalityNotSupportedError,
    OmniRequestError,
    StageExecutionError,
)
from vllm_omni.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    OmniOutput,
    RequestError,
    RequestMetrics,
)
from vllm_omni.serial import MessageDecoder, encode

REQUEST_ERRORS = [
    OmniRequestError("the request needs 9 tokens"),
    InvalidParameterError("height", 17, "a multiple of 16"),
    ModalityNotSupportedError("no audio"),
    DeadlineExceededError("deadline=5 s passed"),
    StageExecutionError("step 3 failed"),
]


def cross_process(error: RequestError) -> RequestError:
    return MessageDecoder(RequestError).decode(encode(error))


@pytest.mark.parametrize("error", REQUEST_ERRORS, ids=lambda error: type(error).__name__)
def test_request_error_keeps_class_and_message(error: OmniRequestError) -> None:
    received = cross_process(RequestError.from_exception(error)).to_exception()
    assert type(received) is type(error)
    assert str(received) == str(error)


def test_every_request_error_of_the_package_is_covered() -> None:
    classes = {
        value
        for value in vars(vllm_omni.errors).values()
        if isinstance(value, type) and issubclass(value, OmniRequestError)
    }
    assert classes == {type(error) for error in REQUEST_ERRORS}


def test_invalid_parameter_keeps_its_name() -> None:
    error = InvalidParameterError("height", 17, "a multiple of 16")
    received = cross_process(RequestError.from_exception(error)).to_exception()
    assert isinstance(received, InvalidParameterError)
    assert received.param == "height"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("out of memory"), "RuntimeError: out of memory"),
        (KeyError("x"), "KeyError: 'x'"),
        (CacheAllocationError("9 bytes do not fit"), "CacheAllocationError: 9 bytes do not fit"),
    ],
)
def test_any_other_error_becomes_one_of_the_stage(error: Exception, message: str) -> None:
    received = cross_process(RequestError.from_exception(error)).to_exception()
    assert type(received) is StageExecutionError
    assert str(received) == message


@pytest.mark.parametrize("name", ["NoSuchError", "", "RuntimeError"])
def test_unknown_error_type_becomes_one_of_the_stage(name: str) -> None:
    received = RequestError(name, "it broke").to_exception()
    assert type(received) is StageExecutionError
    assert str(received) == "it broke"


@pytest.mark.parametrize(
    "name", ["EngineError", "ConfigError", "annotations", "__doc__", "__name__", "__builtins__"]
)
def test_error_type_that_is_no_request_error_becomes_one_of_the_stage(name: str) -> None:
    received = RequestError(name, "it broke").to_exception()
    assert type(received) is StageExecutionError
    assert str(received) == "it broke"


def test_core_output_crosses_with_its_tensors() -> None:
    sent = EngineCoreOutput(
        request_id="a",
        pooling_output=torch.arange(6, dtype=torch.uint8).view(2, 3),
        finish_reason=FinishReason.STOP,
        output_type="image",
        output_metadata={"step": 4, "num_steps": 4, "queue_time": 0.25},
        additional_outputs={"latents": torch.ones(2, 2)},
    )
    received = MessageDecoder(EngineCoreOutputs).decode(encode(EngineCoreOutputs(outputs=[sent])))
    [output] = received.outputs
    assert output.finished
    assert output.finish_reason is FinishReason.STOP
    assert (output.request_id, output.output_type) == ("a", "image")
    assert output.output_metadata == sent.output_metadata
    assert torch.equal(output.pooling_output, sent.pooling_output)  # type: ignore[arg-type]
    assert torch.equal(output.additional_outputs["latents"], torch.ones(2, 2))


@pytest.mark.parametrize("reason", FinishReason)
def test_final_output_carries_reason_and_error(reason: FinishReason) -> None:
    error = RequestError("StageExecutionError", "it broke")
    sent = EngineCoreOutput(request_id="a", finish_reason=reason, error=error)
    received = MessageDecoder(EngineCoreOutput).decode(encode(sent))
    assert received.finished
    assert (received.finish_reason, received.error) == (reason, error)


def test_unknown_finish_reason_is_refused() -> None:
    data = msgspec.msgpack.encode({"request_id": "a", "finish_reason": "tired"})
    with pytest.raises(msgspec.ValidationError, match="tired"):
        MessageDecoder(EngineCoreOutput).decode(data)


def test_progress_is_not_final() -> None:
    output = EngineCoreOutput(request_id="a", output_metadata={"step": 1})
    assert not output.finished
    assert MessageDecoder(EngineCoreOutput).decode(encode(output)) == output


def test_outputs_share_no_containers() -> None:
    core, other_core = EngineCoreOutput(request_id="a"), EngineCoreOutput(request_id="b")
    core.additional_outputs["latents"] = torch.zeros(1)
    core.output_metadata["step"] = 1
    assert (other_core.additional_outputs, other_core.output_metadata) == ({}, {})
    output, other = (OmniOutput(request_id=id, prompt="") for id in "ab")
    output.seeds.append(1)
    assert (other.seeds, other.images) == ([], [])


def create_request_output(*texts: str) -> RequestOutput:
    return RequestOutput(
        request_id="a",
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


def test_outputs_are_vllms_completions() -> None:
    request_output = create_request_output("one", "two")
    output = OmniOutput(request_id="a", prompt="a cat", request_output=request_output)
    assert output.outputs is request_output.outputs
    assert [completion.text for completion in output.outputs] == ["one", "two"]


def test_outputs_are_none_without_text() -> None:
    assert OmniOutput(request_id="a", prompt="a cat").outputs == []


def test_answer_begins_empty() -> None:
    output = OmniOutput(request_id="a", prompt="a cat")
    assert not output.finished and output.finish_reason is None and output.error is None
    assert (output.step, output.num_steps, output.preview, output.preview_index) == (0, 0, None, 0)
    assert (output.images, output.latents, output.masks, output.hidden_states) == (
        [],
        None,
        None,
        None,
    )
    assert (output.text, output.request_output, output.seeds) == (None, None, [])
    assert output.metrics == RequestMetrics(num_steps=0, queue_time=0.0, total_time=0.0)
