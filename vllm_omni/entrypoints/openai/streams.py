"""Streams that do not wait for whoever reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def run_ahead(source: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The same items, made in a task of their own: a slow reader holds up nobody but itself.

    What the source holds, such as a place in the queue, it lets go of when it is done, not when
    the last item was read. It ends when the reader leaves.
    """
    items: asyncio.Queue[tuple[T] | None] = asyncio.Queue()

    async def run() -> None:
        async with aclosing(source):
            async for item in source:
                items.put_nowait((item,))

    running = asyncio.create_task(run())
    running.add_done_callback(lambda _: items.put_nowait(None))
    try:
        while (item := await items.get()) is not None:
            yield item[0]
        running.result()  # raises what went wrong
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
