"""Pictures behind urls, kept in memory for a limited time."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from fastapi import APIRouter
from fastapi.responses import Response

from vllm_omni.entrypoints.openai.encoding import MEDIA_TYPES
from vllm_omni.entrypoints.openai.errors import ERROR_RESPONSES, APIError
from vllm_omni.entrypoints.openai.protocol import OutputFormat

PATH = "/v1/images/files"


@dataclass(frozen=True)
class StoredFile:
    data: bytes
    media_type: str
    expires_at: float  # time.monotonic()


class FileStore:
    """Within a budget of bytes; when it is full the oldest give way."""

    def __init__(
        self, ttl: float, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ttl = ttl
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._clock = clock
        self._files: dict[str, StoredFile] = {}  # by name, oldest first

    def add(self, data: bytes, output_format: OutputFormat) -> str:
        """Keep a picture; the answer is its path, which nobody can guess."""
        name = f"{uuid.uuid4().hex}.{output_format}"
        if len(data) > self.max_bytes:
            raise APIError(
                400,
                f"the picture has {len(data)} bytes, more than the server keeps for urls: "
                "ask for b64_json",
                "response_format",
            )
        self._keep(name, data)
        return f"{PATH}/{name}"

    def dump(self, urls: Iterable[str]) -> dict[str, str]:
        """What there is of pictures, in base64 by name, for `restore` in a later server."""
        names = [url.rpartition("/")[2] for url in urls]
        found = {name: self.get(name) for name in names}
        return {n: base64.b64encode(f.data).decode() for n, f in found.items() if f is not None}

    def restore(self, files: Mapping[str, str]) -> None:
        """Keep pictures of an earlier server, under the names they had."""
        for name, data in files.items():
            self._keep(name, base64.b64decode(data))

    def get(self, name: str) -> StoredFile | None:
        self._expire()
        return self._files.get(name)

    def get_seconds_left(self, file: StoredFile) -> int:
        return max(0, int(file.expires_at - self._clock()))

    def _keep(self, name: str, data: bytes) -> None:
        self._expire()
        while self._files and self.used_bytes + len(data) > self.max_bytes:
            self._drop(next(iter(self._files)))
        media_type = MEDIA_TYPES[cast(OutputFormat, name.rpartition(".")[2])]
        self._files[name] = StoredFile(data, media_type, self._clock() + self.ttl)
        self.used_bytes += len(data)

    def _expire(self) -> None:
        now = self._clock()
        # All live equally long, so the oldest are the first to go.
        while self._files and next(iter(self._files.values())).expires_at <= now:
            self._drop(next(iter(self._files)))

    def _drop(self, name: str) -> None:
        self.used_bytes -= len(self._files.pop(name).data)


def make_router(files: FileStore) -> APIRouter:
    """GET /v1/images/files/{name}."""
    router = APIRouter(tags=["images"])

    @router.get(
        f"{PATH}/{{name}}",
        summary="A picture that an answer named by its url",
        response_class=Response,
        responses={
            200: {"content": {media_type: {} for media_type in MEDIA_TYPES.values()}},
            **ERROR_RESPONSES,
        },
    )
    async def get_file(name: str) -> Response:
        file = files.get(name)
        if file is None:
            raise APIError(404, "no such picture: it may have expired", "name")
        headers = {"Cache-Control": f"private, max-age={files.get_seconds_left(file)}"}
        return Response(file.data, media_type=file.media_type, headers=headers)

    return router
