"""Every value a request may not have is refused with its name, the value and what is allowed."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni.errors import InvalidParameterError, OmniRequestError
from vllm_omni.params import MAX_SEED, DiffusionParams, OutputMode

NAN, INF = math.nan, math.inf

NOT_SIDES = [0, -16, 15, 8193, 8208, 64.0, "64", True, NAN, 10**400]
NOT_NUMBERS = ["4", True, NAN, INF, -INF, None, [4], 1j]
NOT_SIGMAS = [(), [], 1.0, "1", {1.0}, (0.5, 0.5), (0.5, 0.9), (1.0, 0.0), (1.0,) * 1001]
SIGMAS_ALLOWED = "1 to 1000 falling numbers above 0 and at most 1, such as (1.0, 0.5)"
SECONDS_ALLOWED = "a number of seconds above 0, at most 1000000000"
MODES_ALLOWED = "one of 'pixels', 'latents', 'pixels_and_latents', 'pixels_and_mask'"
NOT_YET = "this version cannot do that yet; leave it out"

REFUSALS: list[tuple[str, Any, str]] = [
    *[("height", value, "a whole number from 16 to 8192") for value in NOT_SIDES],
    *[("width", value, "a whole number from 16 to 8192") for value in NOT_SIDES],
    *[
        ("num_inference_steps", value, "a whole number from 1 to 1000")
        for value in (0, -1, 1001, 10**400, 20.0, "20", True, NAN)
    ],
    *[
        ("preview_every", value, "a whole number from 1 to 1000")
        for value in (0, -1, 1001, 10**400, 1.5, 2.0, "2", True, NAN)
    ],
    *[
        ("num_outputs_per_prompt", value, "a whole number from 1 to 128")
        for value in (0, -1, 129, 1.0, "1", True, None)
    ],
    *[
        ("seed", value, f"a whole number from 0 to {MAX_SEED}")
        for value in (-1, MAX_SEED + 1, 10**400, 1.0, "1", False, NAN)
    ],
    *[
        ("priority", value, f"a whole number from {-(2**31)} to {2**31 - 1}")
        for value in (2**31, -(2**31) - 1, 10**400, 0.0, "0", False, None)
    ],
    *[
        ("true_cfg_scale", value, "a number from 0 to 100")
        for value in (-0.1, 100.1, 1e300, *NOT_NUMBERS)
    ],
    *[
        ("guidance_scale", value, "a number from 0 to 100")
        for value in (-0.1, 100.1, "4", True, NAN, INF)
    ],
    *[("deadline", value, SECONDS_ALLOWED) for value in (0, -1, -0.5, "5", True, NAN, INF)],
    *[("sigmas", value, SIGMAS_ALLOWED) for value in NOT_SIGMAS],
    *[("negative_prompt", value, "a string or None") for value in (5, b"blurry", ["blurry"])],
    *[("output_mode", value, MODES_ALLOWED) for value in ("PIXELS", "png", 1, None)],
    *[
        (name, value, NOT_YET)
        for name, value in (
            ("images", []),
            ("images", "cat.png"),
            ("mask", "mask.png"),
            ("strength", 0.5),
            ("lora", False),
        )
    ],
]


@pytest.mark.parametrize(
    ("param", "value", "allowed"),
    [pytest.param(*case, id=f"{case[0]}-{str(case[1])[:20]}") for case in REFUSALS],
)
def test_refusal_names_parameter_value_and_what_is_allowed(
    param: str, value: Any, allowed: str
) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        DiffusionParams(**{param: value})
    shown = repr(value) if len(repr(value)) <= 200 else f"{value!r:.200}…"
    assert str(caught.value) == f"{param}={shown} is not allowed: {allowed}"
    assert caught.value.param == param


def test_refusal_is_a_request_error_and_a_value_error() -> None:
    with pytest.raises(OmniRequestError):
        DiffusionParams(height=0)
    with pytest.raises(ValueError, match="height=0"):
        DiffusionParams(height=0)


@pytest.mark.parametrize("name", ["height", "width"])
@pytest.mark.parametrize(
    ("value", "nearest"),
    [(17, "16 and 32"), (100, "96 and 112"), (1000, "992 and 1008"), (8191, "8176 and 8192")],
)
def test_refused_size_names_the_two_nearest_that_are_allowed(
    name: str, value: Any, nearest: str
) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        DiffusionParams(**{name: value})
    assert str(caught.value) == (
        f"{name}={value} is not allowed: it must be a multiple of 16; the nearest are {nearest}"
    )


@pytest.mark.parametrize("element", [1.5, -0.5, NAN, INF, "1", True, None])
def test_refused_sigma_is_named(element: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        DiffusionParams(sigmas=(1.0, element))
    assert str(caught.value) == f"sigmas={element!r} is not allowed: {SIGMAS_ALLOWED}"


@pytest.mark.parametrize("param", ["true_cfg_scale", "guidance_scale", "deadline", "sigmas"])
def test_refuses_whole_numbers_that_no_float_can_hold(param: str) -> None:
    value: Any = (10**400,) if param == "sigmas" else 10**400
    with pytest.raises(InvalidParameterError, match=f"{param}=10+… is not allowed"):
        DiffusionParams(**{param: value})


def test_unknown_parameter() -> None:
    with pytest.raises(TypeError, match="num_steps"):
        DiffusionParams(num_steps=20)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("height", 16),
        ("width", 8192),
        ("num_inference_steps", 1),
        ("num_inference_steps", 1000),
        ("num_outputs_per_prompt", 128),
        ("preview_every", 1),
        ("preview_every", 1000),
        ("seed", 0),
        ("seed", MAX_SEED),
        ("priority", -(2**31)),
        ("priority", 2**31 - 1),
        ("true_cfg_scale", 0),
        ("true_cfg_scale", 100.0),
        ("guidance_scale", 0.0),
        ("deadline", 1e-9),
        ("deadline", 3600),
        ("negative_prompt", ""),
        ("sigmas", (1.0,)),
        ("sigmas", (1.0, 0.5, 1e-9)),
    ],
)
def test_limits_themselves_are_allowed(param: str, value: Any) -> None:
    assert getattr(DiffusionParams(**{param: value}), param) == value


@settings(max_examples=300, deadline=None)
@given(
    param=st.sampled_from([field.name for field in dataclasses.fields(DiffusionParams)]),
    value=st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=3),
        st.binary(max_size=3),
        st.lists(st.floats(), max_size=3),
        st.dictionaries(st.text(max_size=1), st.none(), max_size=1),
    ),
)
def test_any_value_is_taken_or_refused_by_name(param: str, value: Any) -> None:
    try:
        params = DiffusionParams(**{param: value})
    except InvalidParameterError as error:
        assert error.param.partition(".")[0] == param  # a field of it may be at fault
        assert str(error).startswith(f"{error.param}=")
    else:
        taken = getattr(params, param)
        assert taken == (tuple(value) if isinstance(value, list) else value)


# --- sigmas and steps ---


def test_sigmas_set_the_number_of_steps() -> None:
    params = DiffusionParams(sigmas=[1, 0.5, 0.25])  # type: ignore[arg-type]
    assert params.sigmas == (1.0, 0.5, 0.25)
    assert all(isinstance(sigma, float) for sigma in params.sigmas)
    assert params.num_inference_steps == 3
    assert DiffusionParams(sigmas=(1.0, 0.5), num_inference_steps=2).num_inference_steps == 2


def test_number_of_steps_must_agree_with_sigmas() -> None:
    with pytest.raises(InvalidParameterError) as caught:
        DiffusionParams(sigmas=(1.0, 0.5), num_inference_steps=3)
    assert str(caught.value) == (
        "num_inference_steps=3 is not allowed: "
        "sigmas has 2 values; give that number or leave it out"
    )


# --- guidance and modes ---


@pytest.mark.parametrize(
    ("true_cfg_scale", "negative_prompt", "expected"),
    [(4.0, "blurry", True), (4.0, "", True), (4.0, None, False), (1.0, "blurry", False)],
)
def test_guidance_needs_a_negative_prompt_and_a_scale_above_one(
    true_cfg_scale: float, negative_prompt: str | None, expected: bool
) -> None:
    params = DiffusionParams(true_cfg_scale=true_cfg_scale, negative_prompt=negative_prompt)
    assert params.do_true_cfg is expected


def test_output_mode_may_be_a_string() -> None:
    params = DiffusionParams(output_mode="latents")  # type: ignore[arg-type]
    assert params.output_mode is OutputMode.LATENTS


def test_what_each_output_mode_gives() -> None:
    assert {mode: (mode.has_pixels, mode.has_latents, mode.has_mask) for mode in OutputMode} == {
        OutputMode.PIXELS: (True, False, False),
        OutputMode.LATENTS: (False, True, False),
        OutputMode.PIXELS_AND_LATENTS: (True, True, False),
        OutputMode.PIXELS_AND_MASK: (True, False, True),
    }


# --- frozen, defaults ---


def test_parameters_are_frozen() -> None:
    params = DiffusionParams(height=64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.height = 17  # type: ignore[misc]
    assert params.height == 64


def test_replaced_values_are_checked_too() -> None:
    with pytest.raises(InvalidParameterError, match="height=17"):
        dataclasses.replace(DiffusionParams(), height=17)


def test_defaults_fill_only_what_is_missing() -> None:
    defaults = DiffusionParams(height=256, width=256, num_inference_steps=20, seed=7)
    params = DiffusionParams(height=64, seed=0, negative_prompt="").with_defaults(defaults)
    assert params == DiffusionParams(
        height=64, width=256, num_inference_steps=20, seed=0, negative_prompt=""
    )


def test_steps_of_the_defaults_do_not_touch_given_sigmas() -> None:
    params = DiffusionParams(sigmas=(1.0, 0.5)).with_defaults(
        DiffusionParams(num_inference_steps=20)
    )
    assert (params.sigmas, params.num_inference_steps) == ((1.0, 0.5), 2)


def test_steps_that_are_given_do_not_clash_with_sigmas_of_the_defaults() -> None:
    defaults = DiffusionParams(sigmas=(1.0, 0.5))
    params = DiffusionParams(num_inference_steps=5).with_defaults(defaults)
    assert (params.sigmas, params.num_inference_steps) == (None, 5)


def test_a_value_too_long_to_show_is_still_refused_by_name() -> None:
    with pytest.raises(InvalidParameterError, match="seed=a number too long to show is not"):
        DiffusionParams(seed=10**5000)
    with pytest.raises(InvalidParameterError, match="negative_prompt=") as caught:
        DiffusionParams(negative_prompt=["x" * 10_000])  # type: ignore[arg-type]
    assert len(str(caught.value)) < 300
