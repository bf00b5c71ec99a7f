"""The package's own code, read: nothing runs what it was sent; and all doors, tried without a key.

That nothing imports pickle or calls eval is in `tests/test_imports.py`; that every route of the API
asks for its key over a socket, in `tests/entrypoints/openai/test_connection.py`.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message

from tests.asking import ask
from tests.serving import ServerProcess
from tests.test_imports import FILES, imports_of, name_of, parse
from vllm_omni.entrypoints.openai.access import OPEN_PATHS, AccessMiddleware
from vllm_omni.entrypoints.openai.config import ServerConfig

# Last names of what is called; of some, Python's own use of pickle is the reason.
FORBIDDEN_CALLS = {
    "recv_pyobj": "pickle",
    "send_pyobj": "pickle",
    "recv": "pickle, of a multiprocessing connection: recv_bytes is not",
    "Manager": "pickle",
    "Queue": "pickle, of multiprocessing",
    "SimpleQueue": "pickle, of multiprocessing",
    "Listener": "pickle, of multiprocessing",
    "system": "a shell",
    "popen": "a shell",
    "mktemp": "a name that somebody else may take first",
    "unsafe_load": "YAML that makes objects",
    "full_load": "YAML that makes objects",
    "load_module": "code from a file",
    "spec_from_file_location": "code from a file",
    "get_class_from_dynamic_module": "code of a checkpoint",
    "run_path": "code from a file",
}
FORBIDDEN_VALUES = {
    ("shell", "True"): "a shell",
    ("verify", "False"): "TLS that is not checked",
    ("weights_only", "False"): "pickle",
    ("share", "True"): "the page for everybody",
}
FORBIDDEN_TEXTS = ("tcp://", "VLLM_ALLOW_INSECURE_SERIALIZATION", "0.0.0.0")
FORBIDDEN_MODULES = {"_pickle", "dbm", "xmlrpc", "telnetlib", "ftplib", "code", "codeop", "runpy"}

# Words to whoever reads --help, and what such an address is called from here.
MAY_SAY = {("entrypoints/cli/serve.py", "0.0.0.0"), ("entrypoints/openai/report.py", "0.0.0.0")}
MAY_CALL = {"asyncio.Queue", "queue.Queue", "queue.SimpleQueue"}  # in one process


def find_calls(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            yield called.rpartition(".")[2].partition("[")[0], called.partition("[")[0], node.lineno


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_nothing_dangerous_is_called(file: Path) -> None:
    tree, imported = parse(file), imports_of(file)
    for name, called, line in find_calls(tree):
        in_full = {each for each in imported if each.rpartition(".")[2] == called} or {called}
        if not in_full & MAY_CALL:
            assert name not in FORBIDDEN_CALLS, (line, called, FORBIDDEN_CALLS[name])
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg is not None:
            assert (node.arg, ast.unparse(node.value)) not in FORBIDDEN_VALUES, node.lineno
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for text in FORBIDDEN_TEXTS:
                assert text not in node.value or (name_of(file), text) in MAY_SAY, node.lineno
    assert {name.partition(".")[0] for name in imports_of(file)} & FORBIDDEN_MODULES == set()
    assert {"yaml.load", "yaml.Loader", "yaml.UnsafeLoader"} & imports_of(file) == set()


def test_the_search_finds_what_it_looks_for() -> None:
    tree = ast.parse("a.b.recv_pyobj(1)\nasyncio.Queue[int]()\nPool().system('x')")
    assert [(name, called) for name, called, _ in find_calls(tree)][:2] == [
        ("recv_pyobj", "a.b.recv_pyobj"),
        ("Queue", "asyncio.Queue"),
    ]
    assert any(name == "recv_bytes" for file in FILES for name, _, _ in find_calls(parse(file)))


# --- doors ---


# In a process of its own: Gradio leaves event loops open.
WALK = """
import json
from fastapi import FastAPI
from starlette.routing import Mount
from vllm_omni.apps.gradio import mount_page

def walk(routes, prefix=""):
    for route in routes:
        yield prefix + getattr(route, "path", "")
        if isinstance(route, Mount):
            yield from walk(route.routes or (), prefix + route.path)

app = FastAPI()
page = mount_page(app)
print(json.dumps(sorted(set(walk(app.routes)))))
page.close()
"""


@pytest.fixture(scope="module")
def paths(server: ServerProcess) -> list[str]:
    """Of the API, as the server tells of them, and of the page, as Gradio has them."""
    walked = subprocess.run([sys.executable, "-c", WALK], check=True, capture_output=True)
    of_page = set(json.loads(walked.stdout))
    of_api = set(httpx.get(f"{server.url}/openapi.json", timeout=60).json()["paths"])
    assert len(of_page) > 30 and "/v1/images/generations" in of_api
    return sorted(of_page | of_api | {"/openapi.json", "/metrics", "/docs", "/", "/nothing"})


async def reached(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError(f"{scope['path']} was reached without a key")


def test_no_route_is_open_without_a_key(paths: list[str]) -> None:
    door = AccessMiddleware(reached, ServerConfig(api_keys=("the-right-key",)))
    for path in paths:
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            if path not in OPEN_PATHS:
                got = ask(door, method, path)
                assert (got.status, got.error["code"]) == (401, "invalid_api_key"), path


def test_no_path_is_a_web_socket(paths: list[str]) -> None:
    door = AccessMiddleware(reached, ServerConfig())
    for path in paths:
        sent: list[Message] = []

        async def send(message: Message, sent: list[Message] = sent) -> None:
            sent.append(message)

        scope = {"type": "websocket", "path": path, "headers": []}
        asyncio.run(door(scope, reached, send))  # type: ignore[arg-type]
        assert sent == [{"type": "websocket.close", "code": 1008}], path


def test_every_answer_forbids_guessing_its_type(server: ServerProcess) -> None:
    for path in ("/v1/models", "/health/live", "/metrics", "/nothing", "/ui/", "/openapi.json"):
        headers = httpx.get(server.url + path, timeout=60).headers
        assert headers["x-content-type-options"] == "nosniff", path
        assert headers["x-frame-options"] == "SAMEORIGIN", path
        assert "server" not in headers, path


# --- the page that says so ---


def test_every_promise_has_its_test() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| (R\d+) \|(.*)\|(.*)\|(.*)\|$", page, re.MULTILINE)
    assert [name for name, *_ in rows] == [f"R{number}" for number in range(1, 20)]
    folders = (root / "tests", root / "tests/entrypoints/openai", root / "tests/entrypoints")
    package = root / "vllm_omni"
    for name, _, kept_in, shown_by in rows:
        for file in re.findall(r"`([\w/]+\.py)`", shown_by):
            assert any((folder / file).is_file() for folder in folders), (name, file)
        for file in re.findall(r"`([\w/]+\.py)`", kept_in):
            places = (package / file, package / "entrypoints/openai" / file)
            assert any(place.is_file() for place in places), (name, file)
