"""Writes the trained parts as one checkpoint: `python -m training.export out/training out/demo`.

The layout is that of `vllm_omni.models.qwen_image.checkpoint`: diffusers' pipeline in bfloat16,
generation_config.json, and a processor folder for the AR stage.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImagePipeline

from training import fast, models
from training.loop import load_weights
from vllm_omni.models.progress import progress_bars_off
from vllm_omni.models.qwen_image import checkpoint


def build_pipeline(folder: Path) -> Any:
    """The stock pipeline with the trained weights, float32."""
    weights = load_weights(folder, "vae")
    mean, std = (weights.pop(f"latents_{name}").tolist() for name in ("mean", "std"))
    vae = models.build_vae(latents_mean=mean, latents_std=std)
    state = vae.state_dict()
    unused = {k: torch.zeros_like(v) for k, v in state.items() if "time_conv" in k}
    vae.load_state_dict(fast.unflatten_state({**weights, **unused}, state))
    tokenizer = models.build_tokenizer()
    text_encoder = models.build_text_encoder(tokenizer)
    text_encoder.load_state_dict(load_weights(folder, "text_encoder"))
    transformer = models.build_transformer()
    transformer.load_state_dict(load_weights(folder, "transformer"))
    return QwenImagePipeline(
        transformer=transformer,
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        scheduler=checkpoint.build_scheduler(),
    )


CACHE_DEFAULTS = {
    "first_block": {"threshold": 0.22},
    "tea": {"threshold": 0.2, "warmup_steps": 3},
    "taylor": {"threshold": 0.2, "extrapolation": 0.5},
}
"""What requests have that only name a step cache; from benchmarks/results/cache_quality.md."""


def export(source: Path, target: Path) -> None:
    """Replace `target` by the checkpoint; a file README.md in it is kept."""
    pipeline = build_pipeline(source).to(dtype=torch.bfloat16)
    readme = target / "README.md"
    kept = readme.read_text() if readme.is_file() else None
    shutil.rmtree(target, ignore_errors=True)
    with progress_bars_off():
        pipeline.save_pretrained(target)
    defaults = checkpoint.GENERATION_CONFIG | {"cache": CACHE_DEFAULTS}
    checkpoint.write_json(target / "generation_config.json", defaults)
    pipeline.tokenizer.save_pretrained(target / "processor")
    settings = checkpoint.IMAGE_PROCESSOR_CONFIG
    checkpoint.write_json(target / "processor" / "preprocessor_config.json", settings)
    for weights in target.rglob("*.safetensors"):
        weights.chmod(0o644)  # safetensors lets only the owner read its files
    if kept is not None:
        readme.write_text(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="folder with the trained parts")
    parser.add_argument("target", type=Path, help="folder of the checkpoint; it is replaced")
    args = parser.parse_args()
    export(args.source, args.target)
    size = sum(file.stat().st_size for file in args.target.rglob("*") if file.is_file())
    print(f"{args.target}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
