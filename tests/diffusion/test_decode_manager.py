"""Latents are decoded in batches of equal shape, and come back in order, as 8-bit pictures."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_omni.diffusion.decode_manager import (
    ParallelDecodeManager,
    shrink_latents,
    to_uint8,
)


@dataclass
class SmallDecoder:
    """A decoder that shows the first three channels of the latents, twice as large."""

    batch_shapes: list[tuple[int, ...]] = field(default_factory=list)

    def __call__(self, latents: Tensor) -> Tensor:
        self.batch_shapes.append(tuple(latents.shape))
        small = latents[:, :3, 0]
        return small.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)


def create_latents(height: int, width: int, level: int) -> Tensor:
    """[4, 1, h, w], decoded to a picture of one grey level from 0 to 255."""
    return torch.full((4, 1, height, width), level / 255 * 2 - 1)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), max_size=12),
    max_batch=st.integers(1, 4),
)
def test_pictures_come_in_the_order_of_the_latents(
    sizes: list[tuple[int, int]], max_batch: int
) -> None:
    decoder = SmallDecoder()
    manager = ParallelDecodeManager(decoder, max_batch)
    images = manager.batch_decode_latents(
        [create_latents(height, width, level) for level, (height, width) in enumerate(sizes)]
    )
    assert len(images) == len(sizes)
    for level, ((height, width), image) in enumerate(zip(sizes, images, strict=True)):
        assert torch.equal(image, torch.full((3, 2 * height, 2 * width), level, dtype=torch.uint8))
    assert all(shape[0] <= max_batch for shape in decoder.batch_shapes)
    num_full = sum(-(-sizes.count(size) // max_batch) for size in set(sizes))
    assert len(decoder.batch_shapes) == num_full  # no more calls than needed


def test_equal_shapes_share_a_decode() -> None:
    decoder = SmallDecoder()
    sizes = [(2, 2), (2, 4), (2, 2), (4, 2), (2, 2), (2, 2)]
    ParallelDecodeManager(decoder, max_batch=3).batch_decode_latents(
        [create_latents(height, width, 0) for height, width in sizes]
    )
    assert decoder.batch_shapes == [
        (3, 4, 1, 2, 2),
        (1, 4, 1, 2, 2),
        (1, 4, 1, 2, 4),
        (1, 4, 1, 4, 2),
    ]


def test_nothing_to_decode() -> None:
    decoder = SmallDecoder()
    assert ParallelDecodeManager(decoder).batch_decode_latents([]) == []
    assert decoder.batch_shapes == []


# --- previews ---


@pytest.mark.parametrize(
    ("size", "small"),
    [
        ((32, 32), (16, 16)),
        ((64, 48), (32, 24)),  # 512 x 384 pixels, the largest that are only halved
        ((10, 26), (5, 13)),  # 80 x 208 pixels
        ((66, 34), (32, 16)),
        ((96, 128), (24, 32)),
        ((130, 1000), (4, 32)),
        ((2, 2), (1, 1)),
        ((2, 1024), (1, 32)),
        ((1024, 2), (32, 1)),
        ((3, 1), (2, 1)),
    ],
)
def test_size_of_a_preview(size: tuple[int, int], small: tuple[int, int]) -> None:
    latents = torch.full((4, 1, *size), 0.5)
    latents[1] = -2.0
    expected = torch.full((4, 1, *small), 0.5)
    expected[1] = -2.0
    torch.testing.assert_close(shrink_latents(latents), expected)


@pytest.mark.parametrize(("side", "factor"), [(64, 2), (96, 3), (128, 4)])
def test_a_preview_is_the_average_of_what_it_covers(side: int, factor: int) -> None:
    latents = torch.randn(4, 1, side, side, generator=torch.Generator().manual_seed(0))
    size = side // factor
    blocks = latents.view(4, 1, size, factor, size, factor)
    torch.testing.assert_close(shrink_latents(latents), blocks.mean(dim=(3, 5)))


def test_nothing_is_left_out_of_a_preview_whose_sides_do_not_divide() -> None:
    latents = torch.arange(70.0).view(1, 1, 1, 70).expand(1, 1, 7, 70)
    [row, *others] = shrink_latents(latents)[0, 0]
    assert (row[0], row[-1]) == (1.0, 68.0)  # of 0 to 2 and 67 to 69
    assert torch.all(row[1:] > row[:-1])
    assert row.mean() == pytest.approx(34.5)
    assert all(torch.equal(other, row) for other in others)


def test_previews_of_equal_size_share_a_decode_and_keep_their_order() -> None:
    decoder = SmallDecoder()
    sizes = [(4, 4), (2, 8), (4, 4), (128, 128), (64, 64)]
    previews = ParallelDecodeManager(decoder).batch_decode_previews(
        [create_latents(height, width, level) for level, (height, width) in enumerate(sizes)]
    )
    assert decoder.batch_shapes == [(2, 4, 1, 2, 2), (1, 4, 1, 1, 4), (2, 4, 1, 32, 32)]
    for level, (height, width) in enumerate([(4, 4), (2, 8), (4, 4), (64, 64), (64, 64)]):
        expected = torch.full((3, height, width), level, dtype=torch.uint8)
        assert torch.equal(previews[level], expected)


# --- levels and masks ---


def to_pil_levels(images: Tensor) -> Tensor:
    """Pictures [batch, 3, H, W] from -1 to 1 as diffusers writes them."""
    pictures = VaeImageProcessor().postprocess(images, output_type="pil")
    return torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures])).permute(
        0, 3, 1, 2
    )


def test_levels_are_rounded_as_diffusers_does() -> None:
    halves = (torch.arange(511) / 2 / 255) * 2 - 1  # every level, and every half way between two
    drawn = torch.rand(3 * 64 * 64 - 511 - 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    outside = torch.tensor([-1.5, -1.0, 1.0, 1.5])
    images = torch.cat((halves, drawn, outside)).view(1, 3, 64, 64)
    assert torch.equal(to_uint8(images), to_pil_levels(images))


def test_half_precision_differs_by_one_level_at_most() -> None:
    """diffusers scales in bfloat16 and rounds twice; here the picture is float32 before that."""
    images = torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32).bfloat16()
    difference = to_uint8(images).int() - to_pil_levels(images).int()
    assert difference.abs().max() <= 1
    assert torch.equal(to_uint8(images), to_uint8(images.float()))


def test_masks_become_the_alpha_channel() -> None:
    images = [
        torch.full((3, 2, 2), 7, dtype=torch.uint8),
        torch.full((3, 1, 4), 9, dtype=torch.uint8),
    ]
    masks = [
        torch.tensor([[0, 255], [255, 0]], dtype=torch.uint8),
        torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8),
    ]
    overlaid = ParallelDecodeManager(SmallDecoder()).apply_masks_batch(images, masks)
    for rgba, image, mask in zip(overlaid, images, masks, strict=True):
        assert rgba.dtype == torch.uint8
        assert torch.equal(rgba[:3], image)
        assert torch.equal(rgba[3], mask)


def test_every_picture_needs_a_mask() -> None:
    image = torch.zeros(3, 2, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="shorter"):
        ParallelDecodeManager(SmallDecoder()).apply_masks_batch([image], [])
