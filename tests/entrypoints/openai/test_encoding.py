"""Pictures as files: formats, metadata, and an event loop that goes on meanwhile."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from PIL import Image

from tests.pictures import open_picture, read_parameters, read_pixels
from vllm_omni.entrypoints.openai.encoding import ImageEncoder, write_image
from vllm_omni.entrypoints.openai.protocol import OutputFormat


def make_noise(side: int, channels: int = 3) -> Image.Image:
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 256, (side, side, channels), dtype=np.uint8))


def test_png_keeps_every_pixel_and_how_to_make_it() -> None:
    image = make_noise(32, channels=4)
    parameters = {"prompt": "zwei Zeilen\n“äöü” 丸 \x00 \\", "seed": 2**63 - 1}
    png = write_image(image, "png", parameters=parameters)
    assert (read_pixels(png) == np.asarray(image)).all()
    assert read_parameters(png) == parameters


def test_a_picture_without_parameters_has_none() -> None:
    assert set(open_picture(write_image(make_noise(16), "png")).info) == {"Software"}


@pytest.mark.parametrize("output_format", ["jpeg", "webp"])
def test_less_quality_is_fewer_bytes(output_format: OutputFormat) -> None:
    sizes = [len(write_image(make_noise(64), output_format, q)) for q in (0, 30, 60, 100)]
    assert sizes == sorted(sizes) and len(set(sizes)) == 4


def test_previews_are_scaled_to_the_size_of_the_picture() -> None:
    small = Image.new("RGB", (8, 16), (10, 200, 30))
    png = write_image(small, "png", size=(32, 64))
    pixels = read_pixels(png)
    assert pixels.shape == (64, 32, 3)
    assert (pixels == [10, 200, 30]).all()


def test_the_event_loop_goes_on_while_pictures_are_written() -> None:
    image = make_noise(1024)

    async def watch() -> int:
        """How often the loop got round meanwhile."""
        encoder = ImageEncoder()
        writing = asyncio.gather(*(encoder.encode(image, "png") for _ in range(4)))
        num_turns = 0
        while not writing.done():
            await asyncio.sleep(0.001)
            num_turns += 1
        encoder.shutdown()
        return num_turns

    assert asyncio.run(watch()) > 20  # and not once for each of them
