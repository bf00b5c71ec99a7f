"""What a worker does between loading and its first request: warm up, and measure its memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm_omni.config import DiTConfig, WarmupSize
from vllm_omni.diffusion.cache_manager import DiTCacheManager
from vllm_omni.diffusion.memory import (
    MemoryLimits,
    derive_limits,
    get_memory_budget,
    measure_largest,
)
from vllm_omni.errors import ModelLoadError
from vllm_omni.models.interface import RunnerAdapter

logger = logging.getLogger(__name__)

_GIB = 2**30
_SIDES = (1024, 512, 256, 128, 64)  # pixels, of pictures to measure with


class DummyRequests:
    """Requests that nobody asked for, of any size, to see what they do to a device."""

    def __init__(
        self, adapter: RunnerAdapter[Any], cache_manager: DiTCacheManager, config: DiTConfig
    ) -> None:
        self.adapter = adapter
        self.cache_manager = cache_manager
        self.config = config

    def warm_up(self, sizes: Iterable[WarmupSize]) -> None:
        """Compile, capture and load all that requests of these sizes need."""
        for size in sizes:
            start = time.perf_counter()
            with self._prepare(size) as states:
                self.adapter.warm_up_step(states)
                self.adapter.warm_up_decode(states)
                for result in self.adapter.start_decode(states):
                    result.wait()
            seconds = time.perf_counter() - start
            logger.info("warm for %dx%d, %d at once, in %.1f s", *_parts(size), seconds)

    def measure_limits(self) -> MemoryLimits:
        """What fits at once into the share of the GPU that this worker may take."""
        device, config = self.cache_manager.device, self.config
        # Weights are laid out, and libraries take their workspace, at first use.
        self._step(1)
        self._decode(_SIDES[-1])
        # The cache may fill up to its own limit at any time; that much is not there for steps.
        cache_bytes = config.cache_config.max_cache_size - self.cache_manager.used_bytes
        room = get_memory_budget(device, config.gpu_memory_utilization) - cache_bytes
        if room <= 0:
            raise ModelLoadError(
                f"gpu_memory_utilization={config.gpu_memory_utilization:g} leaves nothing for "
                f"requests beside the weights and max_cache_size: {-room / _GIB:.1f} GiB are "
                f"missing; raise it, lower that, or set cpu_offload"
            )
        step = measure_largest(device, self._step, config.max_num_batched_tokens, 1)
        decode = measure_largest(device, self._decode, _SIDES[0], _SIDES[-1])
        if not config.enforce_eager:  # graphs keep what they compute in
            room -= int(config.max_cudagraph_capture_size * step.bytes_per_unit)
        limits = derive_limits(room, step, decode, config.max_num_batched_tokens)
        logger.info(
            "room for %.1f GiB beside the weights: steps of %d tokens (%.2f MiB each), decodes of "
            "%.1f megapixels (%.1f GiB each)",
            room / _GIB,
            limits.max_num_tokens,
            step.bytes_per_unit / 2**20,
            limits.max_decode_latents * 64 / 1e6,
            decode.bytes_per_unit * 1e6 / 64 / _GIB,
        )
        return limits

    @torch.no_grad()
    def _step(self, num_tokens: int) -> int:
        """Take a step of about so many tokens, or of the fewest there are; how many it had."""
        for side in _SIDES:
            of_one = self.adapter.make_dummy_inputs(side, side).num_tokens
            if of_one <= num_tokens:
                break
        count = max(1, min(self.config.max_num_seqs, num_tokens // of_one))
        with self._prepare(WarmupSize(side, side, count)) as states:
            self.adapter.step(states)
            return sum(state.num_tokens for state in states)

    @torch.no_grad()
    def _decode(self, side: int) -> int:
        """Decode a picture; how many latent positions it had."""
        with self._prepare(WarmupSize(side, side)) as states:
            for result in self.adapter.start_decode(states):
                result.wait()
        return (side // 8) ** 2

    @contextmanager
    def _prepare(self, size: WarmupSize) -> Iterator[list[Any]]:
        """States of as many requests as the size says, that are gone afterwards."""
        inputs = self.adapter.make_dummy_inputs(size.width, size.height)
        request_ids = [f"dummy-{index}" for index in range(size.count)]
        states: list[Any] = []
        try:
            with torch.no_grad():
                for request_id in request_ids:
                    states.append(self.adapter.prepare(request_id, inputs))
                yield states
        finally:
            for state in states:
                self.adapter.release(state)
            for request_id in request_ids:
                self.cache_manager.release_cache(request_id)


def _parts(size: WarmupSize) -> tuple[int, int, int]:
    return size.width, size.height, size.count
