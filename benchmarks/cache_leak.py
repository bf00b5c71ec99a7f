"""Does anything stay behind? Thousands of requests of every kind, many of them cut short.

A tiny random checkpoint in this process, no vLLM. Requests differ in size, steps, guidance, cache
(none, ours with thresholds at which all, some or no rows hit, Cache-DiT with and without
calibrator), output and prompt; they come at random, pass each other (priorities, at most eight
in a step), are aborted at random points, miss deadlines, or are wrong. The budget is so
small that step caches and prompts are evicted and requests have to wait for room.

After every thousandth the engine is left to run dry, and what is there is counted:

    python benchmarks/cache_leak.py --requests 10000 --out benchmarks/results

Exit code 1 if a request did not end exactly once, or if anything was counted that belongs to one.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import psutil
import torch
from cache_dit.caching.cache_contexts import CachedContext
from torch import Tensor

from vllm_omni.cache_dit_params import CacheDiTParams
from vllm_omni.config import DiTCacheConfig, DiTConfig
from vllm_omni.diffusion.engine_core import DiffusionEngineCore
from vllm_omni.diffusion.executor import UniProcDiffusionExecutor
from vllm_omni.diffusion.messages import DiffusionRequest
from vllm_omni.diffusion.step_cache import RowCache
from vllm_omni.models.qwen_image.checkpoint import write_checkpoint
from vllm_omni.models.qwen_image.input_processor import QwenImageInputProcessor
from vllm_omni.models.qwen_image.inputs import QwenImageCustomInputs
from vllm_omni.outputs import EngineCoreOutput
from vllm_omni.params import DiffusionParams, OutputMode
from vllm_omni.step_cache import CacheParams, StepCacheParams

MAX_CACHE_SIZE = 350_000  # bytes: less than eight requests with step caches and their prompts
MAX_WAITING = 24  # requests in the engine, so that their number has no part in what is measured
PERIOD = 1000  # requests from one count to the next
WARM_UP = 2  # counts before memory is compared
SIDES = (32, 48, 64)
PROMPTS = tuple(
    f"a {colour} cat" + " and a dog" * n for colour in ("red", "blue") for n in range(8)
)

CACHES: tuple[CacheParams | None, ...] = (
    None,
    None,
    StepCacheParams(threshold=0.0),
    StepCacheParams(threshold=0.5),
    StepCacheParams(threshold=10.0, max_skips=2),
    StepCacheParams(method="tea", threshold=0.5),
    StepCacheParams(method="tea", threshold=10.0),
    StepCacheParams(method="taylor", threshold=10.0, max_skips=1),
    StepCacheParams(method="taylor", threshold=10.0, order=2, warmup_steps=2),
    CacheDiTParams(options={"residual_diff_threshold": 1.0, "max_warmup_steps": 1}),
    CacheDiTParams(options={"max_warmup_steps": 1, "calibrator": "taylorseer"}),
    CacheDiTParams(options={"cache_type": "DBPrune", "residual_diff_threshold": 1.0}),
)


@dataclass(frozen=True)
class Count:
    """What is there when no request is."""

    num_requests: int  # ended so far
    seconds: float
    rss_mb: float
    states: int  # in the runner
    request_bytes: int  # in the cache manager, step caches included
    prompt_bytes: int
    row_caches: int  # objects that Python's garbage collector knows
    contexts: int  # of Cache-DiT
    tensors: int
    objects: int


class Crowd:
    """Sends requests, takes in what comes back."""

    def __init__(self, core: DiffusionEngineCore, seed: int) -> None:
        self.core = core
        self.rng = Random(seed)
        self.processor = QwenImageInputProcessor(Path(core.dit_config.model))
        self.running: set[str] = set()
        self.ends: Counter[str] = Counter()  # by how they ended
        self.caches: Counter[str] = Counter()
        self.num_ended_twice = 0
        self.num_skipped_rows = 0
        self.evictions: Counter[str] = Counter()
        self.max_step_cache_bytes = 0
        self.num_passed_over = 0

    def add(self, request_id: str) -> None:
        inputs = self._make_inputs()
        self.caches["none" if inputs.cache is None else inputs.cache.method] += 1
        deadline = 0.001 if self.rng.random() < 0.02 else None
        self.core.add_request(
            DiffusionRequest(
                request_id=request_id,
                custom_inputs=inputs,
                deadline=deadline,
                priority=self.rng.randrange(3),
            )
        )
        self.running.add(request_id)

    def _make_inputs(self) -> QwenImageCustomInputs:
        rng = self.rng
        params = DiffusionParams(
            width=rng.choice(SIDES),
            height=rng.choice(SIDES),
            num_inference_steps=rng.choice((1, 2, 3, 4)),
            negative_prompt=rng.choice((None, " ")),
            seed=rng.randrange(1000),
            cache=rng.choice(CACHES),
            output_mode=OutputMode.PIXELS if rng.random() < 0.05 else OutputMode.LATENTS,
            preview_every=1 if rng.random() < 0.02 else None,
        )
        if rng.random() < 0.02:  # refused by the worker
            return self.processor.process_embeds(torch.zeros(3, 7), None, params)
        return self.processor.process(rng.choice(PROMPTS), params)

    def abort_some(self) -> None:
        if self.running and self.rng.random() < 0.1:
            self.core.abort_requests([self.rng.choice(sorted(self.running))])

    def step(self) -> None:
        news, _ = self.core.step()
        for of_client in news.values():
            for output in of_client.outputs:
                if output.finished:
                    self._end(output)
            if (stats := of_client.step_stats) is not None:
                self.num_skipped_rows += stats.num_skipped_rows
                self.evictions.update(stats.num_evictions)
                self.num_passed_over += stats.num_running > stats.num_requests > 0
                self.max_step_cache_bytes = max(
                    self.max_step_cache_bytes, stats.cache_bytes[0]["step_cache"]
                )

    def _end(self, output: EngineCoreOutput) -> None:
        if output.request_id not in self.running:
            self.num_ended_twice += 1
            return
        self.running.remove(output.request_id)
        reason = output.error.type if output.error is not None else str(output.finish_reason)
        self.ends[reason] += 1


def run(core: DiffusionEngineCore, num_requests: int, seed: int) -> tuple[Crowd, list[Count]]:
    crowd = Crowd(core, seed)
    counts: list[Count] = []
    start = time.perf_counter()
    for number in range(1, num_requests + 1):
        crowd.add(str(number))
        crowd.abort_some()
        while len(crowd.running) >= MAX_WAITING or crowd.rng.random() < 0.2:
            crowd.step()
        if number % PERIOD == 0 or number == num_requests:
            while core.has_requests():
                crowd.step()
            counts.append(count_all(core, number, time.perf_counter() - start))
            print(json.dumps(asdict(counts[-1])), file=sys.stderr, flush=True)
    return crowd, counts


def count_all(core: DiffusionEngineCore, num_requests: int, seconds: float) -> Count:
    assert isinstance(core.executor, UniProcDiffusionExecutor)
    worker = core.executor.worker
    gc.collect()
    objects = [type(one) for one in gc.get_objects()]
    return Count(
        num_requests=num_requests,
        seconds=round(seconds, 1),
        rss_mb=round(psutil.Process().memory_info().rss / 2**20, 1),
        states=len(worker.model_runner.states),
        request_bytes=worker.cache_manager.request_bytes,
        prompt_bytes=worker.cache_manager.get_bytes()["prompt"],
        row_caches=sum(one is RowCache for one in objects),
        contexts=sum(issubclass(one, CachedContext) for one in objects),
        tensors=sum(issubclass(one, Tensor) for one in objects),
        objects=len(objects),
    )


def find_faults(crowd: Crowd, counts: Sequence[Count], num_requests: int) -> list[str]:
    faults = []
    if crowd.running or crowd.ends.total() != num_requests or crowd.num_ended_twice:
        faults.append(f"{crowd.ends.total()} ends of {num_requests}, {len(crowd.running)} open")
    for count in counts:
        left = (count.states, count.request_bytes, count.row_caches, count.contexts)
        if any(left):
            faults.append(f"after {count.num_requests}: {left}")
    steady = counts[WARM_UP - 1 :]
    if steady and steady[-1].tensors > steady[0].tensors + 50:
        faults.append(f"tensors: {[count.tensors for count in steady]}")
    return faults


def to_markdown(report: dict[str, Any]) -> str:
    counts = report["counts"]
    columns = list(counts[0])
    lines = [
        "# Nothing stays behind",
        f"- command: `{report['command']}`",
        f"- {sum(report['ends'].values())} requests, seed {report['seed']}; ends: "
        + ", ".join(f"{name} {number}" for name, number in sorted(report["ends"].items())),
        "- caches: " + ", ".join(f"{k} {v}" for k, v in sorted(report["caches"].items())),
        f"- steps with somebody passed over: {report['num_passed_over']}; rows taken by caches: "
        f"{report['num_skipped_rows']}; evictions: {report['evictions']}; most bytes of step "
        f"caches at once: {report['max_step_cache_bytes']} of a budget of {MAX_CACHE_SIZE}",
        f"- resident memory from {counts[WARM_UP - 1]['num_requests']} requests to the end: "
        f"{report['rss_growth_mb']:+.1f} MB"
        if len(counts) >= WARM_UP
        else "- too few requests to say anything about resident memory",
        f"- faults: {'; '.join(report['faults']) or 'none'}",
        "",
        "Counted after every thousandth request, with none in the engine:",
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(str(count[name]) for name in columns)} |" for count in counts),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    args = parse_args()
    torch.set_num_threads(1)
    logging.getLogger("vllm_omni").setLevel(logging.ERROR)  # hundreds of requests are to fail
    with tempfile.TemporaryDirectory() as folder:
        core = DiffusionEngineCore(
            DiTConfig(
                model=str(write_checkpoint(Path(folder, "model"), "tiny")),
                device="cpu",
                max_num_seqs=8,
                policy="priority",
                ageing_steps=20,
                cache_config=DiTCacheConfig(max_cache_size=MAX_CACHE_SIZE),
            )
        )
        crowd, counts = run(core, args.requests, args.seed)
        core.shutdown()
    faults = find_faults(crowd, counts, args.requests)
    steady = counts[WARM_UP - 1 :]
    report = {
        "command": shlex.join(["python", *sys.argv]),
        "seed": args.seed,
        "ends": dict(crowd.ends),
        "caches": dict(crowd.caches),
        "num_passed_over": crowd.num_passed_over,
        "num_skipped_rows": crowd.num_skipped_rows,
        "evictions": dict(crowd.evictions),
        "max_step_cache_bytes": crowd.max_step_cache_bytes,
        "rss_growth_mb": round(steady[-1].rss_mb - steady[0].rss_mb, 1) if steady else None,
        "faults": faults,
        "counts": [asdict(count) for count in counts],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "cache_leak.json").write_text(json.dumps(report, indent=2) + "\n")
    (args.out / "cache_leak.md").write_text(to_markdown(report))
    print(to_markdown(report))
    return 1 if faults else 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
