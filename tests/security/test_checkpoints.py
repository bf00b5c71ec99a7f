"""Checkpoints that are broken, or want to be more than weights: refused in one line, never run."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.drawing import MakeCheckpoint
from vllm_omni.ar.config import ARModel
from vllm_omni.ar.engine import AREngine
from vllm_omni.diffusion.pipeline_manager import load_whole
from vllm_omni.errors import ModelLoadError
from vllm_omni.models.qwen_image.input_processor import QwenImageInputProcessor
from vllm_omni.models.registry import get_model_spec, load_class
from vllm_omni.models.weights import check_tensors, check_weights

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
ENCODER = "text_encoder/model.safetensors"
CPU = torch.device("cpu")

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def model(checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    """One to break."""
    return Path(shutil.copytree(checkpoint(0), tmp_path / "model"))


def load(model: Path, component: str) -> Any:
    component_class = load_class(get_model_spec(model).components[component])
    return load_whole(component_class, model / component, torch.float32, CPU)


def load_all(model: Path) -> None:
    """Everything that reads a file of a checkpoint, apart from vLLM's loader."""
    check_weights(model)
    QwenImageInputProcessor(model)
    for component in get_model_spec(model).components:
        load(model, component)


def change(path: Path, how: Callable[[Tensors, str], None]) -> str:
    """Write a file again, with one of its tensors changed; the answer is its name."""
    tensors = load_file(path)
    name = sorted(tensors)[len(tensors) // 2]
    how(tensors, name)
    save_file(tensors, path, metadata={"format": "pt"})
    return name


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# --- broken ones; more of them, which need no model to be seen, are in tests/models ---


def drop(tensors: Tensors, name: str) -> None:
    del tensors[name]


def reshape(tensors: Tensors, name: str) -> None:
    tensors[name] = torch.zeros(3, 5)


def to_whole_numbers(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].to(torch.int64)


@pytest.mark.parametrize(
    ("file", "how", "message"),
    [
        (TRANSFORMER, drop, "no file of it holds the tensor"),
        (TRANSFORMER, reshape, r"has the shape \[3, 5\], and should have"),
        (TRANSFORMER, to_whole_numbers, "holds I64 and no floats"),
        (ENCODER, drop, "is missing"),
        (ENCODER, reshape, "is mismatched"),
    ],
)
def test_the_tensor_is_named(
    model: Path, file: str, how: Callable[[Tensors, str], None], message: str
) -> None:
    name = change(model / file, how)
    check_weights(model)  # the file is whole: it is not what the model needs
    component = file.partition("/")[0]
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(model, component)
    assert name in str(caught.value) and str(model / component) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_flipped_bit_of_a_header_is_seen_or_changes_nothing(model: Path) -> None:
    path = model / TRANSFORMER
    with safe_open(path, "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    rng, num_seen = random.Random(0), 0
    for _ in range(120):
        position, bit = rng.randrange(8 + length), 1 << rng.randrange(8)
        path.write_bytes(whole[:position] + bytes([whole[position] ^ bit]) + whole[position + 1 :])
        try:
            check_weights(model)
            check_tensors(path.parent, shapes)
        except ModelLoadError as error:
            num_seen += 1
            assert "transformer" in str(error) and "\n" not in str(error)
        else:  # a space, or the metadata
            assert whole[position : position + 1] in b' ":{}_metadatformpt'
    assert num_seen > 110


@pytest.mark.parametrize("damage", ["cut off", "another one", "none"])
def test_tokenizers(model: Path, damage: str) -> None:
    path = model / "tokenizer" / "tokenizer.json"
    if damage == "cut off":
        path.write_text(path.read_text()[:5000])
    elif damage == "another one":
        content = json.loads(path.read_text())
        content["model"]["merges"] = content["model"]["merges"][:10]
        path.write_text(json.dumps(content))
    else:
        shutil.rmtree(path.parent)
    with pytest.raises(ModelLoadError, match="tokenizer") as caught:
        QwenImageInputProcessor(model)
    assert str(model) in str(caught.value) and "\n" not in str(caught.value)


# --- pickles ---


class Canary:
    """A pickle that leaves a mark where it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_not_read(model: Path, tmp_path: Path, name: str) -> None:
    mark = tmp_path / "mark"
    for component in ("transformer", "text_encoder"):
        for file in (model / component).glob("*.safetensors"):
            file.unlink()
        (model / component / name).write_bytes(pickle.dumps(Canary(mark)))
    with pytest.raises(ModelLoadError, match=r"there is no \.safetensors file"):
        check_weights(model)
    for component in ("transformer", "text_encoder"):
        with pytest.raises(ModelLoadError, match=component):
            load(model, component)
    if name == "pytorch_model.bin":
        with pytest.raises(ModelLoadError, match="vLLM cannot load"):
            AREngine(model)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Canary(mark)))
    assert mark.exists()  # it would have been seen


# --- code ---

AUTO_MAP = {
    "AutoConfig": "canary.Config",
    "AutoModel": "canary.Model",
    "AutoModelForCausalLM": "canary.Model",
    "AutoModelForImageTextToText": "canary.Model",
    "AutoTokenizer": ["canary.Tokenizer", "canary.Tokenizer"],
    "AutoProcessor": "canary.Processor",
    "AutoImageProcessor": "canary.Processor",
}
POISON: dict[str, Any] = {"auto_map": AUTO_MAP, "trust_remote_code": True}


def poison_index(model: Path) -> None:
    edit(model / "model_index.json", _class_name=["canary", "Pipeline"], **POISON)


def poison_pipeline(model: Path) -> None:
    edit(model / "model_index.json", transformer=["canary", "Model"], vae=["canary", "Model"])


def poison_parts(model: Path) -> None:
    for component in ("transformer", "vae"):
        edit(model / component / "config.json", _class_name="canary.Model", **POISON)


def poison_encoder(model: Path) -> None:
    edit(model / "text_encoder" / "config.json", **POISON)


def poison_encoder_type(model: Path) -> None:
    path = model / "text_encoder" / "config.json"
    edit(path, model_type="canary", architectures=["CanaryModel"], **POISON)


def poison_attention(model: Path) -> None:
    names = ("_attn_implementation_internal", "_attn_implementation", "attn_implementation")
    path = model / "text_encoder" / "config.json"
    edit(path, **dict.fromkeys(names, f"{model}/canary:attend"), _experts_implementation="canary")


def poison_tokenizer(model: Path) -> None:
    for folder in ("tokenizer", "processor"):
        edit(model / folder / "tokenizer_config.json", tokenizer_class="Canary", **POISON)


def poison_template(model: Path) -> None:
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    for folder in ("tokenizer", "processor"):
        edit(model / folder / "tokenizer_config.json", chat_template=escape)


@pytest.mark.parametrize(
    "poison",
    [
        poison_index,
        poison_pipeline,
        poison_parts,
        poison_encoder,
        poison_encoder_type,
        poison_attention,
        poison_tokenizer,
        poison_template,
    ],
)
def test_code_in_a_checkpoint_is_never_run(
    model: Path,
    tmp_path: Path,
    poison: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mark = tmp_path / "mark"
    code = f"open({str(mark)!r}, 'w').close()\nclass Config: pass\nModel = Tokenizer = Config\n"
    for folder in (model, *(path for path in model.iterdir() if path.is_dir())):
        (folder / "canary.py").write_text(code)
        (folder / "pipeline.py").write_text(code)
    poison(model)
    monkeypatch.setattr("sys.stdin", None)  # nobody is asked
    for read in (load_all, ARModel):
        try:
            read(model)
        except ModelLoadError as error:
            assert str(model) in str(error)
    assert not mark.exists()
