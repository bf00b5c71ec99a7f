"""`vllm-omni`: the command line."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import vllm_omni
from vllm_omni import envs
from vllm_omni.entrypoints.cli import bench, checkpoint, doctor, generate, serve
from vllm_omni.entrypoints.cli.parser import CommandParser
from vllm_omni.errors import EngineError, OmniRequestError

PROGRAM = "vllm-omni"
COMMANDS = (generate, serve, bench, checkpoint, doctor)

_EPILOG = """\
examples:
  vllm-omni generate "a red circle" -o circle.png    a picture, without a server
  vllm-omni serve --ui                               a server, with a page to draw and chat in
  vllm-omni doctor                                   what works on this machine
"""


def run() -> None:
    """The command as a shell starts it."""
    exit_code = main(is_shell=True)
    with suppress(OSError):  # of stderr: there is nowhere left to say it
        try:
            sys.stdout.flush()
        except OSError as error:
            exit_code = 1
            print(f"error: cannot write to stdout: {error}", file=sys.stderr)
        sys.stderr.flush()
    # Not sys.exit(): to take apart an interpreter with vLLM in it lasts seconds and is of no use.
    os._exit(exit_code)


def main(argv: Sequence[str] | None = None, is_shell: bool = False) -> int:
    """Run a command; its exit code is 0, 1 for a failure, 2 for a wrong argument.

    Args:
        is_shell: the process ends with the command.
    """
    args = make_parser().parse_args(argv)
    args.is_shell = is_shell
    envs.set_log_level(args.log_level)
    # Where it is missing, as on CPUs, torch says so in every run.
    logging.getLogger("torch._library.triton").setLevel(args.log_level.upper())
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=args.log_level.upper())
    try:
        exit_code: int = args.run(args)
    except (EngineError, OmniRequestError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 130
    return exit_code


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} COMMAND [options]",
        description="Serve models whose answer is more than text.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=vllm_omni.__version__)
    parser.set_defaults(log_level="error")
    subparsers = parser.add_subparsers(
        title="commands", prog=PROGRAM, dest="command", metavar="COMMAND", required=True
    )
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


if __name__ == "__main__":
    run()
