"""Log lines: one for each thing that happened, plain or JSON, from every process of a server."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

from vllm_omni import envs

# Whatever could end a line, move the cursor or change the colour of what follows.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_BARE = re.compile(r"[^\s\"=]+")  # a value that needs no quotes


class PlainFormatter(logging.Formatter):
    """`2026-11-15 11:30:04 INFO access: GET /health 200 seconds=0.001`."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        name = record.name.removeprefix("vllm_omni.").removeprefix("entrypoints.openai.")
        process = _get_process(record)
        where = f"{process}: {name}" if process else name
        text = f"{when} {record.levelname} {where}: {escape(record.getMessage())}"
        for key, value in _get_fields(record).items():
            text += f" {key}={_quote(value)}"
        if record.exc_info:
            text += f" | {escape(self.formatException(record.exc_info))}"
        return text


class JSONFormatter(logging.Formatter):
    """The same as an object."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": record.created,
            "level": record.levelname.lower(),
            "process": _get_process(record) or "vllm-omni api",
            "logger": record.name,
            "message": record.getMessage(),
            **_get_fields(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)  # ASCII: nothing in it can end a line


def configure(log_format: str, level: str) -> None:
    """Our own lines from INFO on, those of libraries from `level` on; all to stderr.

    Processes of stages, which start later, do the same when they call `configure_child`.
    """
    envs.set_log_format(log_format, level)
    configure_child()


def configure_child() -> None:
    """As the server that this process belongs to was told; without one, leave things as they are.

    vLLM's lines go the same way: it is told not to set up its own.
    """
    if (chosen := envs.log_format()) is None:
        return
    log_format, level = chosen
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter() if log_format == "json" else PlainFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.getLogger("vllm_omni").setLevel(min(logging.INFO, logging.getLevelName(level.upper())))


def escape(text: str) -> str:
    """A text without control characters."""
    return _CONTROL.sub(lambda found: repr(found.group())[1:-1], text)


def _quote(value: object) -> str:
    text = escape(str(value))
    return text if _BARE.fullmatch(text) else json.dumps(text)


def _get_fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return fields


def _get_process(record: logging.LogRecord) -> str | None:
    """The stage's process that a line comes from; None: the server's own."""
    return None if record.processName == "MainProcess" else record.processName
