"""`PromptCache`: the hidden states of prompts that were encoded before, for all requests.

It stands before an AR stage, in the process that talks to it: a prompt that is known, as the
negative prompt nearly always is, does not go there at all.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Hashable, Sequence
from contextlib import aclosing

from torch import Tensor

from vllm_omni.ar.messages import ARRequest
from vllm_omni.engine.stage_client import StageClient
from vllm_omni.outputs import EngineCoreOutput, FinishReason


class PromptCache:
    """Within a budget of bytes; the least recently used give way."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self.num_evictions = 0
        self._entries: OrderedDict[Hashable, Tensor] = OrderedDict()

    async def outputs(
        self, client: StageClient, requests: Sequence[ARRequest], expires_at: float | None = None
    ) -> AsyncGenerator[EngineCoreOutput, None]:
        """What the stage would give; see `StageClient.outputs`."""
        keys = {request.request_id: make_key(client, request) for request in requests}
        misses = []
        for request in requests:
            hidden_states = self.get(keys[request.request_id])
            if hidden_states is None:
                misses.append(request)
                continue
            yield EngineCoreOutput(
                request_id=request.request_id,
                finish_reason=FinishReason.STOP,
                pooling_output=hidden_states,
                output_type="hidden_states",
            )
        async with aclosing(client.outputs(misses, expires_at)) as outputs:
            async for output in outputs:
                is_complete = output.finish_reason is FinishReason.STOP
                if is_complete and output.pooling_output is not None:
                    self.put(keys[output.request_id], output.pooling_output)
                yield output

    def get(self, key: Hashable) -> Tensor | None:
        hidden_states = self._entries.get(key)
        if hidden_states is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._entries.move_to_end(key)
        return hidden_states

    def put(self, key: Hashable, hidden_states: Tensor) -> None:
        if hidden_states.nbytes > self.max_bytes:
            return
        if (old := self._entries.pop(key, None)) is not None:  # two asked for it at once
            self.used_bytes -= old.nbytes
        while self.used_bytes + hidden_states.nbytes > self.max_bytes:
            _, evicted = self._entries.popitem(last=False)
            self.used_bytes -= evicted.nbytes
            self.num_evictions += 1
        self._entries[key] = hidden_states
        self.used_bytes += hidden_states.nbytes


def make_key(client: StageClient, request: ARRequest) -> Hashable:
    """Model, prompt inside its template, and pictures."""
    prompt = request.prompt if isinstance(request.prompt, str) else tuple(request.prompt)
    images = tuple(
        (image.mode, image.size, hashlib.sha256(image.tobytes()).digest())
        for image in request.images
    )
    return client.stage.model_path, client.stage.stage_id, prompt, images
