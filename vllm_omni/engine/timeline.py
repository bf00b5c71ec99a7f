"""`TimelineRecorder`: writes a request's life down, as the coordinator sees it pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from vllm_omni.config import StageConfig
from vllm_omni.outputs import EngineCoreOutput, FinishReason, OmniOutput, StepStats
from vllm_omni.timeline import RequestTimeline, Span


@dataclass(eq=False)
class _Child:
    """One request inside a stage."""

    index: int
    steps: list[StepStats] = field(default_factory=list)  # it was in
    result: StepStats | None = None  # the step that gave its result
    error: str | None = None


@dataclass(eq=False)
class _Hop:
    """A hop that is under way."""

    stage: StageConfig
    makes: str
    start: float
    children: dict[str, _Child]
    num_prompt_tokens: int = 0


class TimelineRecorder:
    """Of one request, from its arrival to the end that it gets exactly once."""

    def __init__(
        self,
        request_id: str,
        output_format: str,
        clock: Callable[[], float] = time.monotonic,
        arrival_time: float | None = None,
    ) -> None:
        """Begin now, or where the request has waited before, when it came."""
        self.is_finished = False
        self._clock = clock
        self._hop: _Hop | None = None
        now = clock()
        start = now if arrival_time is None else arrival_time
        self._timeline = RequestTimeline(
            request_id=request_id,
            output_format=output_format,
            start=start,
            end=now,
            wall_start=time.time() - (now - start),
            outcome=FinishReason.STOP,
        )

    def begin_hop(self, stage: StageConfig, makes: str, request_ids: Sequence[str]) -> None:
        """A stage is about to get its requests."""
        children = {request_id: _Child(index) for index, request_id in enumerate(request_ids)}
        self._hop = _Hop(stage, makes, self._clock(), children)

    def take(self, output: EngineCoreOutput) -> None:
        """Note what a stage says of one of its requests."""
        hop = self._hop
        assert hop is not None
        child = hop.children[output.request_id]
        if output.error is not None:
            child.error = output.error.type
        if output.request_output is not None and output.finished:
            hop.num_prompt_tokens += len(output.request_output.prompt_token_ids or ())
        if "preview" in output.additional_outputs and self._timeline.first_preview is None:
            self._timeline.first_preview = self._clock()
        step = output.output_metadata.get("step")
        if output.step_stats is None or step is None:
            return  # of an AR stage; or it has ended without being in that step
        if step > len(child.steps):
            child.steps.append(output.step_stats)
        if output.finished:
            child.result = output.step_stats

    def end_hop(self) -> None:
        """The stage has said all."""
        if (hop := self._hop) is None:
            return
        self._hop = None
        stage_id, engine_type = hop.stage.stage_id, hop.stage.engine_type
        end = self._clock()
        self._timeline.spans.append(
            Span(
                name=f"stage {stage_id} {engine_type}: {hop.makes}",
                start=hop.start,
                end=end,
                stage_id=stage_id,
                makes=hop.makes,
                attributes={
                    "engine_type": engine_type,
                    "num_requests": len(hop.children),
                    **({"num_prompt_tokens": hop.num_prompt_tokens} if engine_type == "ar" else {}),
                },
            )
        )
        if engine_type == "diffusion":
            for child in hop.children.values():
                self._timeline.spans += _spans_of(hop, child, end)

    def finish(self, answer: OmniOutput) -> RequestTimeline:
        """The request has its answer."""
        assert answer.finish_reason is not None
        self._timeline.num_images = len(answer.images)
        self._timeline.num_pixels = sum(image.width * image.height for image in answer.images)
        error = None if answer.error is None else type(answer.error).__name__
        return self._end(answer.finish_reason, error)

    def fail(self, error: BaseException) -> RequestTimeline:
        """The request has ended without an answer: it failed, or nobody listens any more."""
        if isinstance(error, Exception):
            return self._end(FinishReason.ERROR, type(error).__name__)
        return self._end(FinishReason.ABORT, None)  # cancelled, or its stream was closed

    def _end(self, outcome: FinishReason, error: str | None) -> RequestTimeline:
        assert not self.is_finished
        self.is_finished = True
        self.end_hop()
        self._timeline.end = self._clock()
        self._timeline.outcome = outcome
        self._timeline.error = error
        return self._timeline


def _spans_of(hop: _Hop, child: _Child, end: float) -> Iterator[Span]:
    """What a diffusion stage did with one of its requests."""

    def span(name: str, start: float, end: float, steps: Sequence[StepStats] = ()) -> Span:
        attributes = {"error": child.error} if child.error is not None and name != "queue" else {}
        return Span(
            name=name,
            start=start,
            end=end,
            stage_id=hop.stage.stage_id,
            output=child.index,
            steps=steps,
            attributes=attributes,
        )

    first = child.steps[0] if child.steps else child.result
    if first is None:
        yield span("queue", hop.start, end)  # it never started
        return
    yield span("queue", hop.start, first.start_time)
    if not child.steps:
        yield span("encode", first.start_time, first.end_time)  # text, which takes no steps
        return
    denoised = child.steps[-1].end_time
    if child.result is child.steps[-1]:  # the last step ends with the decoding
        denoised -= child.result.decode_time
    yield span("denoise", first.start_time, denoised, child.steps)
    if child.result is not None:
        yield span("decode", denoised, child.result.end_time)
