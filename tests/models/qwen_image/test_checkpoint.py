"""Random-weight checkpoints load in the stock pipeline, draw, and are reproducible."""

import hashlib
import json
import resource
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors import safe_open
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
)

from vllm_omni.models.qwen_image.checkpoint import (
    CHECKPOINT_SIZES,
    MAX_SEED,
    CheckpointSize,
    write_checkpoint,
)
from vllm_omni.models.qwen_image.prompt import EDIT, TEXT_TO_IMAGE

WEIGHTS = [
    "text_encoder/model.safetensors",
    "transformer/diffusion_pytorch_model.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
]


def hash_files(path: Path) -> dict[str, str]:
    """Relative path -> hash of the content, for every file under `path`."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Writes beyond this size fail, as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", seed=0)


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> QwenImagePipeline:
    pipeline = QwenImagePipeline.from_pretrained(checkpoint)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Qwen2Tokenizer:
    return AutoTokenizer.from_pretrained(checkpoint / "tokenizer")


def draw(pipeline: QwenImagePipeline, prompt: str, seed: int) -> np.ndarray:
    """Pixels [64, 64, 3], levels 0 to 255."""
    output = pipeline(
        prompt,
        height=64,
        width=64,
        num_inference_steps=2,
        true_cfg_scale=1.0,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    )
    return np.asarray(output.images[0]) * 255


def test_stock_pipeline_draws_a_picture_with_contrast(pipeline: QwenImagePipeline) -> None:
    pixels = draw(pipeline, "a red circle", seed=0)
    assert pixels.shape == (64, 64, 3)
    assert pixels.std(axis=(0, 1)).min() > 20
    assert np.mean((pixels <= 0) | (pixels >= 255)) < 0.1


def test_picture_follows_seed_and_prompt(pipeline: QwenImagePipeline) -> None:
    pixels = draw(pipeline, "a red circle", seed=0)
    assert np.array_equal(pixels, draw(pipeline, "a red circle", seed=0))
    assert np.abs(pixels - draw(pipeline, "a red circle", seed=1)).mean() > 20
    # Tests of the engine allow one level of difference: a wrong prompt has to show more.
    assert np.abs(pixels - draw(pipeline, "two black cats", seed=0)).max() > 3


def test_weights_are_float32(checkpoint: Path) -> None:
    for name in WEIGHTS:
        with safe_open(checkpoint / name, framework="pt") as weights:
            dtypes = {weights.get_slice(key).get_dtype() for key in weights.keys()}  # noqa: SIM118
        assert dtypes == {"F32"}, name


def test_files_have_one_mode(checkpoint: Path) -> None:
    modes = {file.stat().st_mode for file in checkpoint.rglob("*") if file.is_file()}
    assert len(modes) == 1


def test_default_request_parameters(checkpoint: Path) -> None:
    assert json.loads((checkpoint / "generation_config.json").read_text()) == {
        "height": 256,
        "width": 256,
        "num_inference_steps": 20,
    }


def test_scheduler_has_qwen_image_values(pipeline: QwenImagePipeline) -> None:
    config = pipeline.scheduler.config
    assert (config.base_shift, config.max_shift, config.shift_terminal) == (0.5, 0.9, 0.02)
    assert (config.base_image_seq_len, config.max_image_seq_len) == (256, 8192)
    assert config.use_dynamic_shifting
    assert config.time_shift_type == "exponential"


@pytest.mark.parametrize("size", CHECKPOINT_SIZES.values(), ids=CHECKPOINT_SIZES)
def test_head_dims_add_up(size: CheckpointSize) -> None:
    text_head_dim = size.text_hidden_size // 4
    assert text_head_dim >= 32
    assert sum(size.mrope_section) == text_head_dim // 2
    assert sum(size.axes_dims_rope) == size.attention_head_dim


def test_same_seed_gives_same_files(checkpoint: Path, tmp_path: Path) -> None:
    assert hash_files(write_checkpoint(tmp_path / "again", seed=0)) == hash_files(checkpoint)


def test_other_seed_gives_other_weights(checkpoint: Path, tmp_path: Path) -> None:
    ours, other = hash_files(checkpoint), hash_files(write_checkpoint(tmp_path / "one", seed=1))
    assert ours.keys() == other.keys()
    # The index records the seed; tokenizer and configs do not depend on it.
    assert [name for name in ours if ours[name] != other[name]] == ["model_index.json", *WEIGHTS]


def test_global_random_state_is_untouched(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    write_checkpoint(tmp_path / "tiny", seed=3)
    assert torch.equal(torch.get_rng_state(), state)


def test_writing_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "tiny")
    assert capfd.readouterr() == ("", "")


def test_makes_parents_and_returns_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert write_checkpoint("a/b") == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b" / "model_index.json").is_file()


def test_fills_an_empty_directory(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    assert (tmp_path / "model_index.json").is_file()


def test_replaces_its_own_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny", seed=MAX_SEED)
    (path / "left over").touch()
    write_checkpoint(path, seed=0)
    assert hash_files(path) == hash_files(checkpoint)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["notes.txt", "model_index.json"])
def test_refuses_a_directory_with_other_content(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(FileExistsError, match="is not empty and was not written by this command"):
        write_checkpoint(tmp_path)
    assert (tmp_path / name).read_text() == "{}"


def test_refuses_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("text")
    with pytest.raises(FileExistsError, match="is a file"):
        write_checkpoint(path)
    assert path.read_text() == "text"


def test_refuses_an_unknown_size(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="size='huge' is not allowed: one of tiny, small"):
        write_checkpoint(tmp_path / "x", size="huge")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1])
def test_refuses_a_seed_out_of_range(tmp_path: Path, seed: int) -> None:
    with pytest.raises(ValueError, match=f"seed={seed} is not allowed: a whole number from 0 to"):
        write_checkpoint(tmp_path / "x", seed=seed)


def test_failed_write_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny", seed=0)
    before = hash_files(path)
    with file_size_limit(2**20), pytest.raises(OSError, match="cannot write the weights"):
        write_checkpoint(path, seed=1)
    assert hash_files(path) == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("folder", ["tokenizer", "processor"])
def test_template_prefixes_have_qwen_image_lengths(checkpoint: Path, folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / folder)
    assert isinstance(tokenizer, Qwen2Tokenizer)
    for template, num_tokens in ((TEXT_TO_IMAGE, 34), (EDIT, 64)):
        whole = tokenizer(template.apply("a cat")).input_ids
        prefix = tokenizer(template.prefix).input_ids
        assert len(prefix) == num_tokens
        assert whole[:num_tokens] == prefix


def test_everyday_prompt_has_one_token_a_word(tokenizer: Qwen2Tokenizer) -> None:
    assert len(tokenizer("a photo of a red circle").input_ids) == 6


@given(st.text(st.characters(exclude_categories=["Cs", "Cn"])))
def test_tokenizer_round_trip_is_lossless(tokenizer: Qwen2Tokenizer, text: str) -> None:
    # As in Qwen, a text is brought to its composed form first; nothing else may change.
    composed = unicodedata.normalize("NFC", text)
    assert tokenizer.decode(tokenizer(text).input_ids) == composed


def test_chat_template_places_text_and_image(tokenizer: Qwen2Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is it?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_text_encoder_carries_words_to_later_tokens(pipeline: QwenImagePipeline) -> None:
    with torch.no_grad():
        red, _ = pipeline.encode_prompt("a red circle")  # [1, T, D]: a, red, circle, end of turn
        blue, _ = pipeline.encode_prompt("a blue circle")
    assert torch.equal(red[:, 0], blue[:, 0])
    assert (red[:, 2:] - blue[:, 2:]).abs().mean() > 0.1


def test_text_encoder_sees_images(checkpoint: Path, tokenizer: Qwen2Tokenizer) -> None:
    """The processor's patches fit the vision tower, and another image gives other states."""
    processor = AutoImageProcessor.from_pretrained(checkpoint / "processor")
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint / "text_encoder").eval()
    assert model.config.text_config.eos_token_id == tokenizer.eos_token_id

    def encode(colour: str) -> torch.Tensor:
        images = processor(images=[Image.new("RGB", (112, 56), colour)], return_tensors="pt")
        num_image_tokens = int(images["image_grid_thw"].prod()) // processor.merge_size**2
        assert num_image_tokens == 8  # 112 x 56 pixels, 28 x 28 a token
        text = EDIT.apply("a cat").replace("<|image_pad|>", "<|image_pad|>" * num_image_tokens)
        tokens = tokenizer(text, return_tensors="pt")
        is_image = (tokens.input_ids == model.config.image_token_id).int()
        with torch.no_grad():
            output = model.model(**tokens, **images, mm_token_type_ids=is_image)
        states: torch.Tensor = output.last_hidden_state  # [1, T, D]
        return states

    red, blue = encode("red"), encode("blue")
    assert red.isfinite().all()
    assert torch.equal(red[:, :64], blue[:, :64])
    assert (red[:, 64:] - blue[:, 64:]).abs().mean() > 0.1
