"""How keys share places and turns."""

from __future__ import annotations

import random

from vllm_omni.entrypoints.openai.sharing import FairQueue, Quota

KEYS = ("a", "b", "c", "d")


def fill(quota: Quota, owner: str) -> int:
    """How many an owner gets, one by one."""
    taken = 0
    while quota.has_room(owner, 1):
        quota.take(owner, 1)
        taken += 1
    return taken


def test_every_key_has_its_part() -> None:
    quota = Quota(80, KEYS)
    assert fill(quota, "a") == 50  # all but the 10 of each other
    assert [fill(quota, key) for key in "bcd"] == [10, 10, 10]
    assert quota.used == 80
    quota.give_back("a", 50)
    assert fill(quota, "b") == 40  # what is left of the half that is everybody's, with its own


def test_without_keys_it_is_whoevers() -> None:
    for owners in ((), ("a",)):
        assert fill(Quota(7, owners), "a") == 7


def test_one_alone_always_fits() -> None:
    quota = Quota(10, KEYS)
    assert quota.has_room("a", 1000)
    quota.take("a", 1000)
    assert not quota.has_room("b", 2) and quota.has_room("b", 1)
    quota.give_back("a", 1000)
    assert quota.used == 0 and fill(quota, "b") == 7


def test_parts_are_never_given_away() -> None:
    rng = random.Random(0)
    quota = Quota(1000, KEYS)
    held: dict[str, list[int]] = {key: [] for key in KEYS}
    for _ in range(5000):
        owner, amount = rng.choice(KEYS), rng.randint(1, 60)
        if held[owner] and rng.random() < 0.4:
            quota.give_back(owner, held[owner].pop())
        elif quota.has_room(owner, amount):
            quota.take(owner, amount)
            held[owner].append(amount)
        assert quota.used == sum(map(sum, held.values())) <= 1000
        for key in KEYS:
            free = int(quota.share) - sum(held[key])
            assert free <= 0 or quota.has_room(key, free)


def drain(queue: FairQueue[str]) -> list[str]:
    expected = list(queue)
    got = [queue.pop() for _ in range(len(queue))]
    assert got == expected and len(queue) == 0
    return got


def test_one_waits_for_one_of_each_other_key() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(100):
        queue.push(f"a{i}", "a", 0, 5)
    assert [queue.pop() for _ in range(10)] == [f"a{i}" for i in range(10)]
    queue.push("b0", "b", 0, 5)
    queue.push("c0", "c", 0, 5)
    assert sorted(queue.pop() for _ in range(3)) == ["a10", "b0", "c0"]
    assert drain(queue) == [f"a{i}" for i in range(11, 100)]


def test_turns_are_shared_by_cost() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(4):
        queue.push(f"large{i}", "a", 0, 10)
    for i in range(40):
        queue.push(f"small{i}", "b", 0, 1)
    order = drain(queue)
    before = [
        sum(name.startswith("small") for name in order[: order.index(f"large{i}")])
        for i in range(4)
    ]
    assert before == [0, 10, 20, 30]


def test_an_owner_does_not_save_up() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(50):
        queue.push(f"a{i}", "a", 0, 1)
        queue.pop()
    for i in range(6):  # b had nothing of all this, and gets no more than its half now
        queue.push(f"a{i}", "a", 0, 1)
        queue.push(f"b{i}", "b", 0, 1)
    first = drain(queue)[:6]
    assert sorted(name[0] for name in first) == list("aaabbb")


def test_priority_orders_the_requests_of_one_key() -> None:
    queue: FairQueue[str] = FairQueue()
    for name, priority in (("a1", 0), ("a2", 0), ("a3", -1), ("a4", 5)):
        queue.push(name, "a", priority, 1)
    for name, priority in (("b1", -1000), ("b2", -1000)):  # says nothing to another key's
        queue.push(name, "b", priority, 1)
    order = drain(queue)
    assert [name for name in order if name[0] == "a"] == ["a3", "a1", "a2", "a4"]
    assert sorted(order[:4]) == ["a1", "a3", "b1", "b2"]


def test_who_leaves_is_forgotten() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in ("a1", "a2", "a3"):
        queue.push(name, "a", 0, 1)
    queue.push("b1", "b", 7, 1)
    queue.remove("a2", "a", 0)
    queue.remove("b1", "b", 7)
    assert len(queue) == 2 and drain(queue) == ["a1", "a3"]
