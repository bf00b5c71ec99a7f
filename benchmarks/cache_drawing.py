"""How `cache_quality.py` draws: with our engine, or alone in diffusers, with a cache or without."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from vllm_omni.config import DiTCacheConfig, DiTConfig
from vllm_omni.diffusion.engine_core import DiffusionEngineCore
from vllm_omni.diffusion.messages import DiffusionRequest
from vllm_omni.models.qwen_image.input_processor import QwenImageInputProcessor
from vllm_omni.models.registry import read_json
from vllm_omni.outputs import EngineCoreOutput
from vllm_omni.params import DiffusionParams
from vllm_omni.step_cache import CacheParams, StepCacheParams, parse_cache

if TYPE_CHECKING:
    from benchmarks.demo_quality import Pixels, Task
else:  # beside this script
    from demo_quality import Pixels, Task

SIDE = 256
NUM_STEPS = 20
GUIDANCE = 3.0
CHUNK = 4  # pictures that a process draws alone before it takes others


@dataclass(frozen=True)
class Setting:
    """A cache in words: a method, for ours its threshold, and further fields."""

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

    def parse(self) -> CacheParams | None:
        """For our engine; what is not written is as in any model, not as the demo model has it."""
        cache = parse_cache(self.fields)
        return cache.with_defaults() if isinstance(cache, StepCacheParams) else cache


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
    cpu_seconds: float  # of the process: what others do on the machine has less of a part in it

    def take_faster(self, other: Drawing) -> Drawing:
        """The same pictures, with the shorter times of both."""
        return replace(
            self,
            seconds=min(self.seconds, other.seconds),
            cpu_seconds=min(self.cpu_seconds, other.cpu_seconds),
        )


class Artist(Protocol):
    """What draws."""

    def draw(self, tasks: Sequence[Task], setting: Setting) -> Drawing: ...


# --- inside the engine ---


class Engine:
    """Draws all prompts in one batch, as far as it has room; encodes every prompt once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.core = DiffusionEngineCore(
            DiTConfig(
                model=str(args.model),
                device=args.device,
                dtype="float32",
                enforce_eager=True,  # nothing is timed on a GPU, and compiling takes long
                max_num_seqs=args.batch,
                max_num_resident=args.batch,
                max_num_batched_tokens=args.batch * 2 * (SIDE * SIDE // 256 + 64),
                decode_batch_size=min(args.batch, 50),
                cache_config=DiTCacheConfig(max_cache_size=8 * 2**30, cache_cleanup_interval=1e6),
            )
        )
        self.processor = QwenImageInputProcessor(args.model)
        self.num_layers: int = read_json(args.model, "transformer/config.json")["num_layers"]

    def draw(self, tasks: Sequence[Task], setting: Setting) -> Drawing:
        start, cpu_start = time.perf_counter(), time.process_time()
        for index, task in enumerate(tasks):
            params = DiffusionParams(
                negative_prompt=" ",
                true_cfg_scale=GUIDANCE,
                width=SIDE,
                height=SIDE,
                num_inference_steps=NUM_STEPS,
                seed=task.seed,
                cache=setting.parse(),
            )
            inputs = self.processor.process(task.prompt, params)
            self.core.add_request(DiffusionRequest(request_id=str(index), custom_inputs=inputs))
        ended = self._run()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        outputs = [ended[str(index)] for index in range(len(tasks))]
        return Drawing(
            pictures=[_pixels_of(output) for output in outputs],
            num_blocks=sum(map(self._count_blocks, outputs)),
            seconds=seconds,
            cpu_seconds=cpu_seconds,
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


# --- alone in diffusers ---


@cache
def load_pipeline(model: Path, device: str) -> Any:
    """The stock pipeline; `num_blocks` of its transformer counts computed blocks."""
    from diffusers import QwenImagePipeline

    pipeline = QwenImagePipeline.from_pretrained(model, dtype=torch.float32).to(device)
    pipeline.set_progress_bar_config(disable=True)
    network = pipeline.transformer
    network.num_blocks = 0

    def count(*_: Any) -> None:
        network.num_blocks += 1

    # A block that a cache leaves out is still called; its attention is not.
    for block in network.transformer_blocks:
        block.attn.register_forward_pre_hook(count)
    return pipeline


class Alone:
    """Draws one picture after another, as users of diffusers do; on CPUs in many processes."""

    def __init__(self, args: argparse.Namespace, pool: ProcessPoolExecutor | None) -> None:
        self.model = args.model
        self.device = args.device
        self.pool = pool if self.device == "cpu" else None

    def draw(self, tasks: Sequence[Task], setting: Setting) -> Drawing:
        if self.pool is None:
            return draw_alone(self.model, self.device, setting, tasks)
        parts = [
            self.pool.submit(
                draw_alone, self.model, self.device, setting, tasks[start : start + CHUNK]
            )
            for start in range(0, len(tasks), CHUNK)
        ]
        drawings = [part.result() for part in parts]
        return Drawing(
            pictures=[picture for drawing in drawings for picture in drawing.pictures],
            num_blocks=sum(drawing.num_blocks for drawing in drawings),
            seconds=sum(drawing.seconds for drawing in drawings),
            cpu_seconds=sum(drawing.cpu_seconds for drawing in drawings),
        )


def draw_alone(model: Path, device: str, setting: Setting, tasks: Sequence[Task]) -> Drawing:
    """With the pipeline of this process."""
    pipeline = load_pipeline(model, device)
    network = pipeline.transformer
    before = network.num_blocks
    start, cpu_start = time.perf_counter(), time.process_time()
    pictures = [_draw_one(pipeline, setting, task) for task in tasks]
    return Drawing(
        pictures=pictures,
        num_blocks=network.num_blocks - before,
        seconds=time.perf_counter() - start,
        cpu_seconds=time.process_time() - cpu_start,
    )


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
