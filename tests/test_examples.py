"""The examples run as they are written, and README and docs show them as they are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.pictures import get_color, open_picture, read_pixels
from tests.serving import ServerProcess
from vllm_omni.entrypoints.cli.main import make_parser

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PAGES = (ROOT / "README.md", ROOT / "docs" / "server.md")
WRITTEN_URL = "http://127.0.0.1:8000"
FENCED = re.compile(r"<!-- (examples/\S+) -->\n```\w+\n(.*?)```", re.DOTALL)
OUT_OF_REACH = re.compile("ENOTFOUND|ECONN|ETIMEDOUT|EAI_AGAIN|E40[13]")  # what npm says
PREVIEWS = ["preview-0.png", "preview-1.png", "preview-2.png", "final.png"]


class Folder:
    """Where an example runs, as it is written but for the server's address."""

    def __init__(self, path: Path, server: ServerProcess) -> None:
        self.path = path
        self.server = server

    def run(self, name: str, *command: str) -> str:
        """What the example prints."""
        text = (EXAMPLES / name).read_text()
        assert WRITTEN_URL in text
        script = self.path / Path(name).name
        script.write_text(text.replace(WRITTEN_URL, self.server.url))
        return call(self.path, *command, script.name)

    def assert_red_circle(self, name: str) -> None:
        pixels = read_pixels((self.path / name).read_bytes())
        assert pixels.shape == (256, 256, 3)
        red, green, blue = get_color(pixels, 0.5, 0.5)
        assert red > 150 and green < 90 and blue < 90, name


def call(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path, server: ServerProcess) -> Folder:
    return Folder(tmp_path, server)


@pytest.fixture(scope="module")
def node_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OpenAI's client for Node, from the registry that npm is set to."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("Node is not here: apt-get install nodejs npm")
    folder = tmp_path_factory.mktemp("node")
    shutil.copy(EXAMPLES / "node" / "package.json", folder)
    command = ["npm", "install", "--no-audit", "--no-fund", "--fetch-retries=1"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("npm install took too long: the registry may be out of reach")
    if done.returncode != 0 and OUT_OF_REACH.search(done.stderr):
        pytest.skip("npm's registry is out of reach: set it with npm config set registry URL")
    assert done.returncode == 0, done.stderr
    return folder / "node_modules"


# --- they run ---


def test_curl(folder: Folder) -> None:
    answer = json.loads(folder.run("curl.sh", "sh"))
    [image] = answer["data"]
    assert open_picture(httpx.get(image["url"]).content).size == (256, 256)


def test_curl_stream(folder: Folder) -> None:
    lines = folder.run("curl_stream.sh", "sh").splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    partial = "image_generation.partial_image"
    assert names == [partial, partial, "image_generation.completed"]


def test_generate(folder: Folder) -> None:
    folder.run("client_generate.py", sys.executable)
    folder.assert_red_circle("circle-0.png")
    folder.assert_red_circle("circle-1.png")


def test_stream(folder: Folder) -> None:
    assert folder.run("client_stream.py", sys.executable).split() == PREVIEWS
    for name in PREVIEWS:
        assert open_picture((folder.path / name).read_bytes()).size == (256, 256)


def test_jobs(folder: Folder) -> None:
    *states, url = folder.run("client_jobs.py", sys.executable).splitlines()
    assert re.fullmatch(r"queued: 0 %, [\d.]+ s to go", states[0])
    assert open_picture(httpx.get(url).content).size == (256, 256)


def test_chat(folder: Folder) -> None:
    written, drawn, seen = folder.run("client_chat.py", sys.executable).splitlines()
    assert "background" in written
    assert re.fullmatch(r".*blue star.*: \d{4,} characters", drawn)
    assert "star" in seen


def test_node(folder: Folder, node_modules: Path) -> None:
    (folder.path / "node_modules").symlink_to(node_modules)
    folder.run("node/generate.mjs", "node")
    folder.assert_red_circle("circle.png")
    assert folder.run("node/stream.mjs", "node").split() == PREVIEWS
    assert all((folder.path / name).stat().st_size > 1000 for name in PREVIEWS)


# --- they are what is written ---


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_show_the_examples(page: Path) -> None:
    shown = FENCED.findall(page.read_text())
    assert len(shown) >= 3
    for name, block in shown:
        assert block == (ROOT / name).read_text(), name


def test_every_example_of_the_server_is_shown() -> None:
    shown = {name for page in PAGES for name, _ in FENCED.findall(page.read_text())}
    patterns = ("*.sh", "client_*.py", "node/generate.mjs")
    files = {path for pattern in patterns for path in EXAMPLES.glob(pattern)}
    assert shown == {path.relative_to(ROOT).as_posix() for path in files}


def test_the_server_of_these_tests_is_that_of_the_readme() -> None:
    assert "```\nvllm-omni serve --ui\n```" in PAGES[0].read_text()
    shown, tested = (make_parser().parse_args(["serve", *more, "--ui"]) for more in ([], ["demo"]))
    assert vars(shown) == vars(tested)
