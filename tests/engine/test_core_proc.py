"""What crosses to a diffusion stage's process and back arrives as it was sent, in vLLM's format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    UtilityOutput,
)
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

import vllm_omni.outputs as omni
from tests.drawing import MakeCheckpoint
from vllm_omni.config import DiTConfig
from vllm_omni.diffusion.messages import DiffusionRequest
from vllm_omni.engine.core_proc import (
    DiffusionCoreInVllm,
    OmniEngineCoreOutput,
    OmniEngineCoreOutputs,
    from_wire,
    make_core_config,
    make_core_request,
    to_wire,
)
from vllm_omni.models.qwen_image.inputs import QwenImageCustomInputs
from vllm_omni.outputs import FinishReason, RequestError
from vllm_omni.params import OutputMode

LARGE = 100_000  # elements; vLLM sends tensors from 256 bytes on in frames of their own


def cross(message: Any, message_type: Any) -> Any:
    """Through vLLM's own encoder and decoder, as over a socket."""
    frames = [bytearray(frame) for frame in MsgpackEncoder().encode(message)]
    return MsgpackDecoder(message_type).decode(frames)


def create_tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(shape, generator=generator) * 100
    return values > 50 if dtype is torch.bool else values.to(dtype)


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def create_output(**changes: Any) -> omni.EngineCoreOutput:
    fields: dict[str, Any] = {
        "request_id": "0_r",
        "new_token_ids": [1, 2, 3],
        "pooling_output": create_tensor(torch.uint8, 3, 64, 64),
        "finish_reason": FinishReason.ERROR,
        "error": RequestError("InvalidParameterError", "height=17 is not allowed", "height"),
        "output_type": "image",
        "output_metadata": {
            "step": 3,
            "num_steps": 4,
            "queue_time": 0.25,
            "more": {"a": [1, None]},
        },
        "additional_outputs": {
            "latents": create_tensor(torch.float32, 16, 64),
            "mask": create_tensor(torch.uint8, 64, 64),
        },
    }
    return omni.EngineCoreOutput(**(fields | changes))


def assert_same(received: omni.EngineCoreOutput, sent: omni.EngineCoreOutput) -> None:
    for field in msgspec.structs.fields(omni.EngineCoreOutput):
        a, b = getattr(received, field.name), getattr(sent, field.name)
        if field.name == "pooling_output":
            assert equal(a, b)
        elif field.name == "additional_outputs":
            assert list(a) == list(b)
            assert all(equal(a[name], b[name]) for name in b)
        else:
            assert a == b, field.name


# --- outputs ---


def test_output_crosses_with_every_field() -> None:
    sent = create_output()
    unset = {"request_output", "step_stats"}  # made on the client's side
    for field in msgspec.structs.fields(omni.EngineCoreOutput):
        if field.name not in unset:
            default = getattr(omni.EngineCoreOutput(""), field.name)
            value = getattr(sent, field.name)
            assert isinstance(value, Tensor) or value != default, f"{field.name} is not tried here"
    stats = omni.StepStats(start_time=5.0, step_time=0.25, num_rows=3, memory_bytes={0: 1 << 40})
    outputs = OmniEngineCoreOutputs(outputs=[to_wire(sent)], timestamp=12.5, step_stats=stats)
    received = cross(outputs, OmniEngineCoreOutputs)
    assert received.timestamp == 12.5
    assert received.step_stats == stats
    [output] = received.outputs
    assert_same(from_wire(output), sent)


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reason_crosses(reason: FinishReason | None) -> None:
    error = RequestError("StageExecutionError", "why") if reason is FinishReason.ERROR else None
    sent = omni.EngineCoreOutput("r", finish_reason=reason, error=error)
    assert from_wire(to_wire(sent)) == sent
    [output] = cross(OmniEngineCoreOutputs(outputs=[to_wire(sent)]), OmniEngineCoreOutputs).outputs
    received = from_wire(output)
    assert received == sent
    assert received.finish_reason is reason
    assert received.finished == (reason is not None)


def test_a_request_that_vllm_could_not_decode_has_an_error() -> None:
    output = OmniEngineCoreOutput("r", new_token_ids=[], finish_reason=VllmFinishReason.ERROR)
    error = from_wire(output).error
    assert error is not None and "could not read" in error.message


@pytest.mark.parametrize("name", omni.TENSOR_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (LARGE,), (3, 70, 90)], ids=str)
def test_tensors_cross_whatever_they_hold(name: str, shape: tuple[int, ...]) -> None:
    tensor = create_tensor(getattr(torch, name), *shape)
    sent = create_output(pooling_output=tensor, additional_outputs={"latents": tensor})
    [output] = cross(OmniEngineCoreOutputs(outputs=[to_wire(sent)]), OmniEngineCoreOutputs).outputs
    assert equal(output.pooling_output, tensor)
    assert equal(output.additional_outputs["latents"], tensor)


def test_tensor_that_is_a_view_crosses() -> None:
    tensor = create_tensor(torch.float32, 64, 64).t()[::2]
    sent = create_output(pooling_output=tensor, additional_outputs={})
    [output] = cross(OmniEngineCoreOutputs(outputs=[to_wire(sent)]), OmniEngineCoreOutputs).outputs
    assert equal(output.pooling_output, tensor)


def test_not_a_number_crosses() -> None:
    tensor = torch.tensor([float("nan"), float("inf"), -0.0])
    sent = create_output(pooling_output=tensor, additional_outputs={})
    [output] = cross(OmniEngineCoreOutputs(outputs=[to_wire(sent)]), OmniEngineCoreOutputs).outputs
    assert output.pooling_output.view(torch.int32).tolist() == tensor.view(torch.int32).tolist()


def test_many_outputs_stay_apart() -> None:
    sent = [
        create_output(request_id=str(i), pooling_output=torch.full((LARGE,), i)) for i in range(5)
    ]
    received = cross(
        OmniEngineCoreOutputs(outputs=[to_wire(output) for output in sent]), OmniEngineCoreOutputs
    )
    for i, output in enumerate(received.outputs):
        assert output.request_id == str(i)
        assert equal(output.pooling_output, torch.full((LARGE,), i))


def test_outputs_of_vllm_itself_are_read() -> None:
    """With all that vLLM puts there: its own fields come before ours."""
    event = EngineCoreEvent(type=EngineCoreEventType.QUEUED, timestamp=1.5)
    sent = EngineCoreOutputs(
        engine_index=3,
        outputs=[
            EngineCoreOutput(
                request_id="a",
                new_token_ids=[4, 5],
                pooling_output=create_tensor(torch.float32, 7, 9),
                finish_reason=VllmFinishReason.LENGTH,
                stop_reason="end",
                events=[event],
                kv_transfer_params={"x": 1},
                trace_headers={"y": "z"},
                routed_experts=np.arange(6).reshape(2, 3),
                num_nans_in_logits=2,
                mm_cache_miss_hashes=["h"],
                prompt_token_id_logprobs=create_tensor(torch.float32, 2, 2),
            ),
            EngineCoreOutput(request_id="b", new_token_ids=[]),
        ],
        scheduler_stats=SchedulerStats(num_running_reqs=4),
        timestamp=9.5,
        finished_requests={"a"},
        wave_complete=6,
        start_wave=7,
    )
    received = cross(sent, OmniEngineCoreOutputs)
    assert (received.engine_index, received.timestamp) == (3, 9.5)
    assert received.scheduler_stats.num_running_reqs == 4
    assert (received.wave_complete, received.start_wave) == (6, 7)
    assert received.finished_requests == {"a"}
    first, second = received.outputs
    for output in (first, second):
        assert isinstance(output, OmniEngineCoreOutput)
        assert (output.error, output.output_type) == (None, None)
        assert (output.output_metadata, output.additional_outputs) == ({}, {})
    assert (first.request_id, first.new_token_ids) == ("a", [4, 5])
    assert (first.finish_reason, first.stop_reason) == (VllmFinishReason.LENGTH, "end")
    assert equal(first.pooling_output, sent.outputs[0].pooling_output)
    assert equal(first.prompt_token_id_logprobs, sent.outputs[0].prompt_token_id_logprobs)
    assert first.events == [event]
    assert first.routed_experts.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (first.kv_transfer_params, first.trace_headers) == ({"x": 1}, {"y": "z"})
    assert (first.num_nans_in_logits, first.mm_cache_miss_hashes) == (2, ["h"])
    assert (second.request_id, second.finish_reason) == ("b", None)


def test_utility_calls_of_vllm_are_read() -> None:
    result = UtilityOutput(call_id=5, result=UtilityResult([{"num_requests": 3}]))
    received = cross(EngineCoreOutputs(utility_output=result), OmniEngineCoreOutputs)
    assert received.utility_output.call_id == 5
    assert received.utility_output.result.result == [{"num_requests": 3}]


def test_our_fields_are_the_last() -> None:
    """vLLM reads by position; what it adds in a new version moves ours, in both processes."""
    names = [field.name for field in msgspec.structs.fields(OmniEngineCoreOutput)]
    assert names[: len(msgspec.structs.fields(EngineCoreOutput))] == [
        field.name for field in msgspec.structs.fields(EngineCoreOutput)
    ]
    assert [field.name for field in msgspec.structs.fields(OmniEngineCoreOutputs)] == [
        *(field.name for field in msgspec.structs.fields(EngineCoreOutputs)),
        "step_stats",
    ]


@pytest.mark.parametrize("data", [b"", b"\xc1", b"nothing", b"\x91\xa1r", b"\x92\x00\x91\x91\x05"])
def test_outputs_that_are_garbage_are_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        MsgpackDecoder(OmniEngineCoreOutputs).decode([data])


# --- requests ---


@pytest.fixture(scope="module")
def core(checkpoint: MakeCheckpoint) -> Iterator[DiffusionCoreInVllm]:
    """An engine core as it is in its process, without the sockets."""
    config = make_core_config(
        DiTConfig(model=str(checkpoint(0)), device="cpu", load_text_encoder=False)
    )
    core = DiffusionCoreInVllm(config)
    yield core
    core.shutdown()


def create_request(**changes: Any) -> DiffusionRequest[QwenImageCustomInputs]:
    fields: dict[str, Any] = {
        "prompt_embeds": create_tensor(torch.float32, 5, 128),
        "negative_prompt_embeds": create_tensor(torch.bfloat16, 3, 128),
        "height": 64,
        "width": 96,
        "output_mode": OutputMode.PIXELS_AND_LATENTS,
        "mask": create_tensor(torch.uint8, 64, 96),
        "preview_every": 2,
        "num_inference_steps": 3,
        "true_cfg_scale": 2.5,
        "seed": 2**63 - 1,
        "sigmas": (1.0, 0.5, 0.25),
        "latents": create_tensor(torch.float32, 24, 64),
    }
    return DiffusionRequest(
        request_id="0_r",
        custom_inputs=QwenImageCustomInputs(**(fields | changes)),
        priority=-3,
        deadline=12.5,
        arrival_time=1234.5,
    )


def receive(core: DiffusionCoreInVllm, envelope: EngineCoreRequest) -> DiffusionRequest[Any]:
    request, _ = core.preprocess_add_request(cross(envelope, EngineCoreRequest))
    assert isinstance(request, DiffusionRequest)
    return request


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"latents": None, "mask": None, "sigmas": None},
        {
            "prompt_embeds": None,
            "negative_prompt_embeds": None,
            "prompt_token_ids": [1, 2, 3],
            "negative_prompt_token_ids": [],
            "num_prefix_tokens": 34,
        },
        {"task": "text_encoding", "prompt_token_ids": [1, 2, 3], "prompt_embeds": None},
    ],
    ids=["embeddings", "less", "tokens", "text encoding"],
)
def test_request_crosses_with_its_tensors(
    core: DiffusionCoreInVllm, changes: dict[str, Any]
) -> None:
    sent = create_request(**changes)
    received = receive(core, make_core_request(sent))
    for field in msgspec.structs.fields(DiffusionRequest):
        if field.name != "custom_inputs":
            assert getattr(received, field.name) == getattr(sent, field.name), field.name
    for field in msgspec.structs.fields(QwenImageCustomInputs):
        a, b = getattr(received.custom_inputs, field.name), getattr(sent.custom_inputs, field.name)
        assert equal(a, b) if isinstance(b, Tensor) else a == b, field.name
    assert received.custom_inputs.num_tokens == sent.custom_inputs.num_tokens


def test_request_says_which_client_and_wave_it_is_of(core: DiffusionCoreInVllm) -> None:
    envelope = make_core_request(create_request())
    envelope.client_index, envelope.current_wave = 4, 9
    request, wave = core.preprocess_add_request(cross(envelope, EngineCoreRequest))
    assert (request.request_id, request.client_index, wave) == ("0_r", 4, 9)
    assert envelope.request_id == "0_r"  # vLLM aborts by it


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"nothing", b"\x80", b"\x81\xaarequest_id\x05"],
    ids=["empty", "not msgpack", "text", "no fields", "field of another kind"],
)
def test_garbage_is_refused(core: DiffusionCoreInVllm, data: bytes) -> None:
    envelope = make_core_request(create_request())
    envelope.pooling_params.extra_kwargs = {"request": data}
    with pytest.raises(msgspec.DecodeError):
        receive(core, envelope)


def test_every_damaged_request_is_refused_or_read(core: DiffusionCoreInVllm) -> None:
    """Nothing but an error of decoding comes of bytes that somebody changed."""
    envelope = make_core_request(create_request())
    good = envelope.pooling_params.extra_kwargs["request"]
    generator = np.random.default_rng(0)
    num_refused = 0
    for _ in range(300):
        data = bytearray(good)
        data[generator.integers(0, 400)] = generator.integers(0, 256)
        envelope.pooling_params.extra_kwargs = {"request": bytes(data)}
        try:
            core.preprocess_add_request(envelope)
        except msgspec.DecodeError:
            num_refused += 1
    assert num_refused > 20


def test_core_in_vllms_machinery_draws(core: DiffusionCoreInVllm) -> None:
    """The steps of a request, as vLLM's loop takes them, with outputs for its client."""
    sent = create_request(mask=None, sigmas=None, negative_prompt_embeds=None)
    request = receive(core, make_core_request(sent))
    request.client_index = 2
    request.deadline = None
    core.core.add_request(request)
    seen: list[OmniEngineCoreOutput] = []
    did_work = True
    while did_work:
        news, did_work = core.step()
        for client, outputs in news.items():
            assert client == 2
            seen += cross(outputs, OmniEngineCoreOutputs).outputs
    assert [output.output_metadata["step"] for output in seen] == [1, 2, 3]
    assert seen[-1].finish_reason is VllmFinishReason.STOP
    assert seen[-1].pooling_output.shape == (3, 64, 96)
    assert seen[-1].additional_outputs["latents"].shape == (24, 64)


def test_abort_in_vllms_machinery_ends_a_request(core: DiffusionCoreInVllm) -> None:
    request = receive(core, make_core_request(create_request(mask=None, sigmas=None)))
    request.deadline = None
    core.core.add_request(request)
    core.step()
    core.abort_requests(["0_r", "never heard of"])
    news, _ = core.step()
    [output] = news[0].outputs
    assert output.finish_reason is VllmFinishReason.ABORT
    assert core.step() == ({}, False)


def test_worker_is_called_by_name(core: DiffusionCoreInVllm) -> None:
    [stats] = core.collective_rpc("get_stats")
    assert stats["num_requests"] == 0
    assert core.get_supported_tasks() == ("plugin",)
