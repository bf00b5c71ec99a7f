"""CUDA graphs for a training loop: what the host launches each time is launched once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

NUM_WARM_UPS = 2  # calls before a function is recorded: they compile, and make the buffers it keeps


class Recorder:
    """Makes functions that are recorded as CUDA graphs. All share their memory: of what a recorded
    function makes, only that lasts which it wrote into tensors from before."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.is_on = generator.device.type == "cuda"
        if self.is_on:
            torch.cuda.synchronize()
            torch.cuda.set_stream(torch.cuda.Stream())  # the default one cannot be recorded
            self.pool = torch.cuda.graph_pool_handle()

    def wrap(self, function: Callable[..., None]) -> Callable[..., None]:
        """The same function of tensors, recorded on its third call on a GPU and replayed from then
        on. It must draw all random numbers from the generator, and wait for nothing."""
        return _Recorded(self, function) if self.is_on else function


class _Recorded:
    def __init__(self, recorder: Recorder, function: Callable[..., None]) -> None:
        self.recorder = recorder
        self.function = function
        self.num_calls = 0
        self.inputs: list[Tensor] = []
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *inputs: Tensor) -> None:
        self.num_calls += 1
        if self.num_calls <= NUM_WARM_UPS:
            self.function(*inputs)
            return
        if self.graph is None:
            self.graph = self._record(inputs)
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.graph.replay()

    def _record(self, inputs: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        self.inputs = [tensor.clone() for tensor in inputs]
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.recorder.generator)
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(graph, pool=self.recorder.pool, stream=stream):
            self.function(*self.inputs)
        return graph
