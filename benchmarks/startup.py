"""From the shell to the file: a plain diffusers script and `vllm-omni generate`, side by side.

    python benchmarks/startup.py [--rounds 5] [--json FILE]

A round starts each command once, in turn; each loads the same checkpoint, draws the same 256 x 256
picture with 20 steps and writes a PNG. What is counted is the whole life of the process. A last
part says where the time goes: what the imports take, with and without Python's garbage collector.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_omni.models.qwen_image.checkpoint import write_checkpoint

PROMPT = "a large red star on a blue background"
SIZE, STEPS, SEED = 256, 20, 1

PLAIN_SCRIPT = f"""
import sys
import torch
from diffusers import QwenImagePipeline

pipeline = QwenImagePipeline.from_pretrained(sys.argv[1])
pipeline.set_progress_bar_config(disable=True)
image = pipeline(
    {PROMPT!r}, height={SIZE}, width={SIZE}, num_inference_steps={STEPS},
    generator=torch.Generator("cpu").manual_seed({SEED}),
).images[0]
image.save(sys.argv[2])
"""

IMPORTS = {
    "torch": "import torch",
    "diffusers' pipeline": "from diffusers import QwenImagePipeline",
    "vLLM's engine": "import vllm_omni.ar.engine",
    "vLLM's engine, without the collector": (
        "from vllm_omni.importing import fast_imports\n"
        "with fast_imports():\n    import vllm_omni.ar.engine"
    ),
}


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder, "model"), "tiny")
        image = Path(folder, "image.png")
        commands = make_commands(model, image)
        for command in commands.values():  # files into the page cache, vLLM's own cache filled
            run(command, image)
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(args.rounds):
            for name, command in commands.items():
                seconds[name].append(run(command, image))
    imports = {name: time_import(code, args.rounds) for name, code in IMPORTS.items()}
    print_report(seconds, imports)
    if args.json:
        report = {"seconds": seconds, "imports": imports, "load_average": os.getloadavg()}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def make_commands(model: Path, image: Path) -> dict[str, list[str]]:
    ours = [
        *(sys.executable, "-m", "vllm_omni.entrypoints.cli.main", "generate", PROMPT),
        *("--model", str(model), "-o", str(image), "--size", f"{SIZE}x{SIZE}"),
        *("--steps", str(STEPS), "--seed", str(SEED)),
    ]
    return {
        "plain diffusers": [sys.executable, "-c", PLAIN_SCRIPT, str(model), str(image)],
        "embedded": ours,
        "process": [*ours, "--mode", "process"],
    }


def run(command: Sequence[str], image: Path) -> float:
    """Seconds until a command has ended, which must have written the picture."""
    image.unlink(missing_ok=True)
    start = time.perf_counter()
    subprocess.run(
        command, check=True, capture_output=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    seconds = time.perf_counter() - start
    assert image.is_file(), command
    return seconds


def time_import(code: str, num_rounds: int) -> list[float]:
    """Seconds of an import in a process of its own, the interpreter's start and end left out."""
    script = f"import time; start = time.perf_counter()\n{code}\nprint(time.perf_counter() - start)"
    return [
        float(
            subprocess.run(
                [sys.executable, "-c", script], check=True, capture_output=True, text=True
            ).stdout.split()[-1]
        )
        for _ in range(num_rounds)
    ]


def print_report(seconds: dict[str, list[float]], imports: dict[str, list[float]]) -> None:
    plain = seconds["plain diffusers"]
    print(f"{'':40} {'seconds':>8} {'times plain, same round':>24}")
    for name, of_rounds in seconds.items():
        ratios = [ours / theirs for ours, theirs in zip(of_rounds, plain, strict=True)]
        print(f"{name:40} {statistics.median(of_rounds):8.2f} {statistics.median(ratios):24.2f}")
    print("imports alone")
    for name, of_rounds in imports.items():
        print(f"  {name:38} {statistics.median(of_rounds):8.2f}")
    load: Any = os.getloadavg()
    print(f"load average after: {load[0]:.2f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write everything here as well")
    return parser.parse_args()


if __name__ == "__main__":
    main()
