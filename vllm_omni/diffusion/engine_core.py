"""`DiffusionEngineCore`: schedule, execute, update; nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from vllm_omni.config import DiTConfig
from vllm_omni.diffusion.executor import DiffusionExecutor
from vllm_omni.diffusion.messages import (
    DiffusionModelRunnerOutput,
    DiffusionRequest,
    DiffusionSchedulerOutput,
)
from vllm_omni.diffusion.scheduler import DiffusionScheduler
from vllm_omni.models.registry import get_model_spec, load_class
from vllm_omni.outputs import EngineCoreOutputs, FinishReason, StepStats


class DiffusionEngineCore:
    """A diffusion model behind a queue of requests. Not thread safe: one caller steps it."""

    def __init__(self, dit_config: DiTConfig, executor: DiffusionExecutor | None = None) -> None:
        """Load the model, or take an executor that does, and that may not be ready yet."""
        self.dit_config = dit_config
        self.scheduler: DiffusionScheduler = load_class(get_model_spec(dit_config.model).scheduler)(
            dit_config
        )
        self.executor = executor or DiffusionExecutor.from_config(dit_config)
        if executor is None:
            self.executor.wait_until_ready()
        self.model_time = 0.0  # seconds of the last step inside the model's networks
        # Told the requests of each step before it is taken.
        self.on_schedule: Callable[[Iterable[str]], None] | None = None

    def add_request(self, request: DiffusionRequest[Any]) -> None:
        """Queue a request; raises an `OmniRequestError` if it can never run."""
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests before the next step; each still gets its final output."""
        self.scheduler.finish_requests(request_ids, FinishReason.ABORT)

    def has_requests(self) -> bool:
        return self.scheduler.has_requests()

    def step(self) -> tuple[dict[int, EngineCoreOutputs], bool]:
        """One denoising step for a batch: the news by client, and whether there was any work."""
        if not self.scheduler.has_requests():
            return {}, False
        start_time = time.monotonic()
        scheduler_output = self.scheduler.schedule()
        if self.on_schedule is not None:
            self.on_schedule(scheduler_output.num_scheduled_steps)
        model_output = self.executor.execute_model(scheduler_output)
        self.model_time = model_output.model_time
        news = self.scheduler.update_from_output(scheduler_output, model_output)
        for of_client in news.values():
            of_client.step_stats = self._make_stats(start_time, scheduler_output, model_output)
            break  # one client counts each step, or it would be counted twice
        return news, True

    def _make_stats(
        self,
        start_time: float,
        scheduler_output: DiffusionSchedulerOutput[Any],
        model_output: DiffusionModelRunnerOutput,
    ) -> StepStats:
        num_running, num_waiting = self.scheduler.get_request_counts()
        return StepStats(
            start_time=start_time,
            step_time=time.monotonic() - start_time,
            model_time=model_output.model_time,
            prepare_time=model_output.prepare_time,
            denoise_time=model_output.denoise_time,
            decode_time=model_output.decode_time,
            num_requests=len(scheduler_output.num_scheduled_steps),
            num_rows=scheduler_output.total_num_scheduled_rows,
            num_tokens=scheduler_output.total_num_scheduled_tokens,
            max_num_tokens=self.dit_config.max_num_batched_tokens,
            num_running=num_running,
            num_waiting=num_waiting,
            num_computed_steps=sum(
                num_steps > 0 for num_steps in model_output.num_computed_steps.values()
            ),
            num_cached_rows=model_output.num_cached_rows,
            num_skipped_rows=sum(model_output.num_skipped_rows.values()),
            num_skipped_blocks=model_output.num_skipped_blocks,
            cache_bytes=model_output.cache_bytes,
            num_evictions=model_output.num_evictions,
            memory_bytes=model_output.memory_bytes,
        )

    def shutdown(self) -> None:
        self.executor.shutdown()
