"""`StepCacheParams`: how a request may leave out work that its last steps have done already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from vllm_omni.cache_dit_params import CACHE_DIT, CacheDiTParams
from vllm_omni.errors import InvalidParameterError

Method = Literal["first_block", "tea", "taylor"]

_METHODS = (*get_args(Method), CACHE_DIT)

MAX_COEFFICIENTS = 8
MAX_CACHE_STEPS = 1000
MAX_NUMBER = 1e9

CacheDefaults = Mapping[str, Mapping[str, Any]]
"""Of a model: by method, what requests have that do not say it themselves."""

_DEFAULTS: CacheDefaults = {
    "first_block": {"threshold": 0.08},
    "tea": {"threshold": 0.2},
    "taylor": {"threshold": 0.12},
}
_DEFAULTS_OF_ALL: Mapping[str, Any] = {
    "warmup_steps": 1,
    "max_skips": MAX_CACHE_STEPS,
    "extrapolation": 1.0,
}
MODEL_FIELDS = ("threshold", *_DEFAULTS_OF_ALL)  # those that a model may have its own defaults of


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
    # None, here and below: the model's own.
    threshold: float | None = None  # relative difference; 0: none is near
    warmup_steps: int | None = None  # first steps that are always taken in full
    max_skips: int | None = None  # most steps in a row without the tail
    order: int = 1  # taylor: of the extrapolation, 1 or 2
    extrapolation: float | None = None  # taylor: part of the extrapolated change that is added
    # tea: polynomial that rescales a difference, highest power first.
    coefficients: tuple[float, ...] = (1.0, 0.0)

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            _refuse("method", self.method, f"one of {', '.join(_METHODS)}")
        _check_float("threshold", self.threshold, 10)
        _check_float("extrapolation", self.extrapolation, 1)
        if self.warmup_steps is not None:
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

    def with_defaults(self, defaults: CacheDefaults | None = None) -> StepCacheParams:
        """Nothing is None that a model may have a default of."""
        known = {
            **_DEFAULTS_OF_ALL,
            **_DEFAULTS[self.method],
            **(defaults or {}).get(self.method, {}),
        }
        missing = [name for name in MODEL_FIELDS if getattr(self, name) is None]
        return replace(self, **{name: known[name] for name in missing})


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


def parse_cache_defaults(value: Any) -> CacheDefaults:
    """From a model's own file: a mapping of `MODEL_FIELDS` by method."""
    if not isinstance(value, Mapping):
        raise InvalidParameterError("cache", value, "a mapping of fields by method")
    for method, given in value.items():
        if not isinstance(given, Mapping):
            raise InvalidParameterError(f"cache.{method}", given, "a mapping of fields")
        if unknown := sorted(set(given) - set(MODEL_FIELDS)):
            _refuse(
                f"{method}.{unknown[0]}", given[unknown[0]], f"one of {', '.join(MODEL_FIELDS)}"
            )
        StepCacheParams(method=method, **given)
    return value


def _refuse(name: str, value: object, allowed: str) -> None:
    raise InvalidParameterError(f"cache.{name}", value, allowed)


def _is_number(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= MAX_NUMBER  # type: ignore[arg-type]


def _check_float(name: str, value: object, high: float) -> None:
    if value is None:
        return
    if not _is_number(value) or not 0 <= value <= high:  # type: ignore[operator]
        _refuse(name, value, f"a number from 0 to {high:g}")


def _check_int(name: str, value: object, low: int) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not low <= value <= MAX_CACHE_STEPS:  # type: ignore[operator]
        _refuse(name, value, f"a whole number from {low} to {MAX_CACHE_STEPS}")
