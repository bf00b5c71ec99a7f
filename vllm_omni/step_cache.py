"""`StepCacheParams`: how a request may leave out work that its last steps have done already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from vllm_omni.cache_dit_params import CACHE_DIT, CacheDiTParams
from vllm_omni.errors import InvalidParameterError

Method = Literal["first_block", "tea", "taylor"]

_METHODS = (*get_args(Method), CACHE_DIT)

MAX_COEFFICIENTS = 8
MAX_CACHE_STEPS = 1000
MAX_NUMBER = 1e9

_DEFAULT_THRESHOLDS: dict[str, float] = {"first_block": 0.08, "tea": 0.2, "taylor": 0.12}


@dataclass(frozen=True, kw_only=True)
class StepCacheParams:
    """Of one request.

    Every step runs the first block of the network. Where what it sees is near enough to what it
    saw before, the blocks behind it, the tail, are left out, and what they added before is added.

    Example:
        DiffusionParams(cache=StepCacheParams(method="first_block", threshold=0.1))
    """

    # first_block: the change that the first block makes is near to that of the last full step.
    # tea: the differences of its modulated input, rescaled, have not summed up to the threshold.
    # taylor: as first_block, but what is added is extrapolated from the last full steps.
    method: Method = "first_block"
    threshold: float | None = None  # relative difference; 0: none is near; None: the method's own
    warmup_steps: int = 1  # first steps that are always taken in full
    max_skips: int | None = None  # most steps in a row without the tail; None: as many as are near
    order: int = 1  # taylor: of the extrapolation, 1 or 2
    # tea: polynomial that rescales a difference, highest power first.
    coefficients: tuple[float, ...] = (1.0, 0.0)

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            _refuse("method", self.method, f"one of {', '.join(_METHODS)}")
        if self.threshold is None:
            object.__setattr__(self, "threshold", _DEFAULT_THRESHOLDS[self.method])
        if not _is_number(self.threshold) or not 0 <= self.threshold <= 10:  # type: ignore[operator]
            _refuse("threshold", self.threshold, "a number from 0 to 10")
        _check_int("warmup_steps", self.warmup_steps, 0)
        if self.max_skips is not None:
            _check_int("max_skips", self.max_skips, 1)
        if self.order not in (1, 2) or isinstance(self.order, bool):
            _refuse("order", self.order, "1 or 2")
        given = self.coefficients
        is_list = isinstance(given, (list, tuple)) and 1 <= len(given) <= MAX_COEFFICIENTS
        if not is_list or not all(_is_number(one) for one in given):
            _refuse("coefficients", given, f"1 to {MAX_COEFFICIENTS} numbers")
        object.__setattr__(self, "coefficients", tuple(float(one) for one in given))

    def to_json(self) -> dict[str, Any]:
        """What `parse_cache` takes."""
        return asdict(self)


CacheParams = StepCacheParams | CacheDiTParams
"""What a request may have: a cache of ours, or Cache-DiT's."""


def parse_cache(value: Any) -> CacheParams | None:
    """From what a user gives: None, a method's name, or a mapping of fields."""
    cache = _parse_cache(value)
    if isinstance(cache, CacheDiTParams):
        cache.check_installed()
    return cache


def _parse_cache(value: Any) -> CacheParams | None:
    if value is None or isinstance(value, CacheParams):
        return value
    if isinstance(value, str):
        value = {"method": value}
    if not isinstance(value, Mapping):
        raise InvalidParameterError(
            "cache", value, f"one of {', '.join(_METHODS)}, or a mapping of its fields"
        )
    if value.get("method") == CACHE_DIT:
        return CacheDiTParams.parse(value)
    if "method" not in value:
        _refuse("method", None, f"one of {', '.join(_METHODS)}")
    names = {field.name for field in fields(StepCacheParams)}
    if unknown := sorted(str(name) for name in set(value) - names):
        _refuse(unknown[0], value.get(unknown[0]), f"only {', '.join(sorted(names))} are known")
    return StepCacheParams(**value)


def _refuse(name: str, value: object, allowed: str) -> None:
    raise InvalidParameterError(f"cache.{name}", value, allowed)


def _is_number(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= MAX_NUMBER  # type: ignore[arg-type]


def _check_int(name: str, value: object, low: int) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not low <= value <= MAX_CACHE_STEPS:  # type: ignore[operator]
        _refuse(name, value, f"a whole number from {low} to {MAX_CACHE_STEPS}")
