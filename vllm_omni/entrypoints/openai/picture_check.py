"""Pictures of strangers are first decoded in a process of its own, which has little and may die.

Decoders have holes, and files that are small can take hours: a JPEG of a million scans, a GIF of a
million comments. What this process has not read within its limits, nobody else has to read.
"""

from __future__ import annotations

import io
import math
import resource
import select
import signal
import struct
import subprocess
import sys
import time
from queue import Empty, SimpleQueue
from typing import IO

import msgspec
import setproctitle
from PIL import Image

from vllm_omni.processes import end_with_parent

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # by PIL's names
WITH_PREVIEW = "MPO"  # what PIL calls a JPEG of which cameras have put a second one behind

_CPU_SECONDS = 1  # of one picture, and one more for so many pixels:
_PIXELS_PER_SECOND = 10_000_000
_MEMORY = 2**29  # bytes of address space, and more for each pixel:
_BYTES_PER_PIXEL = 16
_MAX_WAIT = 60.0  # seconds, on a machine that has no time
_HEAD = struct.Struct("<QQ")  # of a call: bytes that follow, most pixels
_LENGTH = struct.Struct("<I")  # of a reply


class Facts(msgspec.Struct):
    """What a picture turned out to be."""

    format: str = ""
    width: int = 0
    height: int = 0
    is_animated: bool = False
    problem: str = ""  # "huge", "broken", "costly"; empty: it was decoded, or is over `max_pixels`


class PictureChecker:
    """Has pictures decoded, in as many processes as it is called from threads."""

    def __init__(self) -> None:
        self._idle: SimpleQueue[_Child] = SimpleQueue()

    def check(self, data: bytes, max_pixels: int) -> Facts:
        """Decode a picture, unless it has too many pixels."""
        while (child := self._take() or _Child()).is_dead:  # while nobody asked it for anything
            child.close()
        try:
            facts = child.check(data, max_pixels)
        except (EOFError, BrokenPipeError, TimeoutError):
            child.close()  # over a limit
            return Facts(problem="costly")
        except BaseException:
            child.close()
            raise
        self._idle.put(child)
        return facts

    def shutdown(self) -> None:
        while (child := self._take()) is not None:
            child.close()

    def _take(self) -> _Child | None:
        try:
            return self._idle.get_nowait()
        except Empty:
            return None


class _Child:
    """This end of the process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # PIL warns of this and that
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._calls, self._replies = self._process.stdin, self._process.stdout

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def check(self, data: bytes, max_pixels: int) -> Facts:
        self._calls.write(_HEAD.pack(len(data), max_pixels))
        self._calls.write(data)
        self._calls.flush()
        poll = select.poll()
        poll.register(self._replies, select.POLLIN)
        if not poll.poll(1e3 * _MAX_WAIT):
            raise TimeoutError
        length = _LENGTH.unpack(_read(self._replies, _LENGTH.size))[0]
        return msgspec.msgpack.decode(_read(self._replies, length), type=Facts)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._replies.close()
        try:
            self._calls.close()
        except BrokenPipeError:
            return  # what it had not read yet


def _read(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


# --- in the process ---


def main() -> None:
    """Answer calls until their end is closed."""
    setproctitle.setproctitle("vllm-omni pictures")
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    calls, replies = sys.stdin.buffer, sys.stdout.buffer
    while len(head := calls.read(_HEAD.size)) == _HEAD.size:
        length, max_pixels = _HEAD.unpack(head)
        data = _read(calls, length)
        _limit(max_pixels)
        reply = msgspec.msgpack.encode(look(data, max_pixels))
        replies.write(_LENGTH.pack(len(reply)) + reply)
        replies.flush()


def _limit(max_pixels: int) -> None:
    """For the next picture: over the first the system ends this process, over the second PIL."""
    seconds = _CPU_SECONDS + max_pixels / _PIXELS_PER_SECOND
    used = time.process_time()
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used + seconds), most))
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY + _BYTES_PER_PIXEL * max_pixels, most))


def look(data: bytes, max_pixels: int) -> Facts:
    """What a file holds."""
    facts = Facts()
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            facts.format = opened.format or ""
            facts.width, facts.height = opened.size
            if facts.width * facts.height <= max_pixels:
                is_still = facts.format == WITH_PREVIEW
                facts.is_animated = not is_still and getattr(opened, "is_animated", False)
                opened.load()
    except Image.DecompressionBombError:
        facts.problem = "huge"
    except Exception:  # a broken file makes PIL raise anything
        facts.problem = "broken"
    return facts


if __name__ == "__main__":
    main()
