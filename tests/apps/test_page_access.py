"""The page behind keys, and what of it strangers and other web pages can reach: nothing."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.apps.conftest import open_page
from tests.drawing import MakeCheckpoint
from tests.serving import ServerProcess

KEY = "a-key-for-the-page"


@pytest.fixture(scope="module")
def keyed_server(
    checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("keyed server") / "log"
    server = ServerProcess(log, str(checkpoint(0)), "--ui", "--api-key", KEY)
    server.wait_until_ready()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


# --- what is there at all ---


@pytest.mark.parametrize(
    "path",
    [
        "gradio_api/info",
        "gradio_api/openapi.json",
        "gradio_api/file=/etc/passwd",
        "gradio_api/file=https://example.com/",
        "gradio_api/proxy=https://example.com/",
        "gradio_api/runs",
        "gradio_api/deep_link",
        "gradio_api/vibe-code",
        "gradio_api/call/draw",
        "gradio_api/run/predict",
        "monitoring",
        "login",
        "docs",
        "openapi.json",
        "pictures/",
        "pictures/anything",
        "../v1/models/../../etc/passwd",
    ],
)
def test_only_what_the_page_uses_is_there(client: httpx.Client, path: str) -> None:
    for method in ("GET", "POST"):
        assert client.request(method, f"/ui/{path}").status_code in (404, 405)


def test_answers_forbid_what_the_page_does_not_do(client: httpx.Client) -> None:
    answer = client.get("/ui/")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Path=/ui" in cookie
    assert "max-age" not in cookie.lower() and "expires" not in cookie.lower()
    for path in ("/", "/ui"):
        assert client.get(path, follow_redirects=False).headers["location"] == "/ui/"
    assert client.get("/favicon.ico").headers["content-type"] == "image/svg+xml"


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://example.com"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_other_web_pages_cannot_use_it(client: httpx.Client, headers: dict[str, str]) -> None:
    body = {"data": [], "fn_index": 0, "session_hash": "x"}
    answer = client.post("/ui/gradio_api/queue/join", json=body, headers=headers)
    assert answer.status_code == 403


def test_uploads_are_limited(client: httpx.Client) -> None:
    files = {"files": ("big.png", b"\0" * (9 * 2**20))}
    assert client.post("/ui/gradio_api/upload", files=files).status_code == 413


# --- whose pictures they are ---


def test_pictures_are_for_the_browser_that_asked(
    browser: Browser, keyed_server: ServerProcess
) -> None:
    credentials = {"username": "me", "password": KEY}
    with open_page(browser, keyed_server.url, "keyed", http_credentials=credentials) as page:
        page.locator("#prompt textarea").fill("a circle")
        page.locator("#steps input[type=number]").fill("2")
        page.locator("#prompt textarea").press("Enter")
        expect(page.locator("#stage .frame img")).to_be_visible()
        source = page.locator("#stage .frame img").get_attribute("src") or ""
        mine = page.request.get(source)
        assert (mine.status, mine.headers["content-type"]) == (200, "image/png")
        expect(page.locator("#header .status")).to_contain_text("Idle")
    url = f"{keyed_server.url}{source}"
    assert httpx.get(url).status_code == 401
    assert httpx.get(url, auth=("me", "another key")).status_code == 401
    assert httpx.get(url, auth=("me", KEY)).status_code == 404  # a key, but another browser


@pytest.mark.parametrize(
    "path",
    ["", "/", "/status", "/config", "/theme.css", "/assets/index.js", "/gradio_api/queue/join"],
)
def test_without_a_key_nothing_is_shown(keyed_server: ServerProcess, path: str) -> None:
    for method in ("GET", "POST"):
        answer = httpx.request(method, f"{keyed_server.url}/ui{path}")
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert "set-cookie" not in answer.headers


# Last: it ends the server.
def test_open_tabs_do_not_hold_up_a_shutdown(browser: Browser, keyed_server: ServerProcess) -> None:
    credentials = {"username": "me", "password": KEY}
    # What is open when the server ends is told so with a 503, or cut off.
    may_say = (
        "ERR_|Connection|Failed to fetch|network|heartbeat|Cancelled via cancel scope"
        "|^503: .*/ui/|status of 503|^error: Response "
    )
    with open_page(
        browser, keyed_server.url, "shutdown", may_say, http_credentials=credentials
    ) as page:
        start = time.monotonic()
        assert keyed_server.stop() == 0
        assert time.monotonic() - start < 25  # less than it gives to requests
        status = page.locator("#header .status")
        expect(status).to_have_text("The server does not answer.")
    assert re.search("error|Traceback", keyed_server.log.read_text(), re.IGNORECASE) is None
