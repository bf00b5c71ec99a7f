"""Log lines: one for each thing, whatever is in it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from vllm_omni.logs import JSONFormatter, PlainFormatter, escape

NASTY = "a\nb\rc\x1b[31md\x00e\x85f\u2028g\x7fh\ud800i"


def make_record(message: str, *args: object, **more: object) -> logging.LogRecord:
    record = logging.LogRecord("vllm_omni.access", logging.INFO, "", 0, message, args, None)
    for name, value in more.items():
        setattr(record, name, value)
    return record


def with_error() -> logging.LogRecord:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        return make_record("it failed", exc_info=sys.exc_info())


def test_plain() -> None:
    fields = {
        "seconds": 0.5,
        "client": "127.0.0.1",
        "note": "two words",
        "tricky": 'a"b=c',
        "e": "",
    }
    line = PlainFormatter().format(make_record("%s %d", "GET /x", 200, fields=fields))
    date, time, rest = line.split(" ", 2)
    assert len(date) == 10 and len(time) == 8
    assert rest == (
        'INFO access: GET /x 200 seconds=0.5 client=127.0.0.1 note="two words" '
        'tricky="a\\"b=c" e=""'
    )


def test_json() -> None:
    fields = {"seconds": 0.5, "client": "127.0.0.1"}
    entry = json.loads(JSONFormatter().format(make_record("%s!", "hi", fields=fields)))
    assert isinstance(entry.pop("time"), float)
    assert entry == {
        "level": "info",
        "process": "vllm-omni api",
        "logger": "vllm_omni.access",
        "message": "hi!",
        "seconds": 0.5,
        "client": "127.0.0.1",
    }


@pytest.mark.parametrize("formatter", [PlainFormatter(), JSONFormatter()], ids=["plain", "json"])
def test_nothing_ends_a_line(formatter: logging.Formatter) -> None:
    line = formatter.format(make_record(NASTY, fields={"id": NASTY}))
    assert line.isprintable() and line.splitlines() == [line]
    assert "0x" not in line  # escaped, not described
    line = formatter.format(with_error())
    assert line.isprintable() and "ValueError: two\\nlines" in line


def test_stage_is_named() -> None:
    record = make_record("it failed", processName="vllm-omni ar:0")
    assert "INFO vllm-omni ar:0: access: it failed" in PlainFormatter().format(record)
    assert json.loads(JSONFormatter().format(record))["process"] == "vllm-omni ar:0"


def test_escape_keeps_what_can_be_read() -> None:
    assert escape("A caf\u00e9 \u2603 'x'") == "A caf\u00e9 \u2603 'x'"
    assert escape("a\nb\x1b") == "a\\nb\\x1b"


CODE = """
import logging
from vllm_omni import logs
logs.configure("plain", "error")
logging.getLogger("vllm_omni.server").info("ours")
logging.getLogger("uvicorn.error").info("theirs")
logging.getLogger("uvicorn.error").error("their error")
import vllm.logger  # as a stage's process does
logs.configure_child()
vllm.logger.init_logger("vllm.v1.engine").error("of vLLM\\nin two lines")
"""


def test_lines_of_libraries_go_the_same_way() -> None:
    run = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
    )
    lines = [line.split(": ", 1)[1] for line in run.stderr.splitlines()]
    assert lines == ["ours", "their error", "of vLLM\\nin two lines"]
    assert run.stdout == ""


def test_without_a_server_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni import logs

    monkeypatch.delenv("VLLM_OMNI_LOG", raising=False)
    before = list(logging.getLogger().handlers)
    logs.configure_child()
    assert logging.getLogger().handlers == before
