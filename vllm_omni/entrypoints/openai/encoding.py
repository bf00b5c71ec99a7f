"""Pictures as files, made in threads: the event loop has others to serve."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

import vllm_omni
from vllm_omni.entrypoints.openai.protocol import OutputFormat

MEDIA_TYPES: dict[OutputFormat, str] = {
    "png": "image/png",
    "jpeg": "image/jpeg",
    "webp": "image/webp",
}
PARAMETERS = "parameters"
"""The PNG text chunk with the body, as JSON, that makes the same picture again."""


class ImageEncoder:
    """A pool of threads that write pictures. PIL lets go of the interpreter while it compresses."""

    def __init__(self, num_threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="vllm-omni-encoder")

    async def encode(
        self,
        image: Image.Image,
        output_format: OutputFormat,
        compression: int = 100,
        parameters: Mapping[str, Any] | None = None,
        size: tuple[int, int] | None = None,
    ) -> bytes:
        """The bytes of a file.

        Args:
            compression: quality in percent of jpeg and webp.
            parameters: goes into a PNG, so that the picture can be made again.
            size: to scale to, where it is not the picture's own.
        """
        call = partial(write_image, image, output_format, compression, parameters, size)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    async def to_base64(self, data: bytes) -> str:
        call = partial(base64.b64encode, data)
        encoded = await asyncio.get_running_loop().run_in_executor(self._pool, call)
        return encoded.decode("ascii")

    def shutdown(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def write_image(
    image: Image.Image,
    output_format: OutputFormat,
    compression: int = 100,
    parameters: Mapping[str, Any] | None = None,
    size: tuple[int, int] | None = None,
) -> bytes:
    """A picture as a file; see `ImageEncoder.encode`."""
    if size is not None and image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    file = io.BytesIO()
    if output_format == "png":
        image.save(file, "PNG", pnginfo=_make_info(parameters))
    else:
        image.save(file, output_format.upper(), quality=compression)
    return file.getvalue()


def _make_info(parameters: Mapping[str, Any] | None) -> PngInfo:
    info = PngInfo()
    info.add_text("Software", f"vLLM-omni {vllm_omni.__version__}")
    if parameters is not None:
        info.add_itxt("Description", str(parameters["prompt"]))
        info.add_itxt(PARAMETERS, json.dumps(parameters, ensure_ascii=False))
    return info
