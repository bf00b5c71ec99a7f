"""Pictures are decoded to the pixels of the stock VAE, with and without its work on zeros."""

import copy
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from torch import Tensor

from vllm_omni.models.qwen_image.vae import PictureDecoder

pytestmark = pytest.mark.usefixtures("no_garbage")

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
def decoder(vae: AutoencoderKLQwenImage) -> PictureDecoder:
    return PictureDecoder(copy.deepcopy(vae))


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
    vae: AutoencoderKLQwenImage, decoder: PictureDecoder, batch: int, height: int, width: int
) -> None:
    latents = create_latents(batch, height, width)
    expected = decode_stock(vae, latents)
    assert expected.shape == (batch, 3, 8 * height, 8 * width)
    assert expected.std() > 0.05  # not a picture of nothing
    torch.testing.assert_close(decoder.decode(latents), expected, atol=1e-5, rtol=0)


def test_pixels_are_clamped() -> None:
    vae = create_vae()
    vae.decoder.conv_out.weight *= 10
    latents = create_latents(1, 4, 4)
    expected = decode_stock(vae, latents)
    decoded = PictureDecoder(vae).decode(latents)
    assert (decoded.min().item(), decoded.max().item()) == (-1.0, 1.0)
    torch.testing.assert_close(decoded, expected, atol=1e-4, rtol=0)


def test_picture_does_not_depend_on_its_batch(decoder: PictureDecoder) -> None:
    latents = create_latents(4, 6, 4)
    together = decoder.decode(latents)
    alone = torch.cat([decoder.decode(one) for one in latents.split(1)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_only_the_decoder_changes(vae: AutoencoderKLQwenImage, decoder: PictureDecoder) -> None:
    modules = decoder.vae.decoder.modules()
    assert not any(isinstance(module, QwenImageCausalConv3d) for module in modules)
    video = torch.rand(1, 3, 5, 16, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        decoder.vae.encode(video).latent_dist.mean, vae.encode(video).latent_dist.mean
    )


def test_weights_are_copied_not_shared(
    vae: AutoencoderKLQwenImage, decoder: PictureDecoder
) -> None:
    """The 3-D weights must be free to go: two thirds of them are never used."""
    weight = decoder.vae.decoder.conv_in.weight
    assert weight.untyped_storage().nbytes() == weight.nbytes
    assert torch.equal(weight, vae.decoder.conv_in.weight[:, :, -1])


def test_bfloat16_latents_and_weights() -> None:
    vae = create_vae(torch.bfloat16)
    latents = create_latents(2, 4, 6)
    expected = decode_stock(vae, latents).float()
    decoded = PictureDecoder(vae).decode(latents)
    assert decoded.dtype == torch.bfloat16
    torch.testing.assert_close(decoded.float(), expected, atol=0.05, rtol=0)


# --- tiles, and compiled code for shapes that were warmed up ---


@pytest.mark.parametrize(
    ("height", "width"),
    [
        (16, 16),  # two by two tiles
        (9, 20),
        (40, 8),  # one column
        (13, 14),  # the last tiles are narrower than what fades
        (8, 8),  # fits into one
    ],
)
def test_tiles_equal_diffusers_tiles(height: int, width: int) -> None:
    stock, vae = create_vae(), create_vae()
    stock.enable_tiling(64, 64, 48, 48)
    latents = create_latents(2, height, width)
    expected = decode_stock(stock, latents).clamp(-1, 1)
    decoded = PictureDecoder(vae, tile_size=64).decode(latents)
    torch.testing.assert_close(decoded, expected, atol=1e-5, rtol=0)


def test_tiles_differ_from_one_piece_by_what_they_do_not_see() -> None:
    """The middle block's attention sees all of a piece, so every pixel may change a little."""
    latents = create_latents(1, 24, 24)
    whole = PictureDecoder(create_vae()).decode(latents)
    tiled = PictureDecoder(create_vae(), tile_size=128).decode(latents)
    assert tiled.shape == whole.shape
    difference = (tiled - whole).abs()
    assert difference.mean() < 0.02  # random weights, pictures with a deviation of 0.1 and more
    assert difference.max() < 0.5


def test_what_fits_into_a_tile_is_decoded_in_one_piece() -> None:
    latents = create_latents(2, 6, 8)
    whole = PictureDecoder(create_vae()).decode(latents)
    assert torch.equal(PictureDecoder(create_vae(), tile_size=64).decode(latents), whole)


def test_a_picture_that_does_not_fit_is_decoded_in_tiles() -> None:
    vae = create_vae()
    decoder = PictureDecoder(vae)
    tried: list[int] = []

    def forbid_large(_: Any, arguments: tuple[Tensor, ...]) -> None:
        tried.append(arguments[0].shape[-1])
        if arguments[0].shape[-1] > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")

    latents = create_latents(1, 8, 96)
    expected = PictureDecoder(create_vae(), tile_size=256).decode(latents)
    vae.decoder.register_forward_pre_hook(forbid_large)
    assert torch.equal(decoder.decode(latents), expected)
    assert tried == [96, 32, 32, 32, 24]  # half of it would be 48, which is no multiple of 32
    with pytest.raises(torch.OutOfMemoryError):  # first in smaller batches, by whoever called
        decoder.decode(create_latents(2, 8, 96))


def test_only_shapes_that_were_warmed_up_are_compiled() -> None:
    compiled_shapes: list[tuple[int, ...]] = []

    def note_compiles(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compiled_shapes.append(tuple(int(s) for s in inputs[-1].shape) if inputs else ())
        return graph.forward

    vae = create_vae()
    plain = PictureDecoder(create_vae())
    with torch.no_grad():
        decoder = PictureDecoder(vae, backend=note_compiles)
        decoder.decode(create_latents(1, 4, 4))
        assert compiled_shapes == []
        decoder.warm_up(create_latents(1, 4, 6))
        num_compiled = len(compiled_shapes)
        assert num_compiled > 0
        for batch, height, width in [(1, 4, 6), (1, 4, 4), (2, 4, 6), (1, 6, 4)]:
            latents = create_latents(batch, height, width)
            expected = plain.decode(latents)
            torch.testing.assert_close(decoder.decode(latents), expected, atol=1e-5, rtol=0)
        assert len(compiled_shapes) == num_compiled


def test_tiles_are_compiled_once() -> None:
    num_compiled = 0

    def count_compiles(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        nonlocal num_compiled
        num_compiled += 1
        return graph.forward

    latents = create_latents(1, 9, 12)
    with torch.no_grad():
        decoder = PictureDecoder(create_vae(), tile_size=64, backend=count_compiles)
        decoder.warm_up(latents)
        num_warm = num_compiled
        assert num_warm > 0
        decoded = decoder.decode(latents)
    assert num_compiled == num_warm
    expected = PictureDecoder(create_vae(), tile_size=64).decode(latents)
    torch.testing.assert_close(decoded, expected, atol=1e-5, rtol=0)


def test_a_vae_that_does_not_compile_decodes_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(_: torch.fx.GraphModule, __: list[Any]) -> Any:
        raise RuntimeError("there is no compiler")

    latents = create_latents(1, 4, 6)
    decoder = PictureDecoder(create_vae(), backend=refuse)
    with torch.no_grad():
        decoder.warm_up(latents)
    assert "there is no compiler" in caplog.text
    assert torch.equal(decoder.decode(latents), PictureDecoder(create_vae()).decode(latents))
