"""`vllm-omni generate`: pictures from prompts, without a server."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from vllm_omni.config import DEMO, DiTConfig, Mode
from vllm_omni.entrypoints.cli.settings import (
    add_settings,
    parse_size,
    prepare_file,
    read_settings,
)
from vllm_omni.errors import InvalidParameterError
from vllm_omni.importing import fast_imports
from vllm_omni.models.demo import find_model
from vllm_omni.models.weights import check_weights
from vllm_omni.params import DiffusionParams, make_guidance
from vllm_omni.stage_file import read_stage_file

if TYPE_CHECKING:
    from vllm_omni.outputs import OmniOutput

# In a process of its own, diffusers is imported while this one imports vLLM.
EMBEDDED_DEFAULTS = {"worker_processes": 1}

FILE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")

_EPILOG = """\
examples:
  vllm-omni generate "a red circle"                  into out.png
  vllm-omni generate "a red circle" -n 4 -o c.png    into c-1.png to c-4.png
  vllm-omni generate "a red circle" --cfg 3          closer to the prompt, in twice the time
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `generate` command."""
    parser = subparsers.add_parser(
        "generate",
        help="draw pictures from prompts, without a server",
        usage="vllm-omni generate PROMPT… [options]",
        description="Draw pictures from prompts, all in one batch. Prints the path of each file.",
        epilog=_EPILOG,
    )
    parser.add_argument("prompts", metavar="PROMPT", nargs="+", help="what to draw")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("out.png"),
        help=f"where to: {', '.join(FILE_SUFFIXES)}; several pictures are numbered, as in "
        "out-1.png; default: %(default)s",
    )
    parser.add_argument(
        "--model",
        default=DEMO,
        help="demo or the path of a checkpoint in diffusers layout; default: %(default)s",
    )
    parser.add_argument(
        "--size", metavar="WxH", help="in pixels, multiples of 16; default: the model's"
    )
    parser.add_argument(
        "--steps", metavar="N", type=int, help="denoising steps; default: the model's"
    )
    parser.add_argument(
        "--cfg",
        metavar="F",
        type=float,
        help="guidance scale, on above 1, and then a step costs twice; default: "
        f"{DiffusionParams().true_cfg_scale:g} with --negative, else off",
    )
    parser.add_argument("--negative", metavar="TEXT", help="what not to draw; turns guidance on")
    parser.add_argument(
        "--seed",
        metavar="S",
        type=int,
        help="picture i of a prompt is drawn with S + i; default: a random one",
    )
    parser.add_argument(
        "-n", metavar="N", type=int, default=1, help="pictures per prompt; default: %(default)s"
    )
    parser.add_argument(
        "--output-format",
        choices=("image", "text+image"),
        default="image",
        help="text+image: the model first writes a fuller prompt; default: %(default)s",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt")
    parser.add_argument(
        "--mode",
        choices=get_args(Mode),
        default="embedded",
        help="where stages run: in this process, or each in one of its own; default: %(default)s",
    )
    parser.add_argument(
        "--stage-configs",
        metavar="FILE",
        type=Path,
        help="YAML file of the stages to run, instead of those of the model",
    )
    add_settings(
        parser,
        DiTConfig,
        leave_out=("model", "model_type", "stage_id", "load_text_encoder"),
        defaults=EMBEDDED_DEFAULTS,
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draw, write, report."""
    params = _params(args)
    for prompt in args.prompts:
        if not prompt.strip():
            raise InvalidParameterError("PROMPT", prompt, "words that say what to draw")
    if args.output.suffix.lower() not in FILE_SUFFIXES:
        raise InvalidParameterError("-o", str(args.output), f"one of {', '.join(FILE_SUFFIXES)}")
    prepare_file("-o", args.output)
    settings = _settings(args)
    for stage in settings.get("stage_configs", ()):
        check_weights(find_model(stage.model_path))
    if "stage_configs" not in settings:
        check_weights(find_model(args.model))

    # Heavy imports only now, so that --help and wrong arguments answer at once.
    from tqdm import tqdm

    with fast_imports():
        from vllm_omni.entrypoints.omni import Omni

    omni = Omni(**settings)
    # An orderly shutdown takes longer than a small picture; that the process ends is enough, where
    # everything is in it.
    ends_with_process = args.is_shell and args.mode == "embedded"
    with nullcontext() if ends_with_process else omni:
        # As wide as it can be read: tqdm writes nothing where a terminal does not tell its size.
        width = shutil.get_terminal_size().columns
        with tqdm(unit="step", ncols=width, mininterval=0, miniters=1, leave=False) as bar:

            def show(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            outputs = omni.generate(
                args.prompts, params, progress=show, output_format=args.output_format
            )
        _write(outputs, args)
    return 1 if any(output.error is not None for output in outputs) else 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    settings: dict[str, Any] = {"model": args.model, "mode": args.mode}
    if args.stage_configs is not None:
        settings["stage_configs"] = read_stage_file(args.stage_configs)
    elif args.mode == "embedded":
        settings |= EMBEDDED_DEFAULTS
    return settings | read_settings(args, DiTConfig)


def _write(outputs: Sequence[OmniOutput], args: argparse.Namespace) -> None:
    paths = _paths(args.output, sum(len(output.images) for output in outputs))
    for output in outputs:
        files = []
        for image in output.images:
            files.append(next(paths))
            image.save(files[-1])
        _report(output, files, as_json=args.json)


def _params(args: argparse.Namespace) -> DiffusionParams:
    width, height = parse_size(args.size) if args.size is not None else (None, None)
    return DiffusionParams(
        height=height,
        width=width,
        num_inference_steps=args.steps,
        **make_guidance(args.cfg, args.negative),
        seed=args.seed,
        num_outputs_per_prompt=args.n,
    )


def _paths(path: Path, num_images: int) -> Iterator[Path]:
    if num_images == 1:
        return iter([path])
    return (path.with_stem(f"{path.stem}-{index + 1}") for index in range(num_images))


def _report(output: OmniOutput, files: list[Path], as_json: bool) -> None:
    if as_json:
        report = {
            "prompt": output.prompt,
            "text": output.text,
            "files": [str(file) for file in files],
            "seeds": output.seeds,
            "error": None if output.error is None else str(output.error),
            "metrics": asdict(output.metrics),
        }
        print(json.dumps(report, ensure_ascii=False))
        return
    if output.text is not None:
        print(output.text)
    for file in files:
        print(file)
    if output.error is not None:
        print(f"error: {output.prompt!r}: {output.error}", file=sys.stderr)
