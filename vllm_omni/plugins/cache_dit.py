"""Cache-DiT for single requests, with the numbers that it has alone in diffusers.

Checked against cache-dit 1.5.3; all that knows its private names is here.

Cache-DiT keeps one context for a list of blocks: one count of steps, one set of tensors, and it
tells the guidance branches apart by the parity of its calls. So each request has a context of its
own, in a manager of its own, and runs row by row through a copy of the model whose list of blocks
is Cache-DiT's. `cache_dit.enable_cache` is not called: it changes the pipeline's class.

A step works on a copy of the context, which shares the tensors (Cache-DiT never writes into one),
and replaces it in `commit`; so one that is tried again counts once. Until then both the old and
the new tensors are alive. What is kept is counted by the cache manager and is the first to give
way: without it the next step is taken in full.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from cache_dit import (
    BlockAdapterRegister,
    DBCacheConfig,
    DBPruneConfig,
    DMDCalibratorConfig,
    FoCaCalibratorConfig,
    TaylorSeerCalibratorConfig,
    steps_mask,
)
from cache_dit.caching.cache_blocks import UnifiedBlocks
from cache_dit.caching.cache_contexts import ContextManager, PrunedContext
from torch import Tensor

from vllm_omni.cache_dit_params import CACHE_DIT, CALIBRATOR_OPTIONS, CALIBRATORS, CacheDiTParams
from vllm_omni.diffusion.cache_manager import DiTCacheManager
from vllm_omni.diffusion.external_cache import share_weights
from vllm_omni.errors import InvalidParameterError

# It writes what it does to standard output, where ours says where the picture is.
for _handler in logging.getLogger("CACHE_DIT").handlers:
    _handler.setLevel(logging.WARNING)
    if isinstance(_handler, logging.StreamHandler) and _handler.stream is sys.stdout:
        _handler.setStream(sys.stderr)

_CALIBRATOR_CONFIGS = {
    "taylorseer": TaylorSeerCalibratorConfig,
    "foca": FoCaCalibratorConfig,
    "dmd": DMDCalibratorConfig,
}


class CacheDiTCache:
    """The cache of one request; see `ExternalCache`."""

    def __init__(
        self,
        request_id: str,
        params: CacheDiTParams,
        module: torch.nn.Module,
        *,
        is_guided: bool,
        num_steps: int,
        manager: DiTCacheManager,
    ) -> None:
        self._request_id = request_id
        self._manager = manager
        name, adapter = _find_blocks(module)
        config, calibrator = make_configs(
            params, len(adapter.blocks), num_steps, is_guided=is_guided
        )
        # Not one for all requests: `PrunedContextManager` remembers the first one's blocks.
        self._contexts = ContextManager(cache_type=config.cache_type, name=request_id)
        self._name = name
        self._context = self._contexts.new_context(
            name=name, cache_config=config, calibrator_config=calibrator
        )
        self._pending: Any = None
        self.num_skipped_blocks = 0
        self._num_tail_blocks = (
            len(adapter.blocks) - config.Fn_compute_blocks - config.Bn_compute_blocks
        )
        cached_blocks = UnifiedBlocks(
            adapter.blocks,
            transformer=module,
            forward_pattern=adapter.forward_pattern,
            cache_prefix=name,
            cache_context=name,
            context_manager=self._contexts,
            cache_type=config.cache_type,
        )
        self._module = share_weights(module)
        setattr(self._module, name, torch.nn.ModuleList([cached_blocks]))
        self._swap_in(None)

    @property
    def num_skipped(self) -> int:
        context = self._context
        skipped: int = context.accumulated_cached_steps + context.cfg_accumulated_cached_steps
        return skipped

    @contextmanager
    def take_step(self) -> Iterator[torch.nn.Module]:
        trial = _copy_context(self._context)
        config = trial.cache_config
        if not trial.buffers:  # the first step, or they had to give way: nothing can be reused
            trial.cache_config = replace(
                config, residual_diff_threshold=0.0, steps_computation_mask=None
            )
        self._swap_in(trial)
        try:
            yield self._module
            self._pending = self._contexts.get_context(self._name)
            if self._pending is trial:  # else Cache-DiT has started a new one
                trial.cache_config = config
        finally:
            self._swap_in(None)

    def commit(self) -> None:
        if self._pending is None:
            return
        skipped_before, pruned_before = self.num_skipped, _count_pruned(self._context)
        self._context, self._pending = self._pending, None
        if isinstance(self._context, PrunedContext):
            pruned = _count_pruned(self._context)  # less than before where it has started anew
            self.num_skipped_blocks += pruned - (pruned_before if pruned >= pruned_before else 0)
        else:
            self.num_skipped_blocks += (self.num_skipped - skipped_before) * self._num_tail_blocks
        self._manager.try_hold(
            self._request_id, "external_cache", _count_bytes(self._context), self._drop_tensors
        )

    def _drop_tensors(self) -> None:
        self._pending = None
        self._context.clear_buffers()
        for calibrator in (
            *self._context.get_calibrators(),
            *self._context.get_cfg_calibrators(),
        ):
            if calibrator is not None:
                calibrator.reset_cache()

    def _swap_in(self, context: Any | None) -> None:
        self._contexts._current_context = context
        self._contexts._cached_context_manager.clear()
        if context is not None:
            self._contexts._cached_context_manager[self._name] = context


def make_configs(
    params: CacheDiTParams, num_blocks: int, num_steps: int, *, is_guided: bool
) -> tuple[Any, Any]:
    """Cache-DiT's own configuration objects: of the cache, and of the calibrator or None."""
    params.check_model(num_blocks, num_steps)
    options = dict(params.options)
    calibrator = None
    if (kind := options.pop("calibrator", None)) is not None:
        names = options.keys() & (CALIBRATOR_OPTIONS.keys() | CALIBRATORS[kind].keys())
        calibrator = _CALIBRATOR_CONFIGS[kind](**{name: options.pop(name) for name in names})
    if isinstance(options.get("steps_computation_mask"), str):
        options["steps_computation_mask"] = steps_mask(
            total_steps=num_steps, mask_policy=options["steps_computation_mask"]
        )
    options["Fn_compute_blocks"] = params.get_num_first_blocks(num_blocks)
    options.pop("cache_type", None)
    config_class = DBPruneConfig if params.is_pruning else DBCacheConfig
    return config_class(**options, enable_separate_cfg=is_guided), calibrator


def _find_blocks(module: torch.nn.Module) -> tuple[str, Any]:
    """The name of the list of blocks, and Cache-DiT's description of it."""
    adapter = BlockAdapterRegister.get_adapter(module, skip_post_init=True)
    if adapter is not None and adapter.patch_functor is None:
        for name, child in module.named_children():
            if child is adapter.blocks:
                return name, adapter
    raise InvalidParameterError(
        "cache.method", CACHE_DIT, f"Cache-DiT cannot do it with a {type(module).__name__}"
    )


def _copy_context(context: Any) -> Any:
    """All of it is new but the tensors."""
    return copy.deepcopy(context, {id(tensor): tensor for tensor in _tensors_of(context)})


def _count_bytes(context: Any) -> int:
    storages = [tensor.untyped_storage() for tensor in _tensors_of(context)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _count_pruned(context: Any) -> int:
    if not isinstance(context, PrunedContext):
        return 0
    pruned: int = sum(context.pruned_blocks) + sum(context.cfg_pruned_blocks)
    return pruned


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """Those of a context: in its buffers, and in the states of its calibrators."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors_of(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors_of(one)
    elif type(value).__module__.startswith(f"{CACHE_DIT}.") and not isinstance(value, Enum):
        yield from _tensors_of(vars(value))
