"""Pictures by OpenAI's client, unchanged: what was asked for is what comes, and it is right."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from diffusers import QwenImagePipeline
from PIL import Image
from transformers import AutoTokenizer

from tests.drawing import Case, draw_stock
from tests.pictures import (
    draw,
    get_color,
    get_difference,
    open_picture,
    read_parameters,
    read_pixels,
)
from tests.serving import ServerProcess
from vllm_omni.models.demo import find_model
from vllm_omni.models.progress import progress_bars_off
from vllm_omni.models.qwen_image.prompt import TEXT_TO_IMAGE

CIRCLE = "a large red circle in the center on a white background"
SMALL: dict[str, Any] = {"size": "64x64", "num_inference_steps": 3, "seed": 5}
RED, WHITE = np.array([220, 30, 40]), np.array([245, 245, 245])


def count_tokens(prompt: str) -> int:
    """Those that condition the picture."""
    tokenizer = AutoTokenizer.from_pretrained(find_model("demo") / "tokenizer")
    return len(tokenizer(TEXT_TO_IMAGE.apply(prompt)).input_ids) - TEXT_TO_IMAGE.num_prefix_tokens


# --- plain ---


def test_the_red_circle_is_red(client: openai.OpenAI) -> None:
    before = int(time.time())
    raw = client.images.with_raw_response.generate(
        model="demo",
        prompt=CIRCLE,
        size="256x256",
        quality="low",
        extra_body={"seed": 1, "true_cfg_scale": 3.0},
    )
    answer = raw.parse()
    assert len(raw.headers["x-request-id"]) == 32
    assert before <= answer.created <= time.time()
    assert (answer.size, answer.quality, answer.output_format) == ("256x256", "low", "png")
    assert answer.background == "opaque"
    assert answer.data is not None and len(answer.data) == 1
    assert answer.data[0].url is None and answer.data[0].revised_prompt is None
    image = open_picture(answer.data[0].b64_json)
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (256, 256))
    pixels = read_pixels(answer.data[0].b64_json)
    assert np.abs(get_color(pixels, 0.5, 0.5) - RED).max() < 40
    for x, y in ((0.05, 0.05), (0.95, 0.05), (0.05, 0.95), (0.95, 0.95)):
        assert np.abs(get_color(pixels, x, y) - WHITE).max() < 40


def test_it_is_the_picture_of_diffusers(client: openai.OpenAI) -> None:
    case = Case("a red star above a small blue ring", 128, 192, 6, 4.0, seed=3)
    with progress_bars_off():
        pipeline = QwenImagePipeline.from_pretrained(find_model("demo"), dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    _, pixels = draw_stock(pipeline, case)
    answer = draw(
        client,
        case.prompt,
        size="192x128",
        num_inference_steps=6,
        negative_prompt=case.negative_prompt,
        true_cfg_scale=4.0,
        seed=3,
    )
    assert get_difference(read_pixels(answer.data[0].b64_json), pixels) <= 1


def test_what_is_null_was_not_given(client: openai.OpenAI) -> None:
    nulls: dict[str, Any] = dict.fromkeys(("n", "quality", "background", "output_format", "stream"))
    answer = draw(client, **SMALL, **nulls, model=None, negative_prompt=None, lora=None)
    assert (answer.quality, answer.output_format, len(answer.data)) == ("medium", "png", 1)
    assert answer.data[0].b64_json == draw(client, **SMALL).data[0].b64_json


def test_three_pictures_of_which_each_can_be_made_alone(client: openai.OpenAI) -> None:
    three = draw(client, CIRCLE, **SMALL, n=3)
    assert [image.seed for image in three.data] == [5, 6, 7]
    pictures = [read_pixels(image.b64_json) for image in three.data]
    assert get_difference(pictures[0], pictures[1]) > 20
    for image, pixels in zip(three.data, pictures, strict=True):
        alone = draw(client, CIRCLE, **SMALL | {"seed": image.seed})
        assert get_difference(read_pixels(alone.data[0].b64_json), pixels) <= 1


def test_a_seed_that_was_not_given_is_new_and_told(client: openai.OpenAI) -> None:
    free: dict[str, Any] = {"size": "64x64", "num_inference_steps": 1}
    answers = [draw(client, **free, n=2) for _ in range(3)]
    seeds = [image.seed for answer in answers for image in answer.data]
    assert len(set(seeds)) == 6
    assert all(second == first + 1 for first, second in zip(seeds[::2], seeds[1::2], strict=True))
    again = draw(client, **free, seed=seeds[0])
    difference = get_difference(
        read_pixels(again.data[0].b64_json), read_pixels(answers[0].data[0].b64_json)
    )
    assert difference <= 1


def test_32_at_once_get_the_same_picture(client: openai.OpenAI, server: ServerProcess) -> None:
    async def draw_32() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as many:
            call = many.images.generate
            extra = {"num_inference_steps": 3, "seed": 5}
            answers = await asyncio.gather(
                *(call(prompt=CIRCLE, size="64x64", extra_body=extra) for _ in range(32))
            )
        return [image.b64_json or "" for answer in answers for image in answer.data or ()]

    pictures = [read_pixels(data) for data in asyncio.run(draw_32())]
    alone = read_pixels(draw(client, CIRCLE, **SMALL).data[0].b64_json)
    assert len(pictures) == 32
    assert max(get_difference(pixels, alone) for pixels in pictures) <= 1


# --- how the file comes ---


@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
def test_formats(client: openai.OpenAI, output_format: str) -> None:
    answer = draw(client, CIRCLE, **SMALL, output_format=output_format)
    assert answer.output_format == output_format
    image = open_picture(answer.data[0].b64_json)
    assert (image.format, image.size) == (output_format.upper(), (64, 64))
    png = read_pixels(draw(client, CIRCLE, **SMALL).data[0].b64_json)
    assert np.abs(np.asarray(image).astype(int) - png).mean() < 4


@pytest.mark.parametrize("output_format", ["jpeg", "webp"])
def test_compression(client: openai.OpenAI, output_format: str) -> None:
    sizes = [
        len(
            draw(client, **SMALL, output_format=output_format, output_compression=c)
            .data[0]
            .b64_json
            or ""
        )
        for c in (0, 50, 100)
    ]
    assert sizes[0] < sizes[1] < sizes[2]


def test_url(client: openai.OpenAI, server: ServerProcess) -> None:
    answer = draw(client, **SMALL, output_format="webp", response_format="url", n=2)
    assert [image.b64_json for image in answer.data] == [None, None]
    urls = [image.url or "" for image in answer.data]
    assert urls[0] != urls[1]
    assert all(url.startswith(f"{server.url}/v1/images/files/") for url in urls)
    response = httpx.get(urls[0])
    assert response.headers["content-type"] == "image/webp"
    assert 3500 < int(response.headers["cache-control"].removeprefix("private, max-age=")) <= 3600
    assert open_picture(response.content).size == (64, 64)
    missing = httpx.get(urls[0].replace(".webp", "0.webp"))
    assert missing.status_code == 404
    assert missing.json()["error"]["param"] == "name"


def test_a_png_can_be_made_again(client: openai.OpenAI, server: ServerProcess) -> None:
    prompt = "ein roter Kreis — 赤い丸\n“in quotes”"
    answer = draw(client, prompt, size="64x96", quality="low", true_cfg_scale=2.5)
    png = base64.b64decode(answer.data[0].b64_json or "")
    parameters = read_parameters(png)
    assert parameters == {
        "model": "demo",
        "prompt": prompt,
        "size": "64x96",
        "num_inference_steps": 10,
        "seed": answer.data[0].seed,
        "negative_prompt": " ",
        "true_cfg_scale": 2.5,
    }
    image = open_picture(png)
    assert image.info["Description"] == prompt
    assert image.info["Software"].startswith("vLLM-omni ")
    again = httpx.post(f"{server.url}/v1/images/generations", json=parameters, timeout=60).json()
    assert get_difference(read_pixels(again["data"][0]["b64_json"]), read_pixels(png)) == 0


# --- what is drawn ---


@pytest.mark.parametrize(
    ("quality", "num_steps", "told"),
    [
        ("low", 10, "low"),
        ("auto", 20, "medium"),
        ("medium", 20, "medium"),
        ("standard", 20, "medium"),
        ("high", 30, "high"),
        ("hd", 30, "high"),
        ("xhigh", 40, "xhigh"),
        ("max", 60, "max"),
    ],
)
def test_quality_is_the_number_of_steps(
    client: openai.OpenAI, quality: str, num_steps: int, told: str
) -> None:
    answer = draw(client, size="32x32", quality=quality)
    assert (answer.metrics.num_steps, answer.quality) == (num_steps, told)


def test_steps_go_before_quality(client: openai.OpenAI) -> None:
    answer = draw(client, size="32x32", quality="high", num_inference_steps=2)
    assert answer.metrics.num_steps == 2


@pytest.mark.parametrize("size", ["auto", "48x80"])
def test_size(client: openai.OpenAI, size: str) -> None:
    answer = draw(client, size=size, num_inference_steps=1)
    assert answer.size == ("256x256" if size == "auto" else size)
    width, height = open_picture(answer.data[0].b64_json).size
    assert f"{width}x{height}" == answer.size


def test_guidance(client: openai.OpenAI) -> None:
    def get_pixels(**parameters: Any) -> np.ndarray[Any, Any]:
        return read_pixels(draw(client, CIRCLE, **SMALL, **parameters).data[0].b64_json)

    plain = get_pixels()
    assert get_difference(get_pixels(true_cfg_scale=1.0), plain) == 0
    assert get_difference(get_pixels(true_cfg_scale=1.0, negative_prompt="blue"), plain) == 0
    guided = get_pixels(true_cfg_scale=4.0)
    assert get_difference(guided, plain) > 20
    # A negative prompt turns guidance on, with diffusers' own scale; without one it is a blank.
    assert get_difference(get_pixels(negative_prompt=" "), guided) == 0
    assert get_difference(get_pixels(true_cfg_scale=4.0, negative_prompt=CIRCLE), guided) > 20


def test_a_rewritten_prompt_is_told_and_drawn(client: openai.OpenAI) -> None:
    answer = draw(client, "star", **SMALL, rewrite_prompt=True)
    prompt = answer.data[0].revised_prompt
    assert prompt is not None and "star" in prompt and "background" in prompt
    again = draw(client, prompt, **SMALL)
    assert again.data[0].revised_prompt is None
    drawn, expected = (read_pixels(one.data[0].b64_json) for one in (answer, again))
    assert get_difference(drawn, expected) <= 1
    png = base64.b64decode(answer.data[0].b64_json or "")
    assert read_parameters(png)["prompt"] == prompt
    # The prompt is read twice, as a chat and as what to draw, and written once.
    assert answer.usage.input_tokens > again.usage.input_tokens + count_tokens("star")
    assert answer.usage.output_tokens_details.text_tokens >= count_tokens(prompt) - count_tokens("")
    assert answer.usage.output_tokens_details.image_tokens == 16


def test_a_mask_is_the_alpha_channel(client: openai.OpenAI) -> None:
    masked = draw(client, **SMALL, output_mode="pixels_and_mask")
    pixels = read_pixels(masked.data[0].b64_json)
    assert pixels.shape == (64, 64, 4) and (pixels[..., 3] == 255).all()
    assert get_difference(pixels[..., :3], read_pixels(draw(client, **SMALL).data[0].b64_json)) == 0
    webp = draw(client, **SMALL, output_mode="pixels_and_mask", output_format="webp")
    assert open_picture(webp.data[0].b64_json).format == "WEBP"


# --- what it took ---


def test_usage_and_metrics(client: openai.OpenAI) -> None:
    negative = "blurry, ugly"
    answer = draw(
        client, CIRCLE, size="64x128", n=2, num_inference_steps=3, negative_prompt=negative
    )
    text, image = count_tokens(CIRCLE) + count_tokens(negative), 2 * (64 // 16) * (128 // 16)
    assert answer.usage.model_dump() == {
        "input_tokens": text,
        "input_tokens_details": {"text_tokens": text, "image_tokens": 0},
        "output_tokens": image,
        "output_tokens_details": {"text_tokens": 0, "image_tokens": image},
        "total_tokens": text + image,
    }
    metrics = answer.metrics
    assert metrics.num_steps == 6  # of both pictures
    assert 0 < metrics.queue_time < metrics.total_time < 60


# --- what cannot be had ---


def make_file() -> io.BytesIO:
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "PNG")
    file.name = "picture.png"
    file.seek(0)
    return file


@pytest.mark.parametrize("number", ["one", "several"])
def test_edits_are_refused_clearly(client: openai.OpenAI, number: str) -> None:
    image: Any = make_file() if number == "one" else [make_file(), make_file()]
    with pytest.raises(openai.BadRequestError, match="'demo' does not edit pictures") as caught:
        client.images.edit(image=image, prompt="make it blue", mask=make_file(), n=2)
    assert (caught.value.param, caught.value.code) == ("model", "unsupported_operation")


def test_there_are_no_variations(client: openai.OpenAI) -> None:
    missing = pytest.raises(openai.NotFoundError, match="no such route: POST /v1/images/variations")
    with missing as caught, pytest.deprecated_call():  # by OpenAI as well
        client.images.create_variation(image=make_file())
    assert caught.value.type == "not_found_error"
