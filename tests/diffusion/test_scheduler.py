"""Who steps when: order, budget, fairness, aborts and deadlines, without a model."""

import pytest
import torch

from tests.scheduling import (
    FakeClock,
    StubInputs,
    StubModel,
    add_requests,
    create_request,
    create_scheduler,
    run_steps,
    run_to_end,
    take_step,
)
from vllm_omni.config import Policy
from vllm_omni.diffusion.messages import (
    DiffusionModelRunnerOutput,
    DiffusionRequest,
    RequestResult,
)
from vllm_omni.errors import DeadlineExceededError, InvalidParameterError, OmniRequestError
from vllm_omni.outputs import FinishReason, RequestError

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


def test_shortest_fills_a_step_only_until_the_device_is_busy() -> None:
    scheduler = create_scheduler("shortest", saturating_num_tokens=25, ageing_steps=3)
    model = StubModel()
    add_requests(
        scheduler,
        [
            create_request("large", num_tokens=60, num_steps=2),
            create_request("a", num_tokens=10, num_steps=2),
            create_request("b", num_tokens=10, num_steps=3),
            create_request("c", num_tokens=10, num_steps=4),
        ],
    )
    # Two fill it; the overdue large one comes on top of what the policy picks.
    assert run_steps(scheduler, model, 5) == [
        ["a", "b"],
        ["a", "b"],
        ["b", "c"],
        ["large", "c"],
        ["large", "c"],
    ]


def test_the_shortest_steps_even_if_it_is_larger_than_what_keeps_the_device_busy() -> None:
    scheduler = create_scheduler("shortest", saturating_num_tokens=5)
    scheduler.add_request(create_request("a", num_tokens=60, num_steps=1))
    assert run_steps(scheduler, StubModel(), 1) == [["a"]]


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
        {
            "step": step,
            "num_steps": 3,
            "num_rows": step,
            "num_skipped_rows": 0,
            "queue_time": 2.5,
        }
        for step in (1, 2, 3)
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


def test_preview_comes_with_the_progress_of_its_step() -> None:
    scheduler = create_scheduler()
    add_requests(scheduler, [create_request("a"), create_request("b"), create_request("gone")])
    preview = torch.arange(12, dtype=torch.uint8).view(3, 2, 2)
    step = scheduler.schedule()
    scheduler.finish_requests(["gone"], FinishReason.ABORT)
    news = scheduler.update_from_output(
        step,
        DiffusionModelRunnerOutput(
            num_computed_steps={"a": 1, "b": 1, "gone": 1},
            previews={"a": preview, "gone": preview},
        ),
    )
    gone, a, b = news[0].outputs
    assert a.additional_outputs["preview"] is preview
    assert (a.request_id, a.finished, a.output_metadata["step"]) == ("a", False, 1)
    assert (b.request_id, b.additional_outputs) == ("b", {})
    assert (gone.request_id, gone.additional_outputs) == ("gone", {})


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


def test_refuses_an_id_that_the_workers_still_hold() -> None:
    scheduler, model = create_scheduler(), StubModel()
    scheduler.add_request(create_request("a"))
    take_step(scheduler, model)
    scheduler.finish_requests(["a"], FinishReason.ABORT)
    with pytest.raises(InvalidParameterError, match="request_id='a'"):
        scheduler.add_request(create_request("a"))
    take_step(scheduler, model)
    scheduler.add_request(create_request("a"))
    assert run_to_end(scheduler, model)["a"].finish_reason is FinishReason.STOP


# --- how many hold latents ---


def test_a_new_request_waits_while_too_many_hold_latents() -> None:
    """Each newcomer is more urgent than all before, yet two at most are started at any time."""
    scheduler = create_scheduler("priority", max_num_seqs=1, max_num_resident=2)
    model = StubModel()
    stepped = []
    for index in range(5):
        scheduler.add_request(create_request(str(index), num_steps=3, priority=-index))
        stepped += run_steps(scheduler, model, 1)
        assert scheduler.get_request_counts()[0] <= 2
    assert stepped == [["0"], ["1"], ["1"], ["1"], ["4"]]
    assert set(run_to_end(scheduler, model)) == {"0", "2", "3", "4"}
