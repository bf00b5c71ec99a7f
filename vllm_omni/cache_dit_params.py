"""`CacheDiTParams`: what a request may ask of Cache-DiT. Imports nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NoReturn

import msgspec

from vllm_omni.errors import InvalidParameterError

CACHE_DIT = "cache_dit"
INSTALL_CACHE_DIT = "pip install 'vllm-omni[cache-dit]'"

MAX_STEPS = 1000
MASK_POLICIES = ("slow", "medium", "fast", "ultra")
DEFAULT_FIRST_BLOCKS = 8  # Cache-DiT's own; a model with no more blocks than that takes 1


@dataclass(frozen=True)
class _Option:
    """The values that an option may have."""

    allowed: str
    is_allowed: Callable[[Any], bool]


def _whole(low: int, high: int = MAX_STEPS) -> _Option:
    return _Option(f"a whole number from {low} to {high}", lambda x: _is_whole(x, low, high))


def _number(low: float, high: float) -> _Option:
    def is_allowed(value: Any) -> bool:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and low <= value <= high  # NaN is neither

    return _Option(f"a number from {low:g} to {high:g}", is_allowed)


def _one_of(*values: str) -> _Option:
    return _Option(f"one of {', '.join(values)}", lambda x: isinstance(x, str) and x in values)


def _is_whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_mask(value: Any) -> bool:
    if isinstance(value, str):
        return value in MASK_POLICIES
    is_list = isinstance(value, list) and 1 <= len(value) <= MAX_STEPS
    return is_list and all(_is_whole(x, 0, 1) for x in value) and value[0] == 1


def _are_block_ids(value: Any) -> bool:
    is_list = isinstance(value, list) and len(value) <= MAX_STEPS
    return is_list and all(_is_whole(x, 0, MAX_STEPS) for x in value)


_FLAG = _Option("true or false", lambda x: isinstance(x, bool))
_THRESHOLD = _number(0, 10)

CACHE_OPTIONS: Mapping[str, _Option] = {
    "cache_type": _one_of("DBCache", "DBPrune"),
    "Fn_compute_blocks": _whole(1),
    "Bn_compute_blocks": _whole(0),
    "residual_diff_threshold": _THRESHOLD,
    "max_accumulated_residual_diff_threshold": _number(0, 1000),
    "max_warmup_steps": _whole(0),
    "warmup_interval": _whole(1),
    "max_cached_steps": _whole(-1),
    "max_continuous_cached_steps": _whole(-1),
    "cfg_diff_compute_separate": _FLAG,
    "steps_computation_mask": _Option(
        f"{', '.join(MASK_POLICIES)}, or a list with 1 (compute) or 0 (reuse) for every step, "
        f"the first of them 1",
        _is_mask,
    ),
    "steps_computation_policy": _one_of("dynamic", "static"),
    "force_refresh_step_hint": _whole(1),
    "force_refresh_step_policy": _one_of("once", "repeat"),
}
"""Fields of `DBCacheConfig`."""

PRUNE_OPTIONS: Mapping[str, _Option] = {
    "enable_dynamic_prune_threshold": _FLAG,
    "max_dynamic_prune_threshold": _THRESHOLD,
    "dynamic_prune_threshold_relax_ratio": _number(0, 100),
    "non_prune_block_ids": _Option("a list of blocks, counted from 0", _are_block_ids),
    "force_reduce_calibrator_vram": _FLAG,
}
"""What `DBPruneConfig` has besides."""

CALIBRATOR_OPTIONS: Mapping[str, _Option] = {
    "enable_calibrator": _FLAG,
    "enable_encoder_calibrator": _FLAG,
    "calibrator_cache_type": _one_of("residual", "hidden_states"),
}
"""Fields of every `CalibratorConfig`."""

CALIBRATORS: Mapping[str, Mapping[str, _Option]] = {
    "taylorseer": {"taylorseer_order": _whole(1, 4)},
    "foca": {},
    "dmd": {
        "dmd_history": _whole(2, 16),
        "dmd_rank": _whole(0, 16),
        "dmd_ridge": _number(0, 1),
        "dmd_svd_precision": _one_of("low", "medium", "high"),
    },
}
"""By `calibrator`: the fields of its own configuration."""

_THE_ENGINE_SAYS = "the engine knows and says it itself; leave it out"
_NOT_A_REQUESTS = "it changes the model for all requests; a request cannot have it"

REFUSED_OPTIONS: Mapping[str, str] = {
    "enable_separate_cfg": _THE_ENGINE_SAYS,
    "cfg_compute_first": _THE_ENGINE_SAYS,
    "num_inference_steps": _THE_ENGINE_SAYS,
    "calibrator_config": "give calibrator, and its options beside it",
    "calibrator_type": "give calibrator",
    "calibrator_kwargs": "give the calibrator's options by their names",
    "params_modifiers": "the model has one list of blocks: give the options themselves",
    "extra_cache_config": "Cache-DiT keeps these for itself",
    "parallelism_config": _NOT_A_REQUESTS,
    "quantize_config": _NOT_A_REQUESTS,
    "attention_backend": _NOT_A_REQUESTS,
}
"""What Cache-DiT has and a request cannot have, with the reason."""


# An array, not a map: by that msgspec tells it from `StepCacheParams` in a union.
class CacheDiTParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Of one request: plain values by the names of Cache-DiT's own configuration.

    What is not given is as Cache-DiT has it.

    Example:
        DiffusionParams(cache=CacheDiTParams(options={"calibrator": "taylorseer"}))
    """

    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        given = self.options
        if not isinstance(given, Mapping):
            raise InvalidParameterError("cache.options", given, "a mapping")
        plain = {str(k): list(v) if isinstance(v, tuple) else v for k, v in given.items()}
        msgspec.structs.force_setattr(self, "options", plain)
        known = self._known_options()
        for name, value in plain.items():
            if name not in known:
                _refuse(name, value, self._why_not(name, known))
            if not known[name].is_allowed(value):
                _refuse(name, value, known[name].allowed)
        if self.is_pruning and not plain.get("cfg_diff_compute_separate", True):
            _refuse("cfg_diff_compute_separate", False, "Cache-DiT cannot do that with DBPrune")

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> CacheDiTParams:
        """From what a user gives beside the method's name."""
        if unknown := sorted(str(name) for name in set(fields) - {"method", "options"}):
            raise InvalidParameterError(
                f"cache.{unknown[0]}",
                fields.get(unknown[0]),
                f"with {CACHE_DIT} only method, options are known",
            )
        options = fields.get("options")
        return cls(options={} if options is None else options)

    @property
    def method(self) -> str:
        return CACHE_DIT

    def to_json(self) -> dict[str, Any]:
        """What `parse` takes."""
        return {"method": self.method, "options": self.options}

    @property
    def is_pruning(self) -> bool:
        return bool(self.options.get("cache_type") == "DBPrune")

    @property
    def calibrator(self) -> str | None:
        return self.options.get("calibrator")

    def check_installed(self) -> None:
        """Refuse where the package is missing; does not import it."""
        if find_spec(CACHE_DIT) is None:
            raise InvalidParameterError(
                "cache.method",
                CACHE_DIT,
                f"the package cache-dit is not installed: {INSTALL_CACHE_DIT}",
            )

    def check_model(self, num_blocks: int, num_steps: int) -> None:
        """Refuse what does not go with the model's blocks or the request's steps."""
        last = self.options.get("Bn_compute_blocks", 0)
        first = self.get_num_first_blocks(num_blocks)
        if first + last > num_blocks:
            name = "Bn_compute_blocks" if first <= num_blocks else "Fn_compute_blocks"
            value = last if first <= num_blocks else first
            _refuse(name, value, f"the model has {num_blocks} blocks, for both ends together")
        if too_high := [x for x in self.options.get("non_prune_block_ids", ()) if x >= num_blocks]:
            _refuse("non_prune_block_ids", too_high, f"from 0 to {num_blocks - 1}")
        mask = self.options.get("steps_computation_mask")
        if isinstance(mask, list) and len(mask) != num_steps:
            _refuse("steps_computation_mask", mask, f"{num_steps} values, one for every step")
        if isinstance(mask, str) and num_steps < 8 and num_steps not in (4, 6):
            allowed = f"Cache-DiT has it for 4, 6, 8 or more steps, not for {num_steps}"
            _refuse("steps_computation_mask", mask, allowed)

    def get_num_first_blocks(self, num_blocks: int) -> int:
        """Blocks that every step computes, by which it decides about the others."""
        default = DEFAULT_FIRST_BLOCKS if num_blocks > DEFAULT_FIRST_BLOCKS else 1
        first: int = self.options.get("Fn_compute_blocks", default)
        return first

    def _known_options(self) -> dict[str, _Option]:
        known = {**CACHE_OPTIONS, "calibrator": _one_of(*CALIBRATORS)}
        if self.is_pruning:
            known |= PRUNE_OPTIONS
        if isinstance(self.calibrator, str) and self.calibrator in CALIBRATORS:
            known |= {**CALIBRATOR_OPTIONS, **CALIBRATORS[self.calibrator]}
        return known

    def _why_not(self, name: str, known: Mapping[str, _Option]) -> str:
        if name in REFUSED_OPTIONS:
            return REFUSED_OPTIONS[name]
        if name in PRUNE_OPTIONS:
            return "only with cache_type 'DBPrune'"
        owners = [owner for owner, own in CALIBRATORS.items() if name in own]
        if owners or name in CALIBRATOR_OPTIONS:
            return f"only with calibrator {' or '.join(map(repr, owners or CALIBRATORS))}"
        return f"only {', '.join(sorted(known))} are known"


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    raise InvalidParameterError(f"cache.options.{name}", value, allowed)
