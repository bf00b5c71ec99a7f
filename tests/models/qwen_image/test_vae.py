"""Pictures are decoded to the pixels of the stock VAE, with and without its work on zeros."""

import copy

import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from torch import Tensor

from vllm_omni.models.qwen_image.vae import decode_images, keep_first_frame_only

LATENTS_MEAN = [0.3 * channel - 1 for channel in range(8)]
LATENTS_STD = [0.5 + 0.25 * channel for channel in range(8)]


def create_vae(dtype: torch.dtype = torch.float32) -> AutoencoderKLQwenImage:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae = AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=8,
            dim_mult=[1, 2, 2, 2],
            num_res_blocks=1,
            latents_mean=LATENTS_MEAN,
            latents_std=LATENTS_STD,
        )
    return vae.requires_grad_(False).eval().to(dtype)


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLQwenImage:
    return create_vae()


@pytest.fixture(scope="module")
def single_frame_vae(vae: AutoencoderKLQwenImage) -> AutoencoderKLQwenImage:
    single_frame_vae = copy.deepcopy(vae)
    keep_first_frame_only(single_frame_vae)
    return single_frame_vae


def create_latents(batch: int, height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(height * width + batch)
    return torch.randn(batch, 8, 1, height, width, generator=generator)


def decode_stock(vae: AutoencoderKLQwenImage, latents: Tensor) -> Tensor:
    """The lines of `QwenImagePipeline.__call__`."""
    latents = latents.to(vae.dtype)
    latents_mean = torch.tensor(LATENTS_MEAN).view(1, 8, 1, 1, 1).to(latents.dtype)
    latents_std = 1.0 / torch.tensor(LATENTS_STD).view(1, 8, 1, 1, 1).to(latents.dtype)
    latents = latents / latents_std + latents_mean
    images: Tensor = vae.decode(latents, return_dict=False)[0][:, :, 0]
    return images


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("height", "width"), [(2, 2), (4, 10), (8, 6), (12, 12)])
def test_decode_equals_stock(
    vae: AutoencoderKLQwenImage,
    single_frame_vae: AutoencoderKLQwenImage,
    batch: int,
    height: int,
    width: int,
) -> None:
    latents = create_latents(batch, height, width)
    expected = decode_stock(vae, latents)
    assert expected.shape == (batch, 3, 8 * height, 8 * width)
    assert expected.std() > 0.05  # not a picture of nothing
    for decoder in (vae, single_frame_vae):
        decoded = decode_images(decoder, latents)
        torch.testing.assert_close(decoded, expected, atol=1e-5, rtol=0)


def test_pixels_are_clamped() -> None:
    vae = create_vae()
    vae.decoder.conv_out.weight *= 10
    latents = create_latents(1, 4, 4)
    decoded = decode_images(vae, latents)
    assert (decoded.min().item(), decoded.max().item()) == (-1.0, 1.0)
    torch.testing.assert_close(decoded, decode_stock(vae, latents), atol=1e-4, rtol=0)


def test_picture_does_not_depend_on_its_batch(single_frame_vae: AutoencoderKLQwenImage) -> None:
    latents = create_latents(4, 6, 4)
    together = decode_images(single_frame_vae, latents)
    alone = torch.cat([decode_images(single_frame_vae, one) for one in latents.split(1)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_only_the_decoder_changes(
    vae: AutoencoderKLQwenImage, single_frame_vae: AutoencoderKLQwenImage
) -> None:
    assert not any(
        isinstance(module, QwenImageCausalConv3d) for module in single_frame_vae.decoder.modules()
    )
    video = torch.rand(1, 3, 5, 16, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        single_frame_vae.encode(video).latent_dist.mean, vae.encode(video).latent_dist.mean
    )


def test_weights_are_copied_not_shared(
    vae: AutoencoderKLQwenImage, single_frame_vae: AutoencoderKLQwenImage
) -> None:
    """The 3-D weights must be free to go: two thirds of them are never used."""
    weight = single_frame_vae.decoder.conv_in.weight
    assert weight.untyped_storage().nbytes() == weight.nbytes
    assert torch.equal(weight, vae.decoder.conv_in.weight[:, :, -1])


def test_bfloat16_latents_and_weights() -> None:
    vae = create_vae(torch.bfloat16)
    latents = create_latents(2, 4, 6)
    expected = decode_stock(vae, latents).float()
    keep_first_frame_only(vae)
    decoded = decode_images(vae, latents)
    assert decoded.dtype == torch.bfloat16
    torch.testing.assert_close(decoded.float(), expected, atol=0.05, rtol=0)
