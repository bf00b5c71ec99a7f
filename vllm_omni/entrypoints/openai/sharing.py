"""How keys share a server, so that the many requests of one do not keep out the one of another."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


class Quota:
    """An amount of something, of which every key has a part that nobody else takes.

    Half of it is for whoever comes first, the other half is split evenly between the keys.
    """

    def __init__(self, most: float, owners: Sequence[str] = ()) -> None:
        self.most = most
        self.used = 0.0
        self.share = most // (2 * len(owners)) if len(owners) > 1 else 0.0
        self._owners = owners
        self._held: defaultdict[str, float] = defaultdict(float)

    def has_room(self, owner: str, amount: float) -> bool:
        """Whether an owner may take so much more; one alone may always."""
        if not self.used or self._held.get(owner, 0.0) + amount <= self.share:
            return True
        others = (self._held.get(other, 0.0) for other in self._owners if other != owner)
        kept = sum(max(0.0, self.share - held) for held in others)
        return self.used + amount + kept <= self.most

    def take(self, owner: str, amount: float) -> None:
        self.used += amount
        self._held[owner] += amount

    def give_back(self, owner: str, amount: float) -> None:
        self.used -= amount
        self._held[owner] -= amount
        if not self._held[owner]:
            del self._held[owner]


@dataclass(eq=False)
class _Line(Generic[T]):
    """What waits of one owner, by priority and then by arrival."""

    served: float = 0.0  # what it has cost, of those that had their turn
    waiting: dict[int, dict[T, float]] = field(default_factory=dict)  # by priority: its cost

    def pop(self) -> tuple[T, float]:
        priority = min(self.waiting)
        item = next(iter(self.waiting[priority]))
        return item, self.remove(item, priority)

    def remove(self, item: T, priority: int) -> float:
        cost = self.waiting[priority].pop(item)
        if not self.waiting[priority]:
            del self.waiting[priority]
        return cost

    def __iter__(self) -> Iterator[tuple[T, float]]:
        for priority in sorted(self.waiting):
            yield from self.waiting[priority].items()


class FairQueue(Generic[T]):
    """Who is next: of the owner that had least so far, the one of the lowest priority number.

    Start-time fair queueing: an owner that comes back does not get what it did not ask for.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line[T]] = {}
        self._now = 0.0  # what whoever was last had been served, when its turn came
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, item: T, owner: str, priority: int, cost: float) -> None:
        """Wait for a turn, which costs at least 1."""
        line = self._lines.setdefault(owner, _Line())
        if not line.waiting:
            line.served = max(line.served, self._now)
        line.waiting.setdefault(priority, {})[item] = max(1.0, cost)
        self._num_waiting += 1

    def pop(self) -> T:
        """The next one."""
        line = min((line for line in self._lines.values() if line.waiting), key=_get_served)
        item, cost = line.pop()
        self._now = line.served
        line.served += cost
        self._num_waiting -= 1
        return item

    def remove(self, item: T, owner: str, priority: int) -> None:
        """Of one that waits no longer."""
        self._lines[owner].remove(item, priority)
        self._num_waiting -= 1

    def __iter__(self) -> Iterator[T]:
        """All that wait, in the order of their turns."""
        number = itertools.count()  # equals keep their order
        heap = [
            (line.served, next(number), iter(line)) for line in self._lines.values() if line.waiting
        ]
        heapq.heapify(heap)
        while heap:
            served, _, line = heapq.heappop(heap)
            if (entry := next(line, None)) is not None:
                yield entry[0]
                heapq.heappush(heap, (served + entry[1], next(number), line))


def _get_served(line: _Line[T]) -> float:
    return line.served
