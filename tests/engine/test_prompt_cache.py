"""Prompts that were encoded before do not go to the AR stage again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
import torch
from PIL import Image

from vllm_omni.ar.messages import ARRequest
from vllm_omni.config import StageConfig
from vllm_omni.engine.async_llm import OmniAsyncLLM
from vllm_omni.engine.prompt_cache import PromptCache, make_key
from vllm_omni.outputs import EngineCoreOutput, FinishReason, OmniOutput
from vllm_omni.params import DiffusionParams, OutputMode
from vllm_omni.request import OmniRequest

STATES_BYTES = 3 * 4 * 4


class Stage:
    """Gives [3, 4] hidden states, and counts what it is asked for."""

    def __init__(self, reason: FinishReason = FinishReason.STOP) -> None:
        self.stage = StageConfig(0, "ar", "model")
        self.reason = reason
        self.asked: list[str] = []

    async def outputs(
        self, requests: Sequence[ARRequest], expires_at: float | None = None
    ) -> AsyncGenerator[EngineCoreOutput, None]:
        for request in requests:
            self.asked.append(str(request.prompt))
            yield EngineCoreOutput(
                request_id=request.request_id,
                finish_reason=self.reason,
                pooling_output=torch.full((3, 4), float(len(request.prompt))),
            )


def encode(cache: PromptCache, stage: Any, *prompts: str) -> dict[str, EngineCoreOutput]:
    async def collect() -> dict[str, EngineCoreOutput]:
        requests = [ARRequest(request_id=prompt, prompt=prompt) for prompt in prompts]
        return {o.request_id: o async for o in cache.outputs(stage, requests)}

    return asyncio.run(collect())


def test_only_what_is_new_goes_to_the_stage() -> None:
    cache, stage = PromptCache(1000), Stage()
    encode(cache, stage, "a", "bb")
    outputs = encode(cache, stage, "bb", "ccc", "a")
    assert stage.asked == ["a", "bb", "ccc"]
    assert (cache.num_hits, cache.num_misses) == (2, 3)
    for prompt in ("a", "bb", "ccc"):
        output = outputs[prompt]
        assert output.finish_reason is FinishReason.STOP and output.pooling_output is not None
        assert output.pooling_output.tolist() == [[len(prompt)] * 4] * 3


def test_the_least_recently_used_give_way() -> None:
    cache, stage = PromptCache(2 * STATES_BYTES), Stage()
    encode(cache, stage, "a", "bb")
    encode(cache, stage, "a")
    encode(cache, stage, "ccc")  # in the place of bb
    encode(cache, stage, "a", "bb")
    assert stage.asked == ["a", "bb", "ccc", "bb"]
    assert cache.num_evictions == 2 and cache.used_bytes == 2 * STATES_BYTES


@pytest.mark.parametrize("max_bytes", [0, STATES_BYTES - 1])
def test_what_does_not_fit_is_not_kept(max_bytes: int) -> None:
    cache, stage = PromptCache(max_bytes), Stage()
    encode(cache, stage, "a")
    encode(cache, stage, "a")
    assert stage.asked == ["a", "a"] and cache.used_bytes == 0


def test_what_did_not_come_through_is_not_kept() -> None:
    cache, stage = PromptCache(1000), Stage(FinishReason.ABORT)
    encode(cache, stage, "a")
    assert cache.used_bytes == 0


def test_a_key_tells_model_prompt_and_pictures_apart() -> None:
    red, blue = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    requests = [
        ARRequest(request_id="1", prompt="a"),
        ARRequest(request_id="2", prompt=[1, 2]),
        ARRequest(request_id="3", prompt="a", images=[red]),
        ARRequest(request_id="4", prompt="a", images=[blue]),
        ARRequest(request_id="5", prompt="a", images=[red, red]),
    ]
    stage: Any = Stage()
    keys = {make_key(stage, request) for request in requests}
    assert len(keys) == 5
    assert make_key(stage, ARRequest(request_id="6", prompt="a", images=[red.copy()])) in keys


def test_a_picture_from_a_known_prompt_is_the_same(
    llm: OmniAsyncLLM, runner: asyncio.Runner
) -> None:
    params = DiffusionParams(
        height=64,
        width=64,
        num_inference_steps=2,
        negative_prompt="a prompt of this test",
        seed=1,
        output_mode=OutputMode.LATENTS,
    )

    async def draw(prompt: str) -> OmniOutput:
        async for output in llm.generate(OmniRequest(prompt=prompt, params=params)):  # noqa: B007
            pass
        return output

    cache = llm.coordinator.prompt_cache
    first = runner.run(draw("one more prompt of this test"))
    hits = cache.num_hits
    again = runner.run(draw("one more prompt of this test"))
    other = runner.run(draw("a third prompt of this test"))
    assert cache.num_hits == hits + 3  # both prompts, then the negative one
    assert first.latents is not None and again.latents is not None and other.latents is not None
    assert torch.equal(first.latents, again.latents)
    assert not torch.equal(first.latents, other.latents)
    assert again.metrics.num_prompt_tokens == first.metrics.num_prompt_tokens > 0
    assert again.metrics.num_rows == 4 and again.metrics.num_skipped_rows == 0
