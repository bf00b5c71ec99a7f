"""msgpack with tensors: the only way a message crosses a process. No pickle."""

from __future__ import annotations

import math
from typing import Any, Generic, TypeVar

import msgspec
import torch

from vllm_omni.outputs import TENSOR_DTYPES

T = TypeVar("T")

_TENSOR = 1  # msgpack extension code
_MAX_ELEMENTS = 2**40  # sides of 0 counted as 1: torch cannot lay out an empty tensor of any shape
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in TENSOR_DTYPES}


class TensorHeader(msgspec.Struct, array_like=True):
    dtype: str
    shape: list[int]


_header_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(TensorHeader)


def encode(message: Any) -> bytes:
    """Any of our messages as bytes."""
    return msgspec.msgpack.encode(message, enc_hook=_encode_tensor)


class MessageDecoder(Generic[T]):
    """Turns bytes into one type of message, and into nothing else."""

    def __init__(self, message_type: type[T]) -> None:
        self._decoder = msgspec.msgpack.Decoder(message_type, ext_hook=_decode_tensor)

    def decode(self, data: bytes | bytearray | memoryview) -> T:
        try:
            return self._decoder.decode(data)
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(str(error)) from error


def _encode_tensor(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a {type(value).__name__} cannot cross a process")
    tensor = value.detach().cpu().contiguous()
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise TypeError(f"a tensor of {dtype} cannot cross a process: one of {', '.join(_DTYPES)}")
    header = _header_encoder.encode(TensorHeader(dtype, list(tensor.shape)))
    data = tensor.flatten().view(torch.uint8).numpy().tobytes()
    return msgspec.msgpack.Ext(_TENSOR, len(header).to_bytes(4, "little") + header + data)


def _decode_tensor(code: int, data: memoryview) -> torch.Tensor:
    if code != _TENSOR:
        raise msgspec.ValidationError(f"unknown msgpack extension {code}")
    header_end = 4 + int.from_bytes(data[:4], "little")
    header = _header_decoder.decode(data[4:header_end])
    dtype = _DTYPES.get(header.dtype)
    if dtype is None:
        raise msgspec.ValidationError(f"unknown tensor dtype {header.dtype!r}")
    has_negative = any(side < 0 for side in header.shape)
    if has_negative or math.prod(max(side, 1) for side in header.shape) > _MAX_ELEMENTS:
        raise msgspec.ValidationError(f"tensor shape {header.shape} is not possible")
    num_bytes = math.prod(header.shape) * dtype.itemsize
    if len(data) - header_end != num_bytes:
        raise msgspec.ValidationError(
            f"tensor of {header.dtype} {header.shape} needs {num_bytes} bytes, "
            f"got {len(data) - header_end}"
        )
    if not num_bytes:
        return torch.empty(header.shape, dtype=dtype)
    return torch.frombuffer(bytearray(data[header_end:]), dtype=dtype).view(header.shape)
