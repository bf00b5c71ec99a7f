"""Three pictures of different sizes and steps, drawn in one batch by the embedded model.

python examples/three_pictures.py [FOLDER]
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from vllm_omni import DiffusionParams, Omni

PICTURES = {
    "a large red star on a blue background": (256, 256, 20),
    "a green triangle to the left of an orange hexagon on a light yellow background": (
        384,
        192,
        15,
    ),
    "a large white letter K on a gradient background from dark blue to purple": (192, 256, 10),
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    params = [
        DiffusionParams(
            width=width,
            height=height,
            num_inference_steps=steps,
            negative_prompt=" ",
            true_cfg_scale=3.0,
            seed=2,
        )
        for width, height, steps in PICTURES.values()
    ]
    with Omni(model="demo", worker_processes=1) as omni:
        outputs = omni.generate(list(PICTURES), params)
    for index, output in enumerate(outputs, start=1):
        if output.error is not None:
            sys.exit(f"error: {output.prompt!r}: {output.error}")
        path = folder / f"demo-{index}.png"
        output.images[0].save(path)
        size = "x".join(map(str, output.images[0].size))
        metrics = output.metrics
        how = f"{size}, {metrics.num_steps} steps, {metrics.total_time:.1f} s"
        print(f"{path}  {how}: {output.prompt}")


if __name__ == "__main__":  # the worker's process imports this file
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # of no use on CPUs
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out"))
