"""Tokens and hidden states are those of Hugging Face's model, whatever shares the batch."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.ar.conftest import MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS
from tests.drawing import MakeCheckpoint, MakeStock
from tests.reference import Reference
from vllm_omni.ar.engine import AREngine
from vllm_omni.ar.messages import ARRequest
from vllm_omni.errors import (
    ConfigError,
    EngineDeadError,
    InvalidParameterError,
    ModalityNotSupportedError,
    ModelLoadError,
)
from vllm_omni.models.qwen_image.prompt import TEXT_TO_IMAGE
from vllm_omni.outputs import EngineCoreOutput

ATOL = 1e-4  # of hidden states that are about 4
NUM_NEW_TOKENS = 6
IMAGE_PROMPT = "a photo of <|vision_start|><|image_pad|><|vision_end|> with a hat"
PROMPTS = [
    "a red circle",
    "black and white",
    "a large blue square, " * 30,  # several chunks
    "x",
    "a painting of a cat on the table, " * 40,
]


def create_request(
    request_id: str,
    prompt: str | list[int],
    hidden_states: Literal["prompt", "all"] | None = None,
    images: tuple[Any, ...] = (),
    num_new_tokens: int = NUM_NEW_TOKENS,
) -> ARRequest:
    return ARRequest(
        request_id=request_id,
        prompt=prompt,
        images=images,
        sampling_params=SamplingParams(temperature=0, max_tokens=num_new_tokens, ignore_eos=True),
        hidden_states=hidden_states,
    )


def create_image(width: int = 120, height: int = 90) -> Image.Image:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)
    return Image.fromarray(pixels.numpy())


def step(engine: AREngine) -> list[EngineCoreOutput]:
    news, _ = engine.step()
    return [output for outputs in news.values() for output in outputs.outputs]


def run(engine: AREngine, *requests: ARRequest) -> dict[str, list[EngineCoreOutput]]:
    """All outputs of the requests; each must end exactly once, with its last output."""
    outputs: dict[str, list[EngineCoreOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_requests():
        for output in step(engine):
            outputs[output.request_id].append(output)
    for of_request in outputs.values():
        assert [output.finished for output in of_request[:-1]] == [False] * (len(of_request) - 1)
        assert of_request[-1].finished
    return outputs


def rows_of(outputs: list[EngineCoreOutput]) -> Tensor:
    (rows,) = [o.pooling_output for o in outputs if o.pooling_output is not None]
    return rows


def tokens_of(outputs: list[EngineCoreOutput]) -> list[int]:
    assert outputs[-1].request_output is not None
    return list(outputs[-1].request_output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def reference(checkpoint: MakeCheckpoint, stock: MakeStock) -> Reference:
    return Reference(checkpoint(0), stock(0))


@pytest.fixture(scope="module")
def small_engine(checkpoint: MakeCheckpoint) -> Iterator[AREngine]:
    """Room for 5 blocks of 128 tokens: two long requests get into each other's way."""
    engine = AREngine(checkpoint(0), {"max_model_len": 512, "num_gpu_blocks_override": 6})
    yield engine
    engine.shutdown()


def test_greedy_tokens_equal_hugging_face(engine: AREngine, reference: Reference) -> None:
    outputs = run(engine, *(create_request(str(i), p) for i, p in enumerate(PROMPTS)))
    for i, prompt in enumerate(PROMPTS):
        assert tokens_of(outputs[str(i)]) == reference.generate(
            reference.inputs(prompt), NUM_NEW_TOKENS
        )
        assert [o.pooling_output for o in outputs[str(i)]] == [None] * NUM_NEW_TOKENS


def test_hidden_states_in_one_batch_with_generation(engine: AREngine, reference: Reference) -> None:
    """Prompts of one chunk and of many, opted in and not, text, token ids and image, together."""
    requests = [
        *(create_request(f"prompt {i}", p, "prompt") for i, p in enumerate(PROMPTS)),
        *(create_request(f"none {i}", p) for i, p in enumerate(PROMPTS)),
        *(create_request(f"all {i}", p, "all") for i, p in enumerate(PROMPTS)),
        create_request("ids", [5, 6, 7, 300], "all"),
        create_request("image", IMAGE_PROMPT, "all", (create_image(),)),
        # More tokens than a step has.
        create_request("large image", IMAGE_PROMPT, "prompt", (create_image(500, 400),)),
    ]
    outputs = run(engine, *requests)
    for request in requests:
        inputs = reference.inputs(request.prompt, *request.images)  # type: ignore[arg-type]
        tokens = tokens_of(outputs[request.request_id])
        assert tokens == reference.generate(inputs, NUM_NEW_TOKENS), request.request_id
        if request.hidden_states is None:
            assert all(o.pooling_output is None for o in outputs[request.request_id])
            continue
        # The last token has been sampled and not read.
        read = tokens[:-1] if request.hidden_states == "all" else None
        expected = reference.hidden_states(inputs, read)
        rows = rows_of(outputs[request.request_id])
        assert rows.shape == expected.shape
        assert (rows - expected).abs().max() < ATOL
        first_with_rows = outputs[request.request_id][0].pooling_output is not None
        assert first_with_rows == (request.hidden_states == "prompt")
    assert max(reference.inputs(p)["input_ids"].numel() for p in PROMPTS) > 4 * (
        MAX_NUM_BATCHED_TOKENS
    )


def test_prefix_cache_takes_no_rows(engine: AREngine, reference: Reference) -> None:
    prompt = "a dog with a hat in the garden, " * 30
    expected = reference.hidden_states(reference.inputs(prompt))
    for request_id in ("first", "second"):
        rows = rows_of(run(engine, create_request(request_id, prompt, "prompt"))[request_id])
        assert rows.shape == expected.shape
        assert (rows - expected).abs().max() < ATOL
    # The cache is there: a request without hidden states reads from it.
    (*_, last) = run(engine, create_request("third", prompt))["third"]
    assert last.request_output is not None and last.request_output.num_cached_tokens > 0


def test_preempted_request_gives_each_row_once(
    small_engine: AREngine, reference: Reference
) -> None:
    prompts = {"a": "a small red circle " * 30, "b": "a large blue square " * 30}
    for request_id, prompt in prompts.items():
        small_engine.add_request(create_request(request_id, prompt, "all", num_new_tokens=260))
    scheduler = small_engine._engine.engine_core.engine_core.scheduler
    num_preemptions = 0
    outputs: dict[str, list[EngineCoreOutput]] = {"a": [], "b": []}
    while small_engine.has_requests():
        for output in step(small_engine):
            outputs[output.request_id].append(output)
        live = [request.num_preemptions for request in scheduler.requests.values()]
        num_preemptions = max([num_preemptions, *live])
    assert num_preemptions > 0
    for request_id, prompt in prompts.items():
        tokens = tokens_of(outputs[request_id])
        expected = reference.hidden_states(reference.inputs(prompt), tokens[:-1])
        rows = rows_of(outputs[request_id])
        assert rows.shape == expected.shape
        assert (rows - expected).abs().max() < ATOL


def test_rows_after_the_prefix_equal_the_stock_prompt_embeds(
    engine: AREngine, stock: MakeStock
) -> None:
    for prompt in ("a red circle", "", "a house and a tree, {} " * 20):
        text = TEXT_TO_IMAGE.apply(prompt)
        rows = rows_of(run(engine, create_request("r", text, "prompt", num_new_tokens=1))["r"])
        with torch.no_grad():
            expected, _ = stock(0).encode_prompt(prompt)
        assert rows[TEXT_TO_IMAGE.num_prefix_tokens :].shape == expected[0].shape
        assert (rows[TEXT_TO_IMAGE.num_prefix_tokens :] - expected[0]).abs().max() < ATOL


def test_sampling_is_vllms(engine: AREngine) -> None:
    """Several answers, the seed and stop strings arrive as vLLM makes them."""

    def answers(**changes: Any) -> list[Any]:
        params: dict[str, Any] = {"seed": 1, "temperature": 2.0, "ignore_eos": True, **changes}
        sampling_params = SamplingParams(
            max_tokens=NUM_NEW_TOKENS, output_kind=RequestOutputKind.FINAL_ONLY, **params
        )
        request = ARRequest(request_id="r", prompt="a cat", sampling_params=sampling_params)
        output = run(engine, request)["r"][-1].request_output
        assert output is not None
        return list(output.outputs)

    three = answers(n=3)
    assert len({tuple(answer.token_ids) for answer in three}) == 3
    (alone,) = answers()
    assert alone.token_ids == three[0].token_ids
    stop = alone.text[len(alone.text) // 2 :][:2]
    (stopped,) = answers(stop=[stop])
    assert stopped.stop_reason == stop
    assert stopped.text == alone.text[: alone.text.index(stop)]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 12], ids="after {} steps".format)
def test_abort_frees_what_was_held(engine: AREngine, num_steps: int) -> None:
    """While waiting, in the middle of the prompt, and while generating."""
    runner = engine._engine.model_executor.driver_worker.worker.model_runner
    long = create_request("long", PROMPTS[-1], "all", num_new_tokens=50)
    engine.add_request(long)
    engine.add_request(create_request("other", "a cat", num_new_tokens=30))
    outputs = [output for _ in range(num_steps) for output in step(engine)]
    is_held = any(request_id.startswith("long") for request_id in runner.held_rows)
    assert is_held == (num_steps > 0)
    engine.abort_requests(["long", "never heard of"])
    outputs += step(engine)
    assert runner.held_rows == {}
    assert engine._outputs._rows == {}
    assert engine.has_requests()  # the other one
    while engine.has_requests():
        outputs += step(engine)
    ends = [
        (output.request_id, output.request_output is None) for output in outputs if output.finished
    ]
    assert sorted(ends) == [("long", True), ("other", False)]
    assert all(output.pooling_output is None for output in outputs)
    assert step(engine) == []


def test_abort_of_the_only_request(engine: AREngine) -> None:
    runner = engine._engine.model_executor.driver_worker.worker.model_runner
    engine.add_request(create_request("only", PROMPTS[-1], "prompt"))
    step(engine)
    engine.abort_requests(["only"])
    assert [output.finished for output in step(engine)] == [True]
    assert not engine.has_requests()
    assert runner.held_rows == {}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (create_request("r", "a cat " * MAX_MODEL_LEN), "prompt=.*maximum context length is 1024"),
        (create_request("r", [10**6]), "prompt=.*out of vocabulary"),
        (create_request("r", ""), "prompt=.*cannot be empty"),
        (create_request("r", IMAGE_PROMPT, None, ("not an image",)), "prompt=.*not an image"),
        (create_request("r", "no place for it", None, (create_image(),)), "prompt=.*image"),
        (create_request("r", IMAGE_PROMPT, None, (create_image(2, 900),)), "prompt=.*aspect ratio"),
        (create_request("r", "a cat", "some"), "hidden_states='some'"),  # type: ignore[arg-type]
        (
            ARRequest(
                request_id="r",
                prompt="a cat",
                sampling_params=SamplingParams(n=2),
                hidden_states="prompt",
            ),
            "n=2",
        ),
        (
            ARRequest(
                request_id="r", prompt="a cat", sampling_params=SamplingParams(logprobs=10**4)
            ),
            "logprobs=10000",
        ),
        (
            ARRequest(request_id="r", prompt="a cat", sampling_params={"temperature": -1.0}),
            "sampling_params={'temperature': -1.0}.*temperature must be non-negative",
        ),
        (
            ARRequest(request_id="r", prompt="a cat", sampling_params={"heat": 1.0}),
            "sampling_params={'heat': 1.0}.*heat",
        ),
        (
            ARRequest(request_id="r", prompt="a cat", sampling_params="hot"),
            "sampling_params='hot'.*mapping",
        ),
    ],
    ids=[
        "long",
        "unknown token",
        "empty",
        "no image",
        "no place",
        "narrow image",
        "unknown hidden states",
        "n",
        "logprobs",
        "sampling value",
        "sampling name",
        "sampling kind",
    ],
)
def test_bad_request_is_refused_and_the_next_works(
    engine: AREngine, reference: Reference, request_: ARRequest, message: str
) -> None:
    with pytest.raises(InvalidParameterError, match=f"(?s){message}"):
        engine.add_request(request_)
    assert not engine.has_requests()
    prompt = "a yellow star"
    assert tokens_of(run(engine, create_request("r", prompt))["r"]) == reference.generate(
        reference.inputs(prompt), NUM_NEW_TOKENS
    )


def test_request_id_in_use_is_refused(engine: AREngine) -> None:
    request = create_request("twice", "a cat")
    engine.add_request(request)
    with pytest.raises(InvalidParameterError, match="request_id='twice'"):
        engine.add_request(request)
    engine.abort_requests(["twice"])
    with pytest.raises(InvalidParameterError, match="request_id='twice'"):
        engine.add_request(request)  # its last output is still to come
    assert [output.finished for output in step(engine)] == [True]
    assert tokens_of(run(engine, request)["twice"])


def test_failure_in_a_step_is_the_engines(checkpoint: MakeCheckpoint, engine: AREngine) -> None:
    broken = AREngine(checkpoint(0))
    broken.add_request(create_request("r", "a cat"))
    broken._engine.model_executor.driver_worker.worker.model_runner.model = None
    with pytest.raises(EngineDeadError, match="vLLM failed in a step: AssertionError"):
        step(broken)
    broken.shutdown()
    assert tokens_of(run(engine, create_request("r", "a cat"))["r"])  # the other one goes on


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: shutil.rmtree(path / "text_encoder"),
            "neither config.json nor text_encoder/config.json",
        ),
        (lambda path: (path / "text_encoder" / "config.json").write_text("{"), "config"),
        (
            lambda path: (path / "text_encoder" / "model.safetensors").write_bytes(b"nothing"),
            "(?i)safetensors|header",
        ),
        (lambda path: (path / "text_encoder" / "model.safetensors").unlink(), "weights"),
    ],
    ids=["no folder", "broken config", "broken weights", "no weights"],
)
def test_broken_checkpoint(
    checkpoint: MakeCheckpoint, engine: AREngine, tmp_path: Path, damage: Any, message: str
) -> None:
    model = shutil.copytree(checkpoint(0), tmp_path / "model")
    damage(model)
    with pytest.raises(ModelLoadError, match=message) as caught:
        AREngine(model)
    assert str(model) in str(caught.value)
    assert tokens_of(run(engine, create_request("r", "a cat"))["r"])  # it goes on


def test_checkpoint_without_image_settings_reads_text(
    checkpoint: MakeCheckpoint, reference: Reference, engine: AREngine, tmp_path: Path
) -> None:
    """As Qwen-Image is published: a tokenizer and no processor."""
    model = shutil.copytree(checkpoint(0), tmp_path / "model")
    shutil.rmtree(model / "processor")
    before = sorted(path for path in model.rglob("*"))
    text_engine = AREngine(model)
    try:
        assert sorted(path for path in model.rglob("*")) == before
        rows = rows_of(run(text_engine, create_request("r", "a cat", "prompt"))["r"])
        assert (rows - reference.hidden_states(reference.inputs("a cat"))).abs().max() < ATOL
        with pytest.raises(ModalityNotSupportedError, match="no processor/preprocessor_config"):
            text_engine.add_request(create_request("i", IMAGE_PROMPT, None, (create_image(),)))
    finally:
        text_engine.shutdown()
    # The engines share a process; the end of one is not the end of the other.
    assert tokens_of(run(engine, create_request("r", "a cat"))["r"])


@pytest.mark.parametrize("engine_args", [{"worker_cls": "mine"}, {"max_num_seq": 3}])
def test_engine_args_are_checked(checkpoint: MakeCheckpoint, engine_args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(engine_args))):
        AREngine(checkpoint(0), engine_args)


def seed_everything() -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)


def test_the_process_stays_the_callers(checkpoint: MakeCheckpoint) -> None:
    """A vLLM worker on a CPU forbids `torch.set_num_threads` and seeds everything."""
    seed_everything()
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    seed_everything()
    AREngine(checkpoint(0)).shutdown()
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected

    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads + 1)
    assert torch.get_num_threads() == num_threads + 1
    torch.set_num_threads(num_threads)
