"""What one request may cost."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.entrypoints.openai.errors import APIError
from vllm_omni.entrypoints.openai.limits import check_cost, check_prompt, get_cost
from vllm_omni.params import DiffusionParams


def make_params(**settings: Any) -> DiffusionParams:
    given = {"height": 128, "width": 64, "num_inference_steps": 10} | settings
    return DiffusionParams(**given)


def test_cost() -> None:
    assert get_cost(make_params()) == 128 * 64 * 10
    assert get_cost(make_params(num_outputs_per_prompt=3)) == 3 * 128 * 64 * 10
    guided = make_params(negative_prompt="ugly", true_cfg_scale=4.0)
    assert get_cost(guided) == 2 * 128 * 64 * 10


@pytest.mark.parametrize(
    ("limits", "param", "code"),
    [
        ({"max_pixels": 128 * 64 - 1}, "size", "size_limit_exceeded"),
        ({"max_n": 1}, "n", None),
        ({"max_cost": 2 * 128 * 64 * 10 - 1}, "size", "cost_limit_exceeded"),
    ],
)
def test_cost_over_each_limit(limits: dict[str, Any], param: str, code: str | None) -> None:
    params = make_params(num_outputs_per_prompt=2)
    config = ServerConfig().with_defaults(params)
    assert check_cost(params, config) == 2 * 128 * 64 * 10
    with pytest.raises(APIError) as caught:
        check_cost(params, ServerConfig(**limits).with_defaults(params))
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


def test_prompt() -> None:
    config = ServerConfig(max_prompt_chars=5)
    for fine in (None, "", "12345", "\u00e4\u00f6\u00fc", "\U0001f600"):
        check_prompt("prompt", fine, config)
    for bad in ("123456", "\ud83d", "a\ude00"):
        with pytest.raises(APIError) as caught:
            check_prompt("negative_prompt", bad, config)
        assert (caught.value.status, caught.value.param) == (400, "negative_prompt")
