"""What an AR stage takes in. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from PIL.Image import Image
    from vllm import SamplingParams


@dataclass(frozen=True, kw_only=True)
class ARRequest:
    """Text to go on from, and whether the hidden states are wanted."""

    request_id: str
    prompt: str | Sequence[int] = ""  # text or token ids
    messages: Sequence[Mapping[str, Any]] | None = None  # a chat in OpenAI's form, for the prompt
    images: Sequence[Image] = ()  # one for each image token in the prompt
    # vLLM's, or a mapping of its fields; None: the model's own.
    sampling_params: SamplingParams | Mapping[str, Any] | None = None
    # A row for each token of the prompt, or for all that the model reads: also those it generates,
    # except the last, which is never read.
    hidden_states: Literal["prompt", "all"] | None = None
    priority: int = 0  # lower goes first
    trace_headers: Mapping[str, str] | None = None  # W3C's, of the span that this is a part of
