"""What a vLLM worker needs to return hidden states too, of the requests that ask for them.

A request asks with `SamplingParams.extra_args = {"hidden_states": "prompt" | "all"}`. The rows,
after the final norm, leave in `ModelRunnerOutput.pooler_output`: vLLM's scheduler passes that on
for any request, next to its tokens. Each row leaves once, in order; the rows of a prompt leave
together, with the first token.

With asynchronous scheduling a step is launched before the output of the one before has arrived.
So there are two sides: `execute_model` decides which rows are new and starts their copies; the
output joins them with its tokens when it arrives. Outputs arrive in the order of their steps,
perhaps in another thread, and the scheduler drops one only if its request has ended.

Seams, checked against vLLM 0.32.0: of a model runner `execute_model`, `sample_tokens` and
`execute_model_state.hidden_states`; `SchedulerOutput`, `NewRequestData`, `ModelRunnerOutput` and
`AsyncModelRunnerOutput`. `tests/ar/test_gpu_worker.py` compares the names with vLLM's source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import current_process
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_omni import envs
from vllm_omni.errors import ConfigError, EngineError
from vllm_omni.processes import end_with_parent, show_stacks_when_asked

_PROCESS_NAME = "VllmWorker"  # what vLLM calls them
EXTRA_ARG = "hidden_states"  # key in `SamplingParams.extra_args`


def worker_class_name() -> str:
    """What vLLM's `worker_cls` is to be, on the platform that vLLM has found."""
    if current_platform.is_cpu():
        return "vllm_omni.ar.cpu_worker.HiddenStatesCPUWorker"
    if current_platform.is_cuda():
        return "vllm_omni.ar.gpu_worker.HiddenStatesGPUWorker"
    raise EngineError(
        f"there is no worker for vLLM's platform {current_platform.device_name!r}: "
        "hidden states need a CPU or an NVIDIA GPU"
    )


def _end_with_core() -> None:
    """Have a worker that is a process of its own end with its core, if that is supervised."""
    if envs.is_supervised() and current_process().name.startswith(_PROCESS_NAME):
        end_with_parent()
        show_stacks_when_asked()


@dataclass
class HeldRows:
    """Of one request that asks for rows."""

    wanted: str  # "prompt" or "all"
    num_prompt_tokens: int
    num_taken: int = 0  # rows, from the first on; set when a step is launched
    # Each [rows, hidden]: have arrived and wait for a token; set when an output arrives.
    chunks: list[Tensor] = field(default_factory=list)


@dataclass
class StepRows:
    """The new rows of one step, perhaps still on their way to the CPU."""

    held: dict[str, HeldRows]  # by request id
    rows: list[Tensor]  # of each, [rows, hidden]
    wait: Callable[[], None]  # until the rows are there

    def join(self, output: ModelRunnerOutput) -> None:
        """Put rows next to the tokens; where there is no token, the prompt goes on."""
        self.wait()
        for (request_id, held), rows in zip(self.held.items(), self.rows, strict=True):
            held.chunks.append(rows)
            index = output.req_id_to_index[request_id]
            if output.sampled_token_ids[index]:
                if output.pooler_output is None:
                    output.pooler_output = [None] * len(output.req_ids)
                output.pooler_output[index] = torch.cat(held.chunks)
                held.chunks = []


class HiddenStatesOutput(AsyncModelRunnerOutput):
    """An output that is still to come, and the rows that belong to it."""

    def __init__(self, output: AsyncModelRunnerOutput, step_rows: StepRows) -> None:
        self.output = output
        self.step_rows = step_rows

    def get_output(self) -> ModelRunnerOutput:
        output = self.output.get_output()
        self.step_rows.join(output)
        return output


class HiddenStatesMixin:
    """For a vLLM model runner."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        _check(vllm_config)
        _end_with_core()
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        self.held_rows: dict[str, HeldRows] = {}  # by request id, until the request ends
        self.step_rows: StepRows | None = None  # from `execute_model` to `sample_tokens`

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        for request_id in scheduler_output.finished_req_ids:  # ended or aborted since the last step
            self.held_rows.pop(request_id, None)
        for request in scheduler_output.scheduled_new_reqs:
            if wanted := _wanted(request.sampling_params):
                # It may be there: for the V2 model runner one that was preempted comes as new.
                self.held_rows.setdefault(request.req_id, HeldRows(wanted, request.prompt_len))
        output = super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        self.step_rows = self._take_rows(scheduler_output)
        return output

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        step_rows, self.step_rows = self.step_rows, None
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        if step_rows is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return HiddenStatesOutput(output, step_rows)
        step_rows.join(output)
        return output

    def _take_rows(self: Any, scheduler_output: Any) -> StepRows | None:
        """Start to copy the new rows of the step; a preempted request runs old tokens again."""
        num_scheduled_tokens = scheduler_output.num_scheduled_tokens
        if self.held_rows.keys().isdisjoint(num_scheduled_tokens):
            return None
        state = self.execute_model_state
        if state is None or state.hidden_states is None:
            return None  # not the last rank of a pipeline
        first_positions = _first_positions(scheduler_output)
        taken: dict[str, HeldRows] = {}
        rows = []
        start = 0  # of the request's tokens in the packed batch; padding follows the last request
        for request_id in self._batch_request_ids():
            held = self.held_rows.get(request_id)
            if held is not None:
                # Positions in the request: of this step's first row, and of the rows to take.
                first = first_positions[request_id]
                new = max(first, held.num_taken)
                last = first + num_scheduled_tokens[request_id]
                if held.wanted == "prompt":
                    last = min(last, held.num_prompt_tokens)
                if new < last:
                    taken[request_id] = held
                    rows.append(state.hidden_states[start - first + new : start - first + last])
                    held.num_taken = last
            start += num_scheduled_tokens[request_id]
        if not taken:
            return None
        copies, wait = self._copy_rows(rows)
        return StepRows(taken, copies, wait)

    def _batch_request_ids(self: Any) -> Sequence[str]:
        """In the order of their tokens in the packed batch; here for a V1 model runner."""
        request_ids: Sequence[str] = self.input_batch.req_ids
        return request_ids

    def _copy_rows(self, rows: list[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Copies on the CPU, and how to wait for them; here from the CPU."""
        return [part.clone() for part in rows], lambda: None


def _first_positions(scheduler_output: Any) -> dict[str, int]:
    """Where in its request the first token of this step is."""
    cached = scheduler_output.scheduled_cached_reqs
    positions = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for request in scheduler_output.scheduled_new_reqs:
        positions[request.req_id] = request.num_computed_tokens
    return positions


def _check(config: Any) -> None:
    """Refuse what breaks the promise that each row leaves once."""
    refused = {
        "speculative_config": config.speculative_config,  # rows of drafts that are rejected
        "kv_transfer_config": config.kv_transfer_config,  # drops outputs of requests that go on
        "mm_encoder_only": config.is_mm_encoder_only,  # there are no rows
        # Not all rows of a prompt are computed, or not all by one worker.
        "kv_sharing_fast_prefill": config.cache_config.kv_sharing_fast_prefill,
        "prefill_context_parallel_size": config.parallel_config.prefill_context_parallel_size > 1,
    }
    for name, value in refused.items():
        if value:
            raise ConfigError("vllm_config", name, "hidden states need an engine without it")


def _wanted(sampling_params: Any) -> str | None:
    extra_args = (sampling_params and sampling_params.extra_args) or {}
    wanted: str | None = extra_args.get(EXTRA_ARG)
    return wanted
