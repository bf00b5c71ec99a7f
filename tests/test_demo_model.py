"""The embedded model draws what it is told, says what it sees, and is a plain Qwen-Image."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vllm_omni
from tests.drawing import Case, draw_stock
from vllm_omni import DiffusionParams, Omni, OutputMode
from vllm_omni.models.demo import find_model

PARAMS = DiffusionParams(
    height=256, width=256, num_inference_steps=10, negative_prompt=" ", true_cfg_scale=4.0, seed=1
)
WHITE, RED, BLUE = np.array([245, 245, 245]), np.array([220, 30, 40]), np.array([40, 80, 220])


@pytest.fixture(scope="module")
def demo() -> Iterator[Omni]:
    with Omni(model="demo", device="cpu") as omni:
        yield omni


def color_at(image: Image.Image, x: float, y: float) -> np.ndarray[Any, Any]:
    """Mean colour of a small square around a place from 0 to 1."""
    pixels = np.asarray(image).astype(float)
    row, column = int(y * pixels.shape[0]), int(x * pixels.shape[1])
    mean: np.ndarray[Any, Any] = pixels[row - 4 : row + 4, column - 4 : column + 4].mean(
        axis=(0, 1)
    )
    return mean


def assert_color(image: Image.Image, x: float, y: float, color: np.ndarray[Any, Any]) -> None:
    assert np.abs(color_at(image, x, y) - color).max() < 40, (x, y, color_at(image, x, y))


def test_it_comes_with_the_package() -> None:
    path = find_model("demo")
    assert path == Path(vllm_omni.__file__).parent / "demo"
    index = json.loads((path / "model_index.json").read_text())
    assert {name: entry[1] for name, entry in index.items() if isinstance(entry, list)} == {
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "text_encoder": "Qwen2_5_VLForConditionalGeneration",
        "tokenizer": "Qwen2Tokenizer",
        "transformer": "QwenImageTransformer2DModel",
        "vae": "AutoencoderKLQwenImage",
    }
    assert sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) <= 40e6
    assert (path / "README.md").is_file()


def test_the_red_circle_is_red_and_where_it_should_be(demo: Omni) -> None:
    prompts = [
        "a large red circle in the center on a white background",
        "a large blue square in the top left on a white background",
    ]
    red, blue = (output.images[0] for output in demo.generate(prompts, PARAMS))
    assert_color(red, 0.5, 0.5, RED)
    for x, y in ((0.05, 0.05), (0.95, 0.05), (0.05, 0.95), (0.95, 0.95)):
        assert_color(red, x, y, WHITE)
    assert_color(blue, 0.2, 0.2, BLUE)
    assert_color(blue, 0.8, 0.8, WHITE)


@pytest.mark.parametrize(("height", "width"), [(128, 128), (192, 384), (384, 240)])
def test_other_sizes_do_not_fall_apart(demo: Omni, height: int, width: int) -> None:
    params = DiffusionParams(height=height, width=width, num_inference_steps=10, seed=2)
    [output] = demo.generate("a large red circle in the center on a white background", params)
    assert output.images[0].size == (width, height)
    assert_color(output.images[0], 0.5, 0.5, RED)
    assert_color(output.images[0], 0.05, 0.05, WHITE)


def test_it_draws_what_diffusers_draws(demo: Omni, demo_stock: Any) -> None:
    case = Case("a red star above a small blue ring", 128, 192, 6, 4.0, seed=3)
    latents, pixels = draw_stock(demo_stock, case)
    params = DiffusionParams(
        height=128,
        width=192,
        num_inference_steps=6,
        negative_prompt=case.negative_prompt,
        true_cfg_scale=4.0,
        seed=3,
        output_mode=OutputMode.PIXELS_AND_LATENTS,
    )
    [output] = demo.generate(case.prompt, params)
    assert output.latents is not None
    assert (output.latents[0] - latents).abs().max() <= 1e-3
    assert np.abs(np.asarray(output.images[0]).astype(int) - pixels).max() <= 2


def test_text_to_picture_to_text(demo: Omni) -> None:
    [drawn] = demo.generate("a large red circle in the center on a white background", PARAMS)
    question = [
        {"type": "image_pil", "image_pil": drawn.images[0]},
        {"type": "text", "text": "Describe the picture."},
    ]
    [said] = demo.chat(
        [{"role": "user", "content": question}], {"temperature": 0.0, "max_tokens": 40}
    )
    assert said.text is not None and "red" in said.text and "circle" in said.text


def test_a_short_prompt_is_rewritten_and_drawn(demo: Omni) -> None:
    [output] = demo.generate("star", PARAMS, output_format="text+image")
    assert output.text is not None and "star" in output.text and "background" in output.text
    corner = color_at(output.images[0], 0.03, 0.03)
    assert np.abs(np.asarray(output.images[0]).astype(float) - corner).max() > 60  # something on it
