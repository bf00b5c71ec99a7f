"""Pictures that clients send: inside the request, or by an address where that is allowed.

A picture is decoded in a process that may die of it (`picture_check.py`), its header first; what
goes on is its file, which vLLM reads again when the request's turn comes: a file is small, its
pixels are not.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.entrypoints.openai.errors import APIError
from vllm_omni.entrypoints.openai.picture_check import Facts, PictureChecker

# By PIL's names.
MEDIA_TYPES = {
    "PNG": "image/png",
    "JPEG": "image/jpeg",
    "WEBP": "image/webp",
    "GIF": "image/gif",
}
MIN_SIDE = 8
"""Pixels. Processors take a side of 1 or 3 for the colours."""
MAX_ASPECT = 100
"""Long side over short side; vision towers refuse more than 200."""

FETCH_TIMEOUT = 10.0  # seconds
_DATA_URL = re.compile(r"data:([a-z]+/[a-z0-9.+-]+);base64,", re.IGNORECASE)
_ADDRESS = re.compile(r"[!-\[\]-~]+")  # printable ASCII, but no backslash
_GLOBAL_V6 = ipaddress.ip_network("2000::/3")  # the rest is local, mapped or reserved

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class InputImage:
    """A picture as it came, and the parameter that it came by."""

    url: str
    param: str


class ImageReader:
    """Reads the pictures of requests.

    Args:
        is_allowed: which addresses may be fetched from; those on the internet.
        fetch_timeout: seconds, from the name to the last byte.
    """

    def __init__(
        self,
        config: ServerConfig,
        is_allowed: Callable[[IPAddress], bool] | None = None,
        fetch_timeout: float = FETCH_TIMEOUT,
    ) -> None:
        self.config = config
        self._is_allowed = is_allowed or is_public
        self._fetch_timeout = fetch_timeout
        self._checker = PictureChecker()
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="vllm-omni-reader")

    async def read(self, images: list[InputImage]) -> list[str]:
        """Each as a data URL of a file that was found good."""
        if len(images) > self.config.max_input_images:
            most = self.config.max_input_images
            raise _refuse(images[most], f"the request has {len(images)} pictures: at most {most}")
        return [await self._read(image) for image in images]

    async def _read(self, image: InputImage) -> str:
        loop = asyncio.get_running_loop()
        if image.url[:5].lower() == "data:":
            return await loop.run_in_executor(self._pool, self._check_data_url, image)
        data = await self._fetch(image)
        return await loop.run_in_executor(self._pool, self._check, image, data)

    def shutdown(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._checker.shutdown()

    # --- inside the request ---

    def _check_data_url(self, image: InputImage) -> str:
        found = _DATA_URL.match(image.url)
        if found is None:
            raise _refuse(image, "a data URL is needed such as data:image/png;base64,…")
        if found[1].lower() not in MEDIA_TYPES.values():
            raise _refuse(image, f"{found[1][:40]} is not supported: png, jpeg, webp or gif")
        try:
            data = base64.b64decode(image.url[found.end() :], validate=True)
        except (binascii.Error, ValueError) as error:
            raise _refuse(image, "it is not valid base64") from error
        return self._check(image, data)

    def _check(self, image: InputImage, data: bytes) -> str:
        """Refuse what PIL cannot read, and what is not worth reading."""
        if not data:
            raise _refuse(image, "the picture has 0 bytes")
        facts = self._checker.check(data, self.config.max_input_pixels)
        self._check_facts(image, facts)
        media_type = MEDIA_TYPES.get(facts.format, "image/jpeg")
        return f"data:{media_type};base64,{base64.b64encode(data).decode()}"

    def _check_facts(self, image: InputImage, facts: Facts) -> None:
        size, most = f"{facts.width}x{facts.height}", self.config.max_input_pixels
        if facts.problem == "costly":
            raise _refuse(image, "it takes too long or too much memory to read")
        if facts.problem == "huge":
            raise _refuse(image, f"it has more than {most} pixels")
        if facts.width * facts.height > most:
            raise _refuse(image, f"it has {size} pixels, more than {most}")
        short, long = sorted((facts.width, facts.height))
        if facts.format and (short < MIN_SIDE or long > short * MAX_ASPECT):
            allowed = f"each side at least {MIN_SIDE}, and at most {MAX_ASPECT} times the other"
            raise _refuse(image, f"it has {size} pixels: {allowed}")
        if facts.is_animated:
            raise _refuse(image, "it is animated: send one of its pictures")
        if facts.problem:
            raise _refuse(image, "it is no png, jpeg, webp or gif, or a broken one")

    # --- by an address ---

    async def _fetch(self, image: InputImage) -> bytes:
        url = self._parse(image)
        try:
            async with asyncio.timeout(self._fetch_timeout):
                address = await self._resolve(image, url)
                return await self._download(image, url, address)
        except (TimeoutError, OSError, httpx.HTTPError, httpx.InvalidURL) as error:
            raise _refuse(image, "it could not be fetched") from error

    def _parse(self, image: InputImage) -> httpx.URL:
        scheme = image.url.partition(":")[0].lower()
        if scheme not in ("http", "https"):
            raise _refuse(image, "a data URL is needed such as data:image/png;base64,…")
        if not self.config.fetch_images:
            message = "this server does not fetch pictures: send data:image/png;base64,…"
            raise _refuse(image, message)
        try:
            url = httpx.URL(image.url)
        except httpx.InvalidURL as error:
            raise _refuse(image, "it is not a valid address") from error
        if _ADDRESS.fullmatch(image.url) is None or url.userinfo or not url.host:
            raise _refuse(image, "it is not a plain address")
        return url

    async def _resolve(self, image: InputImage, url: httpx.URL) -> IPAddress:
        """The one address to connect to; a name is public only if all of its addresses are."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(url.host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise _refuse(image, "its host is not known") from error
        addresses = [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]
        if not addresses or not all(self._is_allowed(address) for address in addresses):
            raise _refuse(image, "only public addresses are fetched from")
        return addresses[0]

    async def _download(self, image: InputImage, url: httpx.URL, address: IPAddress) -> bytes:
        """The file, from the address that was checked: the name is not looked up again."""
        headers = {"Host": url.netloc.decode("ascii"), "Accept-Encoding": "identity"}
        host = f"[{address}]" if address.version == 6 else str(address)
        async with (
            httpx.AsyncClient(trust_env=False, follow_redirects=False) as client,
            client.stream(
                "GET",
                url.copy_with(host=host),
                headers=headers,
                extensions={"sni_hostname": url.host},
            ) as response,
        ):
            if response.status_code != 200:
                raise _refuse(image, f"it was answered with status {response.status_code}")
            data = bytearray()
            async for chunk in response.aiter_raw():
                data += chunk
                if len(data) > self.config.max_body_bytes:
                    most = self.config.max_body_bytes
                    raise _refuse(image, f"it has more than {most} bytes")
            return bytes(data)


def is_public(address: IPAddress) -> bool:
    """Whether an address is on the internet, and means no other one inside it."""
    if not address.is_global or address.is_multicast:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return True
    embeds = address.ipv4_mapped or address.sixtofour or address.teredo
    return address in _GLOBAL_V6 and embeds is None


def _refuse(image: InputImage, problem: str) -> APIError:
    return APIError(400, f"{image.param} cannot be used: {problem}", image.param, "invalid_image")
