"""How much a device can hold at once: measured at start, so that no mix of requests runs it out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from vllm_omni.diffusion.isolation import is_out_of_memory
from vllm_omni.errors import StageExecutionError

logger = logging.getLogger(__name__)

_GIB = 2**30
_FRAGMENTATION = 0.1  # of the room, which the allocator may leave between blocks and streams


@dataclass(frozen=True)
class MemoryUse:
    """What a call took at its peak, beside what was there before."""

    num_bytes: int
    size: int  # of the call, in tokens or latent positions

    @property
    def bytes_per_unit(self) -> float:
        return self.num_bytes / self.size


@dataclass(frozen=True)
class MemoryLimits:
    """What fits into a worker's memory at once, a decode beside a step."""

    max_num_tokens: int  # of one step, over all rows
    max_decode_latents: int  # positions of one decode, over all pictures


def get_memory_budget(device: torch.device, utilization: float) -> int:
    """Bytes of a GPU that are left for requests and steps, with the weights in place.

    The share is one of the whole GPU, as in vLLM; what other processes hold is not there to take.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    in_use = torch.cuda.memory_allocated(device)
    return int((1 - _FRAGMENTATION) * min(int(total * utilization) - in_use, free))


def measure_peak(device: torch.device, call: Callable[[], int]) -> MemoryUse:
    """Make a call that answers with its size, and look at the memory that it took."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    size = call()
    torch.cuda.synchronize(device)
    return MemoryUse(max(1, torch.cuda.max_memory_allocated(device) - before), size)


def measure_largest(
    device: torch.device, call: Callable[[int], int], size: int, smallest: int
) -> MemoryUse:
    """Measure a call of a size, or of the half, the quarter … if that does not fit."""
    while True:
        try:
            return measure_peak(device, partial(call, size))
        except Exception as error:
            if not is_out_of_memory(error) or size <= smallest:
                raise
        torch.cuda.empty_cache()
        size = max(smallest, size // 2)


def derive_limits(
    room: int, step: MemoryUse, decode: MemoryUse, max_num_tokens: int
) -> MemoryLimits:
    """How large a step and a decode at the same time may be.

    A decode of the measured size comes first, as each picture needs one; then the step, up to the
    configured budget; what is left goes to larger decodes.

    Args:
        room: bytes for both.
        max_num_tokens: the configured budget.
    """
    of_step = max(0, room - decode.num_bytes)
    num_tokens = min(max_num_tokens, int(of_step / step.bytes_per_unit))
    of_decode = room - num_tokens * step.bytes_per_unit
    num_latents = int(of_decode / decode.bytes_per_unit)
    return MemoryLimits(max(1, num_tokens), max(1, num_latents))


def explain_out_of_memory(doing: str, num_tokens: int, device: torch.device) -> StageExecutionError:
    """What to tell the one whose request does not fit, even alone."""
    advice = "set vae_tile_size" if doing == "decode" else "set cpu_offload"
    state = ""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        state = f", with {free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    return StageExecutionError(
        f"out of memory: this request does not fit alone ({doing} of {num_tokens} tokens on "
        f"{device}{state}); ask for a smaller picture, or {advice} in the server's settings"
    )
