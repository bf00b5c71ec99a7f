"""Pictures that are more than pictures: read as what they are or refused, at once and in bounds.

Truncated, empty, animated and huge ones are in `tests/entrypoints/openai/test_input_images.py`.
"""

from __future__ import annotations

import asyncio
import io
import resource
import time
import zlib
from collections.abc import Callable, Iterator

import psutil
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.entrypoints.openai.test_input_images import make_file, make_url
from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.entrypoints.openai.errors import APIError
from vllm_omni.entrypoints.openai.input_images import ImageReader, InputImage

MOST_SECONDS = 60.0  # on a busy machine: of the processor's there are three
MOST_GROWTH = 100 * 2**10  # KiB of resident memory, here; a child decodes
ZEROS = zlib.compress(bytes(2**27), 9)


def add_chunk(png: bytes, kind: bytes, data: bytes) -> bytes:
    """A PNG with one more chunk, behind its header."""
    head = 8 + 25
    chunk = len(data).to_bytes(4, "big") + kind + data
    return png[:head] + chunk + zlib.crc32(kind + data).to_bytes(4, "big") + png[head:]


def make_text_bomb() -> bytes:
    return add_chunk(make_file(), b"zTXt", b"a\0\0" + ZEROS)


def make_profile_bomb() -> bytes:
    return add_chunk(make_file(), b"iCCP", b"a\0\0" + ZEROS)


def make_many_texts() -> bytes:
    notes = PngInfo()
    for index in range(20_000):
        notes.add_text(f"a{index}", "b" * 100)
    return make_file(pnginfo=notes)


def make_large_exif() -> bytes:
    exif = Image.Exif()
    exif[0x010E] = "a" * 60_000
    return make_file("JPEG", exif=exif)


def make_many_previews() -> bytes:
    """A JPEG with a thousand more behind it, as cameras put one there."""
    file = io.BytesIO()
    frames = [Image.new("RGB", (32, 32), (index % 256, 0, 0)) for index in range(1000)]
    frames[0].save(file, "MPO", save_all=True, append_images=frames[1:])
    return file.getvalue()


def make_page_in_a_gif() -> bytes:
    return make_file("GIF") + b"<script>alert(1)</script>"


def make_archive_in_a_png() -> bytes:
    return make_file() + b"PK\x03\x04" + bytes(1000)


def make_many_scans() -> bytes:
    """A progressive JPEG whose last scan comes fifty thousand times."""
    jpeg = make_file("JPEG", (512, 512), progressive=True)
    last = jpeg.rindex(b"\xff\xda")
    return jpeg[:last] + jpeg[last:-2] * 50_000 + b"\xff\xd9"


def make_many_comments() -> bytes:
    """A GIF of a million comments, which PIL joins one by one."""
    gif = make_file("GIF")
    start = gif.index(b"\x2c")
    return gif[:start] + b"\x21\xfe\x01a\x00" * 10**6 + gif[start:]


BOMBS = {
    make_text_bomb: "a broken one",
    make_profile_bomb: "a broken one",
    make_many_scans: "takes too long",
    make_many_comments: "takes too long",
}
PICTURES = [
    *(make_many_texts, make_large_exif, make_many_previews),
    *(make_page_in_a_gif, make_archive_in_a_png),
]


def get_peak() -> int:
    """Of resident memory, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.fixture(scope="module")
def reader() -> Iterator[ImageReader]:
    reader = ImageReader(ServerConfig())
    yield reader
    reader.shutdown()


def look(reader: ImageReader, data: bytes) -> str:
    """What becomes of a picture: its kind, or why it is refused."""
    peak, start = get_peak(), time.monotonic()
    try:
        [url] = asyncio.run(reader.read([InputImage(make_url(data), "image")]))
        answer = url.partition(";")[0]
    except APIError as error:
        assert error.status == 400
        answer = error.message
    seconds, growth = time.monotonic() - start, get_peak() - peak
    print(f"{len(data)} bytes: {answer}; {seconds:.2f} s, {growth} KiB")
    assert seconds < MOST_SECONDS and growth < MOST_GROWTH
    return answer


@pytest.mark.parametrize("make", BOMBS)
def test_bombs_are_refused_and_the_next_picture_is_read(
    reader: ImageReader, make: Callable[[], bytes]
) -> None:
    assert BOMBS[make] in look(reader, make())
    assert look(reader, make_file()) == "data:image/png"


@pytest.mark.parametrize("make", PICTURES)
def test_what_is_behind_or_beside_a_picture_is_left_alone(
    reader: ImageReader, make: Callable[[], bytes]
) -> None:
    assert look(reader, make()) in ("data:image/png", "data:image/jpeg", "data:image/gif")


def test_a_decoder_that_dies_takes_nobody_along(reader: ImageReader) -> None:
    assert look(reader, make_file()) == "data:image/png"
    [child] = find_children()
    child.kill()
    child.wait()
    assert look(reader, make_file()) == "data:image/png"
    reader.shutdown()
    assert find_children() == []


def find_children() -> list[psutil.Process]:
    children = [child for child in psutil.Process().children() if child.status() != "zombie"]
    return [child for child in children if child.cmdline()[:1] == ["vllm-omni pictures"]]
