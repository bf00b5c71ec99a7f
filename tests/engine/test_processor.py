"""What a user gives becomes what the stages read, or is refused with a reason."""

from __future__ import annotations

import io
import random
import shutil
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImageEditPipeline
from PIL import Image
from vllm import EngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.drawing import MakeCheckpoint, MakeStock
from vllm_omni.ar.config import ARModel
from vllm_omni.engine import MultimodalInputProcessor, OmniProcessor, ProcessedInput, TokenizedData
from vllm_omni.errors import (
    ConfigError,
    InvalidParameterError,
    ModalityNotSupportedError,
    ModelLoadError,
    StageExecutionError,
)
from vllm_omni.models.qwen_image.inputs import TASK_TEXT_ENCODING
from vllm_omni.models.qwen_image.prompt import EDIT, MAX_PROMPT_TOKENS, REWRITE_INSTRUCTION
from vllm_omni.params import DiffusionParams
from vllm_omni.request import OmniRequest, OutputKind

PARAMS = DiffusionParams(height=64, width=96, num_inference_steps=3, seed=5)


@pytest.fixture
def processor(checkpoint: MakeCheckpoint) -> OmniProcessor:
    return OmniProcessor(str(checkpoint(0)))


@pytest.fixture
def text_model(checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    """A model in Hugging Face's layout, which writes and does not draw."""
    model = shutil.copytree(checkpoint(0) / "text_encoder", tmp_path / "text model")
    shutil.copytree(checkpoint(0) / "tokenizer", model, dirs_exist_ok=True)
    return model


def create_image(mode: str = "RGB", size: tuple[int, int] = (6, 4)) -> Image.Image:
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def to_file(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def create_png_header(width: int, height: int) -> bytes:
    """A PNG that says it is large, and holds next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 100))
    return b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"IEND", b"")


def equal(image: Image.Image, other: Image.Image) -> bool:
    return image.mode == other.mode and np.array_equal(np.asarray(image), np.asarray(other))


# --- what a request holds ---


def test_text_is_the_prompt(processor: OmniProcessor) -> None:
    inputs = processor.process_input(OmniRequest(prompt="a cat"))
    assert inputs == ProcessedInput(prompt="a cat")


def test_nothing_is_an_empty_prompt(processor: OmniProcessor) -> None:
    assert processor.process_input(OmniRequest()) == ProcessedInput(prompt="")


@pytest.mark.parametrize("data", [5, None, b"a cat", ["a cat"]])
def test_text_that_is_no_text_is_refused(processor: OmniProcessor, data: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        processor.process_input(OmniRequest(input_modalities={"text": data}))
    assert str(caught.value) == f"text={data!r} is not allowed: a string"


def test_tokens_and_chats_are_passed_on(processor: OmniProcessor) -> None:
    messages = [{"role": "user", "content": "hello"}]
    inputs = processor.process_input(OmniRequest(prompt_token_ids=[5, 6], messages=messages))
    assert inputs == ProcessedInput(prompt_token_ids=(5, 6), messages=messages)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1", "CMYK"])
def test_picture_becomes_rgb(processor: OmniProcessor, mode: str) -> None:
    image = create_image(mode)
    inputs = processor.process_input(OmniRequest(prompt="x", input_modalities={"image": image}))
    assert inputs.prompt == "x"
    [read] = inputs.images
    assert equal(read, image.convert("RGB"))


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "WEBP"])
def test_picture_may_be_a_file(processor: OmniProcessor, format: str) -> None:
    image = create_image()
    data = to_file(image, format, lossless=True)
    inputs = processor.process_input(OmniRequest(input_modalities={"image": data}))
    assert equal(inputs.images[0], image)


@pytest.mark.parametrize("kind", [list, tuple])
def test_pictures_stay_in_order(processor: OmniProcessor, kind: Any) -> None:
    images = [create_image(size=(width, 4)) for width in (3, 5, 2)]
    data = kind([images[0], to_file(images[1]), images[2]])
    inputs = processor.process_input(OmniRequest(input_modalities={"image": data}))
    assert [equal(a, b) for a, b in zip(inputs.images, images, strict=True)] == [True] * 3


@pytest.mark.parametrize(
    "data",
    [b"", b"nothing", to_file(create_image())[:50], to_file(create_image(), "JPEG")[:200]],
    ids=["empty", "not a picture", "cut off", "cut off JPEG"],
)
def test_broken_file_is_refused(processor: OmniProcessor, data: bytes) -> None:
    with pytest.raises(InvalidParameterError, match="image='bytes' is not allowed: a picture: "):
        processor.process_input(OmniRequest(input_modalities={"image": data}))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "ICO", "PPM"])
def test_damaged_file_is_read_or_refused(processor: OmniProcessor, format: str) -> None:
    """Whatever PIL raises or warns of, the caller gets a picture or an error of the request."""
    good = to_file(create_image(size=(16, 16)), format)
    generator = random.Random(0)
    num_refused = 0
    for _ in range(300):
        data = bytearray(good)
        for _ in range(generator.randint(1, 8)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        try:
            processor.process_input(OmniRequest(input_modalities={"image": bytes(data)}))
        except InvalidParameterError as error:
            num_refused += 1
            assert error.param == "image"
    assert num_refused > 0


@pytest.mark.parametrize(("width", "height"), [(30000, 30000), (12000, 12000)])
def test_decompression_bomb_is_refused(processor: OmniProcessor, width: int, height: int) -> None:
    """Far too large, and so large that PIL warns only."""
    bomb = create_png_header(width, height)
    assert len(bomb) < 200
    with pytest.raises(InvalidParameterError, match=r"image='bytes' is not .*Decompression"):
        processor.process_input(OmniRequest(input_modalities={"image": bomb}))


@pytest.mark.parametrize("data", ["cat.png", 5, None, {"url": "x"}, [create_image(), "cat.png"]])
def test_picture_of_another_kind_is_refused(processor: OmniProcessor, data: Any) -> None:
    with pytest.raises(InvalidParameterError, match="a PIL image, or a file of one as bytes"):
        processor.process_input(OmniRequest(input_modalities={"image": data}))


# --- modalities that somebody adds ---


class ShapeProcessor(MultimodalInputProcessor):
    """Words for a shape."""

    def process(self, data: Any) -> ProcessedInput:
        return ProcessedInput(prompt=f"a {data['colour']} {data['kind']}")


class CodeProcessor(MultimodalInputProcessor):
    """Tokens only."""

    def tokenize(self, data: Any) -> TokenizedData:
        return TokenizedData(token_ids=tuple(data))


def test_unknown_modality_is_refused(processor: OmniProcessor) -> None:
    with pytest.raises(ModalityNotSupportedError) as caught:
        processor.process_input(OmniRequest(prompt="a cat", input_modalities={"audio": b""}))
    assert str(caught.value) == "input modality 'audio' is not supported: one of text, image"


def test_registered_modality_is_read_with_the_others(processor: OmniProcessor) -> None:
    processor.register_modality_processor("shape", ShapeProcessor("shape"))
    image = create_image()
    request = OmniRequest(prompt="this is")
    request.add_input("shape", {"colour": "red", "kind": "circle"})
    request.add_input("image", image)
    inputs = processor.process_input(request)
    assert inputs.prompt == "this is a red circle"
    assert equal(inputs.images[0], image)


def test_registered_modality_may_make_tokens_only(processor: OmniProcessor) -> None:
    processor.register_modality_processor("code", CodeProcessor())
    inputs = processor.process_input(OmniRequest(input_modalities={"code": [7, 8, 9]}))
    assert inputs == ProcessedInput(prompt_token_ids=(7, 8, 9))


def test_tokens_of_several_modalities_are_read_in_order(processor: OmniProcessor) -> None:
    processor.register_modality_processor("code", CodeProcessor())
    processor.register_modality_processor("more", CodeProcessor())
    request = OmniRequest(prompt_token_ids=[1], input_modalities={"code": [7, 8], "more": [9]})
    assert processor.process_input(request).prompt_token_ids == (1, 7, 8, 9)


def test_built_in_modality_can_be_read_in_another_way(processor: OmniProcessor) -> None:
    class Loud(MultimodalInputProcessor):
        def process(self, data: Any) -> ProcessedInput:
            return ProcessedInput(prompt=data.upper())

    processor.register_modality_processor("text", Loud())
    assert processor.process_input(OmniRequest(prompt="a cat")).prompt == "A CAT"


def test_processor_need_not_be_one_of_ours(processor: OmniProcessor) -> None:
    own = SimpleNamespace(process=lambda data: ProcessedInput(prompt=str(data)))
    processor.register_modality_processor("number", own)
    assert processor.process_input(OmniRequest(input_modalities={"number": 5})).prompt == "5"


def test_failure_of_a_processor_is_the_requests(processor: OmniProcessor) -> None:
    processor.register_modality_processor("shape", ShapeProcessor())
    with pytest.raises(StageExecutionError) as caught:
        processor.process_input(OmniRequest(input_modalities={"shape": {"colour": "red"}}))
    assert str(caught.value) == "the processor of 'shape' failed: KeyError: 'kind'"
    assert isinstance(caught.value.__cause__, KeyError)


def test_refusal_of_a_processor_arrives_as_it_is(processor: OmniProcessor) -> None:
    class Picky(MultimodalInputProcessor):
        def process(self, data: Any) -> ProcessedInput:
            raise InvalidParameterError("shape", data, "a round one")

    processor.register_modality_processor("shape", Picky())
    with pytest.raises(InvalidParameterError, match="shape='square' is not allowed: a round one"):
        processor.process_input(OmniRequest(input_modalities={"shape": "square"}))


@pytest.mark.parametrize("result", [None, "a cat", {"prompt": "a cat"}])
def test_result_of_another_kind_is_the_processors_failure(
    processor: OmniProcessor, result: Any
) -> None:
    own = SimpleNamespace(process=lambda data: result)
    processor.register_modality_processor("shape", own)
    with pytest.raises(StageExecutionError, match=r"of 'shape' failed: .* no ProcessedInput"):
        processor.process_input(OmniRequest(input_modalities={"shape": "square"}))


def test_processor_without_methods_says_so(processor: OmniProcessor) -> None:
    processor.register_modality_processor("shape", MultimodalInputProcessor("shape"))
    with pytest.raises(ModalityNotSupportedError, match="has to implement process or tokenize"):
        processor.process_input(OmniRequest(input_modalities={"shape": "square"}))


@pytest.mark.parametrize("own", [None, "shape", SimpleNamespace(process=5)])
def test_only_a_processor_can_be_registered(processor: OmniProcessor, own: Any) -> None:
    with pytest.raises(ConfigError, match=r"processor=.*an object with a process method"):
        processor.register_modality_processor("shape", own)
    assert "shape" not in processor.modality_processors


def test_input_processor_keeps_its_settings() -> None:
    settings = {"size": 5}
    own = MultimodalInputProcessor("shape", settings)
    settings.clear()
    assert (own.modality, own.config) == ("shape", {"size": 5})
    assert (MultimodalInputProcessor().modality, MultimodalInputProcessor().config) == ("", {})


# --- which model ---


def test_model_may_be_named_in_every_way(checkpoint: MakeCheckpoint) -> None:
    path = checkpoint(0)
    ways: list[Any] = [
        path,
        str(path),
        {"model": str(path)},
        {"model": path},
        EngineArgs(model=str(path)),
        SimpleNamespace(model_config=SimpleNamespace(model=str(path))),  # as a VllmConfig
    ]
    for way in ways:
        completed = OmniProcessor(way).complete_params(DiffusionParams())
        assert (completed.height, completed.num_inference_steps) == (256, 20)


def test_model_may_be_that_of_a_vllm_config(text_model: Path) -> None:
    processor = OmniProcessor(ARModel(text_model, {"max_model_len": 64}).vllm_config)
    assert processor.process_input(OmniRequest(prompt="a cat")).prompt == "a cat"


def test_model_named_demo_is_found() -> None:
    assert OmniProcessor("demo").complete_params(DiffusionParams()).height == 256


@pytest.mark.parametrize("config", [None, {}, {"model": 5}, 5, SimpleNamespace()])
def test_config_without_a_model_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match="a model's folder, or a config that names it"):
        OmniProcessor(config)


def test_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is not a folder"):
        OmniProcessor(tmp_path / "nothing")
    with pytest.raises(ModelLoadError, match=r"has no model_index\.json"):
        OmniProcessor(tmp_path)


def test_model_that_writes_does_not_draw(text_model: Path) -> None:
    processor = OmniProcessor(text_model)
    inputs = processor.process_input(OmniRequest(prompt="a cat"))
    assert processor.make_text_request(OmniRequest(), inputs).prompt == "a cat"
    for call in (
        lambda: processor.complete_params(PARAMS),
        lambda: processor.make_encode_requests(OmniRequest(), inputs, with_negative=True),
        lambda: processor.make_diffusion_request("r", "a cat", None, PARAMS, 0.0),
    ):
        with pytest.raises(ModalityNotSupportedError, match="the model makes text only"):
            call()


# --- parameters ---


def test_defaults_are_the_checkpoints(processor: OmniProcessor) -> None:
    completed = processor.complete_params(DiffusionParams(width=64, seed=1))
    assert (completed.height, completed.width, completed.num_inference_steps) == (256, 64, 20)
    assert processor.complete_params(PARAMS) == PARAMS


def test_guidance_scale_is_refused(processor: OmniProcessor) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        processor.complete_params(DiffusionParams(guidance_scale=3.5))
    assert caught.value.param == "guidance_scale"
    assert "use true_cfg_scale with negative_prompt" in str(caught.value)


# --- requests of AR stages: text ---


def test_text_request_reads_the_prompt(processor: OmniProcessor) -> None:
    params = SamplingParams(max_tokens=3)
    request = OmniRequest(
        request_id="mine",
        prompt="a cat",
        output_format="text",
        sampling_params=params,
        params=DiffusionParams(priority=4),
    )
    made = processor.make_text_request(request, processor.process_input(request))
    assert (made.request_id, made.prompt, made.messages, made.images) == ("mine", "a cat", None, ())
    assert made.sampling_params is params
    assert (made.hidden_states, made.priority) == (None, 4)


def test_text_request_reads_tokens(processor: OmniProcessor) -> None:
    request = OmniRequest(prompt_token_ids=[5, 6, 7], hidden_state_output=True)
    made = processor.make_text_request(request, processor.process_input(request))
    assert made.prompt == (5, 6, 7)
    assert made.hidden_states == "all"


def test_text_request_with_pictures_becomes_a_chat(processor: OmniProcessor) -> None:
    images = [create_image(), create_image(size=(3, 3))]
    request = OmniRequest(prompt="what is this?", input_modalities={"image": images})
    made = processor.make_text_request(request, processor.process_input(request))
    assert made.messages is not None
    [turn] = made.messages
    assert turn["role"] == "user"
    *pictures, text = turn["content"]
    assert [part["type"] for part in pictures] == ["image_pil", "image_pil"]
    assert all(equal(p["image_pil"], i) for p, i in zip(pictures, images, strict=True))
    assert text == {"type": "text", "text": "what is this?"}
    assert made.images == ()  # they are in the chat


def test_chat_is_passed_on_as_it_is(processor: OmniProcessor) -> None:
    messages = [{"role": "user", "content": "hello"}]
    request = OmniRequest(messages=messages, output_format="text")
    made = processor.make_text_request(request, processor.process_input(request))
    assert made.messages == messages


@pytest.mark.parametrize("kind", OutputKind)
def test_output_kind_goes_into_the_sampling(processor: OmniProcessor, kind: OutputKind) -> None:
    given = SamplingParams(max_tokens=3)
    for params, max_tokens in ((given, 3), ({"max_tokens": 4}, 4), (None, None)):
        request = OmniRequest(prompt="a cat", sampling_params=params, output_kind=kind)
        made = processor.make_text_request(request, processor.process_input(request))
        sampling: Any = made.sampling_params
        values = sampling if isinstance(sampling, dict) else vars_of(sampling)
        assert values["output_kind"] is RequestOutputKind[kind.name]
        assert values.get("max_tokens") == max_tokens
    assert given.output_kind is RequestOutputKind.CUMULATIVE  # the caller's is left alone


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in ("output_kind", "max_tokens")}


# --- requests of AR stages: a fuller prompt ---


def test_rewrite_request_has_the_models_instruction(processor: OmniProcessor) -> None:
    image = create_image()
    request = OmniRequest(prompt="a cat", input_modalities={"image": image}, request_id="mine")
    made = processor.make_rewrite_request(request, processor.process_input(request))
    assert made.request_id == "mine"
    assert made.messages is not None
    system, user = made.messages
    assert system == {"role": "system", "content": REWRITE_INSTRUCTION}
    assert user["content"][1] == {"type": "text", "text": "a cat"}
    assert equal(user["content"][0]["image_pil"], image)
    assert dict(made.sampling_params) == {"temperature": 0.0, "max_tokens": 128}  # type: ignore[arg-type]


def test_rewrite_request_takes_chat_and_sampling_of_the_user(processor: OmniProcessor) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    request = OmniRequest(messages=messages, sampling_params={"max_tokens": 5}, output_kind="delta")  # type: ignore[arg-type]
    made = processor.make_rewrite_request(request, processor.process_input(request))
    assert made.messages == messages
    # What it does not say is the model's own.
    kind = RequestOutputKind.DELTA
    assert made.sampling_params == {"temperature": 0.0, "max_tokens": 5, "output_kind": kind}


def test_a_chat_without_instructions_gets_the_models(processor: OmniProcessor) -> None:
    messages = [{"role": "user", "content": "hello"}]
    request = OmniRequest(messages=messages)
    made = processor.make_rewrite_request(request, processor.process_input(request))
    assert made.messages is not None
    assert list(made.messages) == [{"role": "system", "content": REWRITE_INSTRUCTION}, *messages]


@pytest.mark.parametrize("params", [{"n": 2}, SamplingParams(n=2)], ids=["mapping", "object"])
def test_only_one_text_can_be_drawn(processor: OmniProcessor, params: Any) -> None:
    request = OmniRequest(prompt="a cat", sampling_params=params)
    with pytest.raises(InvalidParameterError, match="n=2 is not allowed: 1 where a picture is"):
        processor.make_rewrite_request(request, processor.process_input(request))
    assert processor.make_text_request(request, ProcessedInput()).sampling_params is params


# --- requests of AR stages: what conditions the picture ---


@pytest.mark.parametrize("prompt", ["a red circle", "", "{} 猫", "a house, " * 30])
def test_encoded_tokens_are_the_stock_pipelines(
    processor: OmniProcessor, stock: MakeStock, prompt: str
) -> None:
    pipeline = stock(0)
    expected = pipeline.tokenizer(pipeline.prompt_template_encode.format(prompt)).input_ids
    request = OmniRequest(prompt=prompt, request_id="mine", params=DiffusionParams(priority=2))
    [made] = processor.make_encode_requests(
        request, processor.process_input(request), with_negative=True
    )
    assert made.prompt == expected
    assert (made.request_id, made.hidden_states, made.priority) == ("mine", "prompt", 2)
    assert made.sampling_params == {"max_tokens": 1, "temperature": 0.0, "detokenize": False}


def test_negative_prompt_is_encoded_where_guidance_is_on(
    processor: OmniProcessor, stock: MakeStock
) -> None:
    pipeline = stock(0)

    def encode(with_negative: bool = True, **params: Any) -> list[Any]:
        request = OmniRequest(prompt="a cat", request_id="r", params=DiffusionParams(**params))
        inputs = processor.process_input(request)
        return processor.make_encode_requests(request, inputs, with_negative)

    def tokens(prompt: str) -> Any:
        return pipeline.tokenizer(pipeline.prompt_template_encode.format(prompt)).input_ids

    made = encode(negative_prompt="blurry")
    assert [one.request_id for one in made] == ["r", "r-negative_prompt"]
    assert [one.prompt for one in made] == [tokens("a cat"), tokens("blurry")]
    assert [one.prompt for one in encode(negative_prompt="")] == [tokens("a cat"), tokens("")]
    for alone in (
        encode(),
        encode(negative_prompt="blurry", true_cfg_scale=1.0),
        encode(negative_prompt="blurry", with_negative=False),
    ):
        assert [one.prompt for one in alone] == [tokens("a cat")]


def test_prompt_with_a_picture_is_in_the_template_for_edits(processor: OmniProcessor) -> None:
    image = create_image()
    request = OmniRequest(prompt="add a hat", input_modalities={"image": image})
    inputs = processor.process_input(request)
    [made] = processor.make_encode_requests(request, inputs, with_negative=False)
    assert made.prompt == EDIT.apply("add a hat")
    assert equal(made.images[0], image)


def test_more_than_one_picture_is_refused(processor: OmniProcessor) -> None:
    request = OmniRequest(prompt="x", input_modalities={"image": [create_image()] * 2})
    inputs = processor.process_input(request)
    with pytest.raises(InvalidParameterError, match="image='2 images' is not allowed: one image"):
        processor.make_encode_requests(request, inputs, with_negative=False)


def test_prefix_rows_are_dropped(processor: OmniProcessor, stock: MakeStock) -> None:
    rows = torch.arange(100.0).unsqueeze(1)
    kept = processor.drop_prefix(rows, ProcessedInput(prompt="x"))
    assert kept[0, 0] == stock(0).prompt_template_encode_start_idx == 34
    edit = QwenImageEditPipeline(None, None, None, None, None, None)
    kept = processor.drop_prefix(rows, ProcessedInput(prompt="x", images=(create_image(),)))
    assert kept[0, 0] == edit.prompt_template_encode_start_idx == 64


def create_prompt(processor: OmniProcessor, num_tokens: int) -> str:
    """A prompt that has so many tokens, with the end of the template."""
    [empty] = processor.make_encode_requests(OmniRequest(), ProcessedInput(), with_negative=False)
    return " cat" * (num_tokens - (len(empty.prompt) - 34))


@pytest.mark.parametrize("name", ["prompt", "negative_prompt"])
def test_prompt_that_is_too_long_is_refused(processor: OmniProcessor, name: str) -> None:
    long = create_prompt(processor, MAX_PROMPT_TOKENS + 1)
    prompts = {"prompt": "a cat", name: long}
    request = OmniRequest(
        prompt=prompts["prompt"],
        params=DiffusionParams(negative_prompt=prompts.get("negative_prompt")),
    )
    inputs = processor.process_input(request)
    with pytest.raises(InvalidParameterError) as caught:
        processor.make_encode_requests(request, inputs, with_negative=True)
    assert caught.value.param == name
    assert str(caught.value).endswith("it has 1025 tokens, the most is 1024")


def test_longest_prompt_is_not_cut(processor: OmniProcessor) -> None:
    request = OmniRequest(prompt=create_prompt(processor, MAX_PROMPT_TOKENS))
    inputs = processor.process_input(request)
    [made] = processor.make_encode_requests(request, inputs, with_negative=False)
    assert len(made.prompt) == MAX_PROMPT_TOKENS + 34


# --- requests of diffusion stages ---


def test_picture_from_embeddings(processor: OmniProcessor) -> None:
    prompt, negative = torch.rand(5, 64), torch.rand(3, 64)
    params = DiffusionParams(
        height=64,
        width=96,
        num_inference_steps=3,
        seed=5,
        true_cfg_scale=3.0,
        negative_prompt="x",
        priority=2,
        deadline=9.0,
    )
    made = processor.make_diffusion_request("mine", prompt, negative, params, 12.5)
    inputs = made.custom_inputs
    assert inputs.prompt_embeds is prompt and inputs.negative_prompt_embeds is negative
    assert (inputs.prompt_token_ids, inputs.negative_prompt_token_ids) == (None, None)
    assert (inputs.height, inputs.width, inputs.num_inference_steps) == (64, 96, 3)
    assert (inputs.seed, inputs.true_cfg_scale) == (5, 3.0)
    assert (made.request_id, made.priority, made.deadline) == ("mine", 2, 9.0)
    assert made.arrival_time == 12.5


def test_picture_from_a_prompt(processor: OmniProcessor, stock: MakeStock) -> None:
    tokenizer, template = stock(0).tokenizer, stock(0).prompt_template_encode
    params = DiffusionParams(seed=5, negative_prompt="blurry")
    inputs = processor.make_diffusion_request("r", "a cat", None, params, 0.0).custom_inputs
    assert inputs.prompt_token_ids == tokenizer(template.format("a cat")).input_ids
    assert inputs.negative_prompt_token_ids == tokenizer(template.format("blurry")).input_ids
    assert (inputs.prompt_embeds, inputs.num_prefix_tokens) == (None, 34)
    assert (inputs.height, inputs.num_inference_steps) == (256, 20)  # the model's defaults


def test_hidden_states_from_a_diffusion_stage(processor: OmniProcessor, stock: MakeStock) -> None:
    request = OmniRequest(
        prompt="a cat", request_id="mine", params=DiffusionParams(priority=2, deadline=9.0)
    )
    made = processor.make_text_encoding_request(request, processor.process_input(request))
    tokenizer, template = stock(0).tokenizer, stock(0).prompt_template_encode
    assert made.custom_inputs.task == TASK_TEXT_ENCODING
    assert made.custom_inputs.prompt_token_ids == tokenizer(template.format("a cat")).input_ids
    assert made.custom_inputs.num_prefix_tokens == 34
    assert (made.request_id, made.priority, made.deadline) == ("mine", 2, 9.0)
