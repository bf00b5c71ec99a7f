"""Chats with pictures, through OpenAI's own client: the user's, and the model's."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from tests.chatting import PICTURE, REWRITE, STAR, chat, make_picture, make_url, say, show, stream
from tests.pictures import get_color, open_picture, read_pixels

# --- pictures in ---


@pytest.mark.parametrize(("shape", "colour"), [("circle", "red"), ("square", "blue")])
def test_a_picture_is_read(client: openai.OpenAI, shape: str, colour: str) -> None:
    answer = chat(client, say(show(make_picture(shape, colour))))
    assert f"{colour} {shape}" in (answer.choices[0].message.content or "")
    assert answer.usage is not None and answer.usage.prompt_tokens > 80  # a token for 28x28 pixels


def test_a_picture_is_read_in_a_stream(client: openai.OpenAI) -> None:
    chunks = stream(client, say(show(make_picture("circle", "green"))))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "green circle" in text


def test_words_that_stand_for_a_picture_do_no_harm(client: openai.OpenAI) -> None:
    pad = "<|vision_start|><|image_pad|><|vision_end|>"
    assert chat(client, say(pad)).choices[0].message.content
    assert chat(client, say(show(make_picture("circle", "red"), pad))).choices[0].message.content


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1/a.png", "does not fetch pictures"),
        ("file:///etc/passwd", "a data URL is needed"),
        ("data:image/png;base64,aGVsbG8=", "no png, jpeg, webp or gif"),
        (make_url(Image.new("RGB", (1, 1))), "1x1 pixels"),
    ],
)
def test_pictures_that_are_refused(client: openai.OpenAI, url: str, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        chat(client, [REWRITE, *say(show(url))])
    assert caught.value.param == "messages.1.content.0.image_url"


# --- pictures out ---


def ask_for_picture(client: openai.OpenAI, messages: list[Any], **parameters: Any) -> Any:
    fields = {**PICTURE, **parameters}
    return client.chat.completions.create(model="demo", messages=messages, extra_body=fields)


def read_picture(image: dict[str, Any], kind: str = "png") -> bytes:
    assert image["type"] == "image_url"
    head, _, data = image["image_url"]["url"].partition(",")
    assert head == f"data:image/{kind};base64"
    return base64.b64decode(data)


def test_a_text_and_its_picture(client: openai.OpenAI) -> None:
    answer = ask_for_picture(client, say("star"))
    message = answer.choices[0].message
    assert (message.content, answer.choices[0].finish_reason) == (STAR, "stop")
    [image] = message.images
    assert image["seed"] == 1
    pixels = read_pixels(read_picture(image))
    assert pixels.shape == (256, 256, 3)
    red, green, blue = get_color(pixels, 0.5, 0.5)
    assert red > 200 and green > 170 and blue < 120  # yellow
    red, green, blue = get_color(pixels, 0.05, 0.05)
    assert blue > 60 and red < 60 and green < 60  # dark blue
    # The picture says how to make it again.
    info = json.loads(open_picture(read_picture(image)).info["parameters"])
    assert (info["prompt"], info["seed"], info["num_inference_steps"]) == (STAR, 1, 10)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (52, 13 + 16 * 16)
    details = usage.completion_tokens_details.model_dump()
    assert (details["text_tokens"], details["image_tokens"]) == (13, 256)


def test_a_picture_in_and_a_picture_out(client: openai.OpenAI) -> None:
    message = ask_for_picture(client, say(show(make_picture("circle", "red"), "draw it")))
    told = message.choices[0].message
    assert "red circle" in told.content
    # Where in the picture the circle is, and how large, the text leaves open.
    red, green, blue = np.moveaxis(read_pixels(read_picture(told.images[0])), -1, 0)[:3]
    assert ((red > 150) & (green < 100) & (blue < 100)).mean() > 0.01
    # The answer, picture and all, is a turn of the chat that goes on.
    after = chat(client, [*say("draw"), told.model_dump(), *say("What is in the picture?")])
    assert after.choices[0].message.content


def test_a_picture_in_a_stream(client: openai.OpenAI) -> None:
    fields = {**PICTURE, "num_inference_steps": 2, "size": "64x64"}
    chunks = stream(client, say("star"), **fields)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == STAR
    with_images = [index for index, delta in enumerate(deltas) if hasattr(delta, "images")]
    assert with_images == [len(deltas) - 2]  # after all words, before the end
    image = open_picture(read_picture(deltas[-2].images[0]))  # type: ignore[attr-defined]
    assert image.size == (64, 64)
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 13 + 16


def test_the_picture_s_own_parameters(client: openai.OpenAI) -> None:
    answer = ask_for_picture(
        client,
        [{"role": "system", "content": "x"}, *say("star")],
        size="64x32",
        num_inference_steps=1,
        output_format="webp",
        output_compression=50,
        max_tokens=4,
        temperature=1,
        seed=None,
        cache="none",
    )
    message = answer.choices[0].message
    assert open_picture(read_picture(message.images[0], "webp")).size == (64, 32)
    assert message.images[0]["seed"] >= 0
    assert (answer.choices[0].finish_reason, len(message.content.split())) == ("length", 4)


def test_the_picture_s_step_cache(client: openai.OpenAI) -> None:
    cache = {"method": "tea", "threshold": 0.5}
    answer = ask_for_picture(client, say("star"), size="64x64", num_inference_steps=4, cache=cache)
    png = read_picture(answer.choices[0].message.images[0])
    used = json.loads(open_picture(png).info["parameters"])["cache"]
    assert (used["method"], used["threshold"]) == ("tea", 0.5)


@pytest.mark.parametrize(
    "parameters", [{"cache": {"method": "tea", "threshold": -1}}, {"lora": "x"}]
)
def test_parameters_of_pictures_that_are_refused(
    client: openai.OpenAI, parameters: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError, match="is not allowed") as caught:
        ask_for_picture(client, say("star"), **parameters)
    assert [caught.value.param] == list(parameters)
    with pytest.raises(openai.BadRequestError, match="is about a picture"):
        ask_for_picture(client, say("star"), **parameters, modalities=["text"])
