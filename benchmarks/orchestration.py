"""What two engines working as one cost, and what they gain.

    python benchmarks/orchestration.py [--rounds 15] [--json FILE]

Overhead: a 256 x 256 picture of 20 steps by the bare diffusion engine core, which encodes the
prompt itself, and by `OmniAsyncLLM` in both modes, where vLLM does; in turn, a new prompt each
time. Whatever else runs on the machine moves these times by more than they differ, so there is a
second figure: what of an embedded request's time is not inside a step of its diffusion engine,
which is all of vLLM's part and all of the way between the two. Overlap: text requests and pictures
at the same time, in both modes, beside each alone. One torch thread in every process, so that two
stages can use two cores and nothing else differs.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vllm_omni import DiffusionParams, OmniAsyncLLM, OmniRequest
from vllm_omni.config import DiTConfig, Mode
from vllm_omni.diffusion.engine_core import DiffusionEngineCore
from vllm_omni.diffusion.messages import DiffusionRequest
from vllm_omni.engine.stage_client import EmbeddedStageClient
from vllm_omni.models.qwen_image.checkpoint import write_checkpoint
from vllm_omni.models.qwen_image.input_processor import QwenImageInputProcessor

MODES: tuple[Mode, ...] = ("embedded", "process")
PARAMS = DiffusionParams(height=256, width=256, num_inference_steps=20, seed=1)
NUM_TEXTS, NUM_PICTURES = 8, 2
TEXT = {"temperature": 0.0, "max_tokens": 256, "ignore_eos": True}


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or write_checkpoint(Path(folder, "model"), args.size_of_checkpoint)
        report = asyncio.run(measure(model, args.rounds))
    print_report(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


async def measure(model: Path, num_rounds: int) -> dict[str, Any]:
    llms: dict[str, OmniAsyncLLM] = {
        mode: OmniAsyncLLM.from_pretrained(str(model), mode=mode) for mode in MODES
    }
    bare = BareEngine(model)
    clock = StepClock(llms["embedded"])
    outside: list[float] = []
    seconds: dict[str, list[float]] = {"bare engine": [], **{mode: [] for mode in MODES}}
    overlap: dict[str, dict[str, list[float]]] = {mode: {} for mode in MODES}
    try:
        for index in range(-1, num_rounds):  # the first does not count
            prompt = f"a large red star on a blue background, number {index}"
            clock.seconds = 0.0
            times: dict[str, float] = {}
            # Each goes first in turn: who follows whom makes a difference, too.
            for name in rotate(["bare engine", *MODES], index):
                if name == "bare engine":
                    times[name] = bare.draw(prompt)
                else:
                    request = OmniRequest(prompt=prompt, params=PARAMS)
                    times[name] = await time_all(llms[name], [request])
            if index >= 0:
                outside.append(times["embedded"] - clock.seconds)
                for name, value in times.items():
                    seconds[name].append(value)
        for index in range(-1, max(3, num_rounds // 5)):
            for mode, llm in llms.items():
                for name, value in (await time_overlap(llm, index)).items():
                    if index >= 0:
                        overlap[mode].setdefault(name, []).append(value)
    finally:
        for llm in llms.values():
            llm.shutdown()
        bare.core.shutdown()
    return {
        "seconds": seconds,
        "outside": outside,
        "overlap": overlap,
        "load_average": os.getloadavg(),
    }


class StepClock:
    """Sums up the time inside the steps of an embedded diffusion engine."""

    def __init__(self, llm: OmniAsyncLLM) -> None:
        client = llm.clients[1]
        assert isinstance(client, EmbeddedStageClient)
        core = client.embedded.engine_core.stage_engines[1]
        self._step = core.step
        self.seconds = 0.0
        core.step = self._timed_step  # type: ignore[method-assign]

    def _timed_step(self) -> Any:
        start = time.perf_counter()
        news = self._step()
        self.seconds += time.perf_counter() - start
        return news


def rotate(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


class BareEngine:
    """The diffusion engine core alone, which encodes the prompt with transformers."""

    def __init__(self, model: Path) -> None:
        self.core = DiffusionEngineCore(DiTConfig(model=str(model)))
        self.processor = QwenImageInputProcessor(model)

    def draw(self, prompt: str) -> float:
        start = time.perf_counter()
        inputs = self.processor.process(prompt, PARAMS)
        self.core.add_request(DiffusionRequest(request_id=prompt, custom_inputs=inputs))
        while self.core.has_requests():
            news, _ = self.core.step()
            finals = [o for outputs in news.values() for o in outputs.outputs if o.finished]
            assert all(output.error is None for output in finals)
        return time.perf_counter() - start


async def time_all(llm: OmniAsyncLLM, requests: Sequence[OmniRequest]) -> float:
    async def answer(request: OmniRequest) -> None:
        async for output in llm.generate(request):  # noqa: B007
            pass
        assert output.error is None

    start = time.perf_counter()
    await asyncio.gather(*(answer(request) for request in requests))
    return time.perf_counter() - start


async def time_overlap(llm: OmniAsyncLLM, index: int) -> dict[str, float]:
    def texts() -> list[OmniRequest]:
        return [
            OmniRequest(prompt=f"text {index} {i}", output_format="text", sampling_params=TEXT)
            for i in range(NUM_TEXTS)
        ]

    def pictures() -> list[OmniRequest]:
        return [
            OmniRequest(prompt=f"picture {index} {i}", params=replace(PARAMS, seed=i))
            for i in range(NUM_PICTURES)
        ]

    return {
        "texts alone": await time_all(llm, texts()),
        "pictures alone": await time_all(llm, pictures()),
        "both at once": await time_all(llm, texts() + pictures()),
    }


def print_report(report: dict[str, Any]) -> None:
    bare = report["seconds"]["bare engine"]
    print(f"{'a 256 x 256 picture, 20 steps':32} {'ms, median':>12} {'over bare, same round':>24}")
    for name, of_rounds in report["seconds"].items():
        ratios = [ours / theirs - 1 for ours, theirs in zip(of_rounds, bare, strict=True)]
        median = 1e3 * statistics.median(of_rounds)
        print(f"{name:32} {median:12.1f} {100 * statistics.median(ratios):22.1f} %")
    share = [o / t for o, t in zip(report["outside"], report["seconds"]["embedded"], strict=True)]
    print(
        f"outside the diffusion engine: {1e3 * statistics.median(report['outside']):.1f} ms, "
        f"{100 * statistics.median(share):.1f} % of an embedded request"
    )
    print(f"\n{NUM_TEXTS} texts of {TEXT['max_tokens']} tokens, {NUM_PICTURES} pictures")
    for mode, times in report["overlap"].items():
        medians = {name: statistics.median(of_rounds) for name, of_rounds in times.items()}
        shown = ", ".join(f"{name} {value:.2f} s" for name, value in medians.items())
        apart = medians["texts alone"] + medians["pictures alone"]
        print(f"{mode:12} {shown}: {apart / medians['both at once']:.2f} times one after the other")
    print(f"load average after: {report['load_average'][0]:.2f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", type=Path, help="checkpoint; random weights when not given")
    parser.add_argument("--size-of-checkpoint", choices=("tiny", "small"), default="tiny")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write everything here as well")
    return parser.parse_args()


if __name__ == "__main__":
    main()
