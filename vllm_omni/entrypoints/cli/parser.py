"""The parser of every command: a mistake is one line, and beside it where to read more."""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

LOG_LEVELS = ("debug", "info", "warning", "error")
WIDTH = 100  # characters of a line of --help


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """The names of options side by side with what they mean, in lines of a readable length."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=WIDTH)


class CommandParser(argparse.ArgumentParser):
    """A command or one of its subcommands, which get a parser of this kind too."""

    def __init__(self, description: str = "", **options: Any) -> None:
        description = textwrap.fill(description, WIDTH)
        super().__init__(description=description, formatter_class=HelpFormatter, **options)
        self.add_argument(  # of all, so that it may stand before the command's name or behind it
            "--log-level",
            default=argparse.SUPPRESS,
            choices=LOG_LEVELS,
            help="how much the engine says on stderr; default: error",
        )

    def parse_known_args(  # type: ignore[override]  # of two overloads, the one that is called
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse here what is not known: the command, not the program, knows its options."""
        parsed, unknown = super().parse_known_args(args, namespace or argparse.Namespace())
        if unknown:
            options = [name for name in unknown if name.startswith("-")]
            self.error(self._describe_unknown((options or unknown)[0]))
        return parsed, []

    def _describe_unknown(self, argument: str) -> str:
        if not argument.startswith("-"):
            return f"unexpected argument: {argument!r}"
        name = argument.partition("=")[0]
        nearest = difflib.get_close_matches(name, self._option_string_actions, n=1)
        return f"unknown option: {name}" + "".join(f"; did you mean {one}?" for one in nearest)

    def error(self, message: str) -> NoReturn:
        """End with exit code 2."""
        self.exit(2, f"error: {message}\n{self.format_usage()}help: {self.prog} --help\n")
