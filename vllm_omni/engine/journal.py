"""What was accepted and not answered: how each request can be run again, as if nothing had been.

An entry knows a request, and how far its answer has got. When the stage has died, `make_request`
gives what the next process is to do, and `take` leaves out of its news what is known already.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from copy import copy
from typing import Any

import msgspec
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as VllmFinishReason

from vllm_omni.diffusion.messages import DiffusionRequest, Snapshot
from vllm_omni.engine.core_proc import OmniEngineCoreOutput, make_core_request
from vllm_omni.outputs import RequestError

MAX_STRIKES = 2  # deaths that a request may be to blame for; then it is refused

_seeds = random.SystemRandom()


class Entry(ABC):
    """A request that has not been answered."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.is_sent = False  # to the process that runs now
        self.is_aborted = False
        self.is_replayed = False  # sent before, to a process that has died
        self.num_strikes = 0  # deaths that it may be to blame for
        self.position = 0  # steps or tokens that the caller has
        self.struck_at = 0  # the position when it was last struck

    @property
    def is_suspect(self) -> bool:
        return self.num_strikes > 0

    @abstractmethod
    def make_request(self) -> EngineCoreRequest:
        """What to send to a process that has not heard of it."""

    @abstractmethod
    def take(self, output: Any) -> bool:
        """Note news of it; whether they are new to the caller."""

    def strike(self) -> None:
        self.num_strikes += 1
        self.struck_at = self.position

    def clear(self) -> bool:
        """Whether it has just got past the point where it may have killed a process."""
        if not self.is_suspect or self.position <= self.struck_at:
            return False
        self.num_strikes = 0
        return True

    def lose(self) -> None:
        """The process that had it is gone."""
        self.is_replayed = self.is_replayed or self.is_sent
        self.is_sent = False

    @abstractmethod
    def refuse(self, reason: str) -> Any:
        """The last output of a request that is not run any more."""


class TextEntry(Entry):
    """A request of vLLM, written again from its beginning; tokens that are out are left out.

    The same tokens come again because one that is sampled has a seed, its own or one from here.
    """

    def __init__(self, request: EngineCoreRequest) -> None:
        super().__init__(request.request_id)
        params = request.sampling_params
        if params is not None and params.seed is None and params.temperature > 0:
            request.sampling_params = _with_seed(params)
        self._request = request
        self._token_ids: list[int] = []  # that the caller has
        self._num_seen = 0  # of them, from the process that runs now

    def make_request(self) -> EngineCoreRequest:
        return self._request

    def lose(self) -> None:
        super().lose()
        self._num_seen = 0

    def take(self, output: EngineCoreOutput) -> bool:
        known = self._token_ids[self._num_seen :]
        if not known or output.finish_reason is VllmFinishReason.ERROR:
            self._token_ids += output.new_token_ids
            self._num_seen = self.position = len(self._token_ids)
            return True
        new = output.new_token_ids
        self._num_seen += min(len(new), len(known))
        if new == known[: len(new)] and not output.finished:
            return False
        # Another batch can round otherwise, and a token that was as likely comes out instead.
        output.new_token_ids = []
        output.new_logprobs = None
        output.pooling_output = None
        output.finish_reason = VllmFinishReason.ERROR
        output.stop_reason = "the stage was started again, and wrote another text than before"
        return True

    def refuse(self, reason: str) -> EngineCoreOutput:
        return EngineCoreOutput(
            request_id=self.request_id,
            new_token_ids=[],
            finish_reason=VllmFinishReason.ERROR,
            stop_reason=reason,
        )


class DrawingEntry(Entry):
    """A request of a diffusion stage: from its last snapshot, or from its seed."""

    def __init__(self, request: DiffusionRequest[Any]) -> None:
        super().__init__(request.request_id)
        self._request = request
        self._queue_time: float | None = None

    def make_request(self) -> EngineCoreRequest:
        return make_core_request(self._request)

    def take(self, output: OmniEngineCoreOutput) -> bool:
        metadata = output.output_metadata
        if (latents := output.additional_outputs.pop("snapshot", None)) is not None:
            snapshot = Snapshot(metadata["step"], latents)
            self._request = msgspec.structs.replace(self._request, snapshot=snapshot)
        if self._queue_time is not None and "queue_time" in metadata:
            metadata["queue_time"] = self._queue_time
        self._queue_time = metadata.get("queue_time")
        if output.finished:
            return True
        step: int = metadata.get("step", 0)
        is_new = step > self.position
        self.position = max(step, self.position)
        return is_new

    def refuse(self, reason: str) -> OmniEngineCoreOutput:
        return OmniEngineCoreOutput(
            request_id=self.request_id,
            new_token_ids=[],
            finish_reason=VllmFinishReason.ERROR,
            error=RequestError("StageExecutionError", reason),
        )

    def end(self) -> OmniEngineCoreOutput:
        """The last output of a request that was aborted while no process had it."""
        return OmniEngineCoreOutput(
            request_id=self.request_id, new_token_ids=[], finish_reason=VllmFinishReason.ABORT
        )


def _with_seed(params: SamplingParams) -> SamplingParams:
    """A copy: several answers to one prompt share theirs."""
    params = copy(params)
    params.seed = _seeds.randrange(2**63)
    return params
