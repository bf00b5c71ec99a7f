"""Clients that leave before their answer is there: the work for them ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Request

from vllm_omni.entrypoints.openai.errors import APIError

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499  # nobody reads this answer; the access log shows it


async def run_until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """The result of some work, which is cancelled when the client closes the connection.

    The body must have been read: what the client sends next can only be its leave.
    """
    task = asyncio.ensure_future(work)
    leave = asyncio.create_task(_wait_for_leave(request))
    try:
        await asyncio.wait({task, leave}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise APIError(CLIENT_CLOSED_REQUEST, "the client closed the connection")
        return task.result()
    finally:
        for one in (task, leave):
            one.cancel()
        await asyncio.gather(task, leave, return_exceptions=True)


async def _wait_for_leave(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
