"""The whole system, in both modes: what it makes is right, and whoever leaves leaves nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.drawing import COMPANY_TOLERANCE, Case, MakeCheckpoint, MakeStock, draw_stock
from tests.reference import Reference
from vllm_omni import DiffusionParams, OmniAsyncLLM, OmniRequest, OutputMode
from vllm_omni.errors import (
    DeadlineExceededError,
    InvalidParameterError,
    ModalityNotSupportedError,
    OmniRequestError,
)
from vllm_omni.models.qwen_image.prompt import EDIT, REWRITE_INSTRUCTION, TEXT_TO_IMAGE
from vllm_omni.outputs import FinishReason, OmniOutput
from vllm_omni.request import OutputKind

PARAMS = DiffusionParams(
    height=64,
    width=96,
    num_inference_steps=4,
    seed=1,
    output_mode=OutputMode.PIXELS_AND_LATENTS,
)
LATENTS = replace(PARAMS, output_mode=OutputMode.LATENTS)
LONG = replace(LATENTS, height=256, width=256, num_inference_steps=500)
GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
ENDLESS = {"temperature": 0.0, "max_tokens": 800, "ignore_eos": True}


@pytest.fixture(scope="module")
def reference(checkpoint: MakeCheckpoint, stock: MakeStock) -> Reference:
    return Reference(checkpoint(0), stock(0))


@pytest.fixture
def run(runner: asyncio.Runner) -> Any:
    """Runs a coroutine in the loop that the system belongs to."""
    return runner.run


async def collect(llm: OmniAsyncLLM, request: OmniRequest) -> list[OmniOutput]:
    """All outputs; the last one, and no other, is finished."""
    outputs = [output async for output in llm.generate(request)]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.request_id for output in outputs} == {request.request_id}
    return outputs


async def answer(llm: OmniAsyncLLM, **fields: Any) -> OmniOutput:
    return (await collect(llm, OmniRequest(**fields)))[-1]


async def assert_idle(llm: OmniAsyncLLM) -> None:
    """No stage holds anything of any request."""
    deadline = time.monotonic() + 10
    while held := [
        stats
        for stage_id in (0, 1)
        for stats in await llm.collective_rpc(stage_id, "get_stats")
        if stats["num_requests"]
    ]:
        assert time.monotonic() < deadline, held
        await asyncio.sleep(0.05)


def create_image() -> Image.Image:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (90, 120, 3), dtype=torch.uint8, generator=generator)
    return Image.fromarray(pixels.numpy())


# --- what it makes ---


@pytest.mark.parametrize("true_cfg_scale", [None, 3.0])
def test_pictures_equal_those_of_diffusers(
    llm: OmniAsyncLLM, run: Any, stock: MakeStock, true_cfg_scale: float | None
) -> None:
    case = Case("a red circle", 64, 96, 4, true_cfg_scale, seed=1)
    params = replace(
        PARAMS, negative_prompt=case.negative_prompt, true_cfg_scale=true_cfg_scale or 1.0
    )
    output = run(answer(llm, prompt=case.prompt, params=params))
    latents, pixels = draw_stock(stock(0), case)
    assert output.latents is not None
    assert (output.latents[0] - latents).abs().max() <= 1e-4
    assert np.abs(np.asarray(output.images[0]).astype(int) - pixels).max() <= 1
    assert output.seeds == [1] and output.finish_reason is FinishReason.STOP
    assert output.metrics.num_steps == 4
    assert 0 < output.metrics.queue_time < output.metrics.total_time


def test_every_kind_of_request_in_one_batch(
    llm: OmniAsyncLLM, run: Any, stock: MakeStock, reference: Reference
) -> None:
    prompts = ["a red circle", "a large blue square, " * 12, "x"]

    async def main() -> list[OmniOutput]:
        return await asyncio.gather(
            *(answer(llm, prompt=p, params=PARAMS) for p in prompts),
            *(answer(llm, prompt=p, output_format="text", sampling_params=GREEDY) for p in prompts),
            *(answer(llm, prompt=p, output_format="hidden_states") for p in prompts),
        )

    outputs = run(main())
    for prompt, picture, text, states in zip(
        prompts, outputs[:3], outputs[3:6], outputs[6:], strict=True
    ):
        latents, _ = draw_stock(stock(0), Case(prompt, 64, 96, 4, None, seed=1))
        assert picture.latents is not None
        assert (picture.latents[0] - latents).abs().max() <= 1e-4
        expected = reference.generate(reference.inputs(prompt), 6)
        assert list(text.outputs[0].token_ids) == expected
        rows = reference.hidden_states(reference.inputs(TEXT_TO_IMAGE.apply(prompt)))
        assert states.hidden_states is not None
        assert (states.hidden_states - rows[34:]).abs().max() <= 1e-4


def test_an_image_as_input(llm: OmniAsyncLLM, run: Any, reference: Reference) -> None:
    image, prompt = create_image(), "make it blue"
    fields: dict[str, Any] = {"prompt": prompt, "input_modalities": {"image": image}}

    async def main() -> tuple[OmniOutput, OmniOutput]:
        return await asyncio.gather(
            answer(llm, **fields, output_format="hidden_states"),
            answer(llm, **fields, output_format="text", sampling_params=GREEDY),
        )

    states, text = run(main())
    rows = reference.hidden_states(reference.inputs(EDIT.apply(prompt), image))
    assert states.hidden_states is not None
    assert (states.hidden_states - rows[64:]).abs().max() <= 1e-4
    chat = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>make it blue<|im_end|>\n"
    inputs = reference.inputs(f"{chat}<|im_start|>assistant\n", image)
    assert list(text.outputs[0].token_ids) == reference.generate(inputs, 6)


def test_text_and_image_in_one_answer(llm: OmniAsyncLLM, run: Any, reference: Reference) -> None:
    request = OmniRequest(
        prompt="a star", output_format="text+image", params=PARAMS, sampling_params=GREEDY
    )
    outputs = run(collect(llm, request))
    texts = [output.text for output in outputs if output.text is not None]
    chat = (
        f"<|im_start|>system\n{REWRITE_INSTRUCTION}<|im_end|>\n"
        "<|im_start|>user\na star<|im_end|>\n<|im_start|>assistant\n"
    )
    expected = reference.generate(reference.inputs(chat), 6)
    assert list(outputs[-1].outputs[0].token_ids) == expected
    written = outputs[-1].text
    assert written is not None and texts == sorted(texts, key=len)
    assert all(written.startswith(text) for text in texts)
    # The text is there before the first step of the picture, which is drawn from it.
    first_step = next(i for i, output in enumerate(outputs) if output.step)
    assert outputs[first_step - 1].text == written
    direct = run(answer(llm, prompt=written, params=PARAMS))
    assert outputs[-1].latents is not None and direct.latents is not None
    assert (outputs[-1].latents - direct.latents).abs().max() <= 1e-4


def test_several_outputs_come_back_as_one_answer(llm: OmniAsyncLLM, run: Any) -> None:
    params = replace(LATENTS, num_outputs_per_prompt=3, seed=7)
    outputs = run(collect(llm, OmniRequest(prompt="a cat", params=params)))
    assert outputs[-1].seeds == [7, 8, 9]
    assert outputs[-1].step == 12
    for index in range(3):
        alone = run(answer(llm, prompt="a cat", params=replace(LATENTS, seed=7 + index)))
        assert outputs[-1].latents is not None and alone.latents is not None
        assert (outputs[-1].latents[index] - alone.latents[0]).abs().max() <= COMPANY_TOLERANCE


def test_latents_and_the_hidden_states_beside_a_picture(
    llm: OmniAsyncLLM, run: Any, stock: MakeStock
) -> None:
    params = replace(PARAMS, output_mode=OutputMode.PIXELS)
    latents = run(answer(llm, prompt="a cat", params=params, output_format="latents"))
    picture = run(answer(llm, prompt="a cat", params=PARAMS, hidden_state_output=True))
    assert latents.images == [] and latents.latents is not None
    assert (latents.latents - picture.latents).abs().max() <= 1e-5
    with torch.no_grad():
        expected, _ = stock(0).encode_prompt("a cat")
    assert (picture.hidden_states - expected[0]).abs().max() <= 1e-4


# --- streams ---


def test_progress_and_previews(llm: OmniAsyncLLM, run: Any) -> None:
    params = replace(PARAMS, preview_every=2, num_inference_steps=5)
    outputs = run(collect(llm, OmniRequest(prompt="a cat", params=params)))
    assert [(o.step, o.num_steps) for o in outputs] == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]
    sizes = [None if o.preview is None else o.preview.size for o in outputs]
    assert sizes == [None, (48, 32), None, (48, 32), None]
    quiet = run(
        collect(llm, OmniRequest(prompt="a cat", params=PARAMS, output_kind=OutputKind.FINAL_ONLY))
    )
    assert len(quiet) == 1 and quiet[0].images


def test_the_stream_of_text_is_that_of_vllm(
    llm: OmniAsyncLLM, run: Any, reference: Reference
) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    request = OmniRequest(prompt="a cat", output_format="text", sampling_params=params)
    deltas = run(collect(llm, request))
    expected = reference.generate(reference.inputs("a cat"), 6)
    assert [id for output in deltas for id in output.outputs[0].token_ids] == expected
    assert 1 < len(deltas) <= 6  # vLLM joins those that nobody has taken yet
    final = run(
        collect(
            llm,
            OmniRequest(
                prompt="a cat",
                output_format="text",
                sampling_params=GREEDY,
                output_kind=OutputKind.FINAL_ONLY,
            ),
        )
    )
    assert len(final) == 1
    assert final[0].text == "".join(output.text or "" for output in deltas)
    assert final[0].outputs[0].finish_reason == "length"


def test_sampling_is_all_of_vllm(llm: OmniAsyncLLM, run: Any, reference: Reference) -> None:
    several = run(
        answer(
            llm,
            prompt="a cat",
            output_format="text",
            sampling_params={"n": 2, "seed": 3, "max_tokens": 4, "ignore_eos": True},
            output_kind=OutputKind.FINAL_ONLY,
        )
    )
    assert [completion.index for completion in several.outputs] == [0, 1]
    assert several.outputs[0].token_ids != several.outputs[1].token_ids
    whole = run(answer(llm, prompt="a cat", output_format="text", sampling_params=GREEDY))
    assert whole.text
    stop = whole.text[len(whole.text) // 2 :]
    stopped = run(
        answer(
            llm, prompt="a cat", output_format="text", sampling_params={**GREEDY, "stop": [stop]}
        )
    )
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.outputs[0].finish_reason == "stop" and stopped.outputs[0].stop_reason == stop
    first = reference.generate(reference.inputs("a cat"), 1)[0]
    tokens = run(
        answer(
            llm,
            prompt_token_ids=reference.tokenizer("a cat").input_ids,
            output_format="text",
            sampling_params={**GREEDY, "max_tokens": 1},
        )
    )
    assert list(tokens.outputs[0].token_ids) == [first]


def test_logprobs(llm: OmniAsyncLLM, run: Any, reference: Reference) -> None:
    params = {**GREEDY, "max_tokens": 1, "logprobs": 2}
    output = run(answer(llm, prompt="a cat", output_format="text", sampling_params=params))
    [logprobs] = output.outputs[0].logprobs
    with torch.no_grad():
        logits = reference.model(**reference.inputs("a cat")).logits[0, -1]
    expected, ids = logits.log_softmax(-1).topk(2)
    assert sorted(logprobs) == sorted(ids.tolist())
    for logprob, id in zip(expected.tolist(), ids.tolist(), strict=True):
        assert logprobs[id].logprob == pytest.approx(logprob, abs=1e-4)


# --- leaving ---


@pytest.mark.parametrize(
    "fields",
    [
        {"params": LONG},
        {"params": replace(LONG, num_outputs_per_prompt=3)},
        {"output_format": "text", "sampling_params": ENDLESS},
        {"output_format": "text", "sampling_params": {**ENDLESS, "temperature": 1.0, "n": 2}},
        {"output_format": "text+image", "sampling_params": ENDLESS, "params": LONG},
    ],
    ids=["image", "three images", "text", "two texts", "text and image"],
)
def test_abort_cancel_and_deadline_end_a_request_at_once(
    llm: OmniAsyncLLM, run: Any, fields: dict[str, Any]
) -> None:
    async def main() -> None:
        # 1. Abort: the stream ends with an output that says so.
        request = OmniRequest(prompt="a cat", **fields)
        seen = []
        async for output in llm.generate(request):
            seen.append(output)
            if len(seen) == 2:
                await llm.abort(request.request_id)
        assert seen[-1].finished and seen[-1].finish_reason is FinishReason.ABORT
        # Of 500 steps or 800 tokens, at most what the stage had told before anybody listened.
        assert len(seen) < 200
        # 2. Cancel the task.
        task = asyncio.create_task(collect(llm, OmniRequest(prompt="a cat", **fields)))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # 3. Stop listening.
        stream = llm.generate(OmniRequest(prompt="a cat", **fields))
        await anext(stream)
        await stream.aclose()
        # 4. The deadline.
        start = time.monotonic()
        params = replace(fields.get("params", PARAMS), deadline=0.1)
        with pytest.raises(DeadlineExceededError, match="deadline"):
            await collect(llm, OmniRequest(prompt="a cat", **{**fields, "params": params}))
        assert time.monotonic() - start < 5
        await assert_idle(llm)

    run(main())


def test_what_has_ended_cannot_be_aborted(llm: OmniAsyncLLM, run: Any) -> None:
    output = run(answer(llm, prompt="a cat", params=PARAMS))
    run(llm.abort(output.request_id))
    run(llm.abort("never heard of"))
    assert run(answer(llm, prompt="a cat", params=PARAMS)).images


# --- what goes wrong ---


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"input_modalities": {"smell": 1}}, ModalityNotSupportedError, "'smell' is not supported"),
        ({"output_format": "video"}, ModalityNotSupportedError, "'video' is not supported: one of"),
        ({"prompt": "very " * 2000}, InvalidParameterError, "the most is 1024"),
        (
            {"params": replace(PARAMS, height=8192, width=8192)},
            OmniRequestError,
            "max_num_batched_tokens",
        ),
        (
            {"params": replace(PARAMS, guidance_scale=2.0)},
            InvalidParameterError,
            "use true_cfg_scale",
        ),
        (
            {"input_modalities": {"image": b"nothing"}, "output_format": "text"},
            InvalidParameterError,
            "a picture: UnidentifiedImageError",
        ),
        (
            {"input_modalities": {"image": create_image()}},
            ModalityNotSupportedError,
            "the model does not edit",
        ),
        (
            {"output_format": "text", "sampling_params": {"temperature": -1.0}},
            InvalidParameterError,
            "temperature",
        ),
        (
            {"output_format": "text", "sampling_params": {"temperatur": 1.0}},
            InvalidParameterError,
            "temperatur",
        ),
        (
            {"output_format": "text", "prompt": "very " * 2000},
            InvalidParameterError,
            "(?i)max_model_len|maximum|length",
        ),
        (
            {"output_format": "text", "messages": [{"role": "user", "content": [{"type": "x"}]}]},
            InvalidParameterError,
            "messages",
        ),
        (
            {"output_format": "text", "sampling_params": {**GREEDY, "n": 2}},
            InvalidParameterError,
            "n must be 1 when using greedy sampling",
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_bad_request_says_why_and_hurts_nobody(
    llm: OmniAsyncLLM, run: Any, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    async def main() -> None:
        good = asyncio.create_task(answer(llm, prompt="a cat", params=PARAMS))
        with pytest.raises(error, match=message):
            await answer(llm, **{"prompt": "a cat", "params": PARAMS, **fields})
        assert (await good).images
        assert (await answer(llm, prompt="a cat", params=PARAMS)).images
        await llm.check_health()
        await assert_idle(llm)

    run(main())


def test_a_request_id_in_use_is_refused(llm: OmniAsyncLLM, run: Any) -> None:
    async def main() -> None:
        request = OmniRequest(prompt="a cat", params=PARAMS)
        first = asyncio.create_task(collect(llm, request))
        await asyncio.sleep(0)
        with pytest.raises(InvalidParameterError, match="request_id"):
            await collect(llm, replace(request))
        assert (await first)[-1].images

    run(main())


# --- all at once ---


def measure_leftovers() -> dict[str, Any]:
    """What a process holds that requests could have left behind."""
    gc.collect()
    return {
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "processes": len(psutil.Process().children(recursive=True)),
        "file descriptors": psutil.Process().num_fds(),
        "shared memory": {path.name for path in Path("/dev/shm").iterdir()},
        "tensors": sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()),
    }


def create_mixed_requests(count: int, random: Random) -> list[OmniRequest]:
    """Requests of all kinds; no two alike."""
    kinds: list[dict[str, Any]] = [
        {"params": PARAMS},
        {"params": replace(PARAMS, negative_prompt="ugly", width=64, num_inference_steps=7)},
        {"params": replace(PARAMS, num_outputs_per_prompt=2, preview_every=2)},
        {"output_format": "latents", "params": replace(PARAMS, height=128)},
        {"output_format": "text", "sampling_params": GREEDY},
        {"output_format": "text", "sampling_params": {**GREEDY, "max_tokens": 30}},
        {"output_format": "hidden_states"},
        {"output_format": "text+image", "params": PARAMS, "sampling_params": GREEDY},
        {
            "output_format": "text",
            "sampling_params": GREEDY,
            "input_modalities": {"image": create_image()},
        },
    ]
    requests = []
    for index in range(count):
        fields = dict(kinds[index % len(kinds)])
        params = replace(fields.pop("params", PARAMS), seed=random.randrange(1000))
        requests.append(OmniRequest(prompt=f"picture {index}", params=params, **fields))
    return requests


def test_64_requests_of_all_kinds_with_a_fifth_aborted(llm: OmniAsyncLLM, run: Any) -> None:
    random = Random(5)

    async def take(request: OmniRequest, leave_after: float | None, how: str) -> Any:
        task = asyncio.create_task(collect(llm, request))
        if leave_after is not None:
            await asyncio.sleep(leave_after)
            if how == "abort":
                await llm.abort(request.request_id)
            else:
                task.cancel()
        return await asyncio.gather(task, return_exceptions=True)

    async def storm() -> None:
        requests = create_mixed_requests(64, random)
        leavers = set(random.sample(range(64), 13))
        results = await asyncio.gather(
            *(
                take(
                    request,
                    random.uniform(0, 0.5) if index in leavers else None,
                    random.choice(["abort", "cancel"]),
                )
                for index, request in enumerate(requests)
            )
        )
        await assert_idle(llm)
        num_left = 0
        for index, (request, [outputs]) in enumerate(zip(requests, results, strict=True)):
            assert isinstance(outputs, (list, asyncio.CancelledError)), outputs
            if not isinstance(outputs, list) or outputs[-1].finish_reason is FinishReason.ABORT:
                assert index in leavers
                num_left += 1
                continue
            # The rest are right: as made alone.
            [*_, alone] = await collect(llm, replace(request, request_id=f"alone {index}"))
            assert_same(outputs[-1], alone)
        assert num_left >= 5, "too few were still there to be aborted"
        await assert_idle(llm)

    async def main() -> None:
        await storm()  # fills the caches that are kept on purpose, each of which is bounded
        before = measure_leftovers()
        await storm()
        after = measure_leftovers()
        # The caches change what they hold; a leak would be at least one for each of 64 requests.
        assert abs(after.pop("tensors") - before.pop("tensors")) < 32
        assert after.pop("shared memory") <= before.pop("shared memory")  # others use it too
        assert after == before

    run(main())


def assert_same(output: OmniOutput, expected: OmniOutput) -> None:
    assert output.text == expected.text
    assert output.seeds == expected.seeds and len(output.images) == len(expected.images)
    for mine, other in (
        (output.latents, expected.latents),
        (output.hidden_states, expected.hidden_states),
    ):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert (mine - other).abs().max() <= 1e-4
    for image, other_image in zip(output.images, expected.images, strict=True):
        difference = np.asarray(image).astype(int) - np.asarray(other_image).astype(int)
        assert np.abs(difference).max() <= 1
