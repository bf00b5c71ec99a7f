"""`ModelClock`: how long a model's networks ran, by the clock of the device they ran on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ModelClock:
    """Adds up the seconds inside networks.

    A GPU works behind the host's back: there the time is that between two events in its stream,
    and counts once the second has passed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds = 0.0
        self._running: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what happens inside."""
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            stream = torch.cuda.current_stream(self.device)
            begin.record(stream)
            yield
            end.record(stream)
            self._running.append((begin, end))
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    def read(self) -> float:
        """Seconds of everything that is done."""
        done = [events for events in self._running if events[1].query()]
        self._running = [events for events in self._running if events not in done]
        self._seconds += sum(begin.elapsed_time(end) for begin, end in done) / 1e3
        return self._seconds
