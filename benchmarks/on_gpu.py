"""All that is measured on a GPU, one after another, each in a process of its own.

    python3 benchmarks/on_gpu.py --out $OUT

Where diffusers is not installed, what is in `vendor/` is taken (README.md). vLLM is not needed.
`--tiny` runs what can be run small on a CPU, to see that it runs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent
ON_A_GPU = {
    "step_latency": [],
    "mixed_load": ["--measure", "--no-plot"],
    "scaling": [],
    "vae_decode": [],
    "fp8_quality": ["--prompts", "60", "--processes", "8", "--device", "cuda"],
}
TINY = {
    "step_latency": ["--tiny"],
    "scaling": ["--tiny"],
    "vae_decode": ["--device", "cpu", "--scale", "32"],
}


def run(name: str, options: list[str], out: Path) -> bool:
    """One of the benchmarks; whether it went well. What it prints is shown and kept."""
    start = time.perf_counter()
    command = [sys.executable, f"benchmarks/{name}.py", "--out", str(out), *options]
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": _python_path(), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            log.write(line)
    code = process.wait()
    print(f"{name}: exit code {code} after {time.perf_counter() - start:.0f} s", flush=True)
    return code == 0


def _python_path() -> str:
    folders = [ROOT]
    if find_spec("diffusers") is None:
        folders += [ROOT / "vendor" / "site", *sorted((ROOT / "vendor").glob("*.whl"))]
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, folders), *([given] if given else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for what comes out")
    parser.add_argument("--only", action="append", choices=ON_A_GPU, help="of these; repeat it")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    args = parser.parse_args()
    benchmarks = TINY if args.tiny else ON_A_GPU
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out.resolve()
    chosen = [name for name in benchmarks if args.only is None or name in args.only]
    failed = [name for name in chosen if not run(name, benchmarks[name], out)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
