"""Builders for tests of scheduling: requests, a scheduler, and a model that only counts steps."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import get_args

import torch

from vllm_omni.config import DiTConfig, Policy
from vllm_omni.diffusion.messages import (
    DiffusionModelRunnerOutput,
    DiffusionRequest,
    DiffusionSchedulerOutput,
    RequestResult,
)
from vllm_omni.diffusion.scheduler import DiffusionScheduler
from vllm_omni.outputs import EngineCoreOutput, RequestError

POLICIES: tuple[Policy, ...] = get_args(Policy)


@dataclass(frozen=True)
class StubInputs:
    num_steps: int = 4
    num_tokens: int = 10
    output_type: str = "image"
    preview_every: int = 0
    num_rows: int = 1


StubRequest = DiffusionRequest[StubInputs]
Step = DiffusionSchedulerOutput[StubInputs]


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class HeldRequest:
    """What a worker keeps of a request."""

    num_steps: int
    num_computed_steps: int = 0
    result_at: int | None = None  # the model's step count at which its result is there


@dataclass
class StubModel:
    """Plays the workers; refuses to start a request twice or to free what it does not hold."""

    decode_delay: int = 0  # steps of the model from a request's last step to its result
    fail_at: dict[str, int] = field(default_factory=dict)  # request id -> step that fails
    held: dict[str, HeldRequest] = field(default_factory=dict)
    num_executed: int = 0

    def execute_model(self, step: Step) -> DiffusionModelRunnerOutput:
        self.num_executed += 1
        for request_id in step.finished_req_ids:
            del self.held[request_id]
        for new_request in step.scheduled_new_reqs:
            assert new_request.request_id not in self.held
            self.held[new_request.request_id] = HeldRequest(new_request.custom_inputs.num_steps)
        output = DiffusionModelRunnerOutput()
        for request_id in step.num_scheduled_steps:
            self._step(request_id, output)
        for request_id, held in self.held.items():
            if held.result_at == self.num_executed:
                output.results[request_id] = RequestResult(torch.tensor(held.num_steps))
        return output

    def _step(self, request_id: str, output: DiffusionModelRunnerOutput) -> None:
        held = self.held[request_id]
        assert held.result_at is None, "a request that is being decoded must not step"
        if self.fail_at.get(request_id) == held.num_computed_steps + 1:
            output.errors[request_id] = RequestError("StageExecutionError", "the stub fails")
            return
        held.num_computed_steps = min(held.num_computed_steps + 1, held.num_steps)
        output.num_computed_steps[request_id] = held.num_computed_steps
        if held.num_computed_steps == held.num_steps:
            held.result_at = self.num_executed + self.decode_delay


def create_scheduler(
    policy: Policy = "fcfs",
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 100,
    max_num_resident: int = 256,
    ageing_steps: int = 1000,
    saturating_num_tokens: int = 4096,
    clock: FakeClock | None = None,
) -> DiffusionScheduler:
    config = DiTConfig(
        policy=policy,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_resident=max_num_resident,
        ageing_steps=ageing_steps,
        saturating_num_tokens=saturating_num_tokens,
    )
    return DiffusionScheduler(config, clock or FakeClock())


def create_request(
    request_id: str,
    *,
    num_steps: int = 4,
    num_tokens: int = 10,
    priority: int = 0,
    client_index: int = 0,
    deadline: float | None = None,
) -> StubRequest:
    return DiffusionRequest(
        request_id=request_id,
        custom_inputs=StubInputs(num_steps, num_tokens),
        priority=priority,
        client_index=client_index,
        deadline=deadline,
    )


def add_requests(scheduler: DiffusionScheduler, requests: Iterable[StubRequest]) -> None:
    for request in requests:
        scheduler.add_request(request)


def take_step(
    scheduler: DiffusionScheduler, model: StubModel
) -> tuple[list[str], list[EngineCoreOutput]]:
    """Ids of the requests that stepped, and the news for all clients."""
    step = scheduler.schedule()
    news = scheduler.update_from_output(step, model.execute_model(step))
    return list(step.num_scheduled_steps), [out for outs in news.values() for out in outs.outputs]


def run_steps(scheduler: DiffusionScheduler, model: StubModel, num_steps: int) -> list[list[str]]:
    """Ids of the requests in each of the next steps."""
    return [take_step(scheduler, model)[0] for _ in range(num_steps)]


def run_to_end(scheduler: DiffusionScheduler, model: StubModel) -> dict[str, EngineCoreOutput]:
    """Step until nothing is left; the final output of each request."""
    final: dict[str, EngineCoreOutput] = {}
    while scheduler.has_requests():
        for output in take_step(scheduler, model)[1]:
            assert output.request_id not in final, "there is news after the final output"
            if output.finished:
                final[output.request_id] = output
    assert model.held == {}
    return final
