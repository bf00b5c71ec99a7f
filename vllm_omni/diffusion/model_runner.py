"""`DiffusionModelRunner`: takes one step with whatever requests were scheduled.

A request that fails, at whatever point, ends with an error; no other request is hurt
(`isolation.py`). A step that is too large for the device's memory is taken in parts.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from vllm_omni.diffusion.cache_manager import DiTCacheManager
from vllm_omni.diffusion.isolation import call_isolated, is_out_of_memory
from vllm_omni.diffusion.memory import explain_out_of_memory
from vllm_omni.diffusion.messages import (
    DiffusionModelRunnerOutput,
    DiffusionSchedulerOutput,
    NewRequestData,
    Snapshot,
)
from vllm_omni.errors import CacheAllocationError, StageExecutionError
from vllm_omni.models.interface import PendingResult, RequestState, RunnerAdapter
from vllm_omni.outputs import RequestError

logger = logging.getLogger(__name__)

R = TypeVar("R")


class DiffusionModelRunner:
    """Holds the state of every started request, each in a row of its own until it ends."""

    def __init__(
        self,
        adapter: RunnerAdapter[Any],
        cache_manager: DiTCacheManager,
        snapshot_steps: int = 0,
    ) -> None:
        self.adapter = adapter
        self.cache_manager = cache_manager
        self.snapshot_steps = snapshot_steps  # from one to the next; 0: none are made
        self.states: dict[str, RequestState] = {}
        self.max_num_tokens: int | None = None  # most of one step that fit into the memory
        self._free_rows: list[int] = []
        self._decoding: dict[str, PendingResult] = {}  # results that the device is working on

    @torch.no_grad()
    def execute_model(
        self, scheduler_output: DiffusionSchedulerOutput[Any]
    ) -> DiffusionModelRunnerOutput:
        model_time = self.adapter.model_time
        output = DiffusionModelRunnerOutput()
        for request_id in scheduler_output.finished_req_ids:
            self._free(request_id)
        self.cache_manager.clear_expired_cache()

        # 1. Start the new requests.
        start = time.perf_counter()
        for new_request in scheduler_output.scheduled_new_reqs:
            self._prepare(new_request, output)
        prepared = time.perf_counter()

        # 2. One step for all, with a preview where one is due. The order of rows does not change
        #    from step to step, whatever the order of scheduling was, so an unchanged batch is
        #    packed once.
        request_ids = [id for id in scheduler_output.num_scheduled_steps if id in self.states]
        request_ids.sort(key=lambda request_id: self.states[request_id].row)
        self._step([id for id in request_ids if self.states[id].num_steps > 0], output)
        denoised = time.perf_counter()

        # 3. Decode those that have arrived, and hand out what is decoded: on a GPU mostly that of
        #    earlier steps, so that this one's decodes run beside the next step.
        done = [id for id in request_ids if id in self.states and self._is_done(id)]
        for request_id in done:
            output.num_computed_steps[request_id] = self.states[request_id].num_computed_steps
        self._decoding.update(
            self._call_isolated("decode", self.adapter.start_decode, done, output)
        )
        self._collect_results(output, waits=not request_ids)

        output.model_time = self.adapter.model_time - model_time
        output.prepare_time = prepared - start
        output.denoise_time = denoised - prepared
        output.decode_time = time.perf_counter() - denoised
        output.num_decoding = len(self._decoding)
        output.max_num_tokens = self.max_num_tokens
        return output

    def _prepare(
        self, new_request: NewRequestData[Any], output: DiffusionModelRunnerOutput
    ) -> None:
        request_id = new_request.request_id
        self.cache_manager.pin_request(request_id)
        try:
            state = self.adapter.prepare(request_id, new_request.custom_inputs)
            if new_request.snapshot is not None:
                _resume(state, new_request.snapshot)
        except Exception as error:
            has_no_room = isinstance(error, CacheAllocationError) or is_out_of_memory(error)
            if has_no_room and self.states:  # there will be, when one of the others has ended
                self._free(request_id)
                output.deferred_req_ids.append(request_id)
            else:
                self._fail(request_id, error, output)
            return
        row = heapq.heappop(self._free_rows) if self._free_rows else len(self.states)
        state.row = row
        self.states[request_id] = state

    def _step(self, request_ids: list[str], output: DiffusionModelRunnerOutput) -> None:
        stepped: dict[str, Tensor] = {}
        for group in self._split_step(request_ids):
            stepped.update(self._call_isolated("step", self.adapter.step, group, output))
        self._fail_where_not_finite(stepped, output)
        # A preview looks along the step, so it comes before the latents move on.
        due = [id for id in stepped if id in self.states and self._is_preview_due(id)]
        output.previews = self._call_isolated("preview", self.adapter.preview, due, output, stepped)
        for request_id, latents in stepped.items():
            if (state := self.states.get(request_id)) is not None:  # it has not failed
                num_skipped_rows, num_skipped_blocks = (
                    state.num_skipped_rows,
                    state.num_skipped_blocks,
                )
                state.advance(latents)
                output.num_cached_rows += state.num_cached_rows
                output.num_skipped_blocks += state.num_skipped_blocks - num_skipped_blocks
                output.num_computed_steps[request_id] = state.num_computed_steps
                if skipped := state.num_skipped_rows - num_skipped_rows:
                    output.num_skipped_rows[request_id] = skipped
                if self._is_snapshot_due(state):
                    output.snapshots[request_id] = state.latents.to("cpu", copy=True)

    def _fail_where_not_finite(
        self, stepped: Mapping[str, Tensor], output: DiffusionModelRunnerOutput
    ) -> None:
        if not stepped:
            return
        # A sum is finite if all its terms are; one transfer from the device for all requests.
        finite = torch.stack([x.sum() for x in stepped.values()]).isfinite().tolist()
        for request_id, is_finite in zip(stepped, finite, strict=True):
            if not is_finite:
                state = self.states[request_id]
                step = state.num_computed_steps + 1
                error = StageExecutionError(
                    f"step {step} of {state.num_steps} gave latents that are not finite numbers"
                )
                self._fail(request_id, error, output)

    def _split_step(self, request_ids: Sequence[str]) -> Iterator[list[str]]:
        """Groups of requests whose tokens fit into the memory together; one alone is tried."""
        group: list[str] = []
        room = float("inf") if self.max_num_tokens is None else self.max_num_tokens
        num_tokens = 0
        for request_id in request_ids:
            more = self.states[request_id].num_tokens
            if group and num_tokens + more > room:
                yield group
                group, num_tokens = [], 0
            group.append(request_id)
            num_tokens += more
        if group:
            yield group

    def _call_isolated(
        self,
        doing: str,
        call: Callable[..., Sequence[R]],
        request_ids: list[str],
        output: DiffusionModelRunnerOutput,
        *arguments: Mapping[str, Any],
    ) -> dict[str, R]:
        """Call for all requests at once; if that fails, for fewer.

        Args:
            call: takes the states of requests, and a list for each of `arguments`.
            arguments: by request id.
        """

        def fail(request_id: str, error: Exception) -> None:
            if is_out_of_memory(error):
                num_tokens = self.states[request_id].num_tokens
                error = explain_out_of_memory(doing, num_tokens, self.cache_manager.device)
            self._fail(request_id, error, output)

        def on_out_of_memory(batch: Sequence[str]) -> None:
            if self.cache_manager.device.type == "cuda":
                torch.cuda.synchronize(self.cache_manager.device)  # decodes free theirs at the end
                torch.cuda.empty_cache()
            if doing == "step" and len(batch) > 1:  # the next step is not to find it out again
                num_tokens = sum(self.states[id].num_tokens for id in batch) - 1
                self.max_num_tokens = min(self.max_num_tokens or num_tokens, num_tokens)

        return call_isolated(call, request_ids, (self.states, *arguments), fail, on_out_of_memory)

    def _collect_results(self, output: DiffusionModelRunnerOutput, waits: bool) -> None:
        """Hand out what is decoded.

        Args:
            waits: for the device to finish; where nobody steps, nobody is held up by that.
        """
        for request_id, pending in list(self._decoding.items()):
            if waits or pending.is_ready():
                del self._decoding[request_id]
                try:
                    output.results[request_id] = pending.wait()
                    self._free(request_id)  # at once, so that what the step tells is what is held
                except Exception as error:
                    self._fail(request_id, error, output)

    def _is_done(self, request_id: str) -> bool:
        state = self.states[request_id]
        return state.num_computed_steps >= state.num_steps

    def _is_snapshot_due(self, state: RequestState) -> bool:
        """After a step; not the last one, and not where latents are not all there is to go on from.

        (With a step cache, what it has stored is a part of the request's state as well.)
        """
        if not self.snapshot_steps or not state.is_resumable:
            return False
        step = state.num_computed_steps
        return step % self.snapshot_steps == 0 and step < state.num_steps

    def _is_preview_due(self, request_id: str) -> bool:
        """After the step that is under way; the last one gives the picture itself."""
        state = self.states[request_id]
        step = state.num_computed_steps + 1
        is_turn = state.preview_every > 0 and step % state.preview_every == 0
        return is_turn and step < state.num_steps

    def _fail(self, request_id: str, error: Exception, output: DiffusionModelRunnerOutput) -> None:
        logger.warning("request %s failed", request_id, exc_info=error)
        output.errors[request_id] = RequestError.from_exception(error)
        output.num_computed_steps.pop(request_id, None)
        self._free(request_id)

    def _free(self, request_id: str) -> None:
        self._decoding.pop(request_id, None)
        if (state := self.states.pop(request_id, None)) is not None:
            heapq.heappush(self._free_rows, state.row)
            self.adapter.release(state)
        self.cache_manager.release_cache(request_id)


def _resume(state: RequestState, snapshot: Snapshot) -> None:
    """Put a request that has only been prepared where it was in an engine that has died."""
    state.latents.copy_(snapshot.latents)
    state.num_computed_steps = snapshot.num_computed_steps
