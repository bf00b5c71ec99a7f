"""Decoding of single pictures with Qwen-Image's video VAE.

The VAE's convolutions are causal in time: a picture is a video of one frame, which the stock
decoder pads with two frames of zeros before every 3-D convolution. Two thirds of the work then
multiplies zeros. Here each such convolution is replaced by the 2-D one that is left of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from torch import Tensor, nn

from vllm_omni.diffusion.isolation import is_out_of_memory

logger = logging.getLogger(__name__)

_MIN_TILE = 32  # latent positions, 256 pixels


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


def _decode(vae: AutoencoderKLQwenImage, latents: Tensor) -> Tensor:
    frames: Tensor = vae.decoder(vae.post_quant_conv(latents))
    return frames[:, :, 0]


class PictureDecoder:
    """Makes pictures of latents with a VAE that it makes one for pictures.

    Args:
        tile_size: side in pixels of the tiles of pictures that are larger; 0: always in one piece.
        backend: what compiles the decoder, for shapes that were warmed up; empty: nothing does.
    """

    def __init__(
        self,
        vae: AutoencoderKLQwenImage,
        tile_size: int = 0,
        backend: str | Callable[..., Any] = "",
    ) -> None:
        self.vae = vae
        keep_first_frame_only(vae)
        device = next(vae.decoder.parameters()).device
        if device.type == "cuda":  # what its convolutions compute in: nothing is turned around
            vae.decoder.to(memory_format=torch.channels_last)
        # Here, because a copy from the host waits for the stream: a decode would for the last one.
        self._mean, self._std = (
            torch.tensor(values, device=device).view(1, -1, 1, 1, 1).to(vae.dtype)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        self.tile = tile_size // vae.spatial_compression_ratio  # latent positions
        self._compiled = torch.compile(_decode, dynamic=True, backend=backend) if backend else None
        self._warm_shapes: set[torch.Size] = set()

    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents [batch, channels, 1, h, w] to pictures [batch, 3, H, W], -1 to 1.

        A picture that does not fit into the memory alone is decoded in smaller and smaller tiles:
        after all its steps, slightly other pixels are better than none.
        """
        latents = latents.to(self.vae.dtype) * self._std + self._mean
        tile = self.tile or max(latents.shape[-2:])
        while True:
            try:
                return self._decode_tiles(latents, tile).clamp(-1.0, 1.0)
            except Exception as error:
                is_last = latents.shape[0] > 1 or tile <= _MIN_TILE
                if is_last or not is_out_of_memory(error):
                    raise
            if latents.device.type == "cuda":
                torch.cuda.empty_cache()
            tile = max(_MIN_TILE, tile // 2 // _MIN_TILE * _MIN_TILE)
            logger.warning("no memory to decode %s: in tiles of %d", latents.shape, tile)

    def warm_up(self, latents: Tensor) -> None:
        """Compile for the shape of some latents. Only here: no request waits for a compiler.

        If that fails, decodes go on without.
        """
        if self._compiled is None:
            return
        start = time.perf_counter()
        shape = latents[..., : self.tile or None, : self.tile or None].shape
        try:
            self._compiled(self.vae, latents.new_zeros(shape, dtype=self.vae.dtype))
        except Exception:  # whatever the compiler stumbles over
            logger.exception("the VAE does not compile for %s: it is decoded without", shape)
            return
        self._warm_shapes.add(shape)
        logger.info("compiled the VAE for %s in %.1f s", shape, time.perf_counter() - start)

    def _decode_piece(self, latents: Tensor) -> Tensor:
        if self._compiled is not None and latents.shape in self._warm_shapes:
            decoded: Tensor = self._compiled(self.vae, latents)
            return decoded
        return _decode(self.vae, latents)

    def _decode_tiles(self, latents: Tensor, size: int) -> Tensor:
        """Tiles that overlap by a quarter and fade into each other, as diffusers' do.

        Args:
            size: of a tile's sides, in latent positions; what is no larger is one piece.
        """
        height, width = latents.shape[-2:]
        if max(height, width) <= size:
            return self._decode_piece(latents)
        stride = size * 3 // 4
        ratio = self.vae.spatial_compression_ratio
        overlap, kept = (size - stride) * ratio, stride * ratio
        strips: list[Tensor] = []
        above: list[Tensor] = []
        for top in range(0, height, stride):
            row: list[Tensor] = []
            for left in range(0, width, stride):
                piece = latents[..., top : top + size, left : left + size]
                # As in `warm_up`: for other strides it would be compiled again.
                tile = self._decode_piece(piece.contiguous())
                if above:
                    tile = _fade(above[len(row)], tile, overlap, dim=2)
                if row:
                    tile = _fade(row[-1], tile, overlap, dim=3)
                row.append(tile)
            strips.append(torch.cat([tile[:, :, :kept, :kept] for tile in row], dim=3))
            above = row
        return torch.cat(strips, dim=2)[:, :, : height * ratio, : width * ratio]


def _fade(before: Tensor, tile: Tensor, overlap: int, dim: int) -> Tensor:
    """A tile [batch, 3, H, W] whose first pixels along `dim` come out of the last of another."""
    overlap = min(before.shape[dim], tile.shape[dim], overlap)
    shape = [1, 1, 1, 1]
    shape[dim] = overlap
    share = (torch.arange(overlap, device=tile.device, dtype=torch.float32) / overlap).view(shape)
    old = before.narrow(dim, before.shape[dim] - overlap, overlap)
    new = tile.narrow(dim, 0, overlap)
    faded = (old * (1 - share) + new * share).to(tile.dtype)
    return torch.cat((faded, tile.narrow(dim, overlap, tile.shape[dim] - overlap)), dim)
