"""vLLM's CUDA worker, with hidden states.

vLLM 0.32.0 has two model runners for a GPU. V2 is the default; V1 is taken for what V2 does not
support and with VLLM_USE_V2_MODEL_RUNNER=0, which holds for all engines of a process. Either works
here, with asynchronous scheduling, which is the default, and without.

Seams, checked against vLLM 0.32.0: `Worker._make_model_runner`; of both model runners those of
`vllm_omni.ar.worker`; of V1 `input_batch.req_ids`, of V2 `execute_model_state.input_batch.req_ids`.

Read in vLLM's source, not run: both model runners with ours on top. What `vllm_omni.ar.worker` does
for them is tested with vLLM's schedulers, synchronous and asynchronous, around a model runner of
the tests; the lines of `_copy_rows` alone ran on an H200 (torch 2.11.0), against a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GPUModelRunnerV1
from vllm.v1.worker.gpu_worker import Worker

from vllm_omni.ar.worker import HiddenStatesMixin


class HiddenStatesCUDAMixin(HiddenStatesMixin):
    """For a vLLM model runner on CUDA: rows are copied while the next step runs."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.copy_stream = torch.cuda.Stream(device)

    def _copy_rows(self, rows: list[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        # On the model's stream: the next step of a CUDA graph writes to the same place.
        rows = [part.clone() for part in rows]
        self.copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copy_stream):
            copies = [part.to("cpu", non_blocking=True) for part in rows]  # to pinned memory
            event = torch.cuda.Event(blocking=True)
            event.record()
        for part in rows:
            part.record_stream(self.copy_stream)  # or its memory would be used again too early
        return copies, event.synchronize


class HiddenStatesGPUModelRunnerV1(HiddenStatesCUDAMixin, GPUModelRunnerV1):
    """vLLM's own, with rows taken on the way."""


class HiddenStatesGPUModelRunnerV2(HiddenStatesCUDAMixin, GPUModelRunnerV2):
    """vLLM's own, with rows taken on the way."""

    def _batch_request_ids(self) -> Sequence[str]:
        request_ids: Sequence[str] = self.execute_model_state.input_batch.req_ids
        return request_ids


class HiddenStatesGPUWorker(Worker):
    """vLLM's own, with a model runner that returns hidden states."""

    def _make_model_runner(self) -> Any:
        runner = (
            HiddenStatesGPUModelRunnerV2
            if self.use_v2_model_runner
            else HiddenStatesGPUModelRunnerV1
        )
        return runner(self.vllm_config, self.device)

    def get_stats(self) -> dict[str, int]:
        runner = self.model_runner
        requests = (
            runner.req_states.req_id_to_index if self.use_v2_model_runner else runner.requests
        )
        return {"num_requests": len(requests)}
