"""Stages from a YAML file. Every mistake in it is reported with the file and the line.

    stage_configs:
      - stage_id: 0
        engine_type: ar
        model_path: models/encoder  # relative to the folder of this file, or the name demo
        vllm_config:                # engine arguments, which vLLM itself checks
          max_model_len: 2048
      - stage_id: 1
        engine_type: diffusion
        model_path: demo
        dit_config:
          max_num_seqs: 8
          cache_config: {dit_cache_tensors: [{size: 1048576}]}

Keys are the fields of `StageConfig` and of the classes in it, which also say what is allowed.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from yaml.constructor import SafeConstructor
from yaml.reader import ReaderError

from vllm_omni.config import DEMO, DiTCacheConfig, DiTCacheTensor, DiTConfig, StageConfig
from vllm_omni.errors import ConfigError, ConfigFileError

MAX_FILE_SIZE = 256 * 1024  # bytes
MAX_DEPTH = 32  # mappings and lists inside each other
MAX_NUMBER_LENGTH = 100  # characters; Python takes a long time over numbers far longer than that

STAGES = "stage_configs"
ONE_STAGE = f"an item of {STAGES}"
UNREADABLE = "cannot read this YAML"

# Fields that are config classes of their own, and those that are lists of them.
_NESTED = {"dit_config": DiTConfig, "cache_config": DiTCacheConfig}
_NESTED_LISTS = {"dit_cache_tensors": DiTCacheTensor, "kv_cache_groups": DiTCacheTensor}

# Field of `DiTConfig` -> field of its stage that it is a copy of.
_COPIED = {"model": "model_path", "stage_id": "stage_id"}

_TAG = "tag:yaml.org,2002:"
_NUMBER_TAGS = {f"{_TAG}{kind}" for kind in ("int", "float")}
_SCALAR_TAGS = _NUMBER_TAGS | {f"{_TAG}{kind}" for kind in ("str", "bool", "null")}

_KINDS: dict[type[yaml.Node], str] = {
    yaml.ScalarNode: "a single value",
    yaml.SequenceNode: "a list",
    yaml.MappingNode: "a mapping",
}


def read_stage_file(path: str | Path) -> tuple[StageConfig, ...]:
    """The stages in a YAML file. A mistake is a `ConfigFileError` that names its line."""
    path = Path(path)
    root = _compose(path, _read_text(path))
    if root is None:
        raise ConfigFileError(f"{path}:1", STAGES, f"the file is empty: it needs {STAGES}")
    entries = _read_mapping("the top level", root)
    _check_names("the top level", entries, [STAGES])
    if STAGES not in entries:
        raise _mistake(root, STAGES, f"{STAGES} is missing")
    nodes = _read_list(STAGES, entries[STAGES])
    if not nodes:
        raise _mistake(entries[STAGES].key, STAGES, f"{STAGES} is empty: it needs a stage")

    stages: list[StageConfig] = []
    lines: dict[int, int] = {}  # stage_id -> where it was given
    for node in nodes:
        stage = _read_stage(node, path.parent)
        key = _read_mapping(ONE_STAGE, node)["stage_id"].key
        if stage.stage_id in lines:
            problem = f"stage_id={stage.stage_id} is already that of line {lines[stage.stage_id]}"
            raise _mistake(key, "stage_id", problem)
        lines[stage.stage_id] = _line_of(key)
        stages.append(stage)
    return tuple(stages)


def _read_stage(node: yaml.Node, folder: Path) -> StageConfig:
    stage: StageConfig = _read_config(ONE_STAGE, node, StageConfig)
    if stage.model_path != DEMO:
        stage = replace(stage, model_path=str(folder / stage.model_path))
    if stage.dit_config is None:
        return stage
    copies = {name: getattr(stage, source) for name, source in _COPIED.items()}
    return replace(stage, dit_config=replace(stage.dit_config, **copies))


def _read_config(param: str, node: yaml.Node, config_class: type) -> Any:
    """An instance of a config class from a mapping of its fields."""
    entries = _read_mapping(param, node)
    copied = _COPIED if config_class is DiTConfig else {}
    for name, source in copied.items():
        if name in entries:
            problem = f"{name} of {param} is the {source} of its stage: leave it out"
            raise _mistake(entries[name].key, name, problem)
    names = [field.name for field in fields(config_class) if field.name not in copied]
    _check_names(param, entries, names)
    for field in fields(config_class):
        is_required = field.default is MISSING and field.default_factory is MISSING
        if is_required and field.name not in entries:
            raise _mistake(node, field.name, f"{field.name} is missing in {param}")

    values = {name: _read_field(name, entry) for name, entry in entries.items()}
    try:
        return config_class(**values)
    except ConfigError as error:
        name = error.param.rpartition(".")[2]
        at = entries[name].key if name in entries else node
        raise _mistake(at, error.param, str(error)) from error


def _read_field(name: str, entry: _Entry) -> Any:
    if name in _NESTED and entry.value.tag != f"{_TAG}null":
        return _read_config(name, entry.value, _NESTED[name])
    if name in _NESTED_LISTS:
        item_name, item_class = f"an item of {name}", _NESTED_LISTS[name]
        return [_read_config(item_name, item, item_class) for item in _read_list(name, entry)]
    return _read_value(name, entry.value)


def _read_value(param: str, node: yaml.Node) -> Any:
    """Text, a number, true, false, null, or lists and mappings of them, as Python has them."""
    if isinstance(node, yaml.MappingNode):
        entries = _read_mapping(param, node)
        return {name: _read_value(name, entry.value) for name, entry in entries.items()}
    if isinstance(node, yaml.SequenceNode):
        return [_read_value(param, item) for item in node.value]
    if node.tag not in _SCALAR_TAGS:  # YAML sees a date in 2026-01-31, for one
        kind = node.tag.removeprefix(_TAG)
        raise _mistake(node, param, f"{param} is a {kind}: put it in quotes if it is text")
    if node.tag in _NUMBER_TAGS and len(node.value) > MAX_NUMBER_LENGTH:
        allowed = f"a number of at most {MAX_NUMBER_LENGTH} characters"
        raise _mistake(node, param, str(ConfigError(param, node.value, allowed)))
    try:
        return SafeConstructor().construct_object(node)
    except ValueError as error:  # YAML sees a number in 0x_
        allowed = "a number, or text in quotes"
        raise _mistake(node, param, str(ConfigError(param, node.value, allowed))) from error


class _Entry(NamedTuple):
    """A key of a mapping and what it stands for. A field's line is that of its key."""

    key: yaml.Node
    value: yaml.Node


def _read_mapping(param: str, node: yaml.Node) -> dict[str, _Entry]:
    if not isinstance(node, yaml.MappingNode):
        raise _mistake(node, param, f"{param} takes a mapping, not {_KINDS[type(node)]}")
    entries: dict[str, _Entry] = {}
    for key, value in node.value:
        if key.tag != f"{_TAG}str":
            raise _mistake(key, param, f"a key of {param} is not text: put it in quotes")
        name = key.value
        if name in entries:
            first = _line_of(entries[name].key)
            raise _mistake(key, name, f"{name!r} is given twice, first in line {first}")
        entries[name] = _Entry(key, value)
    return entries


def _check_names(param: str, entries: dict[str, _Entry], allowed: Sequence[str]) -> None:
    for name, entry in entries.items():
        if name not in allowed:
            nearest = difflib.get_close_matches(name, allowed, n=1)
            hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
            problem = f"unknown key {name!r}{hint}: {param} takes {', '.join(allowed)}"
            raise _mistake(entry.key, name, problem)


def _read_list(param: str, entry: _Entry) -> list[yaml.Node]:
    if not isinstance(entry.value, yaml.SequenceNode):
        problem = f"{param} takes a list, not {_KINDS[type(entry.value)]}"
        raise _mistake(entry.key, param, problem)
    return list(entry.value.value)


def _line_of(at: yaml.Node) -> int:
    return at.start_mark.line + 1


def _mistake(at: yaml.Node, param: str, problem: str) -> ConfigFileError:
    return ConfigFileError(f"{at.start_mark.name}:{_line_of(at)}", param, problem)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_SIZE + 1)
    except OSError as error:
        raise ConfigFileError(str(path), STAGES, f"cannot read it: {error.strerror}") from error
    if len(content) > MAX_FILE_SIZE:
        raise ConfigFileError(str(path), STAGES, f"longer than {MAX_FILE_SIZE} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigFileError(f"{path}:{line}", STAGES, "not text in UTF-8") from error


def _compose(path: Path, text: str) -> yaml.Node | None:
    """The nodes of the one document in a text; None if there is none."""
    try:
        loader = _PlainLoader(text)
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"{UNREADABLE}: {error.reason} ({text[error.position]!r})"
        raise ConfigFileError(f"{path}:{line}", STAGES, problem) from error
    loader.name = str(path)  # what its marks say
    try:
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        assert mark is not None
        context = f"{error.context}, " if error.context else ""
        problem = f"{UNREADABLE}: {context}{error.problem}"
        raise ConfigFileError(f"{path}:{mark.line + 1}", STAGES, problem) from error
    except (ValueError, OverflowError) as error:  # PyYAML calls chr() and int() unchecked
        where = f"{path}:{loader.line + 1}"
        raise ConfigFileError(where, STAGES, f"{UNREADABLE}: {error}") from error


class _PlainLoader(yaml.SafeLoader):
    """PyYAML's safe loader, less what a few short lines can make endless or run code with."""

    depth = 0  # of the node that is being composed

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        problem = None
        if isinstance(event, yaml.AliasEvent):
            problem = f"the alias *{event.anchor} is not allowed: write out what it stands for"
        elif event.tag is not None:
            problem = f"the tag {event.tag} is not allowed: leave it out"
        elif isinstance(event, yaml.CollectionStartEvent) and self.depth == MAX_DEPTH:
            problem = f"more than {MAX_DEPTH} mappings and lists inside each other"
        if problem is not None:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)

        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node
