"""Chromium on the page of a running server, watched for everything that goes wrong in it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Page,
    Request,
    Response,
    expect,
    sync_playwright,
)

from tests.serving import ServerProcess

CHROMIUM = shutil.which("chromium")
SCREENSHOTS = Path(__file__).parents[2] / "out" / "screenshots"
LAPTOP = {"width": 1366, "height": 768}
PHONE = {"width": 390, "height": 844}
TIMEOUT = 60_000  # milliseconds; a busy machine draws slowly

expect.set_options(timeout=TIMEOUT)


# Not for the whole session: while Playwright runs, no other test could run an event loop.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Watch:
    """What a browser complains about, and which hosts it asks for something."""

    def __init__(self, page: Page) -> None:
        self.problems: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        page.on("requestfailed", self._on_failed)
        page.on("response", self._on_response)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text} {message.location}")

    def _on_failed(self, request: Request) -> None:
        # Gradio's own script hangs up when a stream has ended, and the browser when a page closes.
        if request.failure != "net::ERR_ABORTED":
            self.problems.append(f"{request.failure}: {request.url}")

    def _on_response(self, response: Response) -> None:
        if response.status >= 400:
            self.problems.append(f"{response.status}: {response.url}")


def wait_until_loaded(page: Page) -> None:
    """Until the server has filled in the form: what is typed before that is lost."""
    page.locator("#size input").wait_for()
    page.wait_for_function("document.querySelector('#size input').value !== ''")


@contextmanager
def open_page(
    browser: Browser, url: str, name: str, may_say: str = "$^", **options: Any
) -> Iterator[Page]:
    """The page in a browser of its own; afterwards a picture of it is kept, and it was quiet.

    Args:
        may_say: pattern of what may be in its console nevertheless.
    """
    context = browser.new_context(**{"base_url": url, "viewport": LAPTOP} | options)
    context.set_default_timeout(TIMEOUT)
    page = context.new_page()
    watch = Watch(page)
    page.goto("/ui")
    wait_until_loaded(page)
    try:
        yield page
    finally:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"{name}.png")
        context.close()
    problems = [problem for problem in watch.problems if not re.search(may_say, problem)]
    assert "\n".join(problems) == ""
    assert watch.hosts - {""} == {urlsplit(url).netloc}  # "": data URLs


@pytest.fixture
def page(browser: Browser, server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Page]:
    """On a laptop, or as `indirect` parameters say."""
    options = getattr(request, "param", {})
    name = request.node.originalname.removeprefix("test_")
    with open_page(browser, server.url, name, **options) as page:
        yield page
