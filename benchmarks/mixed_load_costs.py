"""What steps and decodes of a mixed load take on this device, ours and stock diffusers'."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from diffusers import AutoencoderKLQwenImage
from torch import Tensor

from vllm_omni.config import DiTConfig
from vllm_omni.diffusion.cache_manager import DiTCacheManager
from vllm_omni.models.qwen_image.adapter import QwenImageRunnerAdapter
from vllm_omni.models.qwen_image.checkpoint import build_scheduler
from vllm_omni.models.qwen_image.state import QwenImageState

if TYPE_CHECKING:
    from benchmarks import gpu_report, packed_rows, virtual_load
else:  # beside this script
    import gpu_report
    import packed_rows
    import virtual_load

SIDES = tuple(size.side for size in virtual_load.MIX)
MIXES: tuple[tuple[int, ...], ...] = (
    *((side,) for side in SIDES),
    (512, 512),
    (512, 512, 512, 512),
    (512, 768),
    (512, 1024),
    (768, 768),
    (768, 1536),
    (1024, 1024),
    (512, 768, 1024),
    (1024, 1536),
)


class Bench:
    """The full-size model with random weights, behind the adapter that the engine uses."""

    def __init__(self, device: torch.device, num_layers: int) -> None:
        self.device = device
        dimensions = packed_rows.Dimensions(num_layers=num_layers)
        self.rows = packed_rows.RowMaker(dimensions, device)
        self.transformer = packed_rows.build_transformer(dimensions, device)
        with device:
            vae = AutoencoderKLQwenImage()
        self.vae = vae.requires_grad_(False).eval().to(torch.bfloat16)

    def make_adapter(self) -> QwenImageRunnerAdapter:
        """From here on the modules are the adapter's: their weights are laid out as it wants."""
        config = DiTConfig()
        self.cache_manager = DiTCacheManager(config.cache_config, self.device)
        pipeline: Any = SimpleNamespace(
            device=self.device,
            dtype=torch.bfloat16,
            scheduler_config=build_scheduler().config,
            transformer=self.transformer,
            vae=self.vae,
        )
        return QwenImageRunnerAdapter(pipeline, self.cache_manager, config)

    def time(self, call: Callable[[], object], num_rounds: int) -> float:
        """Median milliseconds, after one call that does not count."""
        return statistics.median([self._time_once(call) for _ in range(num_rounds + 1)][1:])

    def _time_once(self, call: Callable[[], object]) -> float:
        self._synchronize()
        start = time.perf_counter()
        call()
        self._synchronize()
        return (time.perf_counter() - start) * 1e3

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@torch.no_grad()
def measure(device_name: str, num_layers: int, num_rounds: int) -> dict[str, Any]:
    """Milliseconds of everything that the load is made of."""
    device = torch.device(device_name)
    bench = Bench(device, num_layers)
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device_name,
        "versions": gpu_report.get_versions(),
        "num_layers": num_layers,
        "num_rounds": num_rounds,
    }
    figures["stock_step_ms"] = {side: _stock_step(bench, side, num_rounds) for side in SIDES}
    figures["stock_decode_ms"] = {
        side: bench.time(_stock_decode(bench, side), num_rounds) for side in SIDES
    }
    gc.collect()
    adapter = bench.make_adapter()
    figures["steps"] = []
    for sides in MIXES:
        with ExitStack() as stack:
            states = [stack.enter_context(_request(bench, adapter, side)) for side in sides]
            adapter.warm_up_step(states)
            milliseconds = bench.time(lambda: adapter.step(states), num_rounds)  # noqa: B023
        figures["steps"].append({"sides": sides, "ms": milliseconds})
        print(f"a step of {sides}: {milliseconds:.1f} ms", flush=True)
    figures["decode_ms"] = {side: _decode(bench, adapter, side, num_rounds) for side in SIDES}
    return figures


def _stock_step(bench: Bench, side: int, num_rounds: int) -> float:
    """Both guidance branches, one after the other, as the stock pipeline runs them."""
    rows = bench.rows.make_guided(side)
    forwards = [packed_rows.StockStep(bench.transformer, [row]) for row in rows]
    return bench.time(lambda: [forward() for forward in forwards], num_rounds)


def _stock_decode(bench: Bench, side: int) -> Callable[[], Tensor]:
    latents = bench.rows.noise(1, 16, 1, side // 8, side // 8)

    def decode() -> Tensor:
        images: Tensor = bench.vae.decode(latents, return_dict=False)[0]
        return images.float().cpu()

    return decode


def _decode(bench: Bench, adapter: QwenImageRunnerAdapter, side: int, num_rounds: int) -> float:
    with _request(bench, adapter, side) as state:
        return bench.time(lambda: adapter.decode([state]), num_rounds)


_ids = itertools.count()


@contextmanager
def _request(bench: Bench, adapter: QwenImageRunnerAdapter, side: int) -> Iterator[QwenImageState]:
    """A guided request, prepared, gone afterwards."""
    request_id = f"bench-{next(_ids)}"
    state = adapter.prepare(request_id, adapter.make_dummy_inputs(side, side))
    try:
        yield state
    finally:
        adapter.release(state)
        bench.cache_manager.release_cache(request_id)
