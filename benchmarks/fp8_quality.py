"""fp8 on the demo model: does it still draw what it is told?

Held-out prompts of `demo_quality`, 256x256, 20 steps, guidance 3, drawn by the engine in float32,
in bfloat16, and with the large layers in fp8. Reported: the percent of pictures that show all they
were told (`training.judge`), and PSNR against float32. On a GPU bfloat16's products run in fp8;
all others run in the model's dtype with values that were rounded to fp8. No vLLM is needed.

    PYTHONPATH=. python benchmarks/fp8_quality.py --prompts 150 --device cuda --out $OUT
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from training.judge import judge
from vllm_omni.benchmark.cache import get_psnr
from vllm_omni.config import DiTConfig
from vllm_omni.diffusion.engine_core import DiffusionEngineCore
from vllm_omni.diffusion.messages import DiffusionRequest
from vllm_omni.models.demo import find_model
from vllm_omni.models.qwen_image.input_processor import QwenImageInputProcessor
from vllm_omni.params import DiffusionParams

if TYPE_CHECKING:
    from benchmarks import gpu_report
    from benchmarks.demo_quality import Pixels, Task, make_tasks
    from benchmarks.gpu_report import Figures
else:  # beside this script
    import gpu_report
    from demo_quality import Pixels, Task, make_tasks
    from gpu_report import Figures

SIDE = 256
VARIANTS = {
    "float32": ("float32", "none"),
    "bfloat16": ("bfloat16", "none"),
    "float32, large layers in fp8": ("float32", "fp8"),
    "bfloat16, large layers in fp8": ("bfloat16", "fp8"),
}


def draw(args: argparse.Namespace, tasks: Sequence[Task], dtype: Any, quant: Any) -> list[Pixels]:
    """All pictures, through one engine."""
    core = DiffusionEngineCore(
        DiTConfig(
            model=str(args.model),
            device=args.device,
            dtype=dtype,
            quantization=quant,
            enforce_eager=True,
        )
    )
    processor = QwenImageInputProcessor(args.model)
    params = partial(
        DiffusionParams, negative_prompt=" ", true_cfg_scale=3.0, width=SIDE, height=SIDE
    )
    for index, task in enumerate(tasks):
        inputs = processor.process(task.prompt, params(num_inference_steps=20, seed=task.seed))
        core.add_request(DiffusionRequest(request_id=str(index), custom_inputs=inputs))
    pictures: dict[str, Pixels] = {}
    while core.has_requests():
        news, _ = core.step()
        for outputs in news.values():
            for output in outputs.outputs:
                if output.error is not None:
                    raise output.error.to_exception()
                if output.finished:
                    assert output.pooling_output is not None
                    pixels = output.pooling_output.permute(1, 2, 0).numpy()
                    pictures[output.request_id] = pixels
    core.shutdown()
    return [pictures[str(index)] for index in range(len(tasks))]


def quality(args: argparse.Namespace) -> tuple[Figures, str]:
    """Percent of pictures that show all they were told, and PSNR in dB against float32."""
    tasks = make_tasks(args.prompts)
    scenes, said = [task.scene for task in tasks], [task.said for task in tasks]
    figures: Figures = {}
    exact: list[Pixels] = []
    with ProcessPoolExecutor(args.processes, initializer=torch.set_num_threads, initargs=(1,)) as p:
        for name, (dtype, quantization) in VARIANTS.items():
            if "bfloat16" in name and args.device == "cpu":
                continue  # several times slower there, and no other result
            drawn = draw(args, tasks, dtype, quantization)
            exact = exact or drawn
            right = [all(facts.values()) for facts in p.map(judge, drawn, scenes, said)]
            decibels = [get_psnr(a, b) for a, b in zip(drawn, exact, strict=True)]
            figures[name] = {
                "percent_right": 100 * sum(right) / len(right),
                "median_psnr": sorted(decibels)[len(decibels) // 2],
            }
    body = [[n, f"{f['percent_right']:.1f}", f"{f['median_psnr']:.1f}"] for n, f in figures.items()]
    return figures, gpu_report.table(["weights", "right, %", "median PSNR, dB"], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--model", type=Path, default=find_model("demo"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=150)
    parser.add_argument("--processes", type=int, default=2, help="that judge")
    args = parser.parse_args()
    title = (__doc__ or "").splitlines()[0]
    report: gpu_report.Report[argparse.Namespace] = gpu_report.Report(
        args.out, "fp8_quality", title, {"prompts": args.prompts}
    )
    report.run(args, quality)
    sys.exit(report.has_failed)


if __name__ == "__main__":
    main()
