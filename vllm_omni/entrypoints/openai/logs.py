"""Log lines: one for each thing that happened, plain or JSON."""

from __future__ import annotations

import json
import logging
import sys
import time

from vllm_omni.entrypoints.openai.config import LogFormat


class PlainFormatter(logging.Formatter):
    """`2026-11-15 11:30:04 INFO access: GET /health 200 seconds=0.001`."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        name = record.name.removeprefix("vllm_omni.").removeprefix("entrypoints.openai.")
        text = f"{when} {record.levelname} {name}: {_one_line(record.getMessage())}"
        for key, value in getattr(record, "fields", {}).items():
            text += f" {key}={value}"
        if record.exc_info:
            text += f" | {_one_line(self.formatException(record.exc_info))}"
        return text


class JSONFormatter(logging.Formatter):
    """The same as an object."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def configure(log_format: LogFormat, level: str) -> None:
    """Our own lines from INFO on, those of libraries from `level` on; all to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter() if log_format == "json" else PlainFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.getLogger("vllm_omni").setLevel(min(logging.INFO, logging.getLevelName(level.upper())))


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")
