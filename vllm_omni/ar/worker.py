"""A vLLM worker that also returns hidden states, of the requests that ask for them.

A request asks with `SamplingParams.extra_args = {"hidden_states": "prompt" | "all"}`. The rows,
after the final norm, leave in `ModelRunnerOutput.pooler_output`: vLLM's scheduler passes that on
for any request, next to its tokens. Each row leaves once, in order; the rows of a prompt leave
together, with the first token.

Seams, checked against vLLM 0.32.0: `worker_cls`; `CPUWorker.init_device`; of the V1 model runner
`execute_model`, `sample_tokens`, `execute_model_state`, `requests` and `input_batch.req_ids`. CPU
only: on CUDA the V2 model runner and asynchronous scheduling, where the tokens arrive after
`sample_tokens` has returned, are the default.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_omni.errors import EngineError

EXTRA_ARG = "hidden_states"  # key in `SamplingParams.extra_args`


@dataclass
class HeldRows:
    """Rows of one request that have not left yet, and how many rows have been taken in all."""

    num_taken: int = 0
    chunks: list[Tensor] = field(default_factory=list)  # each [rows, hidden]


class HiddenStatesMixin:
    """For a vLLM V1 model runner without asynchronous scheduling."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held_rows: dict[str, HeldRows] = {}  # by request id

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        for request_id in scheduler_output.finished_req_ids:  # ended or aborted since the last step
            self.held_rows.pop(request_id, None)
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.execute_model_state is not None:  # None: there was nothing to run
            self._take_rows(self.execute_model_state)
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        self._give_rows(output)
        return output

    def _take_rows(self: Any, state: Any) -> None:
        """Keep the new rows of the step; a preempted request runs its old tokens again."""
        start = 0  # of the request's tokens in the packed batch
        for request_id in self.input_batch.req_ids:
            num_scheduled = state.scheduler_output.num_scheduled_tokens[request_id]
            end = start + num_scheduled
            request = self.requests[request_id]
            if wanted := _wanted(request.sampling_params):
                held = self.held_rows.setdefault(request_id, HeldRows())
                # Positions in the request: of this step's first row, and of the rows to take.
                first = request.num_computed_tokens
                new = max(first, held.num_taken)
                last = first + num_scheduled
                if wanted == "prompt":
                    last = min(last, request.num_prompt_tokens)
                if new < last:
                    rows = state.hidden_states[start:end][new - first : last - first]
                    held.chunks.append(rows.clone())  # a view would keep the whole batch alive
                    held.num_taken = last
            start = end

    def _give_rows(self: Any, output: Any) -> None:
        """Send the rows of the requests that have a new token; the others are still in prefill."""
        for request_id, held in self.held_rows.items():
            index = output.req_id_to_index.get(request_id)
            if held.chunks and index is not None and output.sampled_token_ids[index]:
                if not output.pooler_output:
                    output.pooler_output = [None] * len(output.req_ids)
                output.pooler_output[index] = torch.cat(held.chunks)
                held.chunks = []


class HiddenStatesCPUModelRunner(HiddenStatesMixin, CPUModelRunner):
    """vLLM's own, with rows taken on the way."""


class HiddenStatesCPUWorker(CPUWorker):
    """vLLM's own, with a model runner that returns hidden states."""

    def init_device(self) -> None:
        super().init_device()
        if self.use_v2_model_runner:
            raise EngineError(
                "hidden states need vLLM's V1 model runner: VLLM_USE_V2_MODEL_RUNNER=0"
            )
        # There is no hook for the model runner; a second one is cheap before weights are loaded.
        self.model_runner = HiddenStatesCPUModelRunner(self.vllm_config, self.device)


def _wanted(sampling_params: Any) -> str | None:
    extra_args = (sampling_params and sampling_params.extra_args) or {}
    wanted: str | None = extra_args.get(EXTRA_ARG)
    return wanted
