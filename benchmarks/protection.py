"""What supervision costs: the same pictures with snapshots and beats, and without, in turns.

    python benchmarks/protection.py [--rounds 9] [--requests 16] [--concurrency 8]

Without: no snapshots are made, kept or sent. (Beats and the record of each step are a few
microseconds a step and are always there; they are measured by themselves.) There are two systems
without: what they differ by is the noise, as two processes of one program are not equally fast.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import time
from collections import deque
from dataclasses import dataclass

import psutil

from vllm_omni import DiffusionParams, OmniAsyncLLM, OmniRequest
from vllm_omni.engine.black_box import BlackBox
from vllm_omni.processes import cpu_seconds

SIDE = 128  # small: what is fixed weighs most
STEPS = 20
SYSTEMS = {"none": 0, "every 8 steps": 8, "every step": 1, "none, again": 0}


@dataclass(frozen=True)
class Cost:
    """Of one picture."""

    wall: float  # seconds
    processor: float  # seconds, of all processes of the system and of this one


async def main() -> None:
    args = parse_args()
    record = time_record(args.concurrency)
    systems = {
        name: OmniAsyncLLM.from_pretrained("demo", mode="process", snapshot_every=every)
        for name, every in SYSTEMS.items()
    }
    costs: dict[str, list[Cost]] = {name: [] for name in systems}
    order = deque(systems)
    for number in range(args.rounds + 1):
        for name in order:
            cost = await measure(systems[name], args.requests, args.concurrency)
            if number:  # the first round warms up
                costs[name].append(cost)
        order.rotate(1)
    for llm in systems.values():
        llm.shutdown()
    report(costs, record)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=8)
    return parser.parse_args()


async def measure(llm: OmniAsyncLLM, num_requests: int, concurrency: int) -> Cost:
    places = asyncio.Semaphore(concurrency)

    async def draw(seed: int) -> None:
        params = DiffusionParams(height=SIDE, width=SIDE, num_inference_steps=STEPS, seed=seed)
        async with places:
            async for _ in llm.generate(OmniRequest(prompt="a red circle", params=params)):
                pass

    pids = [os.getpid(), *(health.pid or 0 for health in llm.stage_health().values())]
    processes = [psutil.Process(pid) for pid in pids]
    start, used = time.perf_counter(), cpu_seconds(processes)
    await asyncio.gather(*(draw(seed) for seed in range(num_requests)))
    wall, processor = time.perf_counter() - start, cpu_seconds(processes) - used
    return Cost(wall / num_requests, processor / num_requests)


def time_record(num_requests: int) -> float:
    """Seconds that it takes to write down who is in a step."""
    black_box = BlackBox.make(multiprocessing.get_context("forkserver"))
    ids = [f"{number:032x}" for number in range(num_requests)]
    start = time.perf_counter()
    for _ in range(1000):
        with black_box.work():
            black_box.name_requests(ids)
    return (time.perf_counter() - start) / 1000


def report(costs: dict[str, list[Cost]], record: float) -> None:
    print(f"median of {len(costs['none'])} rounds; a round's costs against those without snapshots")
    print("| snapshots | ms a picture | against none | processor ms a picture | against none |")
    print("|---|---|---|---|---|")
    for system, of_one in costs.items():
        cells = [system]
        for name in ("wall", "processor"):
            values = [getattr(cost, name) for cost in of_one]
            ratios = [v / getattr(w, name) for v, w in zip(values, costs["none"], strict=True)]
            cells.append(f"{1000 * statistics.median(values):.0f}")
            cells.append(f"{100 * (statistics.median(ratios) - 1):+.1f} %")
        print(f"| {' | '.join(cells)} |")
    print(f"\nthe record of a step: {record * 1e6:.0f} microseconds")


if __name__ == "__main__":
    asyncio.run(main())
