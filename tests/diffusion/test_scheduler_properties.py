"""What must hold whatever happens: each request ends once, within limits, in order, in time."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.scheduling import (
    POLICIES,
    FakeClock,
    Step,
    StubModel,
    StubRequest,
    add_requests,
    create_request,
    create_scheduler,
    take_step,
)
from vllm_omni.config import Policy
from vllm_omni.diffusion.messages import DiffusionModelRunnerOutput
from vllm_omni.outputs import FinishReason

NO_LIMIT = 256  # more than a run of the machine has requests


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
        max_num_resident=st.sampled_from([1, 3, NO_LIMIT]),
        ageing_steps=st.sampled_from([1, 3, 8, 50]),
        saturating_num_tokens=st.sampled_from([1, 15, 30, 4096]),
        decode_delay=st.integers(0, 2),
    )
    def start(
        self,
        policy: Policy,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_resident: int,
        ageing_steps: int,
        saturating_num_tokens: int,
        decode_delay: int,
    ) -> None:
        self.clock = FakeClock()
        self.scheduler = create_scheduler(
            policy,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_resident=max_num_resident,
            ageing_steps=ageing_steps,
            saturating_num_tokens=saturating_num_tokens,
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
        num_resident = sum(record.expected_end is None for record in self.started())
        may_start = num_resident < self.config.max_num_resident
        assert step.num_scheduled_steps or not any(
            record.is_started or may_start for record in self.runnable()
        )

    def check_order(self, step: Step) -> None:
        """Who did not step had no room behind those that go before it, and not for too long."""
        num_seqs = num_tokens = num_picked_tokens = 0
        num_resident = sum(record.expected_end is None for record in self.started())
        overdue = self.find_overdue()
        for record in sorted(self.runnable(), key=lambda r: self.order(r, r is overdue)):
            is_full = (
                self.config.policy == "shortest"
                and record is not overdue
                and num_picked_tokens > 0
                and num_picked_tokens + record.num_tokens > self.config.saturating_num_tokens
            )
            has_room = not is_full and (
                num_seqs < self.config.max_num_seqs
                and num_tokens + record.num_tokens <= self.config.max_num_batched_tokens
                and (record.is_started or num_resident < self.config.max_num_resident)
            )
            assert (record.request_id in step.num_scheduled_steps) == has_room
            if has_room:
                num_seqs += 1
                num_tokens += record.num_tokens
                num_picked_tokens += 0 if record is overdue else record.num_tokens
                num_resident += not record.is_started
            else:
                record.num_passed_over += 1
                if self.config.max_num_resident == NO_LIMIT:
                    longest = self.config.ageing_steps + record.num_older_steps
                    assert record.num_passed_over <= longest
        assert num_resident <= self.config.max_num_resident

    def find_overdue(self) -> Record | None:
        """The oldest of those that were passed over for too long: it goes first."""
        waited = [r for r in self.runnable() if r.num_passed_over >= self.config.ageing_steps]
        return min(waited, key=lambda record: record.index, default=None)

    def order(self, record: Record, is_overdue: bool) -> tuple[bool, int, int]:
        remaining_steps = record.request.custom_inputs.num_steps - record.num_computed_steps
        rank = {
            "fcfs": 0,
            "priority": record.request.priority,
            "shortest": record.num_tokens * max(1, remaining_steps),
        }[self.config.policy]
        goes_before = is_overdue and self.config.policy != "fcfs"  # where arrival alone counts
        return (False, 0, 0) if goes_before else (True, rank, record.index)

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
