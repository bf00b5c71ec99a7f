"""Pictures that came over HTTP, for tests that look at them."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import openai
from openai.types.image_generate_params import ImageGenerateParamsNonStreaming
from PIL import Image

from vllm_omni.entrypoints.openai.encoding import PARAMETERS
from vllm_omni.entrypoints.openai.protocol import ImagesResponse

Pixels = np.ndarray[Any, Any]
_OPENAI = ImageGenerateParamsNonStreaming.__annotations__


def open_picture(data: bytes | str | None) -> Image.Image:
    """A picture from the bytes of a file, or from base64 of them."""
    assert data is not None
    image = Image.open(io.BytesIO(base64.b64decode(data) if isinstance(data, str) else data))
    image.load()
    return image


def read_pixels(data: bytes | str | None) -> Pixels:
    """[H, W, channels] from 0 to 255."""
    return np.asarray(open_picture(data)).astype(int)


def read_parameters(png: bytes) -> dict[str, Any]:
    """The body that makes a picture again, from its PNG."""
    parameters: dict[str, Any] = json.loads(open_picture(png).info[PARAMETERS])
    return parameters


def get_difference(a: Pixels, b: Pixels) -> int:
    """The largest difference of any value of any pixel."""
    return int(np.abs(a - b).max())


def get_color(pixels: Pixels, x: float, y: float) -> Pixels:
    """The mean colour of a small square around a place from 0 to 1."""
    row, column = int(y * pixels.shape[0]), int(x * pixels.shape[1])
    mean: Pixels = pixels[row - 4 : row + 4, column - 4 : column + 4, :3].mean(axis=(0, 1))
    return mean


def draw(client: openai.OpenAI, prompt: str = "a red circle", **parameters: Any) -> ImagesResponse:
    """Draw through OpenAI's client; parameters that it does not know go beside its own."""
    known = {name: parameters.pop(name) for name in _OPENAI if name in parameters}
    answer = client.images.generate(prompt=prompt, extra_body=parameters, **known)
    return ImagesResponse.model_validate(answer.model_dump())
