"""Tensors of requests and prompts live in one byte budget, and nobody's is lost or lent twice."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_omni.config import DiTCacheConfig, DiTCacheTensor
from vllm_omni.diffusion.cache_manager import DiTCacheManager
from vllm_omni.errors import CacheAllocationError

INTERVAL = 10.0  # seconds


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def create_manager(
    max_cache_size: int = 1000, reserved: Sequence[int] = (), clock: FakeClock | None = None
) -> DiTCacheManager:
    config = DiTCacheConfig(
        dit_cache_tensors=[DiTCacheTensor(size) for size in reserved[::2]],
        kv_cache_groups=[DiTCacheTensor(size) for size in reserved[1::2]],
        max_cache_size=max_cache_size,
        cache_cleanup_interval=INTERVAL,
    )
    return DiTCacheManager(config, clock=clock or FakeClock())


def num_bytes_behind(tensor: Tensor) -> int:
    """Of the whole buffer that a tensor lies in."""
    return tensor.untyped_storage().nbytes()


# --- budget ---


def test_allocations_count_until_they_are_released() -> None:
    manager = create_manager()
    buffer = manager.allocate_cache("a", 300)
    assert (buffer.shape, buffer.dtype) == ((300,), torch.uint8)
    manager.allocate_cache("a", 200, "second")
    manager.allocate_cache("b", 500)
    assert manager.used_bytes == 1000
    manager.release_cache("a")
    assert manager.used_bytes == 500
    assert manager.get_cache("a") is None
    assert manager.get_cache("a", "second") is None
    assert manager.get_cache("b") is not None
    manager.clear_request_cache("b")
    assert manager.used_bytes == 0


def test_allocation_over_budget_names_the_numbers() -> None:
    manager = create_manager(max_cache_size=1000, reserved=[100])
    manager.allocate_cache("a", 600)
    with pytest.raises(CacheAllocationError) as caught:
        manager.allocate_cache("b", 301)
    assert str(caught.value).startswith(
        "301 bytes do not fit: 700 of max_cache_size=1000 are in use"
    )
    assert manager.used_bytes == 700
    manager.allocate_cache("b", 300)


def test_new_buffer_of_the_same_name_replaces_the_old() -> None:
    manager = create_manager(max_cache_size=1000)
    manager.allocate_cache("a", 800)
    new = manager.allocate_cache("a", 900)  # fits, as the old one goes
    assert manager.used_bytes == 900
    assert manager.get_cache("a") is new


@pytest.mark.parametrize("size", [0, -1])
def test_refuses_a_size_below_one_byte(size: int) -> None:
    with pytest.raises(ValueError, match=f"size={size} is not allowed"):
        create_manager().allocate_cache("a", size)


def test_release_of_a_request_that_holds_nothing() -> None:
    manager = create_manager()
    manager.release_cache("unknown")
    assert manager.used_bytes == 0


# --- reserved buffers ---


def test_reserved_buffers_count_from_the_start_and_are_lent_for_nothing() -> None:
    manager = create_manager(max_cache_size=1000, reserved=[600, 400])
    assert manager.used_bytes == 1000
    buffer = manager.allocate_cache("a", 250)
    assert buffer.shape == (250,)
    assert num_bytes_behind(buffer) == 400  # the smallest that is large enough
    assert manager.used_bytes == 1000


def test_reserved_buffer_comes_back() -> None:
    manager = create_manager(max_cache_size=400, reserved=[400])
    first = manager.allocate_cache("a", 400)
    with pytest.raises(CacheAllocationError):
        manager.allocate_cache("b", 1)
    manager.release_cache("a")
    assert manager.allocate_cache("b", 100).data_ptr() == first.data_ptr()


def test_next_larger_buffer_is_lent_while_the_best_is_out() -> None:
    manager = create_manager(max_cache_size=1000, reserved=[600, 400])
    assert [num_bytes_behind(manager.allocate_cache(id, 300)) for id in "ab"] == [400, 600]


def test_buffers_that_are_too_small_are_left_alone() -> None:
    manager = create_manager(max_cache_size=1000, reserved=[100, 600, 300])
    assert num_bytes_behind(manager.allocate_cache("a", 200)) == 300
    assert num_bytes_behind(manager.allocate_cache("b", 200)) == 600
    assert num_bytes_behind(manager.allocate_cache("c", 100)) == 100


def test_without_a_reserved_buffer_that_fits_a_new_one_is_made() -> None:
    manager = create_manager(max_cache_size=1000, reserved=[100])
    buffer = manager.allocate_cache("a", 200)
    assert num_bytes_behind(buffer) == 200
    assert manager.used_bytes == 300


# --- copies ---


def test_cached_tensor_is_a_copy() -> None:
    manager = create_manager()
    source = torch.arange(6.0).view(2, 3)
    held = manager.cache_tensor("a", "text", source)
    source.zero_()
    assert torch.equal(held, torch.arange(6.0).view(2, 3))
    assert manager.get_cache("a", "text") is held
    assert manager.used_bytes == 24


def test_equal_shape_and_dtype_reuse_the_buffer() -> None:
    manager = create_manager()
    first = manager.cache_latents("a", torch.zeros(2, 3))
    second = manager.cache_latents("a", torch.ones(2, 3))
    assert second.data_ptr() == first.data_ptr()
    assert torch.equal(first, torch.ones(2, 3))
    assert manager.get_cached_latents("a") is second


@pytest.mark.parametrize("other", [torch.ones(3, 2), torch.ones(2, 3, dtype=torch.bfloat16)])
def test_other_shape_or_dtype_replaces_the_buffer(other: Tensor) -> None:
    manager = create_manager()
    manager.cache_latents("a", torch.zeros(2, 3))
    held = manager.cache_latents("a", other)
    assert (held.shape, held.dtype) == (other.shape, other.dtype)
    assert torch.equal(held, other)
    assert manager.used_bytes == other.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_any_dtype_and_stride_is_copied_by_value(dtype: torch.dtype) -> None:
    source = torch.arange(24).reshape(4, 6).to(dtype).t()  # not contiguous
    held = create_manager(reserved=[256]).cache_tensor("a", "x", source)
    assert torch.equal(held, source)
    assert held.is_contiguous()


def test_latents_of_two_requests_do_not_touch() -> None:
    manager = create_manager(reserved=[64, 64])
    held = [manager.cache_latents(id, torch.full((2, 3), float(ord(id)))) for id in "abc"]
    for tensor, request_id in zip(held, "abc", strict=True):
        assert torch.equal(tensor, torch.full((2, 3), float(ord(request_id))))


# --- held elsewhere ---


def test_what_lies_elsewhere_is_counted_and_let_go_once() -> None:
    manager = create_manager(1000)
    gone: list[str] = []

    def hold(num_bytes: int, name: str = "x") -> bool:
        return manager.try_hold("a", name, num_bytes, lambda: gone.append(f"{name} {num_bytes}"))

    assert hold(300) and hold(600)  # the second in place of the first
    assert (manager.used_bytes, gone) == (600, [])
    assert not hold(500, "y")
    assert (manager.used_bytes, gone) == (600, ["y 500"])
    manager.release_cache("a")
    assert (manager.used_bytes, gone) == (0, ["y 500", "x 600"])


def test_what_lies_elsewhere_gives_way() -> None:
    manager = create_manager(1000)
    gone: list[str] = []
    manager.cache_prompt("p", torch.zeros(300, dtype=torch.uint8))
    assert manager.try_hold("a", "x", 800, lambda: gone.append("a"))
    assert manager.get_cached_prompt("p") is None
    assert not manager.try_hold("b", "x", 300, lambda: gone.append("b"))
    manager.allocate_cache("b", 300)
    assert (manager.used_bytes, gone, manager.num_evictions) == (300, ["b", "a"], 2)
    assert not manager.try_hold("b", "x", 800, lambda: gone.append("again"))
    manager.release_cache("a")
    assert gone == ["b", "a", "again"]


# --- expiry ---


def test_unused_entries_expire() -> None:
    clock = FakeClock()
    manager = create_manager(clock=clock)
    manager.allocate_cache("old", 100)
    manager.cache_prompt("old", torch.zeros(25))
    clock.now += INTERVAL
    manager.allocate_cache("new", 100)
    manager.clear_expired_cache()
    assert manager.used_bytes == 300  # not older than the interval
    clock.now += 0.1
    manager.clear_expired_cache()
    assert manager.used_bytes == 100
    assert manager.get_cache("old") is None
    assert manager.get_cached_prompt("old") is None
    assert manager.get_cache("new") is not None


def test_use_keeps_an_entry() -> None:
    clock = FakeClock()
    manager = create_manager(clock=clock)
    manager.allocate_cache("a", 100, "used")
    manager.allocate_cache("a", 200, "unused")
    manager.cache_prompt("used", torch.zeros(5, dtype=torch.uint8))
    clock.now += INTERVAL
    manager.get_cache("a", "used")
    manager.get_cached_prompt("used")
    clock.now += 1
    manager.clear_expired_cache()
    assert manager.used_bytes == 105


def test_pinned_request_does_not_expire_until_it_is_released() -> None:
    clock = FakeClock()
    manager = create_manager(clock=clock)
    manager.pin_request("a")
    manager.cache_latents("a", torch.ones(4))
    clock.now += 100 * INTERVAL
    manager.clear_expired_cache()
    held = manager.get_cached_latents("a")
    assert held is not None
    assert torch.equal(held, torch.ones(4))

    manager.release_cache("a")
    assert manager.used_bytes == 0
    manager.allocate_cache("a", 10)  # the same id again, no longer pinned
    clock.now += 2 * INTERVAL
    manager.clear_expired_cache()
    assert manager.used_bytes == 0


def test_step_caches_of_a_request_that_is_passed_over_expire() -> None:
    """All of them at once, pinned or not; its latents stay."""
    clock = FakeClock()
    manager = create_manager(clock=clock)
    gone: list[str] = []
    for request_id in ("waits", "runs"):
        manager.pin_request(request_id)
        manager.cache_latents(request_id, torch.ones(4))
        assert manager.try_cache_tensor(request_id, "signal", torch.ones(8))
        assert manager.try_hold(request_id, "other", 50, partial(gone.append, request_id))
    clock.now += INTERVAL
    assert manager.get_cache("runs", "signal") is not None
    clock.now += 1
    manager.clear_expired_cache()
    assert gone == ["waits"]
    assert manager.get_cache("waits", "signal") is None
    assert manager.get_cached_latents("waits") is not None
    assert manager.get_bytes() == {"request": 32, "step_cache": 32 + 50, "prompt": 0}
    assert manager.get_evictions() == {"step_cache": 0, "prompt": 0}  # nobody took the room


def test_bytes_and_evictions_by_kind() -> None:
    manager = create_manager(max_cache_size=300)
    manager.cache_prompt("p", create_prompt(1, 100))
    manager.allocate_cache("a", 50)
    assert manager.try_cache_tensor("a", "x", create_prompt(1, 60))
    assert manager.try_cache_tensor("a", "y", create_prompt(1, 40))
    assert manager.get_bytes() == {"request": 50, "step_cache": 100, "prompt": 100}
    manager.allocate_cache("b", 120)
    assert manager.get_bytes() == {"request": 170, "step_cache": 100, "prompt": 0}
    assert manager.get_evictions() == {"step_cache": 0, "prompt": 1}
    manager.allocate_cache("b", 100, "more")
    assert manager.get_bytes() == {"request": 270, "step_cache": 0, "prompt": 0}
    assert manager.get_evictions() == {"step_cache": 1, "prompt": 1}
    assert manager.num_evictions == 2


def test_reserved_buffers_give_no_room() -> None:
    """A step cache in one of them is not evicted for a request that needs room elsewhere."""
    manager = create_manager(reserved=[64], max_cache_size=300)
    assert manager.try_cache_tensor("a", "x", torch.ones(16))
    assert manager.try_cache_tensor("b", "x", torch.ones(20))
    manager.allocate_cache("c", 236)
    assert manager.get_cache("a", "x") is not None and manager.get_cache("b", "x") is None
    assert manager.get_evictions()["step_cache"] == 1


# --- prompts ---


def create_prompt(value: int, num_bytes: int = 100) -> Tensor:
    return torch.full((num_bytes,), value, dtype=torch.uint8)


def test_prompt_is_found_by_its_key() -> None:
    manager = create_manager()
    manager.cache_prompt((34, (1, 2)), create_prompt(7))
    cached = manager.get_cached_prompt((34, (1, 2)))
    assert cached is not None
    assert torch.equal(cached, create_prompt(7))
    assert manager.get_cached_prompt((34, (1, 3))) is None


def test_prompt_of_the_same_key_is_counted_once() -> None:
    manager = create_manager()
    for _ in range(3):
        manager.cache_prompt("a", create_prompt(7))
    assert manager.used_bytes == 100


def test_least_recently_used_prompt_goes_first() -> None:
    manager = create_manager(max_cache_size=300)
    for key in "abc":
        manager.cache_prompt(key, create_prompt(ord(key)))
    manager.get_cached_prompt("a")
    manager.cache_prompt("d", create_prompt(ord("d")))
    assert [key for key in "abcd" if manager.get_cached_prompt(key) is not None] == ["a", "c", "d"]
    assert manager.num_evictions == 1
    assert manager.used_bytes == 300


def test_prompts_give_way_to_requests_as_far_as_needed() -> None:
    manager = create_manager(max_cache_size=300)
    for key in "abc":
        manager.cache_prompt(key, create_prompt(ord(key)))
    manager.allocate_cache("request", 150)
    assert [key for key in "abc" if manager.get_cached_prompt(key) is not None] == ["c"]
    assert manager.num_evictions == 2
    assert manager.used_bytes == 250


def test_request_that_cannot_fit_evicts_nothing() -> None:
    manager = create_manager(max_cache_size=300)
    manager.allocate_cache("a", 201)
    manager.cache_prompt("p", create_prompt(1, 50))
    with pytest.raises(CacheAllocationError, match="100 bytes do not fit: 201 of"):
        manager.allocate_cache("b", 100)
    assert manager.get_cached_prompt("p") is not None
    assert manager.num_evictions == 0


def test_requests_do_not_give_way_to_prompts() -> None:
    manager = create_manager(max_cache_size=300)
    manager.allocate_cache("a", 250)
    manager.cache_prompt("p", create_prompt(1, 100))
    assert manager.get_cached_prompt("p") is None
    assert manager.used_bytes == 250


# --- properties ---

ROOM = 300  # bytes beside the reserved buffers
RESERVED = [31, 101, 101, 151]  # odd, while entries are even: one can tell which lie in them


@dataclass(frozen=True)
class Operation:
    kind: str
    request_id: str
    name: str
    size: int
    seconds: float


OPERATIONS = st.builds(
    Operation,
    kind=st.sampled_from(
        ["allocate", "allocate", "cache", "get", "release", "pin", "prompt", "get_prompt", "wait"]
    ),
    request_id=st.sampled_from("abc"),
    name=st.sampled_from("xy"),
    size=st.integers(1, 75).map(lambda half: 2 * half),
    seconds=st.sampled_from([1.0, 6.0]),
)


@dataclass(eq=False)
class Expected:
    """What should be in the manager, kept apart from it."""

    manager: DiTCacheManager
    clock: FakeClock
    # (request id, name) -> (tensor, the byte it is full of, time of the last use)
    held: dict[tuple[str, str], tuple[Tensor, int, float]] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    # key -> (bytes, time of the last use), least recently used first
    prompts: OrderedDict[str, tuple[int, float]] = field(default_factory=OrderedDict)
    num_done: int = 0

    def do(self, operation: Operation) -> None:
        self.num_done += 1
        evictions = self.manager.num_evictions
        getattr(self, operation.kind)(operation)
        for _ in range(self.manager.num_evictions - evictions):
            self.prompts.popitem(last=False)

    def allocate(self, op: Operation) -> None:
        self.held.pop((op.request_id, op.name), None)
        try:
            buffer = self.manager.allocate_cache(op.request_id, op.size, op.name)
        except CacheAllocationError:
            self.check_nothing_fits(op.size)
            return
        assert len(buffer) == op.size
        self._fill(op, buffer)

    def cache(self, op: Operation) -> None:
        value = self.num_done % 256
        try:
            held = self.manager.cache_tensor(
                op.request_id, op.name, torch.full((op.size,), value, dtype=torch.uint8)
            )
        except CacheAllocationError:
            self.held.pop((op.request_id, op.name), None)
            self.check_nothing_fits(op.size)
            return
        self.held[op.request_id, op.name] = (held, value, self.clock.now)

    def get(self, op: Operation) -> None:
        key = (op.request_id, op.name)
        found = self.manager.get_cache(*key)
        assert (found is None) == (key not in self.held)
        if found is not None:
            tensor, value, _ = self.held[key]
            assert found.data_ptr() == tensor.data_ptr()
            self.held[key] = (tensor, value, self.clock.now)

    def release(self, op: Operation) -> None:
        self.manager.release_cache(op.request_id)
        self.pinned.discard(op.request_id)
        self.held = {key: held for key, held in self.held.items() if key[0] != op.request_id}

    def pin(self, op: Operation) -> None:
        self.manager.pin_request(op.request_id)
        self.pinned.add(op.request_id)

    def prompt(self, op: Operation) -> None:
        self.prompts.pop(op.name, None)
        self.manager.cache_prompt(op.name, create_prompt(1, op.size))
        if self.held_bytes + op.size <= ROOM:
            self.prompts[op.name] = (op.size, self.clock.now)

    def get_prompt(self, op: Operation) -> None:
        found = self.manager.get_cached_prompt(op.name)
        assert (found is None) == (op.name not in self.prompts)
        if found is not None:
            self.prompts[op.name] = (len(found), self.clock.now)
            self.prompts.move_to_end(op.name)

    def wait(self, op: Operation) -> None:
        self.clock.now += op.seconds
        self.manager.clear_expired_cache()
        oldest = self.clock.now - INTERVAL
        self.held = {
            key: held
            for key, held in self.held.items()
            if key[0] in self.pinned or held[2] >= oldest
        }
        for key in [key for key, (_, last_used) in self.prompts.items() if last_used < oldest]:
            del self.prompts[key]

    def _fill(self, op: Operation, buffer: Tensor) -> None:
        value = self.num_done % 256
        buffer.fill_(value)
        self.held[op.request_id, op.name] = (buffer, value, self.clock.now)

    @property
    def buffer_sizes(self) -> list[int]:
        return [num_bytes_behind(tensor) for tensor, _, _ in self.held.values()]

    @property
    def held_bytes(self) -> int:
        """Of all buffers but the reserved ones."""
        return sum(size for size in self.buffer_sizes if size % 2 == 0)

    def check_nothing_fits(self, size: int) -> None:
        assert self.held_bytes + size > ROOM
        reserved = Counter(tensor.size for tensor in self.manager.config.reserved_tensors)
        free = reserved - Counter(self.buffer_sizes)
        assert all(free_size < size for free_size in free)

    def check(self) -> None:
        prompt_bytes = sum(num_bytes for num_bytes, _ in self.prompts.values())
        expected = self.manager.config.reserved_size + self.held_bytes + prompt_bytes
        assert self.manager.used_bytes == expected <= self.manager.config.max_cache_size
        for tensor, value, _ in self.held.values():
            assert torch.all(tensor == value), "two entries lie in one buffer"


@pytest.mark.parametrize(
    "reserved",
    [
        pytest.param([], id="nothing reserved"),
        pytest.param(RESERVED[:1], id="one reserved"),
        pytest.param(RESERVED, id="four reserved"),
    ],
)
@settings(max_examples=100, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=40))
def test_every_byte_is_accounted_for(reserved: list[int], operations: list[Operation]) -> None:
    clock = FakeClock()
    manager = create_manager(ROOM + sum(reserved), reserved, clock)
    expected = Expected(manager, clock)
    for operation in operations:
        expected.do(operation)
        expected.check()
    for request_id in "abc":
        manager.release_cache(request_id)
    clock.now += 2 * INTERVAL
    manager.clear_expired_cache()
    assert manager.used_bytes == sum(reserved)
    lent = [manager.allocate_cache(str(index), size) for index, size in enumerate(reserved)]
    assert len({buffer.data_ptr() for buffer in lent}) == len(reserved)
    assert manager.used_bytes == sum(reserved)
