"""Pictures per second on this CPU: stock diffusers one at a time, this engine at concurrency 1 and
8, and what the engine itself adds to a step.

    python benchmarks/engine_cpu.py [--steps 20] [--rounds 3] [--json FILE]

A round is the same eight requests (mixed sizes, half of them guided, drawn to pixels) by each of
the three in turn. A first round is for warming up and for the check that all three draw the same
latents. Whatever else the machine does disturbs neighbours in time alike, so the ratios within a
round are steadier than the rates; on a busy machine `--threads 1` is steadier still, because
threads that wait for each other lose most when others take their cores.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm_omni.diffusion.engine_core import DiffusionEngineCore
from vllm_omni.engine.stage_client import EmbeddedStageClient
from vllm_omni.entrypoints.omni import Omni
from vllm_omni.models.qwen_image.checkpoint import CHECKPOINT_SIZES, write_checkpoint
from vllm_omni.outputs import EngineCoreOutputs

if TYPE_CHECKING:
    from benchmarks import drawing, gpu_report
else:
    import drawing  # beside this script
    import gpu_report

CONCURRENCY = 8
MAX_LATENTS_DIFFERENCE = 1e-4  # of latents, float32

Draw = Callable[[Sequence[drawing.Case]], list[drawing.Drawn]]


@dataclass(frozen=True)
class Spread:
    """Median and extremes over rounds."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:8.3f} {self.min:8.3f} {self.max:8.3f}"


@dataclass
class Contender:
    """One way of drawing the cases."""

    name: str
    draw: Draw
    seconds: list[float] = field(default_factory=list)  # of each counted round


class StepClock:
    """Notes of each pure denoising step the seconds spent outside the model's networks.

    Steps in which a request starts (text encoding) or ends (decoding) are left out.
    """

    def __init__(self, core: DiffusionEngineCore) -> None:
        self.overheads: list[float] = []
        self._core = core
        self._step = core.step
        core.step = self._timed_step  # type: ignore[method-assign]

    def _timed_step(self) -> tuple[dict[int, EngineCoreOutputs], bool]:
        start = time.perf_counter()
        news, has_worked = self._step()
        overhead = time.perf_counter() - start - self._core.model_time
        outputs = [output for by_client in news.values() for output in by_client.outputs]
        if outputs and all(not o.finished and o.output_metadata["step"] > 1 for o in outputs):
            self.overheads.append(overhead)
        return news, has_worked

    def summary(self) -> dict[str, float]:
        return {
            "median_ms": 1e3 * statistics.median(self.overheads),
            "p95_ms": 1e3 * statistics.quantiles(self.overheads, n=20)[-1],
            "num_steps": len(self.overheads),
        }


def main() -> None:
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or write_checkpoint(Path(folder, "model"), args.size_of_checkpoint)
        report = measure(model, args.steps, args.rounds)
    print_report(report)
    if args.json:
        args.json.write_text(json.dumps({**describe_run(args), **report}, indent=2) + "\n")


def measure(model: Path, num_steps: int, num_rounds: int) -> dict[str, Any]:
    load_before = os.getloadavg()
    stock = drawing.StockPipeline(model, "cpu", torch.float32)
    # An engine each, so that neither finds the other's prompts encoded.
    with (
        Omni(str(model), device="cpu", dtype="float32") as alone,
        Omni(str(model), device="cpu", dtype="float32") as together,
    ):
        contenders = [
            Contender("stock diffusers", lambda cases: [stock.draw(case) for case in cases]),
            Contender("concurrency 1", lambda cases: draw_one_by_one(alone, cases)),
            Contender("concurrency 8", lambda cases: drawing.draw_with_omni(together, cases)),
        ]
        difference = check(contenders, drawing.make_cases(CONCURRENCY, num_steps))
        clocks = {1: StepClock(core_of(alone)), 8: StepClock(core_of(together))}
        for round_index in range(1, num_rounds + 1):
            cases = drawing.make_cases(CONCURRENCY, num_steps, round_index)
            for contender in contenders:
                start = time.perf_counter()
                contender.draw(cases)
                contender.seconds.append(time.perf_counter() - start)
    return {
        "max_latents_difference": difference,
        "engines": [compare(contender, contenders[0]) for contender in contenders],
        "overhead_per_step": {number: clock.summary() for number, clock in clocks.items()},
        "load_average": {"before": load_before, "after": os.getloadavg()},
    }


def core_of(omni: Omni) -> DiffusionEngineCore:
    """The diffusion engine behind an embedded model."""
    client = omni.llm.coordinator.clients[1]
    assert isinstance(client, EmbeddedStageClient)
    core = client.embedded.engine_core.stage_engines[1]
    assert isinstance(core, DiffusionEngineCore)
    return core


def draw_one_by_one(omni: Omni, cases: Sequence[drawing.Case]) -> list[drawing.Drawn]:
    return [drawn for case in cases for drawn in drawing.draw_with_omni(omni, [case])]


def check(contenders: Sequence[Contender], cases: Sequence[drawing.Case]) -> float:
    """The warm-up round; all must draw what the first one draws."""
    reference, *others = [contender.draw(cases) for contender in contenders]
    difference = max(drawing.max_difference(drawn, reference) for drawn in others)
    print(f"latents differ from stock by at most {difference:.1e}", flush=True)
    if not difference <= MAX_LATENTS_DIFFERENCE:  # so that NaN fails
        sys.exit(f"that is more than {MAX_LATENTS_DIFFERENCE}: nothing to compare")
    return difference


def compare(contender: Contender, stock: Contender) -> dict[str, Any]:
    ratios = [theirs / ours for theirs, ours in zip(stock.seconds, contender.seconds, strict=True)]
    return {
        "name": contender.name,
        "images_per_second": asdict(Spread.of([CONCURRENCY / s for s in contender.seconds])),
        "times_stock": asdict(Spread.of(ratios)),
        "seconds": contender.seconds,
    }


def print_report(report: dict[str, Any]) -> None:
    columns = f"{'median':>8} {'min':>8} {'max':>8}"
    print(f"\n{'':16}  {'images/s':^26}   {'times stock, same round':^26}")
    print(f"{'':16}  {columns}   {columns}")
    for engine in report["engines"]:
        rate, ratio = Spread(**engine["images_per_second"]), Spread(**engine["times_stock"])
        print(f"{engine['name']:16}  {rate}   {ratio}")
    print(f"\n{'own time per step':24}  {'median':>8} {'p95':>8}")
    for number, summary in report["overhead_per_step"].items():
        name = f"at concurrency {number}, ms"
        steps = f"over {summary['num_steps']} steps"
        print(f"{name:24}  {summary['median_ms']:8.3f} {summary['p95_ms']:8.3f}   {steps}")
    for moment, load in report["load_average"].items():
        print(f"load average {moment}: {load[0]:.2f} (1 min) {load[1]:.2f} (5 min)")


def describe_run(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": gpu_report.get_versions(),
        "cpu": get_cpu_name(),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "model": str(args.model or f"random weights, {args.size_of_checkpoint}"),
        "num_steps": args.steps,
        "num_rounds": args.rounds,
        "cases": [asdict(case) for case in drawing.make_cases(CONCURRENCY, args.steps, 1)],
    }


def get_cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", type=Path, help="checkpoint; random weights when not given")
    parser.add_argument("--size-of-checkpoint", choices=CHECKPOINT_SIZES, default="small")
    parser.add_argument("--threads", type=int, help="of torch; its own choice when not given")
    parser.add_argument("--steps", type=int, default=20, help="of each picture, at least 4")
    parser.add_argument("--rounds", type=int, default=3, help="counted ones")
    parser.add_argument("--json", type=Path, help="write everything here as well")
    args = parser.parse_args()
    if args.steps < 4 or args.rounds < 1:
        parser.error("--steps must be at least 4 and --rounds at least 1")
    return args


if __name__ == "__main__":
    main()
