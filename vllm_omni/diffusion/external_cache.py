"""Step caches that other packages bring: loaded when a request asks for one.

They know one request at a time, so its rows do not run in the packed forward: each has a forward
of its own, through a copy of the model that shares all weights.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Protocol, TypeVar

import torch

from vllm_omni.cache_dit_params import CACHE_DIT, INSTALL_CACHE_DIT, CacheDiTParams
from vllm_omni.diffusion.cache_manager import DiTCacheManager
from vllm_omni.errors import InvalidParameterError

_PLUGIN = "vllm_omni.plugins.cache_dit"

M = TypeVar("M", bound=torch.nn.Module)


class ExternalCache(Protocol):
    """The cache of one request. Its tensors are counted by the cache manager."""

    @property
    def num_skipped(self) -> int:
        """How often a guidance branch took a step by the cache."""

    @property
    def num_skipped_blocks(self) -> int:
        """Blocks that were left out then."""

    def take_step(self) -> AbstractContextManager[torch.nn.Module]:
        """The module for this step: one forward of each branch, the conditional one first.

        Changes nothing before `commit`, so that a step can be tried again.
        """

    def commit(self) -> None:
        """The step counts: keep what it said."""


def make_external_cache(
    request_id: str,
    params: CacheDiTParams,
    module: torch.nn.Module,
    *,
    is_guided: bool,
    num_steps: int,
    manager: DiTCacheManager,
) -> ExternalCache:
    """A cache for one request.

    Args:
        module: takes one row; it is not changed.
        is_guided: whether every step has a second, unconditional row.
    """
    try:
        plugin = import_module(_PLUGIN)
    except ImportError as error:
        raise InvalidParameterError(
            "cache.method", CACHE_DIT, f"it cannot be loaded ({error}): {INSTALL_CACHE_DIT}"
        ) from error
    cache: ExternalCache = plugin.CacheDiTCache(
        request_id, params, module, is_guided=is_guided, num_steps=num_steps, manager=manager
    )
    return cache


def share_weights(module: M) -> M:
    """A copy with the same parameters and the same parts, which can be exchanged in it alone."""
    shared = copy.copy(module)
    shared._modules = dict(module._modules)
    return shared
