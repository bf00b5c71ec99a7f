"""From vLLM's outputs to ours, with the hidden states kept apart from the text.

Seams, checked against vLLM 0.32.0: `OutputProcessor.process_outputs` and `request_states`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm import PoolingRequestOutput, RequestOutput
from vllm.v1.engine import EngineCoreOutput as VllmEngineCoreOutput
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput

from vllm_omni.ar.messages import ARRequest
from vllm_omni.outputs import EngineCoreOutput, FinishReason, RequestError


class HiddenStatesOutputProcessor(OutputProcessor):
    """Keeps hidden states aside: vLLM's takes what has a pooling output for a pooling request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rows: dict[str, list[Tensor]] = {}  # each [rows, hidden], by the caller's request id

    @classmethod
    def replace(cls, engine: Any) -> HiddenStatesOutputProcessor:
        """Give an engine that has no requests yet such an output processor."""
        stock = engine.output_processor
        own = cls(
            stock.tokenizer,
            log_stats=stock.log_stats,
            stream_interval=stock.stream_interval,
            tracing_enabled=stock.tracing_enabled,
        )
        engine.output_processor = own
        return own

    def process_outputs(
        self, engine_core_outputs: list[VllmEngineCoreOutput], *args: Any, **kwargs: Any
    ) -> OutputProcessorOutput:
        for output in engine_core_outputs:
            state = self.request_states.get(output.request_id)  # None: aborted
            if state is None or state.detokenizer is None or output.pooling_output is None:
                continue  # without a detokenizer it is a pooling request
            self._rows.setdefault(state.external_req_id, []).append(output.pooling_output)
            output.pooling_output = None
        return super().process_outputs(engine_core_outputs, *args, **kwargs)

    def take_rows(self, request_id: str) -> Tensor | None:
        """All rows that have come since the last call, [rows, hidden]."""
        rows = self._rows.pop(request_id, None)
        return torch.cat(rows) if rows else None

    def convert(
        self, request: ARRequest, output: RequestOutput | PoolingRequestOutput
    ) -> EngineCoreOutput:
        """vLLM's output of a request as ours; its hidden states come once and complete."""
        if isinstance(output, PoolingRequestOutput):
            return EngineCoreOutput(
                request_id=request.request_id,
                finish_reason=FinishReason.STOP if output.finished else None,
                pooling_output=output.outputs.data,
                output_type="hidden_states",
            )
        is_complete = request.hidden_states == "prompt" or output.finished
        finish_reason = _finish_reason(output)
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[id for completion in output.outputs for id in completion.token_ids],
            finish_reason=finish_reason,
            error=_make_error(output) if finish_reason is FinishReason.ERROR else None,
            pooling_output=self.take_rows(request.request_id) if is_complete else None,
            output_type="text",
            request_output=output,
        )


_REASONS: Mapping[str | None, FinishReason] = {
    "abort": FinishReason.ABORT,
    "error": FinishReason.ERROR,
}


def _make_error(output: RequestOutput) -> RequestError:
    """vLLM's errors have no words; those of `vllm_omni.engine.journal` have."""
    reasons = [one.stop_reason for one in output.outputs if one.finish_reason == "error"]
    message = next(filter(None, reasons), "vLLM ended the request with an error")
    return RequestError("StageExecutionError", str(message))


def _finish_reason(output: RequestOutput) -> FinishReason | None:
    """Whether it ended well; whether at a stop or at its length is in vLLM's own output."""
    if not output.finished:
        return None
    reasons = [_REASONS.get(completion.finish_reason) for completion in output.outputs]
    return next((reason for reason in reasons if reason is not None), FinishReason.STOP)
