"""Decoding of single pictures with Qwen-Image's video VAE.

The VAE's convolutions are causal in time: a picture is a video of one frame, which the stock
decoder pads with two frames of zeros before every 3-D convolution. Two thirds of the work then
multiplies zeros. Here each such convolution is replaced by the 2-D one that is left of it.
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from torch import Tensor, nn


class SingleFrameConv(nn.Module):
    """What a causal 3-D convolution does to the first frame of a video."""

    def __init__(self, conv: nn.Conv3d) -> None:
        super().__init__()
        # Earlier frames do not exist, so only the kernel's last slice in time counts.
        self.weight = nn.Parameter(conv.weight[:, :, -1].clone(), requires_grad=False)
        self.bias = conv.bias
        self.padding = (conv.kernel_size[1] // 2, conv.kernel_size[2] // 2)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, 1, h, w] to the same with other channels."""
        convolved = torch.conv2d(x.squeeze(2), self.weight, self.bias, padding=self.padding)
        return convolved.unsqueeze(2)


def keep_first_frame_only(vae: AutoencoderKLQwenImage) -> None:
    """Make the decoder of a loaded VAE one for pictures. It decodes no videos any more."""
    for module in (vae, *vae.decoder.modules()):
        for name, child in module.named_children():
            is_decoder_conv = module is not vae or name == "post_quant_conv"
            if is_decoder_conv and isinstance(child, QwenImageCausalConv3d):
                setattr(module, name, SingleFrameConv(child))


def decode_images(vae: AutoencoderKLQwenImage, latents: Tensor) -> Tensor:
    """Normalised latents [batch, channels, 1, h, w] to pictures [batch, 3, H, W] from -1 to 1."""
    mean, std = (
        torch.tensor(values, device=latents.device).view(1, -1, 1, 1, 1).to(vae.dtype)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    frames: Tensor = vae.decoder(vae.post_quant_conv(latents.to(vae.dtype) * std + mean))
    return frames[:, :, 0].clamp(-1.0, 1.0)
