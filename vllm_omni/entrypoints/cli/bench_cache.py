"""`vllm-omni bench cache`: which step cache, and how far, for a model."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from random import Random
from typing import get_args

from vllm_omni.config import DEMO, DiTConfig
from vllm_omni.entrypoints.cli.settings import (
    add_settings,
    parse_size,
    prepare_file,
    read_settings,
)
from vllm_omni.params import DiffusionParams
from vllm_omni.step_cache import Method


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench cache`."""
    parser = subparsers.add_parser(
        "cache",
        help="step caches of a model: quality against speed",
        usage="vllm-omni bench cache [options]",
        description=(
            "Draw a set of prompts without a step cache and with every setting, and report how "
            "much work each left out and how far its pictures are from the ones without. The plot "
            "shows quality against speed: pick a setting from it."
        ),
    )
    parser.add_argument("--model", default=DEMO, help="demo or a checkpoint's path; default: demo")
    parser.add_argument(
        "--method",
        dest="methods",
        action="append",
        choices=get_args(Method),
        help="repeatable; default: all",
    )
    parser.add_argument(
        "--threshold",
        dest="thresholds",
        action="append",
        metavar="F",
        type=float,
        help="repeatable; default: five for each method",
    )
    parser.add_argument("--warmup-steps", metavar="N", type=int, default=2, help="default: 2")
    parser.add_argument("--max-skips", metavar="N", type=int, help="in a row; default: any number")
    parser.add_argument(
        "--order", type=int, choices=(1, 2), default=1, help="of taylor; default: 1"
    )
    parser.add_argument("--prompts", metavar="FILE", type=Path, help="one per line")
    parser.add_argument("--num-prompts", metavar="N", type=int, default=8, help="most; default: 8")
    parser.add_argument("--size", metavar="WxH", help="in pixels; default: the model's")
    parser.add_argument("--steps", metavar="N", type=int, help="default: the model's")
    parser.add_argument(
        "--cfg", metavar="F", type=float, default=3.0, help="guidance; default: %(default)s"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures")
    parser.add_argument("--plot", metavar="FILE", type=Path, help=".png, .svg or .pdf")
    add_settings(
        parser, DiTConfig, leave_out=("model", "model_type", "stage_id", "load_text_encoder")
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    from vllm_omni.benchmark.plot import check_plot
    from vllm_omni.benchmark.workload import PROMPTS
    from vllm_omni.entrypoints.cli.bench import read_prompts

    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None:
            prepare_file(option, path)
    if args.plot is not None:
        check_plot(args.plot)
    prompts = list(PROMPTS if args.prompts is None else read_prompts(args.prompts))
    prompts = Random(0).sample(prompts, min(args.num_prompts, len(prompts)))
    width, height = (None, None) if args.size is None else parse_size(args.size)
    params = DiffusionParams(
        width=width,
        height=height,
        num_inference_steps=args.steps,
        true_cfg_scale=args.cfg,
        negative_prompt=" ",
        seed=0,
    )

    from tqdm import tqdm

    from vllm_omni.benchmark.cache import CacheBench, make_settings, to_json, to_text, write_plot
    from vllm_omni.entrypoints.omni import Omni
    from vllm_omni.models.demo import find_model
    from vllm_omni.models.registry import read_json

    settings = make_settings(
        args.methods or get_args(Method),
        args.thresholds,
        warmup_steps=args.warmup_steps,
        max_skips=args.max_skips,
        order=args.order,
    )
    num_blocks = read_json(find_model(args.model), "transformer/config.json")["num_layers"]
    with Omni(**read_settings(args, DiTConfig)) as omni:  # the model among them
        bench = CacheBench(omni, num_blocks, prompts, params)
        bench.measure_plain()
        results = list(tqdm(bench.run(settings), total=len(settings), disable=None, leave=False))
    title = f"Step caches of {args.model}: {len(prompts)} pictures, {bench.seconds:.1f} s without"
    print(f"{title}\n\n{to_text(results)}")
    if args.json is not None:
        content = {
            "command": shlex.join(["vllm-omni", *sys.argv[1:]]),
            "seconds_without": bench.seconds,
            "results": to_json(results),
        }
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    if args.plot is not None:
        write_plot(args.plot, title, results)
    return 0
