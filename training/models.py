"""The parts of the demo checkpoint, untrained: Qwen-Image's classes in small sizes."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from training.captions import make_caption
from training.world import Said, sample_scene
from vllm_omni.models.qwen_image import checkpoint
from vllm_omni.models.qwen_image.prompt import EDIT, REWRITE_INSTRUCTION, TEXT_TO_IMAGE

TEXT_HIDDEN = 256
VISION_HIDDEN = 128
VISION_DEPTH = 3
PATCH = 14  # pixels a side of a vision patch
MERGE = 2  # patches a side that make one token

QUESTIONS = (
    "Describe the picture.",
    "Describe the image.",
    "What is in the picture?",
    "What is in this image?",
    "What do you see?",
    "What is this?",
)
"""What the captioner is asked; the first is the one to use."""


def build_tokenizer() -> Any:
    """Qwen2's tokenizer: every word of the demo world is one token, bytes spell all else."""
    untrained = Qwen2Tokenizer(
        eos_token="<|im_end|>", model_max_length=131072, padding_side="right"
    )
    rng = Random(0)
    captions = []
    for _ in range(4000):
        scene = sample_scene(rng)
        captions.append(make_caption(rng, scene, Said.sample(rng, scene)))
    roles = "system\nuser\nassistant\n"
    texts = [TEXT_TO_IMAGE.text, EDIT.text, REWRITE_INSTRUCTION, roles, *QUESTIONS, *captions]
    pieces = [piece for text in texts for piece in re.split(r"<\|\w+\|>", text)]
    tokenizer = untrained.train_new_from_iterator(
        pieces,
        vocab_size=4096,  # never reached: the words run out first
        min_frequency=1,
        new_special_tokens=list(checkpoint.SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.chat_template = checkpoint.CHAT_TEMPLATE
    for template in (TEXT_TO_IMAGE, EDIT):
        assert len(tokenizer(template.prefix).input_ids) == template.num_prefix_tokens
    return tokenizer


def build_vae(seed: int = 0, **config: Any) -> Any:
    torch.manual_seed(seed)
    return AutoencoderKLQwenImage(
        base_dim=24, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1, **config
    )


def build_transformer(seed: int = 0) -> Any:
    """Starts as the identity of its blocks: modulation and output are zero."""
    torch.manual_seed(seed)
    model = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=6,
        attention_head_dim=64,
        num_attention_heads=4,
        joint_attention_dim=TEXT_HIDDEN,
        guidance_embeds=False,
        axes_dims_rope=(8, 28, 28),
    )
    zeros = [model.proj_out, model.norm_out.linear]
    for block in model.transformer_blocks:
        zeros += [block.img_mod[1], block.txt_mod[1]]
    for linear in zeros:
        torch.nn.init.zeros_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
    return model


def build_text_encoder(tokenizer: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    text_config = {
        "hidden_size": TEXT_HIDDEN,
        "intermediate_size": 2 * TEXT_HIDDEN,
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1_000_000.0,
            "mrope_section": [8, 12, 12],
        },
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision_config = {
        "hidden_size": VISION_HIDDEN,
        "intermediate_size": 2 * VISION_HIDDEN,
        "depth": VISION_DEPTH,
        "num_heads": 4,
        "out_hidden_size": TEXT_HIDDEN,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "window_size": 112,
        # Pictures have a few hundred patches: every block sees all of them.
        "fullatt_block_indexes": list(range(VISION_DEPTH)),
    }
    config = Qwen2_5_VLConfig(
        text_config=text_config,
        vision_config=vision_config,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    # Qwen's start of 0.02 suits thousands of channels.
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            std = (
                0.02 if "embed_tokens" in name or "lm_head" in name else parameter.shape[1] ** -0.5
            )
            torch.nn.init.normal_(parameter, std=std)
    return model
