"""Latents to pixels: stock diffusers' VAE, ours, ours compiled and ours in tiles.

    PYTHONPATH=.:vendor/site:vendor/diffusers-0.42.1-py3-none-any.whl \\
        python3 benchmarks/vae_decode.py --out $OUT

Full-size VAE of Qwen-Image, random weights, bfloat16, one picture at a time. What it needs is in
README.md. Writes vae_decode.json and vae_decode.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import AutoencoderKLQwenImage
from torch import Tensor

from vllm_omni.models.qwen_image.vae import PictureDecoder

if TYPE_CHECKING:
    from benchmarks import gpu_report
else:
    import gpu_report  # beside this script

SIDES = (512, 1024, 1536, 2048)
TILE = 1024
NUM_ROUNDS = 5


def build_vae(device: torch.device) -> Any:
    """The same weights every time."""
    torch.manual_seed(0)
    with device:
        vae = AutoencoderKLQwenImage()
    return vae.requires_grad_(False).eval().to(torch.bfloat16)


def time_call(device: torch.device, call: Callable[[], object]) -> dict[str, float]:
    """Median milliseconds, and the most memory that it took beside what was there, in GiB."""
    is_cuda = device.type == "cuda"
    call()
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if is_cuda else 0
    times = []
    for _ in range(NUM_ROUNDS):
        start = time.perf_counter()
        call()
        if is_cuda:
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    peak = torch.cuda.max_memory_allocated(device) - before if is_cuda else 0
    return {"ms": statistics.median(times), "gib": peak / 2**30}


@torch.no_grad()
def measure(device: torch.device, scale: int) -> dict[str, dict[int, dict[str, float]]]:
    """By way of decoding and side."""
    stock, vae = build_vae(device), build_vae(device)
    latents = {
        side: torch.randn(1, 16, 1, side // 8 // scale, side // 8 // scale, device=device)
        for side in SIDES
    }

    def decode_stock(side: int) -> Tensor:
        images: Tensor = stock.decode(latents[side].to(stock.dtype), return_dict=False)[0]
        return images

    plain = PictureDecoder(vae)
    compiled = PictureDecoder(build_vae(device), backend="inductor")
    tiled = PictureDecoder(build_vae(device), tile_size=TILE // scale)
    start = time.perf_counter()
    for side in SIDES:
        compiled.warm_up(latents[side])
    print(f"compiled in {time.perf_counter() - start:.1f} s", flush=True)
    ways: dict[str, Callable[[int], Tensor]] = {
        "stock": decode_stock,
        "ours": lambda side: plain.decode(latents[side]),
        "ours, compiled": lambda side: compiled.decode(latents[side]),
        f"ours, in tiles of {TILE}²": lambda side: tiled.decode(latents[side]),
    }
    return {
        name: {side: time_call(device, lambda: decode(side)) for side in SIDES}  # noqa: B023
        for name, decode in ways.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=int, default=1, help="smaller by so much, for a CPU")
    args = parser.parse_args()
    device = torch.device(args.device)
    by_way = measure(device, args.scale)
    header = gpu_report.get_header()
    lines = [f"# {(__doc__ or '').splitlines()[0]}\n", f"    {header['command']}\n"]
    lines.append(f"{header['date']}, {header['device']}, {header['versions']}.\n")
    lines.append("| ms, GiB at the peak | " + " | ".join(f"{side}²" for side in SIDES) + " |")
    lines.append("|---" * (len(SIDES) + 1) + "|")
    for name, by_side in by_way.items():
        cells = " | ".join(f"{cell['ms']:.1f}, {cell['gib']:.1f}" for cell in by_side.values())
        lines.append(f"| {name} | {cells} |")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "vae_decode.md").write_text("\n".join(lines) + "\n")
    (args.out / "vae_decode.json").write_text(json.dumps(header | by_way, indent=2) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
