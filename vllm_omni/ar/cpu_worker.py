"""vLLM's CPU worker, with hidden states.

Seams, checked against vLLM 0.32.0: `CPUWorker.init_device` and its `model_runner`; of the V1 model
runner those of `vllm_omni.ar.worker` and `input_batch.req_ids`.
"""

from __future__ import annotations

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_omni.ar.worker import HiddenStatesMixin
from vllm_omni.errors import EngineError


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

    def get_stats(self) -> dict[str, int]:
        return {"num_requests": len(self.model_runner.requests)}
