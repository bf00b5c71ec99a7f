"""`BlackBox`: a few bytes that a stage's process writes and its supervisor reads.

They are shared memory without a name, so that nothing is left of them, and what was written last
can be read when the writer is dead, stopped or stuck.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ctypes import Array, c_char
from dataclasses import dataclass
from multiprocessing.context import BaseContext

_SIZE = 1 << 16
_HEADER = struct.Struct("=QQdI")  # beats, steps, busy since, bytes of ids
_BEATS, _STEPS, _BUSY_SINCE, _NUM_BYTES = 0, 8, 16, 24  # where each begins
_TOO_LONG = 2**32 - 1  # instead of the bytes of ids


@dataclass(frozen=True)
class Reading:
    """What a process has said last."""

    num_beats: int
    num_steps: int
    busy_since: float | None  # time.monotonic() at which what it does now began
    request_ids: tuple[str, ...] | None  # in the step under way; None: too many to name


class BlackBox:
    """One writer, any number of readers, no locks: each field is one that may be a moment old."""

    def __init__(self, memory: Array[c_char]) -> None:
        self._memory = memory

    @property
    def _ids(self) -> memoryview:
        return memoryview(self._memory).cast("B")[_HEADER.size :]

    @classmethod
    def make(cls, context: BaseContext) -> BlackBox:
        return cls(context.RawArray("c", _SIZE))

    # --- the process ---

    def beat(self) -> None:
        """Say that the interpreter runs."""
        struct.pack_into("=Q", self._memory, _BEATS, self.read().num_beats + 1)

    @contextmanager
    def work(self, request_ids: Iterable[str] = ()) -> Iterator[None]:
        """Around all that must come to an end; if it does not, named requests are to blame."""
        self.name_requests(request_ids)
        struct.pack_into("=d", self._memory, _BUSY_SINCE, time.monotonic())
        yield  # not in a finally: an error in here ends the process, and the box shows where
        struct.pack_into("=d", self._memory, _BUSY_SINCE, 0.0)
        (num_steps,) = struct.unpack_from("=Q", self._memory, _STEPS)
        struct.pack_into("=Q", self._memory, _STEPS, num_steps + 1)

    def name_requests(self, request_ids: Iterable[str]) -> None:
        """Say which requests are in the step."""
        data = "\0".join(request_ids).encode()
        if len(data) > _SIZE - _HEADER.size:
            struct.pack_into("=I", self._memory, _NUM_BYTES, _TOO_LONG)
            return
        self._ids[: len(data)] = data
        struct.pack_into("=I", self._memory, _NUM_BYTES, len(data))

    # --- its supervisor ---

    def read(self) -> Reading:
        num_beats, num_steps, busy_since, num_bytes = _HEADER.unpack_from(self._memory, 0)
        request_ids: tuple[str, ...] | None = None
        if num_bytes != _TOO_LONG:
            data = bytes(self._ids[:num_bytes])
            request_ids = tuple(data.decode(errors="replace").split("\0")) if data else ()
        return Reading(num_beats, num_steps, busy_since or None, request_ids)
