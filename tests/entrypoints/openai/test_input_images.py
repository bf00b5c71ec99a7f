"""Pictures that clients send, and addresses that nobody should be made to fetch."""

from __future__ import annotations

import asyncio
import base64
import io
import ipaddress
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.inner_server import InnerServer
from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.entrypoints.openai.errors import APIError
from vllm_omni.entrypoints.openai.input_images import ImageReader, InputImage, is_public

PARAM = "messages.0.content.1.image_url"


def make_file(
    kind: str = "PNG", size: tuple[int, int] = (32, 32), mode: str = "RGB", **options: Any
) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, 1 if mode in ("1", "L", "P", "I;16") else "red").save(
        file, kind, **options
    )
    return file.getvalue()


def make_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def read(*urls: str, reader: ImageReader | None = None, **config: Any) -> list[str]:
    used = reader or ImageReader(ServerConfig(**config))
    try:
        return asyncio.run(used.read([InputImage(url, PARAM) for url in urls]))
    finally:
        used.shutdown()


def refuse(url: str, **options: Any) -> str:
    """The message with which a picture is refused."""
    with pytest.raises(APIError) as caught:
        read(url, **options)
    error = caught.value
    assert (error.status, error.param, error.code) == (400, PARAM, "invalid_image")
    assert error.message.startswith(f"{PARAM} cannot be used: ")
    return error.message


# --- inside the request ---


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "gif"])
def test_each_kind_goes_on_as_it_came(kind: str) -> None:
    url = make_url(make_file(kind.upper()), f"image/{kind}")
    assert read(url) == [url]
    assert read(url.replace("data:image", "DATA:Image")) == [url]


@pytest.mark.parametrize("mode", ["RGBA", "L", "1", "P", "I;16"])
def test_each_mode_of_colours_is_read(mode: str) -> None:
    url = make_url(make_file(mode=mode))
    assert read(url) == [url]


def test_the_type_is_that_of_the_file() -> None:
    data = make_file("JPEG")
    assert read(make_url(data, "image/png")) == [make_url(data, "image/jpeg")]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (make_url(b""), "0 bytes"),
        (make_url(b"hello"), "no png, jpeg, webp or gif"),
        (make_url(make_file()[:50]), "no png, jpeg, webp or gif, or a broken one"),
        (make_url(make_file("JPEG", (64, 64))[:-100]), "or a broken one"),
        (make_url(make_file("BMP")), "no png, jpeg, webp or gif"),
        (make_url(make_file("TIFF")), "no png, jpeg, webp or gif"),
        (make_url(make_file("ICO")), "no png, jpeg, webp or gif"),
        (make_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "no png, jpeg"),
        (make_url(make_file("BMP"), "image/bmp"), "image/bmp is not supported"),
        (make_url(b"<svg/>", "image/svg+xml"), "image/svg+xml is not supported"),
        (make_url(b"hello", "text/plain"), "text/plain is not supported"),
        ("data:image/png;base64,****", "not valid base64"),
        ("data:image/png;base64,iVBORw0", "not valid base64"),
        (make_url(make_file()) + "\n", "not valid base64"),
        (make_url(make_file()).replace(",", ", "), "not valid base64"),
        ("data:image/png,hello", "a data URL is needed"),
        ("data:", "a data URL is needed"),
        ("data:image/png;charset=utf-8;base64,aGVsbG8=", "a data URL is needed"),
        ("hello", "a data URL is needed"),
    ],
)
def test_what_is_no_picture_is_refused(url: str, message: str) -> None:
    assert message in refuse(url)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((1, 1), "1x1 pixels: each side at least 8"),
        ((3, 64), "3x64 pixels: each side at least 8"),
        ((8, 801), "at most 100 times the other"),
        ((101, 100), "101x100 pixels, more than 10000"),
    ],
)
def test_sizes_that_are_refused(size: tuple[int, int], message: str) -> None:
    assert message in refuse(make_url(make_file(size=size)), max_input_pixels=10_000)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animated_pictures_are_refused(kind: str) -> None:
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue")]
    file = io.BytesIO()
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    assert "animated" in refuse(make_url(file.getvalue(), f"image/{kind.lower()}"))


@pytest.mark.parametrize(
    ("side", "message"), [(5000, "5000x5000 pixels, more than"), (50_000, "more than 16777216")]
)
def test_a_bomb_is_not_decoded(side: int, message: str) -> None:
    # The header of a large picture, and nothing else: decoding would say that it is broken.
    header = b"IHDR" + side.to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"
    checksum = zlib.crc32(header).to_bytes(4, "big")
    data = b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4, "big") + header + checksum
    data += (0).to_bytes(4, "big") + b"IDAT"
    assert message in refuse(make_url(data))


def test_there_may_be_only_so_many() -> None:
    url = make_url(make_file())
    assert read(url, url, max_input_images=2) == [url, url]
    with pytest.raises(APIError, match="has 3 pictures: at most 2"):
        read(url, url, url, max_input_images=2)


# --- by an address ---


class Handler(BaseHTTPRequestHandler):
    """Answers by its server's `answer`, and counts."""

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers["Host"]))  # type: ignore[attr-defined]
        self.server.answer(self)  # type: ignore[attr-defined]

    def log_message(self, *_: Any) -> None:
        pass


class Site(ThreadingHTTPServer):
    """A web server on loopback. Every connection to it is counted."""

    def __init__(self, answer: Callable[[Handler], None]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.requests: list[tuple[str, str]] = []
        self.num_connections = 0
        self.port = self.server_address[1]
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def get_request(self) -> Any:
        self.num_connections += 1
        return super().get_request()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


def give(data: bytes, status: int = 200, **headers: str) -> Callable[[Handler], None]:
    def answer(handler: Handler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return answer


@pytest.fixture
def canary() -> Iterator[Site]:
    """Has a picture that nobody may get."""
    with closing(Site(give(make_file()))) as site:
        yield site


def make_hostile_urls(port: int) -> list[str]:
    """Ways to say "this machine", or a network that is not everybody's."""
    hosts = [
        "127.0.0.1",
        "127.1",
        "127.0.1",
        "127.127.127.127",
        "2130706433",  # decimal
        "0x7f000001",
        "0x7f.0.0.1",
        "0177.0.0.1",
        "017700000001",
        "0",
        "0.0.0.0",
        "localhost",
        "localhost.",
        "LOCALHOST",
        "%6c%6f%63alhost",
        "①②⑦.⓪.⓪.①",
        "127。0。0。1",
        "[::1]",
        "[::]",
        "[0:0:0:0:0:0:0:1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::127.0.0.1]",
        "[64:ff9b::127.0.0.1]",
        "[2002:7f00:1::]",  # 6to4 of 127.0.0.1
        "[2001:0:7f00:1::1]",  # Teredo
        "[fe80::1]",
        "[fe80::1%25lo]",
        "[fc00::1]",
        "[fec0::1]",
        "[ff02::1]",
        "169.254.169.254",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.0.1",
        "100.64.0.1",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        socket.gethostname(),
    ]
    return [
        *(f"http://{host}:{port}/canary.png" for host in hosts),
        f"https://127.0.0.1:{port}/",
        f"http://example.com@127.0.0.1:{port}/",
        f"http://127.0.0.1:{port}@example.com/",
        f"http://user:password@127.0.0.1:{port}/",
        f"http://example.com\\@127.0.0.1:{port}/",
        f"http://127.0.0.1:{port}\\@example.com/",
        f"http:\\\\127.0.0.1:{port}/",
        f"http://127.0.0.1:{port}#@example.com/",
        f"http://127.0.0.1:{port}?@example.com/",
        f"http://exa mple.com@127.0.0.1:{port}/",
        f"http://127.0.0.1:{port}/\r\nX-Injected: yes",
        f" http://127.0.0.1:{port}/",
        f"http:/127.0.0.1:{port}/",
        f"http:127.0.0.1:{port}/",
        f"http:///127.0.0.1:{port}/",
        f"//127.0.0.1:{port}/",
        f"HTTP://127.0.0.1:{port}/",
        f"http://127.0.0.1:{port}:80/",
        "http://127.0.0.1:99999/",
        "http://",
        "http://[::1",
        "http://.",
        "http://a..b/",
        f"http://{'a' * 300}/",
        "http://no-such-host.invalid/",
        f"ftp://127.0.0.1:{port}/",
        f"gopher://127.0.0.1:{port}/_GET",
        "file:///etc/passwd",
        "file://localhost/etc/passwd",
        "javascript:alert(1)",
        "blob:http://127.0.0.1/x",
        "unix:///var/run/docker.sock",
    ]


def test_no_address_of_this_machine_is_fetched(canary: Site) -> None:
    for url in make_hostile_urls(canary.port):
        refuse(url, fetch_images=True)
        refuse(url)
    assert canary.num_connections == 0
    assert len(make_hostile_urls(canary.port)) > 60


def test_nor_through_a_chat(canary: Site, inner: InnerServer) -> None:
    with inner.serve(fetch_images=True) as served:
        for url in make_hostile_urls(canary.port):
            part = {"type": "image_url", "image_url": {"url": url}}
            message = {"role": "user", "content": [{"type": "text", "text": "what is it?"}, part]}
            answer = httpx.post(
                f"{served.url}/v1/chat/completions", json={"messages": [message]}, timeout=60
            )
            assert answer.status_code == 400, url
            assert answer.json()["error"]["param"] == PARAM
    assert canary.num_connections == 0


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("192.0.2.1", False),
        ("224.0.0.1", False),
        ("0.0.0.0", False),
        ("::1", False),
        ("::ffff:8.8.8.8", False),
        ("::8.8.8.8", False),
        ("64:ff9b::8.8.8.8", False),
        ("2002:808:808::", False),
        ("2001:0:808:808::", False),
        ("2001:db8::1", False),
        ("fe80::1", False),
        ("fd00::1", False),
        ("ff02::1", False),
    ],
)
def test_public_addresses(address: str, expected: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is expected


# That a fetch works is seen on loopback, by a reader that may go there.


def fetch(url: str, timeout: float = 60.0, **config: Any) -> list[str]:
    settings = ServerConfig(fetch_images=True, **config)
    return read(url, reader=ImageReader(settings, lambda _: True, timeout))


def refuse_fetch(url: str, timeout: float = 60.0, **config: Any) -> str:
    with pytest.raises(APIError) as caught:
        fetch(url, timeout, **config)
    assert (caught.value.status, caught.value.param) == (400, PARAM)
    return caught.value.message


def test_a_picture_is_fetched_by_the_name_and_from_the_address(canary: Site) -> None:
    assert fetch(f"http://localhost:{canary.port}/a/b.png?c=d") == [make_url(make_file())]
    assert canary.requests == [("/a/b.png?c=d", f"localhost:{canary.port}")]


def test_redirects_are_not_followed(canary: Site) -> None:
    target = f"http://127.0.0.1:{canary.port}/"
    for status in (301, 302, 303, 307, 308):
        with closing(Site(give(b"", status, Location=target))) as site:
            message = refuse_fetch(f"http://127.0.0.1:{site.port}/")
        assert f"status {status}" in message
    assert canary.num_connections == 0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (give(b"no", 404), "status 404"),
        (give(b"hello"), "no png, jpeg"),
        (give(b""), "0 bytes"),
        (give(b"x" * 5000), "more than 4096 bytes"),
        (lambda handler: handler.wfile.write(b"nonsense\r\n\r\n"), "could not be fetched"),
    ],
    ids=["missing", "no picture", "empty", "too large", "no HTTP"],
)
def test_what_cannot_be_fetched(answer: Callable[[Handler], None], message: str) -> None:
    with closing(Site(answer)) as site:
        assert message in refuse_fetch(f"http://127.0.0.1:{site.port}/", max_body_bytes=4096)


def drip(handler: Handler) -> None:
    handler.send_response(200)
    handler.end_headers()
    with suppress(OSError):
        while True:
            handler.wfile.write(b"x")
            time.sleep(0.05)


@pytest.mark.parametrize("answer", [drip, lambda handler: time.sleep(2)], ids=["drips", "waits"])
def test_what_takes_too_long_is_cut_off(answer: Callable[[Handler], None]) -> None:
    with closing(Site(answer)) as site:
        message = refuse_fetch(f"http://127.0.0.1:{site.port}/", timeout=0.5)
    assert "could not be fetched" in message


def test_no_answer_where_nobody_listens() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        assert "could not be fetched" in refuse_fetch(url)
