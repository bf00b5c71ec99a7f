"""Whether a checkpoint's files are all there and whole: a matter of milliseconds, before loading.

The tensors are not read, only what each file says about itself.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_omni.errors import ModelLoadError
from vllm_omni.models.registry import get_model_spec, read_json

_SMALL_FILES = ("scheduler/scheduler_config.json", "tokenizer/tokenizer_config.json")
_INDEX = "*.safetensors.index.json"
_MAX_HEADER = 100_000_000  # bytes; safetensors' own limit
_NOTES = "__metadata__"  # of a header, beside the tensors
_ITEM_BYTES = {  # of each type in safetensors' words
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1},
}


def check_weights(model: Path) -> None:
    """Raise `ModelLoadError` if a file of a checkpoint in diffusers layout is missing or broken."""
    if not (model / "model_index.json").is_file() and (model / "config.json").is_file():
        return  # a language model of its own, which vLLM knows how to read
    components = get_model_spec(model).components
    for name in (*_SMALL_FILES, *(f"{component}/config.json" for component in components)):
        read_json(model, name)
    for component in components:
        for path in _find_weights(model / component):
            _check_file(path)


def _find_weights(folder: Path) -> Iterator[Path]:
    indexes = list(folder.glob(_INDEX))
    for index in indexes:
        names = read_json(folder, index.name).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ModelLoadError(f"{index} has no weight_map: it should name a file of each tensor")
        yield from (folder / str(name) for name in sorted(set(names.values())))
    if not indexes:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelLoadError(f"{folder} has no weights: there is no .safetensors file")
        yield from files


def check_tensors(folder: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise `ModelLoadError` unless a component's files hold these tensors, all of floats."""
    found = {name: (path, entry) for path in _find_weights(folder) for name, entry in _read(path)}
    for name, shape in shapes.items():
        if name not in found:
            raise ModelLoadError(f"{folder} is broken: no file of it holds the tensor {name}")
        path, entry = found[name]
        if list(entry["shape"]) != list(shape):
            raise ModelLoadError(
                f"{path} does not fit its config.json: {name} has the shape {entry['shape']}, "
                f"and should have {list(shape)}"
            )
        if "F" not in entry["dtype"]:
            raise ModelLoadError(f"{path} is broken: {name} holds {entry['dtype']} and no floats")


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ModelLoadError(f"{path} is missing: the checkpoint's index names it")
    tensors = dict(_read(path))
    begin = 0
    for name, entry in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        num_bytes = math.prod(entry["shape"]) * _ITEM_BYTES.get(entry["dtype"], 0)
        if entry["dtype"] not in _ITEM_BYTES:
            raise ModelLoadError(f"{path} is broken: {name} is of the type {entry['dtype']}")
        if entry["data_offsets"] != [begin, begin + num_bytes]:
            raise ModelLoadError(f"{path} is broken: {name} is not where its header says")
        begin += num_bytes


def _read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a file's header says of each tensor, if the file is as long as it says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER
        if length > min(size - 8, _MAX_HEADER):
            raise ModelLoadError(f"{path} is broken: it ends within its own header")
        try:
            header = json.loads(file.read(length))
            tensors = [(name, _parse(entry)) for name, entry in header.items() if name != _NOTES]
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            raise ModelLoadError(f"{path} is broken: its header cannot be read") from error
    end = max((entry["data_offsets"][1] for _, entry in tensors), default=0)
    if size != 8 + length + end:
        raise ModelLoadError(
            f"{path} is broken: it has {size} bytes, and its header tells of {8 + length + end}"
        )
    yield from tensors


def _parse(entry: Any) -> dict[str, Any]:
    """The types are what safetensors writes; nothing else is taken for a tensor."""
    dtype, shape, offsets = (entry[key] for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or len(offsets) != 2:
        raise ValueError(f"{entry} is no tensor")
    if any(type(number) is not int or number < 0 for number in (*shape, *offsets)):
        raise ValueError(f"{entry} is no tensor")
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}
