"""Writes complete Qwen-Image checkpoints with random weights, to try things out and for tests."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from safetensors import SafetensorError
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from vllm_omni.models.progress import progress_bars_off
from vllm_omni.models.qwen_image.prompt import EDIT, TEXT_TO_IMAGE


@dataclass(frozen=True)
class CheckpointSize:
    """What differs between a small and a large checkpoint; everything else is as in Qwen-Image."""

    # Transformer: blocks, heads, channels a head, and how RoPE shares these among frame, y and x.
    num_layers: int
    num_attention_heads: int
    attention_head_dim: int
    axes_dims_rope: tuple[int, int, int]
    # Text encoder: channels, and how RoPE shares half a head among time, y and x.
    # A head has a quarter of the channels, at least 32: vLLM's attention on CPU has no smaller one.
    text_hidden_size: int
    mrope_section: tuple[int, int, int]
    # VAE: channels of the outermost level, and residual blocks a level.
    vae_base_dim: int
    vae_num_res_blocks: int


CHECKPOINT_SIZES: dict[str, CheckpointSize] = {
    "tiny": CheckpointSize(
        num_layers=4,
        num_attention_heads=4,
        attention_head_dim=32,
        axes_dims_rope=(8, 12, 12),
        text_hidden_size=128,
        mrope_section=(4, 6, 6),
        vae_base_dim=16,
        vae_num_res_blocks=1,
    ),
    "small": CheckpointSize(
        num_layers=8,
        num_attention_heads=8,
        attention_head_dim=64,
        axes_dims_rope=(8, 28, 28),
        text_hidden_size=256,
        mrope_section=(8, 12, 12),
        vae_base_dim=32,
        vae_num_res_blocks=2,
    ),
}

# torch takes seeds of 64 bits.
MAX_SEED = 2**64 - 1

# The model's default request parameters, as vLLM reads them from the same file.
GENERATION_CONFIG = {"height": 256, "width": 256, "num_inference_steps": 20}

# Key in model_index.json that tells our checkpoints from others. The leading underscore makes
# diffusers skip it.
MARKER = "_vllm_omni_random_weights"

SPECIAL_TOKENS = (
    "<|im_start|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

# Words of everyday prompts, one token each, so that a prompt has about as many tokens as words.
_PROMPT_WORDS = (
    "a photo of an old house and a tree, a painting of a cat on the table, a dog with a hat in "
    "the garden, a small red circle, a large blue square, a green triangle, a yellow star, "
    "black, white, orange, purple, pink, brown, left, right, top, bottom, center"
)

# Qwen2.5-VL's turns; a message is a string or a list of text and image parts.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'text' %}{{ content['text'] }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_PATCH_SIZE = 14  # pixels
_MERGE_SIZE = 2  # patches a side that make one token
_PIXELS_PER_TOKEN = (_PATCH_SIZE * _MERGE_SIZE) ** 2

IMAGE_PROCESSOR_CONFIG = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": _PATCH_SIZE,
    "temporal_patch_size": 2,
    "merge_size": _MERGE_SIZE,
    "min_pixels": 4 * _PIXELS_PER_TOKEN,
    # Qwen2.5-VL allows 16384 tokens an image; the text encoder here has 4096 positions.
    "max_pixels": 512 * _PIXELS_PER_TOKEN,
}


def write_checkpoint(path: str | Path, size: str = "tiny", seed: int = 0) -> Path:
    """Write a random-weight checkpoint in diffusers layout and return its absolute path.

    The same size and seed give the same bytes. A checkpoint that this function wrote before is
    replaced; a directory with anything else in it raises `FileExistsError`.
    """
    if size not in CHECKPOINT_SIZES:
        raise ValueError(f"size={size!r} is not allowed: one of {', '.join(CHECKPOINT_SIZES)}")
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed={seed} is not allowed: a whole number from 0 to {MAX_SEED}")
    target = Path(path).resolve()
    _check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)

    pipeline = _build_pipeline(CHECKPOINT_SIZES[size], seed)
    # The checkpoint appears in one rename, so an interrupted run leaves no half of one.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as staging:
        fresh = Path(staging, "fresh")
        _save(pipeline, fresh, marker={"size": size, "seed": seed})
        if target.exists():
            target.rename(Path(staging, "replaced"))
        fresh.rename(target)
    return target


def _check_replaceable(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"{target} is a file: the checkpoint needs a directory of its own")
    index = target / "model_index.json"
    is_ours = index.is_file() and MARKER.encode() in index.read_bytes()
    if not is_ours and any(target.iterdir()):
        raise FileExistsError(
            f"{target} is not empty and was not written by this command: "
            "name a new or an empty directory, or an earlier random-weight checkpoint"
        )


def _build_pipeline(size: CheckpointSize, seed: int) -> Any:
    """All parts of the pipeline; the caller's random numbers go on as if nothing had happened."""
    tokenizer = _train_tokenizer()
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would reseed the GPUs as well.
        torch.default_generator.manual_seed(seed)
        return QwenImagePipeline(
            transformer=_with_he_gain(_build_transformer(size)),
            vae=_with_he_gain(_build_vae(size)),
            text_encoder=_build_text_encoder(size, tokenizer),
            tokenizer=tokenizer,
            scheduler=build_scheduler(),
        )


def _train_tokenizer() -> Any:
    """Qwen2's tokenizer with a vocabulary of whole words, and bytes for everything else."""
    untrained = Qwen2Tokenizer(
        eos_token="<|im_end|>", model_max_length=131072, padding_side="right"
    )
    # Special tokens cut the text before words are looked for, so training sees the same pieces.
    pieces = re.split(r"<\|\w+\|>", TEXT_TO_IMAGE.text + EDIT.text)
    tokenizer = untrained.train_new_from_iterator(
        [*pieces, _PROMPT_WORDS],
        vocab_size=4096,  # never reached: the words run out first
        min_frequency=1,
        new_special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    for template in (TEXT_TO_IMAGE, EDIT):
        num_tokens = len(tokenizer(template.prefix).input_ids)
        if num_tokens != template.num_prefix_tokens:
            raise RuntimeError(
                f"the trained tokenizer splits a template prefix into {num_tokens} tokens, "
                f"Qwen-Image needs {template.num_prefix_tokens}: {template.prefix!r}"
            )
    return tokenizer


def _build_transformer(size: CheckpointSize) -> Any:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=size.num_layers,
        attention_head_dim=size.attention_head_dim,
        num_attention_heads=size.num_attention_heads,
        joint_attention_dim=size.text_hidden_size,
        guidance_embeds=False,
        axes_dims_rope=size.axes_dims_rope,
    )


def _build_vae(size: CheckpointSize) -> Any:
    return AutoencoderKLQwenImage(
        base_dim=size.vae_base_dim,
        z_dim=16,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=size.vae_num_res_blocks,
    )


def _with_he_gain(model: Any) -> Any:
    """Scale torch's default weights, of variance 1 / (3 fan_in), to He's 2 / fan_in.

    The default fades a signal layer by layer: pictures would be nearly grey, and another prompt
    would change them by less than one of 255 levels, so that no test could see a mixed-up prompt.
    """
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d)):
            module.weight.data.mul_(6**0.5)
    return model


def _build_text_encoder(size: CheckpointSize, tokenizer: Any) -> Any:
    shared = {
        "hidden_size": size.text_hidden_size,
        "intermediate_size": 2 * size.text_hidden_size,
        # The usual 0.02 suits thousands of channels; with this few, the layers would add little to
        # the embeddings, and a token would know little of the tokens before it.
        "initializer_range": size.text_hidden_size**-0.5,
    }
    text_config = {
        **shared,
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1_000_000.0,
            "mrope_section": list(size.mrope_section),
        },
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision_config = {
        **shared,
        "depth": 2,
        "num_heads": 4,
        "out_hidden_size": size.text_hidden_size,
        "patch_size": _PATCH_SIZE,
        "spatial_merge_size": _MERGE_SIZE,
        "window_size": 112,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text_config,
        vision_config=vision_config,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def build_scheduler() -> Any:
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=1.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )


def _save(pipeline: Any, path: Path, marker: dict[str, Any]) -> None:
    try:
        with progress_bars_off():
            pipeline.save_pretrained(path)
    except SafetensorError as error:  # a full disk, for one, is not an OSError there
        raise OSError(f"cannot write the weights: {error}") from error
    index = json.loads((path / "model_index.json").read_text())
    write_json(path / "model_index.json", {**index, MARKER: marker})
    write_json(path / "generation_config.json", GENERATION_CONFIG)
    # The AR stage reads the text encoder's tokenizer and image settings from one folder.
    pipeline.tokenizer.save_pretrained(path / "processor")
    write_json(path / "processor" / "preprocessor_config.json", IMAGE_PROCESSOR_CONFIG)
    # safetensors lets only the owner read its files; give them the mode of all the others.
    for weights in path.rglob("*.safetensors"):
        weights.chmod((path / "model_index.json").stat().st_mode)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
