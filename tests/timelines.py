"""Builders for tests of those who read timelines: metrics, traces, spans."""

from __future__ import annotations

from typing import Any

from vllm_omni.config import StageConfig
from vllm_omni.outputs import FinishReason, StepStats
from vllm_omni.timeline import RequestTimeline, Span

STAGES = (
    StageConfig(stage_id=0, engine_type="ar", model_path="m"),
    StageConfig(stage_id=1, engine_type="diffusion", model_path="m"),
)
ARRIVAL = 1000.0  # time.monotonic() of every request here
WALL_ARRIVAL = 1_700_000_000.0


def create_step(start: float, step_time: float = 1.0, **fields: Any) -> StepStats:
    """A step of one guided request, that begins some seconds after the request's arrival."""
    counts = {"num_requests": 1, "num_rows": 2, "num_tokens": 600, "max_num_tokens": 1000}
    return StepStats(start_time=ARRIVAL + start, step_time=step_time, **(counts | fields))


def create_span(name: str, start: float, end: float, **fields: Any) -> Span:
    return Span(name=name, start=ARRIVAL + start, end=ARRIVAL + end, **fields)


def create_timeline(request_id: str = "a", **changes: Any) -> RequestTimeline:
    """A picture: 0.5 s of encoding, 1.5 s in the queue, two steps of 1 s, 0.25 s of decoding."""
    steps = (create_step(2.0), create_step(3.0, 1.25, decode_time=0.25))
    attributes = {"engine_type": "ar", "num_requests": 2, "num_prompt_tokens": 80}
    fields: dict[str, Any] = {
        "request_id": request_id,
        "output_format": "image",
        "start": ARRIVAL,
        "end": ARRIVAL + 4.5,
        "wall_start": WALL_ARRIVAL,
        "outcome": FinishReason.STOP,
        "spans": [
            create_span(
                "stage 0 ar: hidden_states",
                0.0,
                0.5,
                stage_id=0,
                makes="hidden_states",
                attributes=attributes,
            ),
            create_span(
                "stage 1 diffusion: image",
                0.5,
                4.375,
                stage_id=1,
                makes="image",
                attributes={"engine_type": "diffusion", "num_requests": 1},
            ),
            create_span("queue", 0.5, 2.0, stage_id=1, output=0),
            create_span("denoise", 2.0, 4.0, stage_id=1, output=0, steps=steps),
            create_span("decode", 4.0, 4.25, stage_id=1, output=0),
        ],
        "num_images": 1,
        "num_pixels": 256 * 256,
        "first_preview": ARRIVAL + 3.25,
    }
    return RequestTimeline(**(fields | changes))
