"""Everything that passes between scheduler, executor, worker and runner. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from vllm_omni.outputs import RequestError

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


class CustomInputs(Protocol):
    """What the engine must know of a model's own request inputs."""

    @property
    def num_steps(self) -> int:
        """Denoising steps; 0 for a task that needs no denoising."""

    @property
    def num_tokens(self) -> int:
        """Tokens of one step over all guidance branches, text included."""

    @property
    def num_rows(self) -> int:
        """Rows of one step: one for each guidance branch."""

    @property
    def output_type(self) -> str:
        """What the finished request's main tensor is."""

    @property
    def preview_every(self) -> int:
        """Steps from one preview to the next; 0: none."""


InputsT = TypeVar("InputsT", bound=CustomInputs)


class Snapshot(msgspec.Struct, frozen=True):
    """A request after some of its steps: all that is needed to take the others."""

    num_computed_steps: int
    latents: Tensor  # float32


class DiffusionRequest(msgspec.Struct, Generic[InputsT], kw_only=True):
    """A request as it enters a diffusion engine core."""

    request_id: str
    custom_inputs: InputsT
    client_index: int = 0  # which client gets the outputs
    priority: int = 0  # lower goes first
    deadline: float | None = None  # seconds from arrival
    arrival_time: float | None = None  # time.monotonic(); set on arrival when not given
    snapshot: Snapshot | None = None  # to go on from, of an engine core that has died


class NewRequestData(msgspec.Struct, Generic[InputsT], frozen=True):
    """A request the workers have not seen before."""

    request_id: str
    custom_inputs: InputsT
    snapshot: Snapshot | None = None  # to go on from


class DiffusionSchedulerOutput(msgspec.Struct, Generic[InputsT], kw_only=True):
    """One step: who is new, who steps, who is gone."""

    scheduled_new_reqs: list[NewRequestData[InputsT]] = []
    num_scheduled_steps: dict[str, int] = {}  # request id -> 1
    total_num_scheduled_tokens: int = 0
    total_num_scheduled_rows: int = 0
    finished_req_ids: list[str] = []  # ended since the last step; workers free them


class RequestResult(msgspec.Struct, frozen=True):
    """The tensors of a finished request, on the CPU."""

    pooling_output: Tensor
    additional_outputs: dict[str, Tensor] = {}


class DiffusionModelRunnerOutput(msgspec.Struct, kw_only=True):
    """What one step did.

    Each scheduled request is in `num_computed_steps`, `errors` or `deferred_req_ids`.
    """

    num_computed_steps: dict[str, int] = {}  # request id -> steps done so far
    num_skipped_rows: dict[str, int] = {}  # request id -> branches that its cache took this step
    num_cached_rows: int = 0  # branches whose request has a step cache
    num_skipped_blocks: int = 0  # of the transformer, that step caches left out
    cache_bytes: dict[int, dict[str, int]] = {}  # worker -> kind of entry -> bytes
    num_evictions: dict[str, int] = {}  # kind of entry -> those that gave way in this step
    previews: dict[str, Tensor] = {}  # request id -> picture [3, h, w] uint8, where one was due
    snapshots: dict[str, Tensor] = {}  # request id -> latents, where they are to be kept
    results: dict[str, RequestResult] = {}  # request id -> tensors, once decoded
    num_decoding: int = 0  # requests whose results come with a later step
    deferred_req_ids: list[str] = []  # new ones for which there is no memory yet: they wait again
    max_num_tokens: int | None = None  # most of a step that fit into the memory, if that is known
    errors: dict[str, RequestError] = {}
    model_time: float = 0.0  # seconds in text encoder, transformer and VAE
    prepare_time: float = 0.0  # seconds, as the next two
    denoise_time: float = 0.0
    decode_time: float = 0.0
    memory_bytes: dict[int, int] = {}  # worker -> bytes in use; once a second, not in every step

    def merge(self, other: DiffusionModelRunnerOutput) -> None:
        """Add what another worker did in the same step; their limits are the executor's to add."""
        self.num_computed_steps.update(other.num_computed_steps)
        self.num_skipped_rows.update(other.num_skipped_rows)
        self.num_cached_rows += other.num_cached_rows
        self.num_skipped_blocks += other.num_skipped_blocks
        self.cache_bytes.update(other.cache_bytes)
        for kind, evicted in other.num_evictions.items():
            self.num_evictions[kind] = self.num_evictions.get(kind, 0) + evicted
        self.previews.update(other.previews)
        self.snapshots.update(other.snapshots)
        self.results.update(other.results)
        self.errors.update(other.errors)
        self.num_decoding += other.num_decoding
        self.deferred_req_ids += other.deferred_req_ids
        self.memory_bytes.update(other.memory_bytes)
        # Workers work at the same time: the slowest counts.
        self.model_time = max(self.model_time, other.model_time)
        self.prepare_time = max(self.prepare_time, other.prepare_time)
        self.denoise_time = max(self.denoise_time, other.denoise_time)
        self.decode_time = max(self.decode_time, other.decode_time)
