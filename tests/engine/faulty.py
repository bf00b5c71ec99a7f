"""A diffusion engine core that dies, hangs or fails of the requests that ask for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from typing import Any

from vllm_omni.diffusion.messages import DiffusionRequest
from vllm_omni.engine.core_proc import OmniEngineCoreProc

# A request's seed says what it does in its third step.
SEGFAULT = 9_000_001
WAIT = 9_000_003  # for ever
RAISE = 9_000_004  # in the engine itself, not in the model
# ... and what it does when it comes in:
REFUSED = 9_000_005  # an error that is nobody's on purpose, in the scheduler

_FATAL_STEP = 2  # steps before the one it dies in


class FaultyCoreProc(OmniEngineCoreProc):
    """Real in all else."""

    def _name_scheduled(self, request_ids: Iterable[str]) -> None:
        super()._name_scheduled(request_ids)
        for request_id in request_ids:
            scheduled = self.core.scheduler.requests[request_id]
            if scheduled.num_computed_steps == _FATAL_STEP:
                _act(scheduled.request.custom_inputs.seed)

    def add_request(self, request: DiffusionRequest[Any], request_wave: int = 0) -> None:
        if request.custom_inputs.seed == REFUSED:
            request.custom_inputs = None
        super().add_request(request, request_wave)


def _act(seed: int) -> None:
    if seed == SEGFAULT:
        os.kill(os.getpid(), signal.SIGSEGV)
    elif seed == WAIT:
        time.sleep(10_000)
    elif seed == RAISE:
        raise RuntimeError("a mistake in the engine")
