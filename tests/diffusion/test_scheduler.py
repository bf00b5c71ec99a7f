"""Who steps when: order, budget, fairness, aborts and deadlines, without a model."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from vllm_omni.config import DiTConfig, Policy
from vllm_omni.diffusion.messages import (
    DiffusionModelRunnerOutput,
    DiffusionRequest,
    DiffusionSchedulerOutput,
    RequestResult,
)
from vllm_omni.diffusion.scheduler import DiffusionScheduler
from vllm_omni.errors import DeadlineExceededError, InvalidParameterError, OmniRequestError
from vllm_omni.outputs import EngineCoreOutput, FinishReason, RequestError

POLICIES: tuple[Policy, ...] = get_args(Policy)


@dataclass(frozen=True)
class StubInputs:
    num_steps: int = 4
    num_tokens: int = 10
    output_type: str = "image"


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
    ageing_steps: int = 1000,
    clock: FakeClock | None = None,
) -> DiffusionScheduler:
    config = DiTConfig(
        policy=policy,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        ageing_steps=ageing_steps,
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


# --- order ---


def test_fcfs_takes_requests_in_order_of_arrival() -> None:
    scheduler, model = create_scheduler(max_num_seqs=2), StubModel()
    add_requests(
        scheduler,
        [
            create_request("a", num_steps=3, priority=9),
            create_request("b", num_steps=1),
            create_request("c", num_steps=1, priority=-9),
        ],
    )
    assert run_steps(scheduler, model, 3) == [["a", "b"], ["a", "c"], ["a"]]


def test_lower_priority_value_goes_first_and_equals_by_arrival() -> None:
    scheduler, model = create_scheduler("priority", max_num_seqs=1), StubModel()
    priorities = {"a": 5, "b": -1, "c": 5, "d": -1, "e": 0}
    add_requests(
        scheduler,
        [create_request(id, num_steps=1, priority=value) for id, value in priorities.items()],
    )
    assert run_steps(scheduler, model, 5) == [["b"], ["d"], ["e"], ["a"], ["c"]]


def test_shortest_takes_least_remaining_work_first() -> None:
    scheduler, model = create_scheduler("shortest", max_num_seqs=1), StubModel()
    add_requests(
        scheduler,
        [
            create_request("wide", num_steps=1, num_tokens=50),
            create_request("long", num_steps=9, num_tokens=5),
            create_request("small", num_steps=2, num_tokens=10),
        ],
    )
    expected = ["small"] * 2 + ["long"] * 9 + ["wide"]
    assert run_steps(scheduler, model, 12) == [[request_id] for request_id in expected]


def test_shortest_counts_only_the_work_that_remains() -> None:
    scheduler, model = create_scheduler("shortest", max_num_seqs=1), StubModel()
    scheduler.add_request(create_request("old", num_steps=5, num_tokens=10))
    assert run_steps(scheduler, model, 3) == [["old"]] * 3  # 20 token-steps remain
    scheduler.add_request(create_request("new", num_steps=3, num_tokens=10))  # 30 token-steps
    assert run_steps(scheduler, model, 3) == [["old"], ["old"], ["new"]]


def test_request_that_does_not_fit_is_passed_over_and_blocks_nobody() -> None:
    scheduler, model = create_scheduler(max_num_batched_tokens=100), StubModel()
    add_requests(
        scheduler,
        [
            create_request("a", num_tokens=60, num_steps=2),
            create_request("big", num_tokens=100, num_steps=1),
            create_request("b", num_tokens=40, num_steps=3),
        ],
    )
    assert run_steps(scheduler, model, 4) == [["a", "b"], ["a", "b"], ["big"], ["b"]]


def test_total_of_tokens_is_reported_with_the_step() -> None:
    scheduler = create_scheduler()
    add_requests(
        scheduler, [create_request("a", num_tokens=60), create_request("b", num_tokens=40)]
    )
    assert scheduler.schedule().total_num_scheduled_tokens == 100


@pytest.mark.parametrize("policy", ["priority", "shortest"])
def test_passed_over_request_goes_first_after_ageing_steps(policy: Policy) -> None:
    scheduler, model = create_scheduler(policy, ageing_steps=5), StubModel()
    scheduler.add_request(create_request("old", num_tokens=100, num_steps=2, priority=1))
    stepped = []
    for index in range(8):
        scheduler.add_request(create_request(f"new{index}", num_tokens=1, num_steps=1))
        stepped += run_steps(scheduler, model, 1)
    assert stepped[:5] == [["new0"], ["new1"], ["new2"], ["new3"], ["new4"]]
    assert stepped[5:] == [["old"], ["old"], ["new5", "new6", "new7"]]


def test_overdue_requests_go_by_arrival_before_the_policy() -> None:
    scheduler = create_scheduler("priority", max_num_seqs=1, ageing_steps=2)
    model = StubModel()
    add_requests(
        scheduler,
        [
            create_request("a", num_steps=1, priority=9),
            create_request("b", num_steps=1, priority=1),
            create_request("c", num_steps=4, priority=0),
        ],
    )
    assert run_steps(scheduler, model, 6) == [["c"], ["c"], ["a"], ["b"], ["c"], ["c"]]


def test_preemption_keeps_progress() -> None:
    scheduler, model = create_scheduler("priority", max_num_seqs=1), StubModel()
    scheduler.add_request(create_request("low", num_steps=4, priority=5))
    run_steps(scheduler, model, 2)
    scheduler.add_request(create_request("high", num_steps=3, priority=0))
    assert run_steps(scheduler, model, 3) == [["high"]] * 3
    assert model.held["low"].num_computed_steps == 2
    assert scheduler.requests["low"].num_computed_steps == 2
    step = scheduler.schedule()
    assert step.num_scheduled_steps == {"low": 1}
    assert step.scheduled_new_reqs == []  # the workers know it
    scheduler.update_from_output(step, model.execute_model(step))
    assert run_steps(scheduler, model, 1) == [["low"]]
    assert not scheduler.requests


def test_request_joins_between_two_steps() -> None:
    scheduler, model = create_scheduler(), StubModel()
    scheduler.add_request(create_request("a", num_steps=3))
    assert run_steps(scheduler, model, 1) == [["a"]]
    scheduler.add_request(create_request("b", num_steps=3))
    assert run_steps(scheduler, model, 3) == [["a", "b"], ["a", "b"], ["b"]]


def test_counts_of_started_and_waiting_requests() -> None:
    scheduler, model = create_scheduler(max_num_seqs=1), StubModel()
    add_requests(scheduler, [create_request(id, num_steps=2) for id in "abc"])
    assert scheduler.get_request_counts() == (0, 3)
    run_steps(scheduler, model, 1)
    assert scheduler.get_request_counts() == (1, 2)
    run_to_end(scheduler, model)
    assert scheduler.get_request_counts() == (0, 0)


# --- outputs ---


def test_news_of_a_request_from_arrival_to_end() -> None:
    clock = FakeClock()
    scheduler, model = create_scheduler(clock=clock), StubModel()
    scheduler.add_request(create_request("a", num_steps=3))
    clock.now += 2.5
    outputs = [output for _ in range(3) for output in take_step(scheduler, model)[1]]
    assert [output.output_metadata for output in outputs] == [
        {"step": step, "num_steps": 3, "queue_time": 2.5} for step in (1, 2, 3)
    ]
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.STOP]
    assert [output.output_type for output in outputs] == [None, None, "image"]
    assert [output.pooling_output for output in outputs] == [None, None, torch.tensor(3)]


def test_queue_time_counts_from_the_given_arrival() -> None:
    scheduler = create_scheduler()  # its clock says 100
    scheduler.add_request(
        DiffusionRequest(request_id="a", custom_inputs=StubInputs(), arrival_time=90.0)
    )
    [output] = take_step(scheduler, StubModel())[1]
    assert output.output_metadata["queue_time"] == 10.0


def test_additional_outputs_reach_the_client() -> None:
    scheduler = create_scheduler()
    scheduler.add_request(create_request("a", num_steps=1))
    latents = torch.arange(4.0)
    news = scheduler.update_from_output(
        scheduler.schedule(),
        DiffusionModelRunnerOutput(
            num_computed_steps={"a": 1},
            results={"a": RequestResult(torch.zeros(1), {"latents": latents})},
        ),
    )
    assert news[0].outputs[0].additional_outputs["latents"] is latents


def test_each_client_gets_its_own_news() -> None:
    scheduler, model = create_scheduler(max_num_seqs=3), StubModel(fail_at={"failing": 1})
    add_requests(
        scheduler,
        [
            create_request("running", client_index=7),
            create_request("failing", client_index=2),
            create_request("done", client_index=7, num_steps=1),
            create_request("aborted", client_index=5),
            create_request("waiting", client_index=6),
        ],
    )
    scheduler.finish_requests(["aborted"], FinishReason.ABORT)
    step = scheduler.schedule()
    news = scheduler.update_from_output(step, model.execute_model(step))
    assert {
        client_index: {(output.request_id, output.finish_reason) for output in outputs.outputs}
        for client_index, outputs in news.items()
    } == {
        7: {("running", None), ("done", FinishReason.STOP)},
        2: {("failing", FinishReason.ERROR)},
        5: {("aborted", FinishReason.ABORT)},
    }


def test_task_without_steps_takes_one_turn() -> None:
    scheduler, model = create_scheduler(), StubModel()
    scheduler.add_request(create_request("encode", num_steps=0))
    stepped, [output] = take_step(scheduler, model)
    assert stepped == ["encode"]
    assert output.finish_reason is FinishReason.STOP
    assert output.output_metadata["num_steps"] == 0


# --- ends ---


def test_abort_of_a_waiting_request_never_reaches_the_workers() -> None:
    scheduler, model = create_scheduler(max_num_seqs=1), StubModel()
    add_requests(scheduler, [create_request("a", num_steps=1), create_request("b")])
    run_steps(scheduler, model, 1)
    scheduler.finish_requests(["b"], FinishReason.ABORT)
    step = scheduler.schedule()
    assert (step.num_scheduled_steps, step.finished_req_ids) == ({}, ["a"])
    news = scheduler.update_from_output(step, model.execute_model(step))
    assert [(out.request_id, out.finish_reason) for out in news[0].outputs] == [
        ("b", FinishReason.ABORT)
    ]
    assert not scheduler.has_requests()


def test_there_is_work_until_the_abort_has_been_said() -> None:
    scheduler, model = create_scheduler(), StubModel()
    scheduler.add_request(create_request("a"))
    scheduler.finish_requests(["a"], FinishReason.ABORT)
    assert scheduler.has_requests()
    assert run_to_end(scheduler, model)["a"].finish_reason is FinishReason.ABORT


def test_abort_of_a_running_request_takes_effect_before_the_next_step() -> None:
    scheduler, model = create_scheduler(), StubModel()
    add_requests(scheduler, [create_request("a"), create_request("b")])
    run_steps(scheduler, model, 2)
    scheduler.finish_requests(["a"], FinishReason.ABORT)
    step = scheduler.schedule()
    assert (step.num_scheduled_steps, step.finished_req_ids) == ({"b": 1}, ["a"])
    news = scheduler.update_from_output(step, model.execute_model(step))
    assert [(out.request_id, out.finish_reason) for out in news[0].outputs] == [
        ("a", FinishReason.ABORT),
        ("b", None),
    ]
    assert set(run_to_end(scheduler, model)) == {"b"}  # nothing more of "a"


def test_abort_is_said_and_freed_once_however_often_it_is_asked() -> None:
    scheduler, model = create_scheduler(), StubModel()
    add_requests(scheduler, [create_request("a"), create_request("b", num_steps=2)])
    run_steps(scheduler, model, 1)
    scheduler.finish_requests(["a", "a", "unknown"], FinishReason.ABORT)
    scheduler.finish_requests(["a"], FinishReason.ABORT)
    step = scheduler.schedule()
    assert step.finished_req_ids == ["a"]
    news = scheduler.update_from_output(step, model.execute_model(step))
    assert [out.request_id for out in news[0].outputs] == ["a", "b"]
    scheduler.finish_requests(["a"], FinishReason.ABORT)
    assert scheduler.schedule().finished_req_ids == ["b"]


@pytest.mark.parametrize("model_result", ["step", "result", "error"])
def test_abort_while_the_step_is_under_way(model_result: str) -> None:
    scheduler = create_scheduler()
    model = StubModel(fail_at={"a": 1} if model_result == "error" else {})
    scheduler.add_request(create_request("a", num_steps=1 if model_result == "result" else 4))
    step = scheduler.schedule()
    scheduler.finish_requests(["a"], FinishReason.ABORT)
    news = scheduler.update_from_output(step, model.execute_model(step))
    assert [out.finish_reason for out in news[0].outputs] == [FinishReason.ABORT]
    assert run_to_end(scheduler, model) == {}


def test_id_may_be_used_again_after_the_request_has_ended() -> None:
    scheduler, model = create_scheduler(), StubModel()
    scheduler.add_request(create_request("a", num_steps=4))
    run_steps(scheduler, model, 2)
    scheduler.finish_requests(["a"], FinishReason.ABORT)
    scheduler.add_request(create_request("a", num_steps=3))
    step = scheduler.schedule()
    assert step.finished_req_ids == ["a"]
    assert [new.request_id for new in step.scheduled_new_reqs] == ["a"]
    news = scheduler.update_from_output(step, model.execute_model(step))
    assert [out.finish_reason for out in news[0].outputs] == [FinishReason.ABORT, None]
    assert run_to_end(scheduler, model)["a"].output_metadata["step"] == 3


@pytest.mark.parametrize("max_num_seqs", [1, 2], ids=["waiting", "running"])
def test_deadline_ends_a_request(max_num_seqs: int) -> None:
    clock = FakeClock()
    scheduler, model = create_scheduler(max_num_seqs=max_num_seqs, clock=clock), StubModel()
    add_requests(
        scheduler, [create_request("a", num_steps=9), create_request("late", deadline=5.0)]
    )
    clock.now += 4.75
    run_steps(scheduler, model, 2)
    clock.now += 0.25
    stepped, outputs = take_step(scheduler, model)
    assert stepped == ["a"]
    [late] = [out for out in outputs if out.request_id == "late"]
    assert late.finish_reason is FinishReason.ERROR
    assert late.error is not None
    error = late.error.to_exception()
    assert type(error) is DeadlineExceededError
    num_computed_steps = 2 if max_num_seqs == 2 else 0
    assert str(error) == f"deadline=5.0 s passed after {num_computed_steps} of 4 steps"
    assert set(run_to_end(scheduler, model)) == {"a"}


def test_error_of_the_model_ends_only_that_request() -> None:
    scheduler, model = create_scheduler(), StubModel(fail_at={"b": 2})
    add_requests(scheduler, [create_request(id, num_steps=3) for id in "abc"])
    final = run_to_end(scheduler, model)
    assert {id: out.finish_reason for id, out in final.items()} == {
        "a": FinishReason.STOP,
        "b": FinishReason.ERROR,
        "c": FinishReason.STOP,
    }
    assert final["b"].error == RequestError("StageExecutionError", "the stub fails")
    assert final["a"].error is None


def test_result_that_comes_later_than_the_last_step() -> None:
    scheduler, model = create_scheduler(max_num_seqs=1), StubModel(decode_delay=2)
    add_requests(scheduler, [create_request("a", num_steps=2), create_request("b", num_steps=3)])
    stepped, outputs = [], []
    for _ in range(4):
        step, news = take_step(scheduler, model)
        stepped.append(step)
        outputs.append(
            [(out.request_id, out.output_metadata["step"], out.finished) for out in news]
        )
    assert stepped == [["a"], ["a"], ["b"], ["b"]]  # while "a" is decoded, it takes no place
    assert outputs[1] == [("a", 2, False)]
    assert outputs[3] == [("b", 2, False), ("a", 2, True)]
    assert run_to_end(scheduler, model)["b"].finish_reason is FinishReason.STOP


def test_request_that_is_decoded_can_fail() -> None:
    scheduler, model = create_scheduler(), StubModel(decode_delay=9)
    scheduler.add_request(create_request("a", num_steps=1))
    run_steps(scheduler, model, 1)
    error = RequestError("StageExecutionError", "out of memory")
    news = scheduler.update_from_output(
        scheduler.schedule(), DiffusionModelRunnerOutput(errors={"a": error})
    )
    assert [(out.finish_reason, out.error) for out in news[0].outputs] == [
        (FinishReason.ERROR, error)
    ]
    assert run_to_end(scheduler, model) == {}


def test_request_that_is_decoded_can_be_aborted() -> None:
    scheduler, model = create_scheduler(), StubModel(decode_delay=1)
    scheduler.add_request(create_request("a", num_steps=1))
    run_steps(scheduler, model, 1)
    scheduler.finish_requests(["a"], FinishReason.ABORT)
    final = run_to_end(scheduler, model)
    assert {id: out.finish_reason for id, out in final.items()} == {"a": FinishReason.ABORT}


# --- refusals ---


def test_refuses_an_id_that_is_being_worked_on() -> None:
    scheduler, model = create_scheduler(), StubModel()
    scheduler.add_request(create_request("twin", num_steps=2))
    with pytest.raises(InvalidParameterError, match="request_id='twin' is not allowed"):
        scheduler.add_request(create_request("twin", num_steps=3))
    assert run_to_end(scheduler, model)["twin"].output_metadata["num_steps"] == 2


def test_refuses_a_request_that_can_never_fit() -> None:
    scheduler = create_scheduler(max_num_batched_tokens=100)
    with pytest.raises(OmniRequestError, match=r"needs 101 tokens.*max_num_batched_tokens=100"):
        scheduler.add_request(create_request("a", num_tokens=101))
    assert not scheduler.has_requests()
    scheduler.add_request(create_request("b", num_tokens=100))


# --- properties ---


@settings(max_examples=200, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    ageing_steps=st.integers(1, 20),
    num_steps=st.integers(1, 8),
    older_steps=st.lists(st.integers(1, 8), max_size=3),
    newcomer_tokens=st.lists(st.integers(1, 100), min_size=1, max_size=5),
)
def test_nothing_starves_under_a_stream_of_better_requests(
    policy: Policy,
    ageing_steps: int,
    num_steps: int,
    older_steps: list[int],
    newcomer_tokens: list[int],
) -> None:
    """Only those that came before it, each once, and the ageing itself can hold a request up."""
    scheduler, model = create_scheduler(policy, ageing_steps=ageing_steps), StubModel()
    for index, steps in enumerate(older_steps):
        scheduler.add_request(create_request(f"older{index}", num_steps=steps, num_tokens=100))
    scheduler.add_request(create_request("old", num_steps=num_steps, num_tokens=100, priority=9))
    for step in range(ageing_steps + sum(older_steps) + num_steps):
        num_tokens = newcomer_tokens[step % len(newcomer_tokens)]
        scheduler.add_request(
            create_request(f"new{step}", num_steps=1, num_tokens=num_tokens, priority=-1)
        )
        take_step(scheduler, model)
    assert "old" not in scheduler.requests


@settings(max_examples=200, deadline=None)
@given(
    priorities=st.lists(st.integers(-2, 2), min_size=1, max_size=12),
    max_num_seqs=st.integers(1, 4),
)
def test_priority_order_holds(priorities: list[int], max_num_seqs: int) -> None:
    scheduler, model = create_scheduler("priority", max_num_seqs=max_num_seqs), StubModel()
    requests = [
        create_request(str(index), num_steps=1, num_tokens=1, priority=priority)
        for index, priority in enumerate(priorities)
    ]
    add_requests(scheduler, requests)
    stepped = []
    while scheduler.requests:
        stepped += take_step(scheduler, model)[0]
    by_priority = sorted(requests, key=lambda request: request.priority)  # stable
    assert stepped == [request.request_id for request in by_priority]


@dataclass(eq=False)
class Record:
    """What the properties know of a request, kept apart from the scheduler."""

    request: StubRequest
    index: int
    expires_at: float
    num_older_steps: int  # that requests which came before it could take in all
    is_started: bool = False
    num_computed_steps: int = 0
    num_passed_over: int = 0
    expected_end: FinishReason | None = None
    ends: list[FinishReason] = field(default_factory=list)  # as the client is told

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return self.request.custom_inputs.num_tokens


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, aborts, failures and deadlines; every step is checked."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        max_num_seqs=st.integers(1, 4),
        max_num_batched_tokens=st.integers(20, 60),
        ageing_steps=st.sampled_from([1, 3, 8, 50]),
        decode_delay=st.integers(0, 2),
    )
    def start(
        self,
        policy: Policy,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        ageing_steps: int,
        decode_delay: int,
    ) -> None:
        self.clock = FakeClock()
        self.scheduler = create_scheduler(
            policy,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            ageing_steps=ageing_steps,
            clock=self.clock,
        )
        self.config = self.scheduler.config
        self.model = StubModel(decode_delay)
        self.records: dict[str, Record] = {}
        self.freed: list[str] = []

    @rule(
        num_steps=st.integers(0, 5),
        num_tokens=st.integers(1, 20),
        priority=st.integers(-1, 1),
        client_index=st.integers(0, 2),
        fails_at=st.none() | st.integers(1, 5),
        deadline=st.none() | st.integers(1, 20),
    )
    def add(
        self,
        num_steps: int,
        num_tokens: int,
        priority: int,
        client_index: int,
        fails_at: int | None,
        deadline: int | None,
    ) -> None:
        index = len(self.records)
        request = create_request(
            str(index),
            num_steps=num_steps,
            num_tokens=num_tokens,
            priority=priority,
            client_index=client_index,
            deadline=deadline,
        )
        if fails_at is not None:
            self.model.fail_at[request.request_id] = fails_at
        older = [record for record in self.records.values() if record.expected_end is None]
        self.scheduler.add_request(request)
        self.records[request.request_id] = Record(
            request=request,
            index=index,
            expires_at=float("inf") if deadline is None else self.clock.now + deadline,
            num_older_steps=sum(max(1, r.request.custom_inputs.num_steps) for r in older),
        )

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.abort_one(data.draw(st.sampled_from(list(self.records))))

    @rule(count=st.integers(1, 4), seconds=st.sampled_from([0, 0, 1, 5]))
    def step(self, count: int, seconds: int) -> None:
        self.clock.now += seconds
        for _ in range(count):
            step = self.schedule()
            self.update(step, self.model.execute_model(step))

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def abort_while_the_step_is_under_way(self, data: st.DataObject) -> None:
        step = self.schedule()
        output = self.model.execute_model(step)
        self.abort_one(data.draw(st.sampled_from(list(self.records))))
        self.update(step, output)

    def teardown(self) -> None:
        """Whatever has happened: all work ends, each request once and as it should."""
        if not hasattr(self, "records"):
            return
        # Even one after the other: five steps each, then the decode, then the workers are told.
        for _ in range(len(self.records) * (6 + self.model.decode_delay) + 1):
            if self.scheduler.has_requests():
                step = self.schedule()
                self.update(step, self.model.execute_model(step))
        assert not self.scheduler.has_requests()
        for record in self.records.values():
            assert record.ends == [record.expected_end]
        assert sorted(self.freed) == sorted(r.request_id for r in self.started())
        assert self.model.held == {}

    def abort_one(self, request_id: str) -> None:
        self.scheduler.finish_requests([request_id], FinishReason.ABORT)
        record = self.records[request_id]
        record.expected_end = record.expected_end or FinishReason.ABORT

    def schedule(self) -> Step:
        for record in self.records.values():
            if record.expected_end is None and record.expires_at <= self.clock.now:
                record.expected_end = FinishReason.ERROR
        step = self.scheduler.schedule()
        self.freed += step.finished_req_ids
        self.check_limits(step)
        self.check_order(step)
        for new_request in step.scheduled_new_reqs:
            record = self.records[new_request.request_id]
            assert not record.is_started
            record.is_started = True
        assert all(self.records[id].is_started for id in step.num_scheduled_steps)
        return step

    def update(self, step: Step, output: DiffusionModelRunnerOutput) -> None:
        for request_id, num_computed_steps in output.num_computed_steps.items():
            record = self.records[request_id]
            assert num_computed_steps >= record.num_computed_steps
            record.num_computed_steps = num_computed_steps
        for ended, reason in (
            (output.errors, FinishReason.ERROR),
            (output.results, FinishReason.STOP),
        ):
            for request_id in ended:
                record = self.records[request_id]
                record.expected_end = record.expected_end or reason
        for client_index, news in self.scheduler.update_from_output(step, output).items():
            for out in news.outputs:
                record = self.records[out.request_id]
                assert record.request.client_index == client_index
                assert record.ends == [], "there is news after the final output"
                if out.finish_reason is not None:
                    record.ends.append(out.finish_reason)
                else:
                    assert out.output_metadata["step"] == record.num_computed_steps

    def check_limits(self, step: Step) -> None:
        num_tokens = sum(self.records[id].num_tokens for id in step.num_scheduled_steps)
        assert num_tokens == step.total_num_scheduled_tokens
        assert num_tokens <= self.config.max_num_batched_tokens
        assert len(step.num_scheduled_steps) <= self.config.max_num_seqs
        assert set(step.num_scheduled_steps) <= {record.request_id for record in self.runnable()}
        assert step.num_scheduled_steps or not self.runnable()

    def check_order(self, step: Step) -> None:
        """Who did not step had no room behind those that go before it, and not for too long."""
        num_seqs = num_tokens = 0
        for record in sorted(self.runnable(), key=self.order):
            has_room = (
                num_seqs < self.config.max_num_seqs
                and num_tokens + record.num_tokens <= self.config.max_num_batched_tokens
            )
            assert (record.request_id in step.num_scheduled_steps) == has_room
            if has_room:
                num_seqs += 1
                num_tokens += record.num_tokens
            else:
                record.num_passed_over += 1
                assert record.num_passed_over <= self.config.ageing_steps + record.num_older_steps

    def order(self, record: Record) -> tuple[bool, int, int]:
        remaining_steps = record.request.custom_inputs.num_steps - record.num_computed_steps
        rank = {
            "fcfs": 0,
            "priority": record.request.priority,
            "shortest": record.num_tokens * max(1, remaining_steps),
        }[self.config.policy]
        if self.config.policy == "fcfs" or record.num_passed_over < self.config.ageing_steps:
            return True, rank, record.index
        return False, 0, record.index  # overdue

    def runnable(self) -> list[Record]:
        """Requests that have not ended and have steps to take."""
        return [
            record
            for record in self.records.values()
            if record.expected_end is None
            and (
                record.request_id not in self.model.held
                or self.model.held[record.request_id].result_at is None
            )
        ]

    def started(self) -> list[Record]:
        return [record for record in self.records.values() if record.is_started]


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, report_multiple_bugs=False
)
