"""Whether a checkpoint is whole, seen before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.drawing import MakeCheckpoint
from vllm_omni.errors import ModelLoadError
from vllm_omni.models.demo import find_model
from vllm_omni.models.weights import check_weights

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture
def model(checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    """One to break."""
    return Path(shutil.copytree(checkpoint(0), tmp_path / "model"))


def test_whole_ones(model: Path) -> None:
    check_weights(model)
    check_weights(find_model("demo"))


def split(model: Path) -> Path:
    """The transformer in two files and an index; the answer is the second file."""
    path = model / WEIGHTS
    tensors = load_file(path)
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, half in halves.items():
        save_file({name: tensors[name] for name in half}, path.parent / file)
    index = {"weight_map": {name: file for file, half in halves.items() for name in half}}
    (path.parent / f"{path.stem}.safetensors.index.json").write_text(json.dumps(index))
    path.unlink()
    return path.parent / "b.safetensors"


def test_shards(model: Path) -> None:
    second = split(model)
    check_weights(model)
    second.unlink()
    with pytest.raises(ModelLoadError, match=r"b\.safetensors is missing: .* index names it"):
        check_weights(model)


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (lambda m: truncate(m / WEIGHTS, -100), "header tells of"),
    "cut off early": (lambda m: truncate(m / WEIGHTS, 100), "ends within its own header"),
    "empty": (lambda m: truncate(m / WEIGHTS, 0), "ends within its own header"),
    "too long": (
        lambda m: (m / WEIGHTS).write_bytes((m / WEIGHTS).read_bytes() + b"x"),
        "header tells of",
    ),
    "no header": (
        lambda m: (m / WEIGHTS).write_bytes(b"\x02" + b"\0" * 7 + b"xx"),
        "header cannot be read",
    ),
    "odd header": (
        lambda m: (m / WEIGHTS).write_bytes(b"\x0b" + b"\0" * 7 + b'{"a": null}'),
        "header cannot be read",
    ),
    "huge header": (lambda m: (m / WEIGHTS).write_bytes(b"\xff" * 20), "within its own header"),
    "no weights": (lambda m: (m / WEIGHTS).unlink(), r"there is no \.safetensors file"),
    "no component": (lambda m: shutil.rmtree(m / "vae"), r"has no vae/config\.json"),
    "no config": (
        lambda m: (m / "vae/config.json").unlink(),
        r"has no vae/config\.json: is it a w",
    ),
    "no tokenizer": (lambda m: shutil.rmtree(m / "tokenizer"), "has no tokenizer/tokenizer_config"),
    "no scheduler": (lambda m: shutil.rmtree(m / "scheduler"), "has no scheduler/scheduler_config"),
    "no index": (lambda m: (m / "model_index.json").unlink(), r"has no model_index\.json"),
    "broken index": (lambda m: (m / "model_index.json").write_text("{"), "is not valid JSON"),
    "other model": (
        lambda m: (m / "model_index.json").write_text('{"_class_name": "Other"}'),
        "holds a 'Other', for which there is no code",
    ),
    "nothing": (lambda m: shutil.rmtree(m), "is not a folder"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_ones(model: Path, how: str) -> None:
    break_it, message = BROKEN[how]
    break_it(model)
    with pytest.raises(ModelLoadError, match=message) as caught:
        check_weights(model)
    assert str(model) in str(caught.value) and "\n" not in str(caught.value)


def test_index_without_a_map(model: Path) -> None:
    split(model)
    index = next((model / "transformer").glob("*.index.json"))
    for content in ("{}", '{"weight_map": []}', '{"weight_map": {}}'):
        index.write_text(content)
        with pytest.raises(ModelLoadError, match="has no weight_map"):
            check_weights(model)


def test_language_model_of_its_own_is_left_to_vllm(checkpoint: MakeCheckpoint) -> None:
    check_weights(checkpoint(0) / "text_encoder")
