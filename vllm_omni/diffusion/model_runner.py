"""`DiffusionModelRunner`: takes one step with whatever requests were scheduled.

A request that fails, at whatever point, ends with an error; no other request is hurt: when a
batched call fails, its requests are tried again one by one, and only the guilty one fails.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from vllm_omni.diffusion.cache_manager import DiTCacheManager
from vllm_omni.diffusion.messages import (
    DiffusionModelRunnerOutput,
    DiffusionSchedulerOutput,
    NewRequestData,
)
from vllm_omni.errors import StageExecutionError
from vllm_omni.models.interface import RequestState, RunnerAdapter
from vllm_omni.outputs import RequestError

logger = logging.getLogger(__name__)

R = TypeVar("R")


class DiffusionModelRunner:
    """Holds the state of every started request, each in a row of its own until it ends."""

    def __init__(self, adapter: RunnerAdapter[Any], cache_manager: DiTCacheManager) -> None:
        self.adapter = adapter
        self.cache_manager = cache_manager
        self.states: dict[str, RequestState] = {}
        self._free_rows: list[int] = []

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

        # 3. Decode those that have arrived.
        done = [id for id in request_ids if id in self.states and self._is_done(id)]
        for request_id in done:
            output.num_computed_steps[request_id] = self.states[request_id].num_computed_steps
        results = self._call_isolated(self.adapter.decode, done, output)
        output.results.update(results)

        output.model_time = self.adapter.model_time - model_time
        output.prepare_time = prepared - start
        output.denoise_time = denoised - prepared
        output.decode_time = time.perf_counter() - denoised
        return output

    def _prepare(
        self, new_request: NewRequestData[Any], output: DiffusionModelRunnerOutput
    ) -> None:
        request_id = new_request.request_id
        self.cache_manager.pin_request(request_id)
        try:
            state = self.adapter.prepare(request_id, new_request.custom_inputs)
        except Exception as error:
            self._fail(request_id, error, output)
            return
        row = heapq.heappop(self._free_rows) if self._free_rows else len(self.states)
        state.row = row
        self.states[request_id] = state

    def _step(self, request_ids: list[str], output: DiffusionModelRunnerOutput) -> None:
        stepped = self._call_isolated(self.adapter.step, request_ids, output)
        self._fail_where_not_finite(stepped, output)
        # A preview looks along the step, so it comes before the latents move on.
        due = [id for id in stepped if id in self.states and self._is_preview_due(id)]
        output.previews = self._call_isolated(self.adapter.preview, due, output, stepped)
        for request_id, latents in stepped.items():
            if (state := self.states.get(request_id)) is not None:  # it has not failed
                num_skipped_rows = state.num_skipped_rows
                state.advance(latents)
                output.num_computed_steps[request_id] = state.num_computed_steps
                if skipped := state.num_skipped_rows - num_skipped_rows:
                    output.num_skipped_rows[request_id] = skipped

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

    def _call_isolated(
        self,
        call: Callable[..., list[R]],
        request_ids: list[str],
        output: DiffusionModelRunnerOutput,
        *arguments: Mapping[str, Any],
    ) -> dict[str, R]:
        """Call for all requests at once; if that fails, for each alone.

        Args:
            call: takes the states of requests, and a list for each of `arguments`.
            arguments: by request id.
        """
        if not request_ids:
            return {}
        try:
            columns = [[by_id[id] for id in request_ids] for by_id in (self.states, *arguments)]
            results = call(*columns)
        except Exception as error:
            if len(request_ids) == 1:
                self._fail(request_ids[0], error, output)
                return {}
            logger.warning("a batch of %d failed (%r): one by one", len(request_ids), error)
            alone: dict[str, R] = {}
            for request_id in request_ids:
                alone.update(self._call_isolated(call, [request_id], output, *arguments))
            return alone
        return dict(zip(request_ids, results, strict=True))

    def _is_done(self, request_id: str) -> bool:
        state = self.states[request_id]
        return state.num_computed_steps >= state.num_steps

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
        if (state := self.states.pop(request_id, None)) is not None:
            heapq.heappush(self._free_rows, state.row)
            self.adapter.release(state)
        self.cache_manager.release_cache(request_id)
