"""Command-line options made from the fields of a config class, so that each is defined once."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints


def add_settings(
    parser: argparse.ArgumentParser,
    config_class: type,
    leave_out: Collection[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """One `--option` for each field that has a help line.

    Args:
        defaults: what a command takes instead of a field's own default, to be shown.
    """
    group = parser.add_argument_group("engine settings")
    types = get_type_hints(config_class)
    for field in fields(config_class):
        if "help" not in field.metadata or field.name in leave_out:
            continue
        kind = types[field.name]
        options: dict[str, Any] = {"default": argparse.SUPPRESS}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        elif kind in (int, float, str):
            options["type"] = kind
            options["metavar"] = kind.__name__.upper()
        else:
            continue  # nested settings have no option of their own
        assert field.default is not MISSING
        default = defaults.get(field.name, field.default)
        options["help"] = f"{field.metadata['help']}; default: {default}"
        group.add_argument(f"--{field.name.replace('_', '-')}", **options)


def read_settings(args: argparse.Namespace, config_class: type) -> dict[str, Any]:
    """The settings that were given."""
    names = [field.name for field in fields(config_class)]
    return {name: getattr(args, name) for name in names if name in args}
