"""A request's life: which stage had it when, and what was done there. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_omni.outputs import FinishReason, StepStats


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of a request's life; times are of `time.monotonic()`.

    A hop, such as "stage 1 diffusion: image", and within it, for each picture: "queue" until the
    first step, "denoise" from the first step to the last, and "decode".
    """

    name: str
    start: float
    end: float
    stage_id: int | None = None
    makes: str | None = None  # of a hop: what the stage was to make
    output: int | None = None  # within a hop: which of several pictures
    steps: Sequence[StepStats] = ()  # of "denoise"; shared with the others in the same step
    attributes: Mapping[str, str | int | float] = field(default_factory=dict)

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(kw_only=True)
class RequestTimeline:
    """How a request went, written once and read by metrics, traces and people."""

    request_id: str
    output_format: str
    start: float  # time.monotonic()
    end: float
    wall_start: float  # time.time() at `start`: the anchor of all other times
    outcome: FinishReason
    error: str | None = None  # the class of what went wrong, also if only one of several pictures
    spans: list[Span] = field(default_factory=list)
    num_images: int = 0
    num_pixels: int = 0  # over all images
    first_preview: float | None = None  # time.monotonic()

    @property
    def duration(self) -> float:
        return self.end - self.start

    @property
    def num_events(self) -> int:
        """How much there is to keep."""
        return sum(1 + len(span.steps) for span in self.spans)

    def to_wall(self, moment: float) -> float:
        """A moment of `time.monotonic()` as `time.time()`."""
        return self.wall_start + moment - self.start
