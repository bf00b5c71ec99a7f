"""Step caches on the demo model: does it still draw what it is told, and how much work is left?

Held-out prompts of `demo_quality`, 256x256, 20 steps, guidance 3, float32, each drawn with every
setting of every cache: ours inside the engine, all pictures in one batch; Cache-DiT and diffusers'
own FirstBlockCache alone in diffusers, one picture at a time. Reported: the percent of pictures
that show all they were told (`training.judge`), block computations and PSNR against no cache, and
seconds. Two halves make the table, scores on many prompts and seconds on a quiet CPU:

    PYTHONPATH=.:vendor/site:vendor/diffusers-0.42.1-py3-none-any.whl:\\
    vendor/cache_dit-1.5.3-py3-none-any.whl python3 benchmarks/cache_quality.py --device cuda \\
        --prompts 300 --alone-prompts 96 --processes 15 --out $OUT/scores.json
    python benchmarks/cache_quality.py --prompts 12 --alone-prompts 6 --rounds 2 --out clock.json
    python benchmarks/cache_quality.py --report scores.json clock.json --out cache_quality.md

`vendor/`: see benchmarks/packed_step_gpu.py; with cache-dit 1.5.3 beside it. No vLLM is needed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from training.judge import judge
from vllm_omni.benchmark.cache import get_psnr
from vllm_omni.config import DiTCacheConfig, DiTConfig
from vllm_omni.diffusion.engine_core import DiffusionEngineCore
from vllm_omni.diffusion.messages import DiffusionRequest
from vllm_omni.models.qwen_image.input_processor import QwenImageInputProcessor
from vllm_omni.models.registry import read_json
from vllm_omni.outputs import EngineCoreOutput
from vllm_omni.params import DiffusionParams
from vllm_omni.step_cache import parse_cache

if TYPE_CHECKING:
    from benchmarks.demo_quality import Pixels, Task, make_tasks
else:  # beside this script
    from demo_quality import Pixels, Task, make_tasks

SIDE = 256
NUM_STEPS = 20
GUIDANCE = 3.0
CHUNK = 4  # pictures that a process draws alone before it takes others
OURS, ALONE = "vllm-omni", "diffusers"

SETTINGS: tuple[tuple[str, str], ...] = (
    (OURS, "none"),
    *((OURS, f"first_block {t}") for t in ("0.15", "0.2", "0.25", "0.3", "0.4")),
    *((OURS, f"tea {t}") for t in ("0.15", "0.2", "0.25", "0.3", "0.4")),
    *((OURS, f"taylor {t}") for t in ("0.15", "0.2", "0.25", "0.3", "0.4")),
    *((OURS, f"taylor {t} order=2") for t in ("0.2", "0.25", "0.3")),
    (ALONE, "none"),
    (ALONE, "first_block 0.25"),
    (ALONE, "cache_dit residual_diff_threshold=0.25 max_warmup_steps=2"),
    (
        ALONE,
        "cache_dit residual_diff_threshold=0.25 max_warmup_steps=2 calibrator=taylorseer",
    ),
)
"""Engine and cache: a method, for ours its threshold, and further fields."""


@dataclass(frozen=True)
class Setting:
    """A cache, and whose engine has it."""

    engine: str
    cache: str

    @cached_property
    def fields(self) -> dict[str, Any] | None:
        """What `parse_cache` takes."""
        method, *words = self.cache.split()
        if method == "none":
            return None
        given: dict[str, Any] = {}
        for word in words:
            name, _, value = word.rpartition("=")
            given[name or "threshold"] = _parse_value(value)
        return {"method": method, **({"options": given} if method == "cache_dit" else given)}

    @property
    def is_alone(self) -> bool:
        return self.engine == ALONE


def _parse_value(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


@dataclass(frozen=True, eq=False)
class Drawing:
    """What came of all prompts with one setting."""

    pictures: list[Pixels]
    num_blocks: int  # computed, over all rows of all steps
    seconds: float


# --- inside the engine ---


class Engine:
    """Draws all prompts in one batch, as far as it has room; encodes every prompt once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.core = DiffusionEngineCore(
            DiTConfig(
                model=str(args.model),
                device=args.device,
                dtype="float32",
                max_num_seqs=args.batch,
                max_num_resident=args.batch,
                max_num_batched_tokens=args.batch * 2 * (SIDE * SIDE // 256 + 64),
                decode_batch_size=min(args.batch, 50),
                cache_config=DiTCacheConfig(max_cache_size=8 * 2**30, cache_cleanup_interval=1e6),
            )
        )
        self.processor = QwenImageInputProcessor(args.model)
        self.num_layers: int = read_json(args.model, "transformer/config.json")["num_layers"]

    def draw(self, tasks: Sequence[Task], setting: Setting, num_steps: int = NUM_STEPS) -> Drawing:
        start = time.perf_counter()
        for index, task in enumerate(tasks):
            params = DiffusionParams(
                negative_prompt=" ",
                true_cfg_scale=GUIDANCE,
                width=SIDE,
                height=SIDE,
                num_inference_steps=num_steps,
                seed=task.seed,
                cache=parse_cache(setting.fields),
            )
            inputs = self.processor.process(task.prompt, params)
            self.core.add_request(DiffusionRequest(request_id=str(index), custom_inputs=inputs))
        ended = self._run()
        seconds = time.perf_counter() - start
        outputs = [ended[str(index)] for index in range(len(tasks))]
        return Drawing(
            pictures=[_pixels_of(output) for output in outputs],
            num_blocks=sum(map(self._count_blocks, outputs)),
            seconds=seconds,
        )

    def _run(self) -> dict[str, EngineCoreOutput]:
        ended: dict[str, EngineCoreOutput] = {}
        while self.core.has_requests():
            news, _ = self.core.step()
            for outputs in news.values():
                ended |= {one.request_id: one for one in outputs.outputs if one.finished}
        return ended

    def _count_blocks(self, output: EngineCoreOutput) -> int:
        num_rows, num_skipped = (
            int(output.output_metadata[name]) for name in ("num_rows", "num_skipped_rows")
        )
        return num_rows * self.num_layers - num_skipped * (self.num_layers - 1)


def _pixels_of(output: EngineCoreOutput) -> Pixels:
    if output.error is not None:
        raise output.error.to_exception()
    assert output.pooling_output is not None
    pixels: Pixels = output.pooling_output.permute(1, 2, 0).numpy()
    return pixels


# --- alone in diffusers, on the CPU ---


@cache
def load_pipeline(model: Path) -> Any:
    """The stock pipeline; `num_blocks` of its transformer counts computed blocks."""
    from diffusers import QwenImagePipeline

    pipeline = QwenImagePipeline.from_pretrained(model, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    network = pipeline.transformer
    network.num_blocks = 0

    def count(*_: Any) -> None:
        network.num_blocks += 1

    # A block that a cache leaves out is still called; its attention is not.
    for block in network.transformer_blocks:
        block.attn.register_forward_pre_hook(count)
    return pipeline


def draw_alone(model: Path, setting: Setting, tasks: Sequence[Task]) -> Drawing:
    """One picture after another, as users of diffusers call it."""
    pipeline = load_pipeline(model)
    network = pipeline.transformer
    before = network.num_blocks
    start = time.perf_counter()
    pictures = [_draw_one(pipeline, setting, task) for task in tasks]
    return Drawing(pictures, network.num_blocks - before, time.perf_counter() - start)


def _draw_one(pipeline: Any, setting: Setting, task: Task) -> Pixels:
    with _Cached(pipeline, setting):
        [image] = pipeline(
            prompt=task.prompt,
            negative_prompt=" ",
            true_cfg_scale=GUIDANCE,
            width=SIDE,
            height=SIDE,
            num_inference_steps=NUM_STEPS,
            generator=torch.Generator("cpu").manual_seed(task.seed),
        ).images
    return np.asarray(image.convert("RGB"))


class _Cached:
    """A cache for as long as it is entered."""

    def __init__(self, pipeline: Any, setting: Setting) -> None:
        self.pipeline = pipeline
        self.fields = setting.fields or {"method": "none"}

    def __enter__(self) -> None:
        from diffusers import FirstBlockCacheConfig

        network = self.pipeline.transformer
        if self.fields["method"] == "first_block":
            network.enable_cache(FirstBlockCacheConfig(threshold=self.fields["threshold"]))
        elif self.fields["method"] == "cache_dit":
            import cache_dit

            from vllm_omni.cache_dit_params import CacheDiTParams
            from vllm_omni.plugins.cache_dit import make_configs

            config, calibrator = make_configs(
                CacheDiTParams(options=self.fields["options"]),
                len(network.transformer_blocks),
                NUM_STEPS,
                is_guided=True,
            )
            cache_dit.enable_cache(self.pipeline, cache_config=config, calibrator_config=calibrator)

    def __exit__(self, *_: object) -> None:
        if self.fields["method"] == "first_block":
            self.pipeline.transformer.disable_cache()
        elif self.fields["method"] == "cache_dit":
            import cache_dit

            cache_dit.disable_cache(self.pipeline)


# --- the run ---


class Bench:
    """Draws and judges; with `--processes`, judging and drawing alone go on beside the engine."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tasks = make_tasks(max(args.prompts, args.alone_prompts))
        self.pool = ProcessPoolExecutor(
            max(1, args.processes),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=torch.set_num_threads,
            initargs=(1,),
        )

    def run(self) -> list[dict[str, Any]]:
        settings = [Setting(*pair) for pair in self._select()]
        ours = [setting for setting in settings if not setting.is_alone]
        alone = [setting for setting in settings if setting.is_alone]
        started = {setting: self._start_alone(setting) for setting in alone}
        drawn = self._draw_ours(ours)
        drawn |= {setting: _join(parts) for setting, parts in started.items()}
        marks = {setting: self._judge(drawing.pictures) for setting, drawing in drawn.items()}
        right = {setting: [future.result() for future in of] for setting, of in marks.items()}
        self.pool.shutdown()
        plain = {setting.engine: setting for setting in settings if setting.fields is None}
        return [
            self._report(
                setting,
                drawn[setting],
                drawn[plain[setting.engine]],
                right[setting],
                right[plain[setting.engine]],
            )
            for setting in settings
        ]

    def _select(self) -> list[tuple[str, str]]:
        wanted = self.args.settings
        return [
            pair
            for pair in (wanted or SETTINGS)
            if (self.args.alone_prompts if pair[0] == ALONE else self.args.prompts)
        ]

    def _draw_ours(self, settings: Sequence[Setting]) -> dict[Setting, Drawing]:
        if not settings:
            return {}
        engine = Engine(self.args)
        tasks = self.tasks[: self.args.prompts]
        engine.draw(tasks, settings[0], num_steps=1)  # prompts are encoded, memory is there
        drawn: dict[Setting, Drawing] = {}
        for _ in range(self.args.rounds):
            for setting in settings:
                drawing = engine.draw(tasks, setting)
                if setting not in drawn or drawing.seconds < drawn[setting].seconds:
                    drawn[setting] = drawing
                print(f"{drawing.seconds:8.2f} s  {setting.cache}", file=sys.stderr, flush=True)
        engine.core.shutdown()
        return drawn

    def _start_alone(self, setting: Setting) -> list[Future[Drawing]]:
        tasks = self.tasks[: self.args.alone_prompts]
        chunks = [tasks[start : start + CHUNK] for start in range(0, len(tasks), CHUNK)]
        started = [
            self.pool.submit(draw_alone, self.args.model, setting, chunk) for chunk in chunks
        ]
        if not self.args.processes:  # nothing else is to run while it is timed
            for future in started:
                future.result()
        return started

    def _judge(self, pictures: Sequence[Pixels]) -> list[Future[bool]]:
        return [
            self.pool.submit(is_right, picture, task)
            for picture, task in zip(pictures, self.tasks, strict=False)
        ]

    def _report(
        self,
        setting: Setting,
        drawing: Drawing,
        plain: Drawing,
        right: Sequence[bool],
        plain_right: Sequence[bool],
    ) -> dict[str, Any]:
        pairs = list(zip(right, plain_right, strict=True))
        psnrs = [get_psnr(a, b) for a, b in zip(drawing.pictures, plain.pictures, strict=True)]
        kinds: dict[str, list[bool]] = {}
        for task, is_one_right in zip(self.tasks, right, strict=False):
            kinds.setdefault(task.kind, []).append(is_one_right)
        return {
            "engine": setting.engine,
            "cache": setting.cache,
            "prompts": len(right),
            "score": percent(right),
            "lost": sum(was and not now for now, was in pairs),
            "won": sum(now and not was for now, was in pairs),
            "kinds": {kind: percent(of_kind) for kind, of_kind in kinds.items()},
            "block_ratio": round(plain.num_blocks / drawing.num_blocks, 3),
            "psnr": round(float(np.mean(psnrs)), 1),
            "worst_psnr": round(min(psnrs), 1),
            "seconds": round(drawing.seconds, 2),
            "time_ratio": round(plain.seconds / drawing.seconds, 3),
        }


def is_right(picture: Pixels, task: Task) -> bool:
    """Whether everything that was said is there."""
    return all(judge(picture, task.scene, task.said).values())


def _join(parts: Sequence[Future[Drawing]]) -> Drawing:
    drawings = [part.result() for part in parts]
    return Drawing(
        pictures=[picture for drawing in drawings for picture in drawing.pictures],
        num_blocks=sum(drawing.num_blocks for drawing in drawings),
        seconds=sum(drawing.seconds for drawing in drawings),
    )


def percent(values: Sequence[bool]) -> float:
    return round(100 * float(np.mean(values)), 1)


# --- the table ---


def to_markdown(scores: dict[str, Any], clock: dict[str, Any]) -> str:
    """Scores of one run and seconds of another, setting by setting."""
    timed = {(one["engine"], one["cache"]): one for one in clock["results"]}
    lines = [
        "| engine | cache | score, % | lost / won | block computations | PSNR, dB (worst) "
        "| seconds a picture | times faster |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in scores["results"]:
        time_of = timed.get((one["engine"], one["cache"]))
        seconds = f"{time_of['seconds'] / time_of['prompts']:.2f}" if time_of else ""
        faster = f"{time_of['time_ratio']:.2f}" if time_of else ""
        psnr = "" if one["cache"] == "none" else f"{one['psnr']} ({one['worst_psnr']})"
        lines.append(
            f"| {one['engine']} | {one['cache']} | {one['score']} of {one['prompts']} "
            f"| {one['lost']} / {one['won']} | {one['block_ratio']:.2f}x fewer | {psnr} "
            f"| {seconds} | {faster} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    args = parse_args()
    if args.report is not None:
        args.out.write_text(to_markdown(*(json.loads(path.read_text()) for path in args.report)))
        return
    start = time.perf_counter()
    report = {
        "command": shlex.join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "results": Bench(args).run(),
    }
    report["seconds"] = round(time.perf_counter() - start, 1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    print(to_markdown(report, report), end="")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("vllm_omni/demo"))
    parser.add_argument("--out", type=Path, required=True, help="JSON, or Markdown of --report")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the engine")
    parser.add_argument("--prompts", type=int, default=300, help="for the engine; 0: none")
    parser.add_argument("--alone-prompts", type=int, default=96, help="for diffusers; 0: none")
    parser.add_argument("--batch", type=int, default=300, help="pictures in a step")
    parser.add_argument("--rounds", type=int, default=1, help="of the engine; the fastest counts")
    parser.add_argument(
        "--processes", type=int, default=0, help="beside the engine; 0: one after another"
    )
    parser.add_argument(
        "--setting",
        dest="settings",
        action="append",
        type=lambda text: tuple(text.split(":", 1)),
        metavar="ENGINE:CACHE",
        help="instead of all; repeatable, 'vllm-omni:none' first",
    )
    parser.add_argument("--report", type=Path, nargs=2, metavar=("SCORES", "CLOCK"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
