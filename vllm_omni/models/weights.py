"""Whether a checkpoint's files are all there and whole: a matter of milliseconds, before loading.

The tensors are not read, only what each file says about itself.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from vllm_omni.errors import ModelLoadError
from vllm_omni.models.registry import get_model_spec, read_json

_INDEX = "*.safetensors.index.json"
_MAX_HEADER = 100_000_000  # bytes; safetensors' own limit


def check_weights(model: Path) -> None:
    """Raise `ModelLoadError` if a file of a checkpoint in diffusers layout is missing or broken."""
    if not (model / "model_index.json").is_file() and (model / "config.json").is_file():
        return  # a language model of its own, which vLLM knows how to read
    for component in get_model_spec(model).components:
        read_json(model / component, "config.json")
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


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ModelLoadError(f"{path} is missing: the checkpoint's index names it")
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER
        if length > min(size - 8, _MAX_HEADER):
            raise ModelLoadError(f"{path} is broken: it ends within its own header")
        try:
            header = json.loads(file.read(length))
            tensors = [entry for name, entry in header.items() if name != "__metadata__"]
            end = max((int(entry["data_offsets"][1]) for entry in tensors), default=0)
        except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
            raise ModelLoadError(f"{path} is broken: its header cannot be read") from error
    if size != 8 + length + end:
        raise ModelLoadError(
            f"{path} is broken: it has {size} bytes, and its header tells of {8 + length + end}"
        )
