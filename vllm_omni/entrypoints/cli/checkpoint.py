"""`vllm-omni checkpoint`: write a random-weight model to try things out with."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `checkpoint` command."""
    parser = subparsers.add_parser(
        "checkpoint",
        help="write a random-weight Qwen-Image checkpoint",
        description=(
            "Write a complete Qwen-Image checkpoint in diffusers layout, with random weights. "
            "It draws noise, but everything runs as with the real model."
        ),
    )
    parser.add_argument(
        "path",
        metavar="DIR",
        type=Path,
        help="where to: a new or empty directory, or an earlier random-weight checkpoint",
    )
    # No `choices`: the sizes are defined next to torch, which --help must not wait for.
    parser.add_argument(
        "--size",
        metavar="SIZE",
        default="tiny",
        help="tiny (25 MB) or small (360 MB); default: tiny",
    )
    parser.add_argument(
        "--seed",
        metavar="S",
        type=int,
        default=0,
        help="of the weights; the same seed gives the same files; default: 0",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint and print its path."""
    from vllm_omni.models.qwen_image.checkpoint import write_checkpoint

    try:
        path = write_checkpoint(args.path, size=args.size, seed=args.seed)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0
