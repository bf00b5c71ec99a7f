"""What a model must offer to the diffusion engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from vllm_omni.config import DiTConfig
from vllm_omni.diffusion.cache_manager import DiTCacheManager
from vllm_omni.diffusion.messages import RequestResult
from vllm_omni.diffusion.pipeline_manager import PipelineManager


class RequestState(Protocol):
    """A request inside a worker."""

    row: int  # the runner's stable row
    latents: Tensor  # float32, owned by the cache manager
    num_computed_steps: int

    @property
    def num_steps(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Tokens of one step over all guidance branches, text included."""

    @property
    def preview_every(self) -> int:
        """Steps from one preview to the next; 0: none."""

    @property
    def is_resumable(self) -> bool:
        """Whether latents and step are all that another engine needs to go on from here."""

    @property
    def num_cached_rows(self) -> int:
        """Guidance branches with a step cache."""

    @property
    def num_skipped_rows(self) -> int:
        """How often a guidance branch took a step by its cache."""

    @property
    def num_skipped_blocks(self) -> int:
        """Blocks of the transformer that were left out then."""

    def advance(self, latents: Tensor) -> None:
        """Take over the latents of a step, which counts from now on."""


class PendingResult(Protocol):
    """A result that a device may still be working on."""

    def is_ready(self) -> bool: ...

    def wait(self) -> RequestResult:
        """The result, as soon as it is there."""


StateT = TypeVar("StateT", bound=RequestState)


class RunnerAdapter(Protocol[StateT]):
    """The model's side of a step. All methods work on any mix of requests."""

    @property
    def model_time(self) -> float:
        """Seconds spent inside the model's networks, summed up."""

    def __init__(
        self, pipeline: PipelineManager, cache_manager: DiTCacheManager, config: DiTConfig
    ) -> None: ...

    def prepare(self, request_id: str, inputs: Any) -> StateT:
        """Encode, draw the noise, make the schedule."""

    def step(self, states: Sequence[StateT]) -> list[Tensor]:
        """The latents after one more step. Changes nothing, so that it can be tried again."""

    def warm_up_step(self, states: Sequence[StateT]) -> list[Tensor]:
        """`step`, after everything is compiled and captured that steps like this one need."""

    def preview(self, states: Sequence[StateT], stepped: Sequence[Tensor]) -> list[Tensor]:
        """Small pictures [3, h, w] uint8, on the CPU, of what the requests are coming to.

        Changes nothing. The runner calls it in the steps after which a preview is due.

        Args:
            states: as they were before the step.
            stepped: the latents after it, from `step`.
        """

    def start_decode(self, states: Sequence[StateT]) -> Sequence[PendingResult]:
        """The results of requests that have taken all their steps, now or a little later.

        Keeps nothing of a state: it may be released before its result is there.
        """

    def warm_up_decode(self, states: Sequence[StateT]) -> None:
        """Compile what decodes of these requests need, together and alone."""

    def make_dummy_inputs(self, width: int, height: int) -> Any:
        """A guided request of some size, to measure memory with and to warm up."""

    def limit_decode(self, max_latents: int) -> None:
        """Decode no more latent positions at once, but always one picture."""

    def sleep(self) -> None:
        """Keep nothing on the device that can be made again: weights are about to leave it."""

    def release(self, state: StateT) -> None:
        """Keep nothing of a request that has ended."""
