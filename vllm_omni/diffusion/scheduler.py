"""Decides, before every step, which requests take it. Imports no torch.

The central idea is vLLM's, with denoising steps for tokens: there is no phase to be in.
A decision is `{request_id: 1 step}`, and each request's `num_computed_steps` catches up with its
`num_steps`. Every step is a scheduling point, so requests join, leave, are aborted and are
passed over (preempted; their latents stay where they are) between any two steps.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from vllm_omni.config import DiTConfig
from vllm_omni.diffusion.messages import (
    DiffusionModelRunnerOutput,
    DiffusionRequest,
    DiffusionSchedulerOutput,
    NewRequestData,
    RequestResult,
)
from vllm_omni.errors import DeadlineExceededError, InvalidParameterError, OmniRequestError
from vllm_omni.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason, RequestError


class RequestStatus(Enum):
    WAITING = auto()  # no worker knows it yet
    RUNNING = auto()  # workers hold its state, whether or not it is in the current step
    DECODING = auto()  # all steps done, its result is still to come


@dataclass(eq=False, slots=True)
class ScheduledRequest:
    """The scheduler's own record of a request."""

    request: DiffusionRequest[Any]
    num_tokens: int
    num_rows: int
    num_steps: int
    arrival_time: float
    status: RequestStatus = RequestStatus.WAITING
    num_computed_steps: int = 0
    num_skipped_rows: int = 0  # guidance branches of its steps that its cache took
    num_passed_over: int = 0  # steps it was there for and not in
    start_time: float | None = None  # when it was first scheduled

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def remaining_work(self) -> int:
        """Token-steps still to do."""
        return self.num_tokens * max(1, self.num_steps - self.num_computed_steps)

    @property
    def expires_at(self) -> float | None:
        deadline = self.request.deadline
        return None if deadline is None else self.arrival_time + deadline


class DiffusionScheduler:
    """Continuous batching of denoising steps under a token budget."""

    def __init__(self, config: DiTConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.clock = clock
        self.requests: dict[str, ScheduledRequest] = {}  # in order of arrival
        self._finished_req_ids: list[str] = []  # workers are yet to be told
        self._pending_outputs: list[tuple[int, EngineCoreOutput]] = []  # ended between steps
        # What the workers' memory holds in a step; they split larger ones, in which nobody gains.
        self._max_num_tokens = config.max_num_batched_tokens
        self._waits_for_room = False  # no memory for a new request, until one ends

    # --- requests come and go ---

    def add_request(self, request: DiffusionRequest[Any]) -> None:
        if request.request_id in self.requests or request.request_id in self._finished_req_ids:
            raise InvalidParameterError(
                "request_id", request.request_id, "a request of that id is being worked on"
            )
        num_tokens = request.custom_inputs.num_tokens
        if num_tokens > self.config.max_num_batched_tokens:
            raise OmniRequestError(
                f"the request needs {num_tokens} tokens a step, more than "
                f"max_num_batched_tokens={self.config.max_num_batched_tokens}: ask for a smaller "
                f"picture, or raise that setting"
            )
        arrival_time = self.clock() if request.arrival_time is None else request.arrival_time
        snapshot = request.snapshot
        self.requests[request.request_id] = ScheduledRequest(
            request=request,
            num_tokens=num_tokens,
            num_rows=request.custom_inputs.num_rows,
            num_steps=request.custom_inputs.num_steps,
            arrival_time=arrival_time,
            num_computed_steps=0 if snapshot is None else snapshot.num_computed_steps,
        )

    def finish_requests(
        self,
        request_ids: Iterable[str],
        finish_reason: FinishReason,
        error: RequestError | None = None,
    ) -> None:
        """End requests between steps; unknown ids have ended already and are passed over."""
        for request_id in request_ids:
            if request_id in self.requests:
                output = EngineCoreOutput(
                    request_id=request_id, finish_reason=finish_reason, error=error
                )
                client_index = self._forget(request_id)
                self._pending_outputs.append((client_index, output))

    def has_requests(self) -> bool:
        """Whether there is anything left to do or to say."""
        return bool(self.requests or self._finished_req_ids or self._pending_outputs)

    def get_request_counts(self) -> tuple[int, int]:
        """(started, waiting)."""
        waiting = sum(r.status is RequestStatus.WAITING for r in self.requests.values())
        return len(self.requests) - waiting, waiting

    # --- one step ---

    def schedule(self) -> DiffusionSchedulerOutput[Any]:
        self._expire_requests()
        output: DiffusionSchedulerOutput[Any] = DiffusionSchedulerOutput(
            finished_req_ids=self._finished_req_ids
        )
        self._finished_req_ids = []

        num_tokens = 0
        num_picked_tokens = 0  # of those that the policy picked: an overdue one comes on top
        candidates = [r for r in self.requests.values() if r.status is not RequestStatus.DECODING]
        num_resident, _ = self.get_request_counts()
        max_num_resident = self.config.max_num_resident
        if self._waits_for_room and num_resident:
            max_num_resident = num_resident
        # The first of the order fits, so it steps; whoever does not fit behind it is passed over,
        # which holds up nobody, until it is old enough to be first itself. (Only a new first may
        # have to wait, for one of those that hold latents to end.)
        overdue = self._find_overdue(candidates)
        for request in sorted(candidates, key=lambda r: self._order(r, r is overdue)):
            is_new = request.status is RequestStatus.WAITING
            is_overdue = request is overdue
            if (
                len(output.num_scheduled_steps) == self.config.max_num_seqs
                or (num_tokens and num_tokens + request.num_tokens > self._max_num_tokens)
                or (is_new and num_resident >= max_num_resident)
                or (not is_overdue and self._would_slow(request, num_picked_tokens))
            ):
                request.num_passed_over += 1
                continue
            num_tokens += request.num_tokens
            num_picked_tokens += 0 if is_overdue else request.num_tokens
            if is_new:
                num_resident += 1
                request.status = RequestStatus.RUNNING
                request.start_time = self.clock()
                output.scheduled_new_reqs.append(
                    NewRequestData(
                        request.request_id,
                        request.request.custom_inputs,
                        request.request.snapshot,
                    )
                )
            output.num_scheduled_steps[request.request_id] = 1
            output.total_num_scheduled_rows += request.num_rows
        output.total_num_scheduled_tokens = num_tokens
        return output

    def update_from_output(
        self,
        scheduler_output: DiffusionSchedulerOutput[Any],
        model_output: DiffusionModelRunnerOutput,
    ) -> dict[int, EngineCoreOutputs]:
        """Take in what a step did; the answer is the news for each client."""
        news: defaultdict[int, EngineCoreOutputs] = defaultdict(EngineCoreOutputs)
        self._heed_memory(model_output)
        for request_id, error in model_output.errors.items():
            self.finish_requests([request_id], FinishReason.ERROR, error)
        for client_index, output in self._pending_outputs:
            news[client_index].outputs.append(output)
        self._pending_outputs = []

        for request_id, num_computed_steps in model_output.num_computed_steps.items():
            if (request := self.requests.get(request_id)) is None:
                continue  # it was aborted meanwhile
            request.num_computed_steps = num_computed_steps
            request.num_skipped_rows += model_output.num_skipped_rows.get(request_id, 0)
            if num_computed_steps >= request.num_steps:
                request.status = RequestStatus.DECODING
            if request_id not in model_output.results:
                news[request.request.client_index].outputs.append(_progress(request, model_output))

        for request_id, result in model_output.results.items():
            if (request := self.requests.get(request_id)) is not None:
                self._forget(request_id)
                news[request.request.client_index].outputs.append(_final(request, result))
        return dict(news)

    def _heed_memory(self, model_output: DiffusionModelRunnerOutput) -> None:
        if model_output.max_num_tokens is not None:
            self._max_num_tokens = min(
                self.config.max_num_batched_tokens, model_output.max_num_tokens
            )
        for request_id in model_output.deferred_req_ids:
            if (request := self.requests.get(request_id)) is not None:
                request.status = RequestStatus.WAITING
                request.start_time = None
                self._waits_for_room = True

    # --- order ---

    def _order(self, request: ScheduledRequest, is_overdue: bool) -> tuple[int, int]:
        """Smallest goes first, equals by arrival (sorting is stable)."""
        if self.config.policy == "fcfs" or is_overdue:
            return (0, 0)
        if self.config.policy == "priority":
            return (1, request.request.priority)
        return (1, request.remaining_work)

    def _find_overdue(self, candidates: Sequence[ScheduledRequest]) -> ScheduledRequest | None:
        """The one that goes before the policy's picks: the oldest that was passed over too long.

        One at a time is enough for each to have its turn, and leaves the others room to be quick.
        """
        return next((r for r in candidates if r.num_passed_over >= self.config.ageing_steps), None)

    def _would_slow(self, request: ScheduledRequest, num_picked_tokens: int) -> bool:
        """Whether shorter requests would wait for this one in a step that is full enough.

        Tokens that a busy device gets on top take as long as they would in a step of their own, so
        whoever is behind loses nothing by waiting, and those before it are done sooner.
        """
        if self.config.policy != "shortest" or num_picked_tokens == 0:
            return False
        return num_picked_tokens + request.num_tokens > self.config.saturating_num_tokens

    def _expire_requests(self) -> None:
        now = self.clock()
        for request in list(self.requests.values()):
            if request.expires_at is not None and request.expires_at <= now:
                error = DeadlineExceededError(
                    f"deadline={request.request.deadline} s passed after "
                    f"{request.num_computed_steps} of {request.num_steps} steps"
                )
                self.finish_requests(
                    [request.request_id], FinishReason.ERROR, RequestError.from_exception(error)
                )

    def _forget(self, request_id: str) -> int:
        """Drop a request that has ended; the answer is its client."""
        request = self.requests.pop(request_id)
        if request.status is not RequestStatus.WAITING:
            self._finished_req_ids.append(request_id)
            self._waits_for_room = False
        return request.request.client_index


def _progress(
    request: ScheduledRequest, model_output: DiffusionModelRunnerOutput
) -> EngineCoreOutput:
    tensors = {
        "preview": model_output.previews.get(request.request_id),
        "snapshot": model_output.snapshots.get(request.request_id),
    }
    return EngineCoreOutput(
        request_id=request.request_id,
        additional_outputs={name: t for name, t in tensors.items() if t is not None},
        output_metadata=_metadata(request),
    )


def _final(request: ScheduledRequest, result: RequestResult) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=request.request_id,
        finish_reason=FinishReason.STOP,
        pooling_output=result.pooling_output,
        additional_outputs=result.additional_outputs,
        output_type=request.request.custom_inputs.output_type,
        output_metadata=_metadata(request),
    )


def _metadata(request: ScheduledRequest) -> dict[str, Any]:
    assert request.start_time is not None
    return {
        "step": request.num_computed_steps,
        "num_steps": request.num_steps,
        "num_rows": request.num_computed_steps * request.request.custom_inputs.num_rows,
        "num_skipped_rows": request.num_skipped_rows,
        "queue_time": request.start_time - request.arrival_time,
    }
