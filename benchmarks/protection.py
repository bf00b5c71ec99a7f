"""What supervision costs: the same pictures with snapshots and beats, and without, in turns.

    python benchmarks/protection.py [--rounds 7] [--requests 16] [--concurrency 8]

Without: no snapshots are made, kept or sent. (Beats and the record of each step are a few
microseconds a step and are always there; they are measured by themselves.)
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time

from vllm_omni import DiffusionParams, OmniAsyncLLM, OmniRequest
from vllm_omni.engine.black_box import BlackBox

SIDE = 256
STEPS = 20


async def main() -> None:
    args = parse_args()
    record = time_record(args.concurrency)
    systems = {
        every: OmniAsyncLLM.from_pretrained("demo", mode="process", snapshot_every=every)
        for every in (0, 8, 1)
    }
    rates: dict[int, list[float]] = {every: [] for every in systems}
    for number in range(args.rounds + 1):
        for every, llm in systems.items():
            rate = await measure(llm, args.requests, args.concurrency)
            if number:  # the first round warms up
                rates[every].append(rate)
    for llm in systems.values():
        llm.shutdown()
    report(rates, record)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=8)
    return parser.parse_args()


async def measure(llm: OmniAsyncLLM, num_requests: int, concurrency: int) -> float:
    """Pictures a second."""
    places = asyncio.Semaphore(concurrency)

    async def draw(seed: int) -> None:
        params = DiffusionParams(height=SIDE, width=SIDE, num_inference_steps=STEPS, seed=seed)
        async with places:
            async for _ in llm.generate(OmniRequest(prompt="a red circle", params=params)):
                pass

    start = time.perf_counter()
    await asyncio.gather(*(draw(seed) for seed in range(num_requests)))
    return num_requests / (time.perf_counter() - start)


def time_record(num_requests: int) -> float:
    """Seconds that it takes to write down who is in a step."""
    black_box = BlackBox.make(multiprocessing.get_context("forkserver"))
    ids = [f"{number:032x}" for number in range(num_requests)]
    start = time.perf_counter()
    for _ in range(1000):
        with black_box.work():
            black_box.name_requests(ids)
    return (time.perf_counter() - start) / 1000


def report(rates: dict[int, list[float]], record: float) -> None:
    print(f"| snapshot every | pictures/s, median of {len(rates[0])} | against none, by round |")
    print("|---|---|---|")
    for every, of_one in rates.items():
        ratios = [rate / without for rate, without in zip(of_one, rates[0], strict=True)]
        change = 100 * (statistics.median(ratios) - 1)
        name = f"{every} steps" if every else "never"
        print(f"| {name} | {statistics.median(of_one):.2f} | {change:+.1f} % |")
    print(f"\nthe record of a step: {record * 1e6:.0f} microseconds")


if __name__ == "__main__":
    asyncio.run(main())
