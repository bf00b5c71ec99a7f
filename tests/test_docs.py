"""What README and docs name is there: pages, headings, commands and their options."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_omni.config import DiTConfig
from vllm_omni.entrypoints.cli.main import make_parser

ROOT = Path(__file__).parents[1]
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "training" / "README.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "vllm_omni" / "demo" / "README.md",
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
COMMAND = re.compile(r"^vllm-omni .*", re.MULTILINE)
OPTION = re.compile(r"`(?:vllm-omni [^`]*?)?(--[a-z][a-z-]+)")
SETTING = re.compile(r"^\| `--([a-z-]+)[^|]*\| ([^|]*) \|", re.MULTILINE)

all_pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def make_anchor(heading: str) -> str:
    """As GitHub makes them."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@all_pages
def test_links(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if not link.startswith("http")]
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in map(make_anchor, HEADING.findall(target.read_text())), link


def list_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from list_parsers(below)


def test_commands() -> None:
    """Each line of a page that is a command can be given as it is written."""
    commands = [line for page in PAGES for line in COMMAND.findall(page.read_text())]
    assert len(commands) > 10
    for command in commands:
        make_parser().parse_args(shlex.split(command, comments=True)[1:])


def test_options() -> None:
    """Each option that a page names exists; scripts of training have their own."""
    parsers = list(list_parsers(make_parser()))
    known = {name for parser in parsers for name in parser._option_string_actions}
    for page in PAGES:
        if page.parent.name != "training":
            assert set(OPTION.findall(page.read_text())) <= known, page


def test_defaults_on_gpus() -> None:
    told = SETTING.findall((ROOT / "docs" / "gpu.md").read_text())
    assert len(told) >= 8
    config = DiTConfig(policy="priority")  # as `serve` has it
    values = {"none": (), "off": False, "`none`": "none", "`priority`": "priority"}
    for option, default in told:
        name = option.replace("-", "_")
        value = getattr(config, name if hasattr(config, name) else f"{name}s")
        assert value == (values[default] if default in values else float(default)), option
