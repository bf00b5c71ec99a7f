"""Tensors cross processes bit by bit; bytes that are no message are refused, never guessed at."""

import math
import pickle
import random
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_omni.diffusion.messages import (
    DiffusionModelRunnerOutput,
    DiffusionSchedulerOutput,
    NewRequestData,
    RequestResult,
)
from vllm_omni.models.qwen_image.inputs import QwenImageCustomInputs
from vllm_omni.outputs import RequestError
from vllm_omni.params import OutputMode
from vllm_omni.serial import MessageDecoder, encode

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


class Message(msgspec.Struct):
    """One tensor between two other fields."""

    before: int
    tensor: Any
    after: str


def create_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> Tensor:
    """Random bits, so among the floats all kinds of NaN."""
    num_bytes = math.prod(shape) * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    flat = torch.randint(high, (num_bytes,), dtype=torch.uint8, generator=generator)
    return flat.view(dtype).view(shape)


def bits_of(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def cross_process(message: Message) -> Message:
    return MessageDecoder(Message).decode(encode(message))


def create_frame(payload: bytes, code: int = 1) -> bytes:
    """A `Message` whose tensor is the given msgpack extension."""
    return msgspec.msgpack.encode(Message(1, msgspec.msgpack.Ext(code, payload), "end"))


def create_payload(dtype: Any, shape: Any, data: bytes) -> bytes:
    header = msgspec.msgpack.encode([dtype, shape])
    return len(header).to_bytes(4, "little") + header + data


# --- round trips ---


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), max_size=4),
    seed=st.integers(0, 1000),
)
def test_tensor_crosses_bit_by_bit(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    tensor = create_tensor(dtype, shape, seed)
    received = cross_process(Message(1, tensor, "end"))
    assert (received.before, received.after) == (1, "end")
    assert isinstance(received.tensor, Tensor)
    assert (received.tensor.dtype, list(received.tensor.shape)) == (dtype, shape)
    assert bits_of(received.tensor) == bits_of(tensor)


def test_value_of_a_single_number() -> None:
    received = cross_process(Message(1, torch.tensor(2.5), "end")).tensor
    assert received.shape == ()
    assert received.item() == 2.5


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).view(3, 4).t(),
        torch.arange(12)[::3],
        torch.arange(12).view(3, 4)[1:, 1:],
        torch.ones(1).expand(5),
    ],
    ids=["transposed", "strided", "slice", "expanded"],
)
def test_only_what_a_view_shows_crosses(tensor: Tensor) -> None:
    data = encode(Message(1, tensor, "end"))
    assert len(data) < tensor.nbytes + 100
    assert torch.equal(MessageDecoder(Message).decode(data).tensor, tensor)


def test_gradients_stay_behind() -> None:
    received = cross_process(Message(1, torch.ones(2, requires_grad=True), "end")).tensor
    assert torch.equal(received, torch.ones(2))
    assert not received.requires_grad


def test_received_tensor_is_writable_and_owns_its_memory() -> None:
    data = bytearray(encode(Message(1, torch.ones(3), "end")))
    received = MessageDecoder(Message).decode(data).tensor
    data[:] = bytes(len(data))
    received += 1
    assert received.tolist() == [2.0, 2.0, 2.0]


def test_step_crosses_to_a_worker_and_back() -> None:
    inputs = QwenImageCustomInputs(
        prompt_token_ids=[1, 2, 3],
        negative_prompt_embeds=torch.ones(2, 4, dtype=torch.bfloat16),
        height=64,
        width=96,
        num_inference_steps=3,
        seed=2**63 - 1,
        sigmas=(1.0, 0.5, 0.1),
        output_mode=OutputMode.PIXELS_AND_MASK,
        preview_every=2,
    )
    step = DiffusionSchedulerOutput(
        scheduled_new_reqs=[NewRequestData("a", inputs)],
        num_scheduled_steps={"a": 1},
        total_num_scheduled_tokens=58,
        finished_req_ids=["b"],
    )
    received = MessageDecoder(DiffusionSchedulerOutput[QwenImageCustomInputs]).decode(encode(step))
    [new_request] = received.scheduled_new_reqs
    assert isinstance(new_request.custom_inputs, QwenImageCustomInputs)
    for name in inputs.__struct_fields__:
        sent, got = getattr(inputs, name), getattr(new_request.custom_inputs, name)
        assert torch.equal(sent, got) if isinstance(sent, Tensor) else sent == got, name
    assert received.num_scheduled_steps == {"a": 1}
    assert received.total_num_scheduled_tokens == 58
    assert received.finished_req_ids == ["b"]

    output = DiffusionModelRunnerOutput(
        num_computed_steps={"a": 1},
        previews={"a": torch.arange(12, dtype=torch.uint8).view(3, 2, 2)},
        results={"c": RequestResult(torch.zeros(3), {"mask": torch.ones(2, dtype=torch.uint8)})},
        errors={"d": RequestError("StageExecutionError", "it broke")},
        model_time=0.5,
    )
    back = MessageDecoder(DiffusionModelRunnerOutput).decode(encode(output))
    assert torch.equal(back.previews["a"], output.previews["a"])
    assert torch.equal(back.results["c"].pooling_output, torch.zeros(3))
    assert back.results["c"].additional_outputs["mask"].tolist() == [1, 1]
    assert (back.num_computed_steps, back.errors) == (output.num_computed_steps, output.errors)
    assert back.model_time == 0.5


# --- refusals ---


@pytest.mark.parametrize("value", [object(), lambda: None, 1j, Message])
def test_only_messages_and_tensors_cross(value: object) -> None:
    with pytest.raises(TypeError, match=f"a {type(value).__name__} cannot cross a process"):
        encode(Message(1, value, "end"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int16, torch.complex64])
def test_sender_refuses_a_dtype_that_the_receiver_does_not_know(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=str(dtype).removeprefix("torch.")):
        encode(Message(1, torch.zeros(2, dtype=dtype), "end"))


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x01", id="half a header length"),
        pytest.param(b"\xff\xff\xff\xff", id="header length beyond the end"),
        pytest.param(b"\x00\x00\x00\x00" + bytes(8), id="no header"),
        pytest.param(create_payload("float32", [2], bytes(7)), id="a byte too few"),
        pytest.param(create_payload("float32", [2], bytes(9)), id="a byte too many"),
        pytest.param(create_payload("float32", [2], b""), id="no data"),
        pytest.param(create_payload("float32", [0], bytes(4)), id="data for an empty tensor"),
        pytest.param(create_payload("float32", [], b""), id="no data for one number"),
        pytest.param(create_payload("float32", [2**40, 2**40], bytes(8)), id="huge shape"),
        pytest.param(create_payload("float32", [-1], b""), id="negative side"),
        pytest.param(create_payload("float32", [-1, -2], bytes(8)), id="two negative sides"),
        pytest.param(create_payload("float32", [2.0], bytes(8)), id="fractional side"),
        pytest.param(create_payload("float32", "2", bytes(8)), id="shape is text"),
        pytest.param(create_payload("float64", [1], bytes(8)), id="unknown dtype"),
        pytest.param(create_payload("load", [1], bytes(8)), id="attribute of torch"),
        pytest.param(create_payload(5, [1], bytes(8)), id="dtype is a number"),
        pytest.param(create_payload(["float32"], [1], bytes(4)), id="dtype is a list"),
        pytest.param(pickle.dumps(torch.zeros(2)), id="pickle"),
    ],
)
def test_broken_tensor_is_refused(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        MessageDecoder(Message).decode(create_frame(payload))


@pytest.mark.parametrize("shape", [[0, 2**63], [2**62, 2**62, 0]])
def test_empty_tensor_with_sides_that_torch_cannot_hold_is_refused(shape: list[int]) -> None:
    with pytest.raises(msgspec.DecodeError):
        MessageDecoder(Message).decode(create_frame(create_payload("float32", shape, b"")))


@pytest.mark.parametrize("code", [0, 2, 127, -2])
def test_unknown_extension_is_refused(code: int) -> None:
    payload = create_payload("float32", [1], bytes(4))
    with pytest.raises(msgspec.ValidationError, match=f"unknown msgpack extension {code}"):
        MessageDecoder(Message).decode(create_frame(payload, code))


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", pickle.dumps({"before": 1}), b'{"before": 1}', msgspec.msgpack.encode([1, 2])],
    ids=["empty", "reserved byte", "pickle", "json", "other message"],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        MessageDecoder(Message).decode(data)


def test_message_cut_short_is_refused_wherever_it_is_cut() -> None:
    data = encode(Message(1, torch.arange(5.0), "end"))
    for length in range(len(data)):
        with pytest.raises(msgspec.DecodeError):
            MessageDecoder(Message).decode(data[:length])


def test_random_bytes_are_refused() -> None:
    rng, decoder = random.Random(0), MessageDecoder(Message)
    for _ in range(2000):
        with pytest.raises(msgspec.DecodeError):
            decoder.decode(rng.randbytes(rng.randrange(200)))


def test_random_tensor_payloads_are_refused() -> None:
    rng, decoder = random.Random(1), MessageDecoder(Message)
    for _ in range(2000):
        header = rng.randbytes(rng.randrange(20))
        payload = len(header).to_bytes(4, "little") + header + rng.randbytes(rng.randrange(20))
        with pytest.raises(msgspec.DecodeError):
            decoder.decode(create_frame(payload))


def test_damaged_message_is_refused_or_holds_exactly_the_bytes_it_came_with() -> None:
    """One to three bytes of a good message changed, 2000 times."""
    rng, decoder = random.Random(2), MessageDecoder(Message)
    tensor = torch.arange(6.0).view(2, 3)
    good = encode(Message(1, tensor, "end"))
    num_decoded = 0
    for _ in range(2000):
        damaged = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            received = decoder.decode(damaged).tensor
        except msgspec.DecodeError:
            continue
        if isinstance(received, Tensor):
            num_decoded += 1
            assert received.nbytes == tensor.nbytes
            assert bits_of(received) in damaged
    assert num_decoded > 100  # damaged data bytes cannot be told from others


def test_text_that_is_no_text_and_endless_nesting_are_refused() -> None:
    for data in (b"\xa1\xff", b"\x91" * 5000 + b"\xc0"):
        with pytest.raises(msgspec.DecodeError):
            MessageDecoder(object).decode(data)
