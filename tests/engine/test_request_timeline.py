"""A request's life is written down once, and told once, however it ends; steps are told as well."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from vllm_omni import DiffusionParams, OmniAsyncLLM, OmniRequest
from vllm_omni.config import StageConfig
from vllm_omni.engine.timeline import TimelineRecorder
from vllm_omni.errors import (
    DeadlineExceededError,
    InvalidParameterError,
    ModalityNotSupportedError,
)
from vllm_omni.outputs import (
    EngineCoreOutput,
    FinishReason,
    OmniOutput,
    RequestError,
    StepStats,
)
from vllm_omni.timeline import RequestTimeline, Span

PARAMS = DiffusionParams(height=64, width=96, num_inference_steps=4, seed=1)
LONG = replace(PARAMS, height=256, width=256, num_inference_steps=500)
DRAW, WRITE = "stage 1 diffusion: image", "stage 0 ar: text"
ENCODE = "stage 0 ar: hidden_states"


@pytest.fixture
def told(llm: OmniAsyncLLM) -> Iterator[list[RequestTimeline]]:
    """Every timeline that was told."""
    told: list[RequestTimeline] = []
    llm.coordinator.on_finished = told.append
    yield told
    llm.coordinator.on_finished = None


@pytest.fixture
def steps(llm: OmniAsyncLLM) -> Iterator[list[tuple[int, StepStats]]]:
    """Every step that was told, with its stage."""
    steps: list[tuple[int, StepStats]] = []
    for client in llm.clients:
        stage_id = client.stage.stage_id
        client.on_step = lambda stats, id=stage_id: steps.append((id, stats))
    yield steps
    for client in llm.clients:
        client.on_step = None


async def collect(llm: OmniAsyncLLM, request: OmniRequest) -> list[OmniOutput]:
    return [output async for output in llm.generate(request)]


def names_of(timeline: RequestTimeline) -> list[str]:
    return [span.name for span in timeline.spans]


def assert_in_order(timeline: RequestTimeline) -> None:
    """Hops follow each other, and what is within a hop fills it without gaps."""
    hops = [span for span in timeline.spans if span.makes is not None]
    moments = [timeline.start, *(t for hop in hops for t in (hop.start, hop.end)), timeline.end]
    assert moments == sorted(moments)
    within: dict[tuple[int | None, int], list[Span]] = {}
    for span in timeline.spans:
        if span.output is not None:
            within.setdefault((span.stage_id, span.output), []).append(span)
    for spans in within.values():
        hop = next(hop for hop in hops if hop.stage_id == spans[0].stage_id)
        assert spans[0].start == hop.start and spans[-1].end <= hop.end
        assert all(a.end == b.start and a.duration >= 0 for a, b in pairwise(spans))


# --- what is written down ---


def test_a_picture(llm: OmniAsyncLLM, runner: asyncio.Runner, told: list[RequestTimeline]) -> None:
    before = time.time()
    # Prompts of its own: those that are known do not go to the AR stage.
    params = replace(PARAMS, preview_every=2, negative_prompt="no timeline", true_cfg_scale=4.0)
    [*_, answer] = runner.run(collect(llm, OmniRequest(prompt="a timeline", params=params)))
    [timeline] = told
    assert answer.timeline is timeline
    assert timeline.request_id == answer.request_id
    assert (timeline.outcome, timeline.error) == (FinishReason.STOP, None)
    assert (timeline.output_format, timeline.num_images, timeline.num_pixels) == (
        "image",
        1,
        64 * 96,
    )
    assert names_of(timeline) == [ENCODE, DRAW, "queue", "denoise", "decode"]
    assert_in_order(timeline)
    encode, draw, queue, denoise, decode = timeline.spans
    assert (encode.makes, draw.makes, queue.makes) == ("hidden_states", "image", None)
    assert encode.attributes["num_requests"] == 2  # the prompt and the negative one
    assert int(encode.attributes["num_prompt_tokens"]) > 2 * 34
    assert len(denoise.steps) == 4
    assert all(stats.num_requests == 1 and stats.num_rows == 2 for stats in denoise.steps)
    assert denoise.steps[0].start_time == denoise.start
    assert denoise.end < denoise.steps[-1].end_time == decode.end
    assert decode.duration == pytest.approx(denoise.steps[-1].decode_time)
    assert queue.duration < denoise.duration
    assert timeline.first_preview is not None
    assert denoise.steps[1].end_time < timeline.first_preview < timeline.end
    assert before <= timeline.wall_start <= timeline.to_wall(timeline.end) <= time.time()
    assert timeline.num_events == 5 + 4


def test_several_pictures_after_a_text(
    llm: OmniAsyncLLM, runner: asyncio.Runner, told: list[RequestTimeline]
) -> None:
    request = OmniRequest(
        prompt="a cat",
        output_format="text+image",
        params=replace(PARAMS, num_outputs_per_prompt=2),
        sampling_params={"max_tokens": 5, "ignore_eos": True},
    )
    runner.run(collect(llm, request))
    [timeline] = told
    assert names_of(timeline) == [WRITE, ENCODE, DRAW, *["queue", "denoise", "decode"] * 2]
    assert [span.output for span in timeline.spans] == [None] * 3 + [0] * 3 + [1] * 3
    assert timeline.num_images == 2
    assert_in_order(timeline)


@pytest.mark.parametrize(
    ("output_format", "expected"),
    [
        ("text", [WRITE]),
        ("hidden_states", [ENCODE]),
        ("latents", [ENCODE, "stage 1 diffusion: latents", "queue", "denoise", "decode"]),
    ],
)
def test_other_formats(
    llm: OmniAsyncLLM,
    runner: asyncio.Runner,
    told: list[RequestTimeline],
    output_format: str,
    expected: list[str],
) -> None:
    request = OmniRequest(
        prompt="a cat",
        output_format=output_format,
        params=PARAMS,
        sampling_params={"max_tokens": 3},
    )
    runner.run(collect(llm, request))
    [timeline] = told
    assert names_of(timeline) == expected
    assert (timeline.output_format, timeline.num_images) == (output_format, 0)
    assert_in_order(timeline)


# --- once, however it ends ---


async def abort_while_drawing(llm: OmniAsyncLLM, request: OmniRequest) -> None:
    async for output in llm.generate(request):
        if output.step == 3:
            await llm.abort(request.request_id)
    assert output.finish_reason is FinishReason.ABORT and output.timeline is not None


async def abort_at_once(llm: OmniAsyncLLM, request: OmniRequest) -> None:
    task = asyncio.create_task(collect(llm, request))
    while not llm.coordinator.num_requests:
        await asyncio.sleep(0)
    await llm.abort(request.request_id)
    assert (await task)[-1].finish_reason is FinishReason.ABORT


async def cancel(llm: OmniAsyncLLM, request: OmniRequest) -> None:
    async def watch() -> None:
        async for output in llm.generate(request):
            if output.step == 3:
                drawing.set()

    drawing = asyncio.Event()
    task = asyncio.create_task(watch())
    await drawing.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


async def stop_listening(llm: OmniAsyncLLM, request: OmniRequest) -> None:
    async with aclosing(llm.generate(request)) as outputs:
        async for output in outputs:
            if output.step == 3:
                break


@pytest.mark.parametrize("leave", [abort_while_drawing, cancel, stop_listening])
def test_whoever_leaves_while_it_is_drawn(
    llm: OmniAsyncLLM, runner: asyncio.Runner, told: list[RequestTimeline], leave: Any
) -> None:
    runner.run(leave(llm, OmniRequest(prompt="a cat", params=LONG)))
    [timeline] = told
    assert (timeline.outcome, timeline.error) == (FinishReason.ABORT, None)
    assert names_of(timeline) == [ENCODE, DRAW, "queue", "denoise"]
    assert 3 <= len(timeline.spans[-1].steps) < 500
    assert timeline.num_images == 0
    assert_in_order(timeline)


def test_abort_at_once(
    llm: OmniAsyncLLM, runner: asyncio.Runner, told: list[RequestTimeline]
) -> None:
    runner.run(abort_at_once(llm, OmniRequest(prompt="a cat", params=LONG)))
    [timeline] = told
    assert (timeline.outcome, timeline.error) == (FinishReason.ABORT, None)
    assert names_of(timeline)[:1] == [ENCODE]
    assert llm.coordinator.num_requests == 0


def test_whoever_leaves_with_the_answer_has_had_it(
    llm: OmniAsyncLLM, runner: asyncio.Runner, told: list[RequestTimeline]
) -> None:
    async def main() -> None:
        async with aclosing(llm.generate(OmniRequest(prompt="a cat", params=PARAMS))) as outputs:
            async for output in outputs:
                if output.finished:
                    assert told == [output.timeline]
                    break

    runner.run(main())
    assert [timeline.outcome for timeline in told] == [FinishReason.STOP]


def test_deadline(llm: OmniAsyncLLM, runner: asyncio.Runner, told: list[RequestTimeline]) -> None:
    with pytest.raises(DeadlineExceededError):
        request = OmniRequest(prompt="a cat", params=replace(LONG, deadline=1.0))
        runner.run(collect(llm, request))
    [timeline] = told
    assert (timeline.outcome, timeline.error) == (FinishReason.ERROR, "DeadlineExceededError")
    assert 1.0 <= timeline.duration < 5.0
    assert_in_order(timeline)


@pytest.mark.parametrize(
    ("fields", "error", "expected"),
    [
        ({"output_format": "audio"}, ModalityNotSupportedError, []),
        ({"output_format": "text", "sampling_params": {"n": -1}}, InvalidParameterError, [WRITE]),
    ],
    ids=["by the plan", "by a stage"],
)
def test_refused(
    llm: OmniAsyncLLM,
    runner: asyncio.Runner,
    told: list[RequestTimeline],
    fields: dict[str, Any],
    error: type[Exception],
    expected: list[str],
) -> None:
    with pytest.raises(error):
        runner.run(collect(llm, OmniRequest(prompt="a cat", **fields)))
    [timeline] = told
    assert (timeline.outcome, timeline.error) == (FinishReason.ERROR, error.__name__)
    assert names_of(timeline) == expected


def test_a_listener_that_fails_hurts_nobody(
    llm: OmniAsyncLLM, runner: asyncio.Runner, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(news: object) -> None:
        raise RuntimeError("no disk")

    llm.coordinator.on_finished = explode
    llm.clients[1].on_step = explode
    try:
        with caplog.at_level(logging.ERROR, "vllm_omni"):
            [*_, answer] = runner.run(collect(llm, OmniRequest(prompt="a cat", params=PARAMS)))
    finally:
        llm.coordinator.on_finished = None
        llm.clients[1].on_step = None
    assert len(answer.images) == 1
    # Four steps and an end; also what a request that was left before has still to say.
    assert len(caplog.records) >= 5
    assert {record.message for record in caplog.records} == {"a listener failed"}


# --- steps ---


def test_every_step_is_told(
    llm: OmniAsyncLLM, runner: asyncio.Runner, steps: list[tuple[int, StepStats]]
) -> None:
    [*_, answer] = runner.run(collect(llm, OmniRequest(prompt="a cat", params=PARAMS)))
    assert answer.timeline is not None
    denoise = next(span for span in answer.timeline.spans if span.name == "denoise")
    assert steps == [(1, stats) for stats in denoise.steps]
    assert [stats.num_running for _, stats in steps] == [1, 1, 1, 0]


def test_an_abort_leaves_nothing_running_to_be_told(
    llm: OmniAsyncLLM, runner: asyncio.Runner, steps: list[tuple[int, StepStats]]
) -> None:
    async def main() -> None:
        await abort_while_drawing(llm, OmniRequest(prompt="a cat", params=LONG))

    runner.run(main())
    assert [stats.num_running for _, stats in steps][-2:] == [1, 0]
    assert steps[-1][1].num_requests == 0


# --- the recorder alone ---


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


STAGE = StageConfig(stage_id=7, engine_type="diffusion", model_path="m")


def create_step(start_time: float, decode_time: float = 0.0) -> StepStats:
    return StepStats(start_time=start_time, step_time=1.0, decode_time=decode_time)


def create_news(request_id: str, step: int, stats: StepStats, **fields: Any) -> EngineCoreOutput:
    metadata = {"step": step, "num_steps": 2}
    return EngineCoreOutput(
        request_id=request_id, output_metadata=metadata, step_stats=stats, **fields
    )


def times_of(timeline: RequestTimeline) -> list[tuple[str, float, float]]:
    return [(span.name, span.start, span.end) for span in timeline.spans]


def test_result_that_comes_after_the_last_step() -> None:
    clock = Clock()
    recorder = TimelineRecorder("a", "image", clock)
    clock.now = 101.0
    recorder.begin_hop(STAGE, "image", ["a"])
    first, second, third = create_step(102.0), create_step(104.0), create_step(105.0, 0.5)
    recorder.take(create_news("a", 1, first))
    recorder.take(create_news("a", 2, second))
    recorder.take(create_news("a", 2, third, finish_reason=FinishReason.STOP))
    clock.now = 107.0
    recorder.end_hop()
    clock.now = 108.0
    answer = OmniOutput(request_id="a", prompt="", finish_reason=FinishReason.STOP)
    timeline = recorder.finish(answer)
    assert times_of(timeline) == [
        ("stage 7 diffusion: image", 101.0, 107.0),
        ("queue", 101.0, 102.0),
        ("denoise", 102.0, 105.0),
        ("decode", 105.0, 106.0),
    ]
    assert list(timeline.spans[2].steps) == [first, second]
    assert (timeline.start, timeline.end, timeline.duration) == (100.0, 108.0, 8.0)


def test_one_picture_of_two_fails_before_it_starts() -> None:
    clock = Clock()
    recorder = TimelineRecorder("a", "image", clock)
    recorder.begin_hop(STAGE, "image", ["0_a", "1_a"])
    step = create_step(102.0, decode_time=0.25)
    error = RequestError("StageExecutionError", "it broke")
    recorder.take(
        EngineCoreOutput("1_a", finish_reason=FinishReason.ERROR, error=error, step_stats=step)
    )
    recorder.take(create_news("0_a", 1, step, finish_reason=FinishReason.STOP))
    clock.now = 104.0
    answer = OmniOutput(
        request_id="a",
        prompt="",
        finish_reason=FinishReason.STOP,
        error=error.to_exception(),
    )
    timeline = recorder.finish(answer)
    assert times_of(timeline) == [
        ("stage 7 diffusion: image", 100.0, 104.0),
        ("queue", 100.0, 102.0),
        ("denoise", 102.0, 102.75),
        ("decode", 102.75, 103.0),
        ("queue", 100.0, 104.0),
    ]
    assert (timeline.outcome, timeline.error) == (FinishReason.STOP, "StageExecutionError")


def test_text_that_a_diffusion_stage_encodes() -> None:
    recorder = TimelineRecorder("a", "hidden_states", Clock())
    recorder.begin_hop(STAGE, "hidden_states", ["a"])
    recorder.take(create_news("a", 0, create_step(102.0), finish_reason=FinishReason.STOP))
    timeline = recorder.fail(KeyboardInterrupt())
    assert [span.name for span in timeline.spans[1:]] == ["queue", "encode"]
    assert (timeline.outcome, timeline.error) == (FinishReason.ABORT, None)


def test_failure_in_the_middle_of_a_hop() -> None:
    recorder = TimelineRecorder("a", "image", Clock())
    recorder.begin_hop(STAGE, "image", ["a"])
    recorder.take(create_news("a", 1, create_step(102.0)))
    timeline = recorder.fail(RuntimeError("gone"))
    assert [span.name for span in timeline.spans[1:]] == ["queue", "denoise"]
    assert (timeline.outcome, timeline.error) == (FinishReason.ERROR, "RuntimeError")
    assert recorder.is_finished
