"""What a user may ask of a diffusion request: validated once, here, then trusted everywhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

from vllm_omni.config import MAX_SECONDS
from vllm_omni.errors import InvalidParameterError
from vllm_omni.step_cache import CacheParams, parse_cache

SIZE_MULTIPLE = 16
"""Pixels per side of one latent token: 8 by the VAE times 2 by the patch."""

MAX_SIDE = 8192
MAX_STEPS = 1000
MAX_OUTPUTS_PER_PROMPT = 128
MAX_SEED = 2**63 - 1

_NO_NEGATIVE = " "  # diffusers' own choice for guidance without a negative prompt
_NOT_YET = ("images", "mask", "strength", "lora")


class OutputMode(StrEnum):
    """What a finished image request gives back."""

    PIXELS = "pixels"
    LATENTS = "latents"
    PIXELS_AND_LATENTS = "pixels_and_latents"
    PIXELS_AND_MASK = "pixels_and_mask"

    @property
    def has_pixels(self) -> bool:
        return self is not OutputMode.LATENTS

    @property
    def has_latents(self) -> bool:
        return self in (OutputMode.LATENTS, OutputMode.PIXELS_AND_LATENTS)

    @property
    def has_mask(self) -> bool:
        return self is OutputMode.PIXELS_AND_MASK


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionParams:
    """Parameters of one image request; `None` means the model's own default.

    Example:
        DiffusionParams(height=256, width=256, num_inference_steps=20, seed=1)
    """

    # what to draw
    height: int | None = None  # pixels, a multiple of 16
    width: int | None = None  # pixels, a multiple of 16
    negative_prompt: str | None = None  # guidance is on when this is given and true_cfg_scale > 1
    num_outputs_per_prompt: int = 1  # output i is drawn with seed + i
    output_mode: OutputMode = OutputMode.PIXELS
    # A preview after every that many steps; the last step gives the picture itself, no preview.
    preview_every: int | None = None

    # how to sample
    num_inference_steps: int | None = None
    true_cfg_scale: float = 4.0
    guidance_scale: float | None = None  # for guidance-distilled models only
    sigmas: tuple[float, ...] | None = None  # unshifted noise levels, one a step, falling
    seed: int | None = None  # drawn at random, and reported, when not given
    # Given as such, as a method's name, or as a mapping of fields; None: every step in full.
    cache: CacheParams | None = None

    # how to schedule
    priority: int = 0  # lower goes first
    deadline: float | None = None  # seconds from arrival; the request fails when they are over

    # refused until the capability behind them is there
    images: Any = None
    mask: Any = None
    strength: float | None = None
    lora: Any = None

    def __post_init__(self) -> None:
        for name in _NOT_YET:
            if getattr(self, name) is not None:
                raise InvalidParameterError(
                    name, getattr(self, name), "this version cannot do that yet; leave it out"
                )
        for name in ("height", "width"):
            if getattr(self, name) is not None:
                _check_side(name, getattr(self, name))
        object.__setattr__(self, "cache", parse_cache(self.cache))
        self._check_sampling()
        _check_int("num_outputs_per_prompt", self.num_outputs_per_prompt, 1, MAX_OUTPUTS_PER_PROMPT)
        if self.preview_every is not None:
            _check_int("preview_every", self.preview_every, 1, MAX_STEPS)
        _check_int("priority", self.priority, -(2**31), 2**31 - 1)
        if self.deadline is not None:
            allowed = f"a number of seconds above 0, at most {MAX_SECONDS:.0f}"
            _check_float("deadline", self.deadline, 0.0, MAX_SECONDS, allowed)
            if self.deadline == 0:
                raise InvalidParameterError("deadline", self.deadline, allowed)
        if self.negative_prompt is not None and not isinstance(self.negative_prompt, str):
            raise InvalidParameterError("negative_prompt", self.negative_prompt, "a string or None")
        if self.output_mode not in tuple(OutputMode):
            allowed = ", ".join(repr(mode.value) for mode in OutputMode)
            raise InvalidParameterError("output_mode", self.output_mode, f"one of {allowed}")
        object.__setattr__(self, "output_mode", OutputMode(self.output_mode))

    def _check_sampling(self) -> None:
        if self.num_inference_steps is not None:
            _check_int("num_inference_steps", self.num_inference_steps, 1, MAX_STEPS)
        _check_float("true_cfg_scale", self.true_cfg_scale, 0.0, 100.0, "a number from 0 to 100")
        if self.guidance_scale is not None:
            allowed = "a number from 0 to 100"
            _check_float("guidance_scale", self.guidance_scale, 0.0, 100.0, allowed)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if self.sigmas is not None:
            object.__setattr__(self, "sigmas", _check_sigmas(self.sigmas))
            if self.num_inference_steps not in (None, len(self.sigmas)):
                raise InvalidParameterError(
                    "num_inference_steps",
                    self.num_inference_steps,
                    f"sigmas has {len(self.sigmas)} values; give that number or leave it out",
                )
            object.__setattr__(self, "num_inference_steps", len(self.sigmas))

    @property
    def do_true_cfg(self) -> bool:
        """Whether each step has a second, unconditional row (the rule of diffusers)."""
        return self.true_cfg_scale > 1 and self.negative_prompt is not None

    def with_defaults(self, defaults: DiffusionParams) -> DiffusionParams:
        """Size and number of steps from the model's defaults, where they are not given."""
        names = ("height", "width", "num_inference_steps")
        missing = [name for name in names if getattr(self, name) is None]
        return replace(self, **{name: getattr(defaults, name) for name in missing})


def _check_side(name: str, value: object) -> None:
    _check_int(name, value, SIZE_MULTIPLE, MAX_SIDE)
    assert isinstance(value, int)
    if value % SIZE_MULTIPLE:
        below = value // SIZE_MULTIPLE * SIZE_MULTIPLE
        raise InvalidParameterError(
            name,
            value,
            f"it must be a multiple of {SIZE_MULTIPLE}; the nearest are {below} "
            f"and {below + SIZE_MULTIPLE}",
        )


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidParameterError(name, value, f"a whole number from {low} to {high}")


def _check_float(name: str, value: object, low: float, high: float, allowed: str) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # type: ignore[operator]  # NaN is neither
        raise InvalidParameterError(name, value, allowed)


def _check_sigmas(value: object) -> tuple[float, ...]:
    allowed = f"1 to {MAX_STEPS} falling numbers above 0 and at most 1, such as (1.0, 0.5)"
    if not isinstance(value, (tuple, list)) or not 1 <= len(value) <= MAX_STEPS:
        raise InvalidParameterError("sigmas", value, allowed)
    for sigma in value:
        _check_float("sigmas", sigma, 0.0, 1.0, allowed)
    falling = all(later < earlier for earlier, later in pairwise(value))
    if not falling or value[-1] <= 0:
        raise InvalidParameterError("sigmas", value, allowed)
    return tuple(float(sigma) for sigma in value)


def make_guidance(scale: float | None, negative: str | None) -> dict[str, Any]:
    """Fields of `DiffusionParams`: a scale above 1 turns guidance on, as a negative prompt does."""
    if negative is None and scale is not None and scale > 1:
        negative = _NO_NEGATIVE
    given: dict[str, Any] = {"negative_prompt": negative}
    return given if scale is None else given | {"true_cfg_scale": scale}
