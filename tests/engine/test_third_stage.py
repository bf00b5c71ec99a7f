"""A third stage on a model of its own, and a modality of its own, without a change to the engine.

A shape becomes words, a rewriter makes a prompt of them, and the two stages of the drawing model
draw it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from tests.drawing import Case, MakeCheckpoint, MakeStock, draw_stock
from vllm_omni import DiffusionParams, OmniAsyncLLM, OmniOutput, OmniRequest, OutputMode
from vllm_omni.ar.engine import AREngine
from vllm_omni.ar.messages import ARRequest
from vllm_omni.config import DiTConfig, StageConfig
from vllm_omni.engine import MultimodalInputProcessor, ProcessedInput
from vllm_omni.errors import ModalityNotSupportedError
from vllm_omni.models.progress import progress_bars_off
from vllm_omni.models.qwen_image.prompt import REWRITE_INSTRUCTION
from vllm_omni.outputs import FinishReason
from vllm_omni.stage_file import read_stage_file

REWRITER, ENCODER, DRAWER = 0, 1, 2
SHAPE = {"colour": "red", "kind": "circle"}
WORDS = "a red circle"
CHAT = [
    {"role": "system", "content": REWRITE_INSTRUCTION},
    {"role": "user", "content": WORDS},
]
SAMPLING = {"temperature": 0.0, "max_tokens": 12}
PARAMS = DiffusionParams(
    height=64,
    width=96,
    num_inference_steps=3,
    true_cfg_scale=3.0,
    negative_prompt="blurry, ugly",
    seed=5,
    output_mode=OutputMode.PIXELS_AND_LATENTS,
)


class ShapeProcessor(MultimodalInputProcessor):
    """Words for a shape."""

    def process(self, data: Any) -> ProcessedInput:
        return ProcessedInput(prompt=f"a {data['colour']} {data['kind']}")


@pytest.fixture(scope="module")
def rewriter_model(checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model in Hugging Face's layout, with other weights than the drawing model's."""
    model = tmp_path_factory.mktemp("models") / "rewriter"
    shutil.copytree(checkpoint(1) / "text_encoder", model)
    shutil.copytree(checkpoint(1) / "tokenizer", model, dirs_exist_ok=True)
    return model


def create_stages(rewriter_model: Path, model: Path) -> tuple[StageConfig, ...]:
    return (
        StageConfig(
            stage_id=REWRITER,
            engine_type="ar",
            model_path=str(rewriter_model),
            input_modalities=["text"],
            output_modalities=["text"],
            vllm_config={"max_model_len": 512},
        ),
        StageConfig(
            stage_id=ENCODER,
            engine_type="ar",
            model_path=str(model),
            input_modalities=["text"],
            output_modalities=["hidden_states"],
        ),
        StageConfig(
            stage_id=DRAWER,
            engine_type="diffusion",
            model_path=str(model),
            dit_config=DiTConfig(device="cpu"),
        ),
    )


def write_stage_file(path: Path, model: Path) -> Path:
    """The same stages; the rewriter is named relative to the file."""
    path.write_text(
        f"""
stage_configs:
  - stage_id: {REWRITER}
    engine_type: ar
    model_path: rewriter
    input_modalities: [text]
    output_modalities: [text]
    vllm_config:
      max_model_len: 512
  - stage_id: {ENCODER}
    engine_type: ar
    model_path: {model}
    input_modalities: [text]
    output_modalities: [hidden_states]
  - stage_id: {DRAWER}
    engine_type: diffusion
    model_path: {model}
    dit_config:
      device: cpu
""",
        encoding="utf-8",
    )
    return path


@pytest.fixture(scope="module")
def llm(checkpoint: MakeCheckpoint, rewriter_model: Path) -> Iterator[OmniAsyncLLM]:
    path = write_stage_file(rewriter_model.parent / "stages.yaml", checkpoint(0))
    llm = OmniAsyncLLM.from_vllm_config(
        vllm_config={"max_model_len": 1024}, stage_configs=read_stage_file(path), mode="embedded"
    )
    llm.processor.register_modality_processor("shape", ShapeProcessor("shape"))
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def rewritten(rewriter_model: Path) -> tuple[list[int], str]:
    """Tokens and text of Hugging Face's model, greedily, for the same chat."""
    with progress_bars_off():
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(rewriter_model)
    tokenizer = AutoTokenizer.from_pretrained(rewriter_model)
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    input_ids = torch.tensor([tokenizer(prompt).input_ids])
    with torch.no_grad():
        output = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=SAMPLING["max_tokens"],
        )
    tokens = output[0, input_ids.shape[1] :].tolist()
    return tokens, tokenizer.decode(tokens, skip_special_tokens=True)


def create_request(**changes: Any) -> OmniRequest:
    fields: dict[str, Any] = {
        "input_modalities": {"shape": SHAPE},
        "output_format": "text+image",
        "params": PARAMS,
        "sampling_params": SAMPLING,
    }
    return OmniRequest(**(fields | changes))


def generate(llm: OmniAsyncLLM, runner: asyncio.Runner, request: OmniRequest) -> list[OmniOutput]:
    async def collect() -> list[OmniOutput]:
        return [output async for output in llm.generate(request)]

    return runner.run(collect())


def latents_of(output: OmniOutput) -> torch.Tensor:
    assert output.error is None and output.latents is not None
    return output.latents[0]


def test_rewriter_writes_what_hugging_faces_model_writes(
    llm: OmniAsyncLLM, runner: asyncio.Runner, rewritten: tuple[list[int], str]
) -> None:
    tokens, text = rewritten
    answer = generate(llm, runner, create_request())[-1]
    assert answer.finished and answer.finish_reason is FinishReason.STOP
    assert list(answer.outputs[0].token_ids) == tokens
    assert answer.text == text
    assert len(text) > 5 and text != WORDS


def test_rewriter_writes_what_it_writes_alone(
    llm: OmniAsyncLLM, runner: asyncio.Runner, rewriter_model: Path
) -> None:
    alone = AREngine(rewriter_model, {"max_model_len": 512})
    try:
        alone.add_request(ARRequest(request_id="r", messages=CHAT, sampling_params=SAMPLING))
        outputs = []
        while alone.has_requests():
            news, _ = alone.step()
            outputs += news[0].outputs
    finally:
        alone.shutdown()
    answer = generate(llm, runner, create_request())[-1]
    assert answer.text == outputs[-1].request_output.outputs[0].text


def test_picture_is_that_of_the_rewritten_text(
    llm: OmniAsyncLLM, runner: asyncio.Runner, stock: MakeStock
) -> None:
    answer = generate(llm, runner, create_request())[-1]
    assert answer.text is not None
    # The same system without the rewriter, and diffusers.
    direct = generate(
        llm,
        runner,
        create_request(
            prompt=answer.text,
            input_modalities={},
            output_format="image",
            stage_configs=llm.stage_configs[ENCODER:],
        ),
    )[-1]
    assert direct.text is None
    expected, _ = draw_stock(stock(0), Case(answer.text, 64, 96, 3, 3.0, seed=5))
    assert (latents_of(answer) - latents_of(direct)).abs().max() <= 1e-4
    assert (latents_of(answer) - expected).abs().max() <= 1e-4

    not_rewritten, _ = draw_stock(stock(0), Case(WORDS, 64, 96, 3, 3.0, seed=5))
    assert (latents_of(answer) - not_rewritten).abs().max() > 1e-2


def test_text_is_rewritten_also_where_only_the_picture_is_shown(
    llm: OmniAsyncLLM, runner: asyncio.Runner
) -> None:
    shown = generate(llm, runner, create_request())[-1]
    hidden = generate(llm, runner, create_request(output_format="image"))
    assert all(output.text is None for output in hidden)
    assert (latents_of(hidden[-1]) - latents_of(shown)).abs().max() <= 1e-4


def test_modality_stands_for_its_words(llm: OmniAsyncLLM, runner: asyncio.Runner) -> None:
    from_shape = generate(llm, runner, create_request())[-1]
    from_words = generate(llm, runner, create_request(prompt=WORDS, input_modalities={}))[-1]
    assert from_words.text == from_shape.text
    assert (latents_of(from_words) - latents_of(from_shape)).abs().max() <= 1e-4
    other = create_request(input_modalities={"shape": SHAPE | {"colour": "blue"}})
    from_other = generate(llm, runner, other)[-1]
    assert (latents_of(from_other) - latents_of(from_shape)).abs().max() > 1e-2


def test_news_are_text_first_and_then_steps(llm: OmniAsyncLLM, runner: asyncio.Runner) -> None:
    *news, answer = generate(llm, runner, create_request())
    texts = [output.text for output in news if output.text is not None]
    steps = [output.step for output in news if output.num_steps]
    assert len(news) == len(texts) + len(steps)
    assert [output.text is not None for output in news] == [True] * len(texts) + [False] * 2
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert texts[-1] == answer.text
    assert steps == [1, 2]
    assert (answer.step, answer.num_steps) == (3, 3)


def test_each_format_comes_from_its_stage(
    llm: OmniAsyncLLM, runner: asyncio.Runner, stock: MakeStock
) -> None:
    both = generate(llm, runner, create_request(hidden_state_output=True))[-1]
    assert both.text is not None
    with torch.no_grad():
        expected, _ = stock(0).encode_prompt(both.text)
    assert both.hidden_states is not None
    assert (both.hidden_states - expected[0]).abs().max() <= 1e-4
    encoded = generate(llm, runner, create_request(output_format="hidden_states"))[-1]
    assert encoded.hidden_states is not None and encoded.images == []
    assert (encoded.hidden_states - expected[0]).abs().max() <= 1e-4


def test_several_at_once_do_not_mix(llm: OmniAsyncLLM, runner: asyncio.Runner) -> None:
    colours = ["red", "blue", "green", "yellow"]
    requests = [
        create_request(
            input_modalities={"shape": SHAPE | {"colour": colour}},
            params=replace(PARAMS, seed=seed),
        )
        for seed, colour in enumerate(colours)
    ]
    alone = [generate(llm, runner, replace(r, request_id=f"{r.request_id}-"))[-1] for r in requests]

    async def all_at_once() -> list[list[OmniOutput]]:
        async def collect(request: OmniRequest) -> list[OmniOutput]:
            return [output async for output in llm.generate(request)]

        return await asyncio.gather(*(collect(request) for request in requests))

    for expected, (*_, answer) in zip(alone, runner.run(all_at_once()), strict=True):
        assert answer.text == expected.text
        assert (latents_of(answer) - latents_of(expected)).abs().max() <= 1e-4


def test_modality_is_known_only_where_it_was_registered(
    llm: OmniAsyncLLM, runner: asyncio.Runner
) -> None:
    with pytest.raises(ModalityNotSupportedError) as caught:
        generate(llm, runner, create_request(input_modalities={"sound": b""}))
    assert str(caught.value) == "input modality 'sound' is not supported: one of text, image, shape"


def test_stage_file_says_the_same_as_python(
    checkpoint: MakeCheckpoint, rewriter_model: Path
) -> None:
    path = write_stage_file(rewriter_model.parent / "stages.yaml", checkpoint(0))
    for read, made in zip(
        read_stage_file(path), create_stages(rewriter_model, checkpoint(0)), strict=True
    ):
        if made.dit_config is not None:  # a file fills in the model and the id
            dit_config = replace(made.dit_config, model=made.model_path, stage_id=made.stage_id)
            made = replace(made, dit_config=dit_config)
        assert read == made
