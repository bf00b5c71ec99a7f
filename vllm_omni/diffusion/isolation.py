"""Calls for many requests at once, in which one that fails hurts no other.

When a batched call fails, it is made again for each request alone, and only the guilty one fails.
When the device runs out of memory nobody is guilty: the batch is cut into halves, and again, until
it fits; only a request that does not fit alone, after all that can be freed is free, fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

logger = logging.getLogger(__name__)

R = TypeVar("R")

# What CUDA's libraries say when they, not torch, ask for memory and get none; and torch on a host.
_ALLOCATION_FAILURES = (
    "out of memory",
    "ALLOC_FAILED",
    "ALLOCATION_FAILED",  # cuDNN from 9 on
    "can't allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host, has no more memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(s in str(error) for s in _ALLOCATION_FAILURES)


def call_isolated(
    call: Callable[..., Sequence[R]],
    request_ids: Sequence[str],
    columns: Sequence[Mapping[str, Any]],
    fail: Callable[[str, Exception], None],
    on_out_of_memory: Callable[[Sequence[str]], None],
    is_last_try: bool = False,
) -> dict[str, R]:
    """What the call gives for each request that it works for.

    Args:
        call: takes a list for each of `columns`, and changes nothing, so that it can be repeated.
        columns: the call's arguments by request id.
        fail: told of a request that fails alone.
        on_out_of_memory: told of a batch that did not fit, before anything is tried again; frees
            what it can.
        is_last_try: that was done already for this request alone.
    """
    if not request_ids:
        return {}
    try:
        results = call(*([by_id[id] for id in request_ids] for by_id in columns))
        return dict(zip(request_ids, results, strict=True))
    except Exception as failure:
        error = failure
    has_run_out = is_out_of_memory(error)
    if has_run_out:
        # The frames of the traceback hold the tensors that took the memory.
        error = error.with_traceback(None)
        on_out_of_memory(request_ids)
    is_alone = len(request_ids) == 1
    if is_alone and (is_last_try or not has_run_out):
        fail(request_ids[0], error)
        return {}
    if is_alone:
        groups = [request_ids]
    elif has_run_out:
        half = (len(request_ids) + 1) // 2
        groups = [request_ids[:half], request_ids[half:]]
    else:
        groups = [[request_id] for request_id in request_ids]
    reason = f"{type(error).__name__}: {str(error).partition('. ')[0]}"  # CUDA's go on and on
    logger.warning(
        "a batch of %d failed (%s): again in %d parts", len(request_ids), reason, len(groups)
    )
    del error  # or it would be held while the parts run
    done: dict[str, R] = {}
    for group in groups:
        done.update(call_isolated(call, group, columns, fail, on_out_of_memory, is_alone))
    return done
