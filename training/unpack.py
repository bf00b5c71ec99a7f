"""The reverse of export: `python -m training.unpack vllm_omni/demo out/training`.

What it writes is what `train_dit --start … --resume` goes on from.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from transformers import Qwen2_5_VLForConditionalGeneration

from training import fast
from training.loop import save_weights
from vllm_omni.models.progress import progress_bars_off


def unpack(source: Path, target: Path) -> None:
    """The parts of a checkpoint as training saves them."""
    with progress_bars_off():
        vae = AutoencoderKLQwenImage.from_pretrained(source / "vae")
        text_encoder = Qwen2_5_VLForConditionalGeneration.from_pretrained(source / "text_encoder")
        transformer = QwenImageTransformer2DModel.from_pretrained(source / "transformer")
    statistics = {name: torch.tensor(vae.config[name]) for name in ("latents_mean", "latents_std")}
    fast.flatten_vae(vae)
    kernels = {k: v for k, v in vae.state_dict().items() if "time_conv" not in k}
    save_weights({**kernels, **statistics}, target, "vae")
    save_weights(text_encoder.state_dict(), target, "text_encoder")
    save_weights(transformer.state_dict(), target, "transformer")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="folder of the checkpoint")
    parser.add_argument("target", type=Path, help="folder for the parts")
    args = parser.parse_args()
    unpack(args.source, args.target)


if __name__ == "__main__":
    main()
