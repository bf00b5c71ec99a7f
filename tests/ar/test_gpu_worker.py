"""The CUDA worker without a GPU: vLLM's schedulers around a model runner with known rows."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import json
import textwrap
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import EngineArgs, SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import gpu_model_runner as v1
from vllm.v1.worker.gpu import model_runner as v2
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu_worker import Worker

from vllm_omni.ar.cpu_worker import HiddenStatesCPUWorker
from vllm_omni.ar.gpu_worker import (
    HiddenStatesCUDAMixin,
    HiddenStatesGPUModelRunnerV1,
    HiddenStatesGPUModelRunnerV2,
    HiddenStatesGPUWorker,
)
from vllm_omni.ar.worker import EXTRA_ARG, HiddenStatesMixin, worker_class_name
from vllm_omni.errors import ConfigError

BLOCK_SIZE = 4
MAX_NUM_BATCHED_TOKENS = 16
MAX_NUM_SEQS = 4
PADDING = 8  # a CUDA graph runs a multiple of this

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}


def row(request_id: str, position: int) -> list[float]:
    """What the model computes for a token of a request."""
    return [float(request_id), float(position)]


def token(position: int) -> int:
    """What the model samples at the end of so many tokens."""
    return 100 + position


class KnownAsyncOutput(AsyncModelRunnerOutput):  # type: ignore[misc]
    """As vLLM's: the tokens are there when they are asked for, not before."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self.output = output
        self.token_ids = output.sampled_token_ids
        output.sampled_token_ids = []

    def get_output(self) -> ModelRunnerOutput:
        self.output.sampled_token_ids = self.token_ids
        return self.output


class KnownModelRunner:
    """What the mixin sees of a V1 model runner, with rows and tokens that a test can foretell."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self.is_async = vllm_config.scheduler_config.async_scheduling
        self.execute_model_state: Any = None
        self.input_batch = SimpleNamespace(req_ids=[])
        self.num_prompt_tokens: dict[str, int] = {}
        # As with CUDA graphs, every step has its rows at the same place.
        self.buffer = torch.empty(MAX_NUM_BATCHED_TOKENS + PADDING, 2)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        if not scheduler_output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        first, self.num_tokens = {}, {}
        for new in scheduler_output.scheduled_new_reqs:
            self.num_prompt_tokens[new.req_id] = new.prompt_len
            first[new.req_id] = new.num_computed_tokens
            self.num_tokens[new.req_id] = len(new.prefill_token_ids or new.prompt_token_ids or ())
        cached = scheduler_output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            first[request_id] = cached.num_computed_tokens[i]
            num_prompt_tokens = self.num_prompt_tokens[request_id]
            self.num_tokens[request_id] = num_prompt_tokens + cached.num_output_tokens[i]
        # Decodes first, as attention backends like it, and otherwise not as scheduled.
        num_scheduled = scheduler_output.num_scheduled_tokens
        request_ids = sorted(num_scheduled, key=lambda r: (num_scheduled[r], -int(r)))
        self.ends = {r: first[r] + num_scheduled[r] for r in request_ids}
        rows = [row(r, p) for r in request_ids for p in range(first[r], self.ends[r])]
        self.buffer.fill_(torch.nan)
        self.buffer[: len(rows)] = torch.tensor(rows)
        self.set_state(request_ids, self.buffer[: -(-len(rows) // PADDING) * PADDING])
        return None

    def set_state(self, request_ids: list[str], hidden_states: Tensor) -> None:
        self.input_batch.req_ids = request_ids
        self.execute_model_state = SimpleNamespace(hidden_states=hidden_states)

    def sample_tokens(self, grammar_output: None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        self.execute_model_state = None
        request_ids = list(self.ends)
        output = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={r: i for i, r in enumerate(request_ids)},
            sampled_token_ids=[
                [token(end)] if end >= self.num_tokens[r] else [] for r, end in self.ends.items()
            ],
        )
        return KnownAsyncOutput(output) if self.is_async else output


class KnownModelRunnerV2(KnownModelRunner):
    """The same of a V2 model runner."""

    def set_state(self, request_ids: list[str], hidden_states: Tensor) -> None:
        input_batch = SimpleNamespace(req_ids=request_ids)
        self.execute_model_state = SimpleNamespace(
            input_batch=input_batch, hidden_states=hidden_states
        )
        del self.input_batch.req_ids[:]


class LateCopiesMixin(HiddenStatesMixin):
    """As on CUDA: a copy has its values when it was waited for."""

    def _copy_rows(self, rows: list[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        sources, _ = super()._copy_rows(rows)
        copies = [torch.full_like(source, torch.nan) for source in sources]

        def wait() -> None:
            for late, source in zip(copies, sources, strict=True):
                late.copy_(source)

        return copies, wait


class RunnerV1(LateCopiesMixin, KnownModelRunner):
    pass


class RunnerV2(LateCopiesMixin, KnownModelRunnerV2):
    _batch_request_ids = HiddenStatesGPUModelRunnerV2._batch_request_ids


class Core:
    """vLLM's loop: the next step is launched before the output of the last is read."""

    def __init__(self, vllm_config: Any, runner: Any, num_blocks: int) -> None:
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.float32
        )
        vllm_config.cache_config.num_gpu_blocks = num_blocks
        is_async = vllm_config.scheduler_config.async_scheduling
        self.max_in_flight = 2 if is_async else 1
        self.scheduler = (AsyncScheduler if is_async else Scheduler)(
            vllm_config=vllm_config,
            kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=BLOCK_SIZE,
        )
        # It sends a V2 model runner a request that was preempted as if it were new.
        self.scheduler.use_v2_model_runner = runner is RunnerV2
        self.runner = runner(vllm_config, torch.device("cpu"))
        self.in_flight: deque[tuple[SchedulerOutput, Any]] = deque()
        self.outputs: dict[str, list[EngineCoreOutput]] = {}

    def add(
        self,
        request_id: str,
        num_prompt_tokens: int,
        hidden_states: str | None,
        max_tokens: int = 6,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        params = SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=list(stop_token_ids),
            extra_args=hidden_states and {EXTRA_ARG: hidden_states},
        )
        prompt = list(range(num_prompt_tokens))
        self.outputs[request_id] = []
        self.scheduler.add_request(Request(request_id, prompt, params, None))

    def step(self) -> None:
        if self.scheduler.has_requests():
            scheduler_output = self.scheduler.schedule()
            output = self.runner.execute_model(scheduler_output)
            if output is None:
                output = self.runner.sample_tokens(None)
            self.in_flight.append((scheduler_output, output))
            if len(self.in_flight) < self.max_in_flight and self.scheduler.has_requests():
                return
        scheduler_output, output = self.in_flight.popleft()
        if isinstance(output, AsyncModelRunnerOutput):
            output = output.get_output()
        for of_client in self.scheduler.update_from_output(scheduler_output, output).values():
            for of_request in of_client.outputs:
                self.outputs[of_request.request_id].append(of_request)

    def run(self) -> None:
        while self.scheduler.has_requests() or self.in_flight:
            self.step()
        assert self.runner.held_rows == {}
        assert EMPTY_MODEL_RUNNER_OUTPUT.pooler_output is None

    def check(self, request_id: str, num_prompt_tokens: int, hidden_states: str | None) -> int:
        """Rows are where they should be; how many tokens there are."""
        outputs = self.outputs[request_id]
        num_tokens = len(outputs)
        assert [t for output in outputs for t in output.new_token_ids] == [
            token(num_prompt_tokens + i) for i in range(num_tokens)
        ]
        prompt = [row(request_id, p) for p in range(num_prompt_tokens)]
        later = [[row(request_id, num_prompt_tokens + i)] for i in range(num_tokens - 1)]
        expected = {
            None: [None] * num_tokens,
            "prompt": [prompt] + [None] * (num_tokens - 1),
            "all": [prompt, *later],
        }
        rows = [output.pooling_output for output in outputs]
        assert [None if r is None else r.tolist() for r in rows] == expected[hidden_states]
        return num_tokens


MakeCore = Callable[..., Core]


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(CONFIG))
    return EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=False,
    ).create_engine_config()


@pytest.fixture(params=[RunnerV1, RunnerV2])
def runner(request: pytest.FixtureRequest) -> type[KnownModelRunner]:
    runner: type[KnownModelRunner] = request.param
    return runner


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def create_core(
    request: pytest.FixtureRequest, runner: type[KnownModelRunner], vllm_config: Any
) -> MakeCore:
    config = copy.deepcopy(vllm_config)
    config.scheduler_config.async_scheduling = request.param  # on a CPU it is always False
    return lambda num_blocks=1000: Core(config, runner, num_blocks)


def test_each_row_leaves_once_with_its_token(create_core: MakeCore) -> None:
    """Prompts of one chunk and of many, opted in and not, more than run at a time."""
    core = create_core()
    cases = [
        (str(i), num_prompt_tokens, hidden_states)
        for i, (num_prompt_tokens, hidden_states) in enumerate(
            (n, h) for n in (1, 3, 16, 17, 70) for h in ("all", None, "prompt")
        )
    ]
    for case in cases:
        core.add(*case)
    core.run()
    for case in cases:
        assert core.check(*case) == 6


@pytest.mark.parametrize("hidden_states", ["prompt", "all"])
def test_preempted_request_gives_each_row_once(create_core: MakeCore, hidden_states: str) -> None:
    core = create_core(num_blocks=11)
    cases = [(str(i), n, hidden_states) for i, n in enumerate((3, 3, 3, 28))]
    for case in cases:
        core.add(*case, max_tokens=12)
    requests = dict(core.scheduler.requests)
    has_tokens, has_output_in_flight = set(), set()
    while core.scheduler.has_requests() or core.in_flight:
        num_preemptions = {r: request.num_preemptions for r, request in requests.items()}
        in_flight = {r for step, _ in core.in_flight for r in step.num_scheduled_tokens}
        had_tokens = {r for r, outputs in core.outputs.items() if outputs}
        core.step()
        for r, request in requests.items():
            if request.num_preemptions > num_preemptions[r]:
                has_tokens.add(r in had_tokens)
                has_output_in_flight.add(r in in_flight)
    assert has_tokens == {False, True}  # in the middle of a prompt, and of an answer
    assert has_output_in_flight == {core.max_in_flight == 2}
    assert core.runner.held_rows == {}
    for case in cases:
        assert core.check(*case) == 12


def test_stopped_request_gives_no_row_of_the_last_token(create_core: MakeCore) -> None:
    """Asynchronously, the step that reads the last token is launched before it is known."""
    core = create_core()
    core.add("1", 20, "all", max_tokens=50, stop_token_ids=[token(25)])
    core.add("2", 20, "prompt", max_tokens=50, stop_token_ids=[token(20)])
    core.run()
    assert core.check("1", 20, "all") == 6
    assert core.check("2", 20, "prompt") == 1


@pytest.mark.parametrize("num_steps", [1, 2, 3, 8])
def test_aborted_request_is_forgotten(create_core: MakeCore, num_steps: int) -> None:
    """In the middle of the prompt and of the answer, with outputs in flight."""
    core = create_core()
    core.add("1", 60, "all", max_tokens=50)
    core.add("2", 5, "prompt")
    for _ in range(num_steps):
        core.step()
    num_outputs = len(core.outputs["1"])
    core.scheduler.finish_requests("1", RequestStatus.FINISHED_ABORTED)
    core.run()
    assert len(core.outputs["1"]) == num_outputs
    assert core.check("2", 5, "prompt") == 6


def test_output_without_rows_is_vllms_own(create_core: MakeCore) -> None:
    core = create_core()
    core.add("1", 5, None)
    scheduler_output = core.scheduler.schedule()
    core.runner.execute_model(scheduler_output)
    kind = KnownAsyncOutput if core.max_in_flight == 2 else ModelRunnerOutput
    assert type(core.runner.sample_tokens(None)) is kind


def test_rank_without_hidden_states_takes_none(create_core: MakeCore) -> None:
    """In a pipeline only the last rank has them: V1 has no state then, V2 one without rows."""
    core = create_core()
    core.add("1", 5, "all")
    core.runner.set_state = lambda request_ids, hidden_states: None
    if isinstance(core.runner, RunnerV2):
        core.runner.execute_model_state = SimpleNamespace(hidden_states=None)
    core.runner.execute_model(core.scheduler.schedule())
    assert core.runner.step_rows is None


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("", "speculative_config", "any", "speculative_config"),
        ("", "kv_transfer_config", "any", "kv_transfer_config"),
        (
            "model_config",
            "multimodal_config",
            SimpleNamespace(mm_encoder_only=True),
            "mm_encoder_only",
        ),
        ("cache_config", "kv_sharing_fast_prefill", True, "kv_sharing_fast_prefill"),
        ("parallel_config", "prefill_context_parallel_size", 2, "prefill_context_parallel_size"),
    ],
)
def test_engine_that_would_lose_rows_is_refused(
    vllm_config: Any, part: str, name: str, value: Any, message: str
) -> None:
    config = copy.deepcopy(vllm_config)
    setattr(getattr(config, part) if part else config, name, value)
    with pytest.raises(ConfigError, match=f"'{message}' is not allowed"):
        RunnerV1(config, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_copies_are_of_the_step_that_made_them(vllm_config: Any) -> None:
    """The next step writes to the same place, and the memory of what was copied is used again."""

    class Runner(HiddenStatesCUDAMixin, KnownModelRunner):
        pass

    device = torch.device("cuda", 0)
    runner = Runner(vllm_config, device)
    buffer = torch.empty(2048, 4096, device=device)
    waits, all_copies = [], []
    for step in range(50):
        buffer.fill_(step)
        copies, wait = runner._copy_rows([buffer[:1000], buffer[1000:1001]])
        waits.append(wait)
        all_copies.append(copies)
    for step, (copies, wait) in enumerate(zip(all_copies, waits, strict=True)):
        wait()
        assert [part.shape[0] for part in copies] == [1000, 1]
        assert all(part.device.type == "cpu" and (part == step).all() for part in copies)


# What follows fails where another vLLM has other names.


def assigned_attributes(cls: type) -> set[str]:
    """Names that a class's methods set on `self`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def fields_of(cls: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def parameters_of(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("module", [v1, v2], ids=["V1", "V2"])
def test_model_runners_have_what_is_used(module: Any) -> None:
    runner = module.GPUModelRunner
    assert parameters_of(runner.__init__) == ["self", "vllm_config", "device"]
    assert parameters_of(runner.execute_model)[:3] == [
        "self",
        "scheduler_output",
        "intermediate_tensors",
    ]
    assert parameters_of(runner.sample_tokens) == ["self", "grammar_output"]
    assert "execute_model_state" in assigned_attributes(runner)
    assert "hidden_states" in module.ExecuteModelState._fields
    # Ours are free names.
    assert not assigned_attributes(runner) & assigned_attributes(HiddenStatesMixin)
    assert not assigned_attributes(runner) & assigned_attributes(HiddenStatesCUDAMixin)
    for name in ("_take_rows", "_copy_rows", "_batch_request_ids"):
        assert not hasattr(runner, name)


def test_batch_order_is_where_it_is_looked_for() -> None:
    assert "input_batch" in assigned_attributes(v1.GPUModelRunner)
    assert "req_ids" in dir(v1.InputBatch)
    # The packed batch is in this order: it decides how many tokens each request has.
    source = inspect.getsource(v1.GPUModelRunner.execute_model)
    assert "req_ids = self.input_batch.req_ids" in source
    assert "[scheduler_output.num_scheduled_tokens[i] for i in req_ids]" in source
    assert "input_batch" in v2.ExecuteModelState._fields
    assert "req_ids" in fields_of(InputBatch)


def test_messages_have_what_is_used() -> None:
    assert {
        "finished_req_ids",
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
    } <= fields_of(SchedulerOutput)
    assert {"req_id", "sampling_params", "num_computed_tokens"} <= fields_of(NewRequestData)
    assert isinstance(NewRequestData.prompt_len, property)
    assert {"req_ids", "num_computed_tokens"} <= fields_of(CachedRequestData)
    assert {"req_ids", "req_id_to_index", "sampled_token_ids", "pooler_output"} <= fields_of(
        ModelRunnerOutput
    )


def test_worker_makes_its_model_runner_where_it_is_replaced() -> None:
    assert "self._make_model_runner()" in inspect.getsource(Worker._init_workspace_and_model_runner)
    assert "self._init_workspace_and_model_runner()" in inspect.getsource(Worker.init_device)
    assert "use_v2_model_runner" in assigned_attributes(Worker)
    for runner, base in (
        (HiddenStatesGPUModelRunnerV1, v1.GPUModelRunner),
        (HiddenStatesGPUModelRunnerV2, v2.GPUModelRunner),
    ):
        assert runner.__mro__[1:4] == (HiddenStatesCUDAMixin, HiddenStatesMixin, base)


def test_worker_of_this_machine() -> None:
    module, _, name = worker_class_name().rpartition(".")
    assert (module, name) == (HiddenStatesCPUWorker.__module__, HiddenStatesCPUWorker.__name__)
    assert HiddenStatesGPUWorker.__module__ == "vllm_omni.ar.gpu_worker"  # named, not imported
