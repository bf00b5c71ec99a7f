"""Command-line options made from the fields of a config class, so that each is defined once."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from vllm_omni.errors import InvalidParameterError


def add_settings(
    parser: argparse.ArgumentParser,
    config_class: type,
    leave_out: Collection[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
    title: str = "engine settings",
) -> None:
    """One `--option` for each field that has a help line; of a list, an option to give repeatedly.

    Args:
        defaults: what a command takes instead of a field's own default, to be shown.
        title: the heading of fields that have no group of their own.
    """
    groups: dict[str, Any] = {}
    types = get_type_hints(config_class)
    for field in fields(config_class):
        if "help" not in field.metadata or field.name in leave_out:
            continue
        kind = types[field.name]
        name = field.name
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": name}
        assert field.default is not MISSING
        default = defaults.get(field.name, field.default)
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction if default else "store_true"
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        elif kind in (int, float, str):
            options |= {"type": kind, "metavar": _get_metavar(name, kind)}
        elif kind == Sequence[str]:
            name = name.removesuffix("s")
            options |= {"action": "append", "metavar": name.rpartition("_")[2].upper()}
        else:
            continue  # nested settings have no option of their own
        options["help"] = field.metadata["help"]
        if default is not False and default not in ("", ()):
            options["help"] += f"; default: {_show_default(name, default)}"
        heading = field.metadata["group"] or title
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        groups[heading].add_argument(f"--{name.replace('_', '-')}", **options)


def _get_metavar(name: str, kind: type) -> str:
    """What to write there, in a word; most numbers with a fraction are times."""
    if name.endswith("_bytes"):
        return "BYTES"
    if name.endswith("_utilization"):
        return "SHARE"
    return {int: "N", float: "SECONDS"}.get(kind, name.rpartition("_")[2].upper())


def _show_default(name: str, default: Any) -> str:
    if name.endswith("_bytes"):
        size, unit = (2**20, "MiB") if default >= 2**20 else (2**10, "KiB")
        return f"{default} ({default / size:g} {unit})"
    return f"{default:g}" if isinstance(default, float) else str(default)


def parse_size(size: str) -> tuple[int, int]:
    """Width and height of a `--size`."""
    width, _, height = size.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise InvalidParameterError("--size", size, "width x height in pixels, such as 256x256")
    return int(width), int(height)


def prepare_file(option: str, path: Path) -> None:
    """Make the folder of a file that is to be written; refuse now what would fail at the end."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        allowed = f"a file in a folder that can be made ({error.strerror})"
        raise InvalidParameterError(option, str(path), allowed) from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidParameterError(option, str(path), "a file that can be written")


def read_settings(args: argparse.Namespace, config_class: type) -> dict[str, Any]:
    """The settings that were given."""
    names = [field.name for field in fields(config_class)]
    return {name: getattr(args, name) for name in names if name in args}
