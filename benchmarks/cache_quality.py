"""Step caches on the demo model: does it still draw what it is told, and how much work is left?

Held-out prompts of `demo_quality`, 256x256, 20 steps, guidance 3, float32, each drawn with every
setting of every cache: ours inside the engine, all pictures in one batch; Cache-DiT and diffusers'
own FirstBlockCache alone in diffusers, one picture at a time. Reported: the percent of pictures
that show all they were told (`training.judge`), block computations and PSNR against no cache, and
seconds. Scores are taken on many prompts, seconds on a quiet CPU, where nothing is judged:

    export PYTHONPATH=.    # where vLLM-omni is not installed, with vendor/ as told below
    bench="python benchmarks/cache_quality.py"
    $bench --device cuda --processes 12 --out scores.json
    $bench --engine diffusers --device cuda --prompts 60 --processes 3 --out alone.json
    $bench --prompts 8 --batch 4 --rounds 2 --out clock.json
    $bench --engine diffusers --prompts 8 --rounds 2 --out clock_alone.json
    $bench --report scores.json alone.json --clock clock.json clock_alone.json --out table.md

No vLLM is needed. For a machine without diffusers see README.md; the wheel of cache-dit 1.5.3 joins
the others in `vendor/` and on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from training.judge import judge
from vllm_omni.benchmark.cache import get_psnr

if TYPE_CHECKING:
    from benchmarks.cache_drawing import Alone, Artist, Drawing, Engine, Setting
    from benchmarks.demo_quality import Pixels, Task, make_tasks
else:  # beside this script
    from cache_drawing import Alone, Artist, Drawing, Engine, Setting
    from demo_quality import Pixels, Task, make_tasks

OURS, ALONE = "vllm-omni", "diffusers"

SETTINGS: Mapping[str, Sequence[str]] = {
    OURS: (
        "none",
        *(f"first_block {threshold}" for threshold in (0.2, 0.22)),
        *(f"first_block {threshold} max_skips=2" for threshold in (0.25, 0.3)),
        "tea 0.2",
        *(f"tea {threshold} warmup_steps=3" for threshold in (0.2, 0.25)),
        "taylor 0.2",
        *(f"taylor {threshold} extrapolation=0.5" for threshold in (0.2, 0.22, 0.25)),
        "taylor 0.25 max_skips=2 extrapolation=0.5",
        "taylor 0.2 order=2 extrapolation=0.25",
    ),
    ALONE: (
        "none",
        "first_block 0.2",
        "cache_dit residual_diff_threshold=0.2 max_warmup_steps=2",
        "cache_dit residual_diff_threshold=0.2 max_warmup_steps=2 calibrator=taylorseer",
    ),
}
"""By engine, no cache first."""


# --- the run ---


@dataclass(frozen=True, eq=False)
class Judged:
    """A setting, what came of it, and the verdicts, which may still be on their way."""

    setting: Setting
    drawing: Drawing
    verdicts: list[Future[bool]]

    @property
    def are_right(self) -> list[bool]:
        return [verdict.result() for verdict in self.verdicts]


class Bench:
    """Draws with every setting, and judges in processes beside it."""

    def __init__(self, args: argparse.Namespace, pool: ProcessPoolExecutor | None) -> None:
        self.args = args
        self.pool = pool
        self.tasks = make_tasks(args.prompts)
        self.artist: Artist = Engine(args) if args.engine == OURS else Alone(args, pool)

    def run(self) -> Iterator[dict[str, Any]]:
        """The figures of each setting; it is judged while the next one is drawn."""
        settings = [Setting(cache) for cache in self.args.settings or SETTINGS[self.args.engine]]
        self.artist.draw(self.tasks[:1], settings[0])  # everything is loaded
        judged: list[Judged] = []
        for setting, drawing in self._draw(settings):
            judged.append(Judged(setting, drawing, self._judge(drawing.pictures)))
            if len(judged) > 1:
                yield self._report(judged[-2], judged[0])
        yield self._report(judged[-1], judged[0])

    def _draw(self, settings: Sequence[Setting]) -> Iterator[tuple[Setting, Drawing]]:
        """Each as soon as it is there; in several rounds all take turns, and the fastest counts."""
        best: dict[Setting, Drawing] = {}
        for number in range(1, self.args.rounds + 1):
            for setting in settings:
                drawing = self.artist.draw(self.tasks, setting)
                print(f"{drawing.seconds:8.2f} s  {setting.cache}", file=sys.stderr, flush=True)
                best[setting] = best.get(setting, drawing).take_faster(drawing)
                if number == self.args.rounds:
                    yield setting, best[setting]

    def _judge(self, pictures: Sequence[Pixels]) -> list[Future[bool]]:
        if self.pool is None:
            return []
        pairs = zip(pictures, self.tasks, strict=True)
        return [self.pool.submit(is_right, picture, task) for picture, task in pairs]

    def _report(self, one: Judged, plain: Judged) -> dict[str, Any]:
        drawing, without = one.drawing, plain.drawing
        psnrs = [get_psnr(a, b) for a, b in zip(drawing.pictures, without.pictures, strict=True)]
        return {
            "engine": self.args.engine,
            "cache": one.setting.cache,
            "prompts": len(drawing.pictures),
            "block_ratio": round(without.num_blocks / drawing.num_blocks, 3),
            "psnr": round(float(np.mean(psnrs)), 1),
            "worst_psnr": round(min(psnrs), 1),
            "seconds": round(drawing.seconds, 2),
            "cpu_seconds": round(drawing.cpu_seconds, 2),
            "time_ratio": round(without.seconds / drawing.seconds, 3),
            "cpu_time_ratio": round(without.cpu_seconds / drawing.cpu_seconds, 3),
            **(self._score(one, plain) if one.verdicts else {}),
        }

    def _score(self, one: Judged, plain: Judged) -> dict[str, Any]:
        """Percent of the pictures that are right, and how many are right in only one of both."""
        right = one.are_right
        pairs = list(zip(right, plain.are_right, strict=True))
        kinds: dict[str, list[bool]] = {}
        for task, is_one_right in zip(self.tasks, right, strict=True):
            kinds.setdefault(task.kind, []).append(is_one_right)
        return {
            "score": percent(right),
            "lost": sum(was and not now for now, was in pairs),
            "won": sum(now and not was for now, was in pairs),
            "kinds": {kind: percent(of_kind) for kind, of_kind in kinds.items()},
        }


def is_right(picture: Pixels, task: Task) -> bool:
    """Whether everything that was said is there."""
    return all(judge(picture, task.scene, task.said).values())


def percent(values: Sequence[bool]) -> float:
    return round(100 * float(np.mean(values)), 1)


def measure(args: argparse.Namespace) -> None:
    """Write what is there after every setting."""
    report: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "results": [],
    }
    start = time.perf_counter()
    pool = make_pool(args.processes) if args.processes else None
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for result in Bench(args, pool).run():
        report["results"].append(result)
        report["seconds"] = round(time.perf_counter() - start, 1)
        report["load"] = os.getloadavg()[1]  # of the last five minutes
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    if pool is not None:
        pool.shutdown()
    print(to_markdown([report], [report]), end="")


def make_pool(num_processes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        num_processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    )


# --- the table ---


def to_markdown(scores: Sequence[dict[str, Any]], clocks: Sequence[dict[str, Any]]) -> str:
    """Scores of some runs and seconds of others, setting by setting."""
    timed = {(one["engine"], one["cache"]): one for clock in clocks for one in clock["results"]}
    lines = [
        "| engine | cache | score, % | lost / won | block computations | PSNR, dB (worst) "
        "| seconds a picture | of the CPU | times faster | by CPU time |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    scored = {
        (one["engine"], one["cache"]): one
        for report in reversed(scores)
        for one in report["results"]
    }  # where several have scored it, the first counts
    for one in sorted(scored.values(), key=_order):
        time_of = timed.get((one["engine"], one["cache"]))
        score = f"{one['score']} of {one['prompts']}" if "score" in one else ""
        cells = [
            one["engine"],
            one["cache"],
            score,
            f"{one['lost']} / {one['won']}" if score else "",
            f"{one['block_ratio']:.2f}x fewer",
            "" if one["cache"] == "none" else f"{one['psnr']} ({one['worst_psnr']})",
            *(
                f"{time_of[name] / time_of['prompts']:.2f}" if time_of else ""
                for name in ("seconds", "cpu_seconds")
            ),
            *(
                f"{time_of[name]:.2f}" if time_of else ""
                for name in ("time_ratio", "cpu_time_ratio")
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _order(one: dict[str, Any]) -> tuple[bool, bool, str]:
    return one["engine"] == ALONE, one["cache"] != "none", one["cache"]


def main() -> None:
    args = parse_args()
    if args.report:
        scores, clocks = (
            [json.loads(path.read_text()) for path in paths] for paths in (args.report, args.clock)
        )
        args.out.write_text(to_markdown(scores, clocks))
    else:
        measure(args)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=list(SETTINGS), default=OURS)
    parser.add_argument("--model", type=Path, default=Path("vllm_omni/demo"))
    parser.add_argument("--out", type=Path, required=True, help="JSON, or Markdown of --report")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to draw")
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--batch", type=int, default=300, help="pictures in a step of our engine")
    parser.add_argument("--rounds", type=int, default=1, help="the fastest counts")
    parser.add_argument(
        "--processes", type=int, default=0, help="that judge, or draw alone; 0: only time is taken"
    )
    parser.add_argument(
        "--setting",
        dest="settings",
        action="append",
        metavar="CACHE",
        help="instead of all, such as 'tea 0.2'; repeatable, the first is what is compared with",
    )
    parser.add_argument("--report", type=Path, nargs="+", metavar="SCORES")
    parser.add_argument("--clock", type=Path, nargs="+", default=[], metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
