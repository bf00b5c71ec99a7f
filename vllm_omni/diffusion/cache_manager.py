"""`DiTCacheManager`: every tensor that outlives a step, within one byte budget."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from vllm_omni.config import DiTCacheConfig
from vllm_omni.errors import CacheAllocationError

_LATENTS = "latents"
_DEFAULT = "cache"
_NOTHING = torch.empty(0)


class CacheKind(StrEnum):
    """Of an entry: who needs it, and how badly."""

    REQUEST = "request"  # latents, projected text: stays as long as its request runs
    STEP_CACHE = "step_cache"  # a request's too, but it may be evicted while that runs
    PROMPT = "prompt"  # of nobody; the first to go


@dataclass(eq=False, slots=True)
class _Entry:
    tensor: Tensor
    num_bytes: int
    last_used: float
    kind: CacheKind
    reserved: Tensor | None = None  # the start-up buffer it lies in, if any
    let_go: Callable[[], None] | None = None  # of what lies elsewhere


class DiTCacheManager:
    """Owns three kinds of entries.

    A request's own (latents, buffers) stay until `release_cache`, or expire when nobody used them
    for `cache_cleanup_interval` seconds; those of a pinned request do not expire. Shared ones
    (prompt embeddings) give way, least recently used first, when a request needs the room; then a
    request's optional ones (step caches), those of the request that used its own longest ago.
    Both expire as well: a request that is passed over for so long gives its step caches back.
    """

    def __init__(
        self,
        config: DiTCacheConfig,
        device: str | torch.device = "cpu",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self._clock = clock
        self._requests: dict[str, dict[str, _Entry]] = {}
        self._pinned: set[str] = set()
        self._shared: OrderedDict[Hashable, _Entry] = OrderedDict()
        # Smallest first, so that the first that fits fits best.
        self._free_reserved = sorted(
            (self._new_buffer(tensor.size) for tensor in config.reserved_tensors), key=len
        )
        self._bytes: Counter[CacheKind] = Counter()  # outside of those buffers
        self._evictions: Counter[CacheKind] = Counter()

    @property
    def used_bytes(self) -> int:
        return self.config.reserved_size + self._bytes.total()

    @property
    def request_bytes(self) -> int:
        """Of that, what requests hold of their own."""
        return self._bytes[CacheKind.REQUEST] + self._bytes[CacheKind.STEP_CACHE]

    @property
    def num_evictions(self) -> int:
        """Entries that gave way, since the start: all step caches of a request count as one."""
        return self._evictions.total()

    def get_bytes(self) -> dict[str, int]:
        """By kind, the buffers that were reserved at start left out."""
        return {kind.value: self._bytes[kind] for kind in CacheKind}

    def get_evictions(self) -> dict[str, int]:
        """By kind, since the start; a request's own entries are never evicted."""
        return {
            kind.value: self._evictions[kind] for kind in CacheKind if kind != CacheKind.REQUEST
        }

    # --- a request's own entries ---

    def allocate_cache(self, request_id: str, size: int, name: str = _DEFAULT) -> Tensor:
        """A buffer of `size` bytes [size] uint8 for a request, replacing its earlier one."""
        if size < 1:
            raise ValueError(f"size={size} is not allowed: at least 1 byte")
        return self._allocate(request_id, name, size, CacheKind.REQUEST).tensor

    def _allocate(self, request_id: str, name: str, size: int, kind: CacheKind) -> _Entry:
        self._drop(request_id, name)
        fitting = (i for i, buffer in enumerate(self._free_reserved) if len(buffer) >= size)
        if (index := next(fitting, None)) is not None:
            reserved = self._free_reserved.pop(index)
            entry = _Entry(reserved[:size], 0, self._clock(), kind, reserved)
        else:
            self._make_room(size)
            entry = _Entry(self._new_buffer(size), size, self._clock(), kind)
        self._add(request_id, name, entry)
        return entry

    def _add(self, request_id: str, name: str, entry: _Entry) -> None:
        self._requests.setdefault(request_id, {})[name] = entry
        self._bytes[entry.kind] += entry.num_bytes

    def get_cache(self, request_id: str, name: str = _DEFAULT) -> Tensor | None:
        entry = self._requests.get(request_id, {}).get(name)
        if entry is None:
            return None
        entry.last_used = self._clock()
        return entry.tensor

    def pin_request(self, request_id: str) -> None:
        """Keep a request's entries from expiring until it is released."""
        self._pinned.add(request_id)

    def release_cache(self, request_id: str) -> None:
        """Free everything a request holds; one that holds nothing is fine."""
        for name in list(self._requests.get(request_id, ())):
            self._drop(request_id, name)
        self._pinned.discard(request_id)

    clear_request_cache = release_cache

    def cache_tensor(self, request_id: str, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor into a buffer of the request's own; the answer is that buffer."""
        return self._copy(request_id, name, tensor, CacheKind.REQUEST)

    def _copy(self, request_id: str, name: str, tensor: Tensor, kind: CacheKind) -> Tensor:
        held = self.get_cache(request_id, name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            entry = self._allocate(request_id, name, tensor.nbytes, kind)
            held = entry.tensor = entry.tensor.view(tensor.dtype).view(tensor.shape)
        return held.copy_(tensor)

    def try_cache_tensor(self, request_id: str, name: str, tensor: Tensor) -> bool:
        """Like `cache_tensor`, for what a request can do without; whether there was room.

        It takes no room from the optional entries of others: they would take it back. Without
        room, what was there before is gone.
        """
        held = self.get_cache(request_id, name)
        is_new = held is None or held.nbytes != tensor.nbytes
        if is_new and not self._has_room(tensor.nbytes):
            self._drop(request_id, name)
            return False
        try:
            self._copy(request_id, name, tensor, CacheKind.STEP_CACHE)
        except torch.OutOfMemoryError:  # another process has taken what is ours by the budget
            return False
        return True

    def try_hold(
        self, request_id: str, name: str, num_bytes: int, let_go: Callable[[], None]
    ) -> bool:
        """Count what a request can do without and somebody else allocated; whether there is room.

        Args:
            let_go: frees it. Called when there is no room, it is evicted, or the request ends.
        """
        if (held := self._requests.get(request_id, {}).get(name)) is not None:
            held.let_go = None  # it is replaced, not dropped
            self._drop(request_id, name)
        if not self._has_room(num_bytes):
            let_go()
            return False
        self._make_room(num_bytes)
        entry = _Entry(_NOTHING, num_bytes, self._clock(), CacheKind.STEP_CACHE, let_go=let_go)
        self._add(request_id, name, entry)
        return True

    def cache_latents(self, request_id: str, latents: Tensor) -> Tensor:
        return self.cache_tensor(request_id, _LATENTS, latents)

    def get_cached_latents(self, request_id: str) -> Tensor | None:
        return self.get_cache(request_id, _LATENTS)

    # --- shared entries ---

    def cache_prompt(self, key: Hashable, embeds: Tensor) -> None:
        """Keep prompt embeddings for whoever asks next, if there is room for them."""
        self._drop_shared(key)
        try:
            self._make_room(embeds.nbytes)
        except CacheAllocationError:
            return  # not worth failing for: the next request encodes again
        self._shared[key] = _Entry(embeds, embeds.nbytes, self._clock(), CacheKind.PROMPT)
        self._bytes[CacheKind.PROMPT] += embeds.nbytes

    def get_cached_prompt(self, key: Hashable) -> Tensor | None:
        entry = self._shared.get(key)
        if entry is None:
            return None
        self._shared.move_to_end(key)
        entry.last_used = self._clock()
        return entry.tensor

    # --- room ---

    def clear_expired_cache(self) -> None:
        """Free what nobody has used for `cache_cleanup_interval` seconds."""
        oldest = self._clock() - self.config.cache_cleanup_interval
        for request_id, entries in list(self._requests.items()):
            if request_id not in self._pinned:
                for name in [name for name, e in entries.items() if e.last_used < oldest]:
                    self._drop(request_id, name)
        for request_id, entries in self._step_caches.items():
            if all(entry.last_used < oldest for entry in entries.values()):
                for name in entries:
                    self._drop(request_id, name)
        for key in [key for key, e in self._shared.items() if e.last_used < oldest]:
            self._drop_shared(key)

    def _has_room(self, size: int) -> bool:
        """Whether something fits beside all that requests hold."""
        needed = self.used_bytes - self._bytes[CacheKind.PROMPT]
        return needed + size <= self.config.max_cache_size

    def _make_room(self, size: int) -> None:
        budget = self.config.max_cache_size
        needed = self.used_bytes - self._bytes[CacheKind.PROMPT] - self._bytes[CacheKind.STEP_CACHE]
        if needed + size > budget:
            raise CacheAllocationError(
                f"{size} bytes do not fit: {needed} of max_cache_size={budget} "
                f"are in use; raise that setting, or run fewer or smaller requests at once"
            )
        while self.used_bytes + size > budget:
            if self._shared:
                self._drop_shared(next(iter(self._shared)))
                self._evictions[CacheKind.PROMPT] += 1
            else:
                self._evict_request()
                self._evictions[CacheKind.STEP_CACHE] += 1

    @property
    def _step_caches(self) -> dict[str, dict[str, _Entry]]:
        """By request and name."""
        by_request = {
            request_id: {
                name: entry for name, entry in entries.items() if entry.kind is CacheKind.STEP_CACHE
            }
            for request_id, entries in self._requests.items()
        }
        return {request_id: entries for request_id, entries in by_request.items() if entries}

    def _evict_request(self) -> None:
        """Of the request that used its own longest ago, all step caches: a part is of no use."""
        evictable = {
            request_id: entries
            for request_id, entries in self._step_caches.items()
            if any(entry.num_bytes for entry in entries.values())  # reserved buffers give no room
        }
        oldest = min(
            evictable, key=lambda id: max(entry.last_used for entry in evictable[id].values())
        )
        for name in evictable[oldest]:
            self._drop(oldest, name)

    def _drop(self, request_id: str, name: str) -> None:
        entries = self._requests.get(request_id, {})
        if (entry := entries.pop(name, None)) is None:
            return
        self._bytes[entry.kind] -= entry.num_bytes
        if entry.reserved is not None:
            self._free_reserved.append(entry.reserved)
            self._free_reserved.sort(key=len)
        if not entries:
            del self._requests[request_id]
        if entry.let_go is not None:
            entry.let_go()

    def _drop_shared(self, key: Hashable) -> None:
        if (entry := self._shared.pop(key, None)) is not None:
            self._bytes[entry.kind] -= entry.num_bytes

    def _new_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)
