"""Step caches over HTTP: chosen by the request, told in the answer, kept in the picture."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import pytest

from tests.pictures import read_parameters, read_pixels
from tests.serving import ServerProcess
from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.errors import ConfigError
from vllm_omni.step_cache import StepCacheParams

BODY = {
    "prompt": "a large red circle in the center on a white background",
    "size": "128x128",
    "num_inference_steps": 10,
    "seed": 1,
}


def draw(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    response = httpx.post(
        f"{server.url}/v1/images/generations", json=BODY | fields, timeout=120, trust_env=False
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def get_png(answer: dict[str, Any]) -> bytes:
    return base64.b64decode(answer["data"][0]["b64_json"])


def test_a_request_chooses_its_cache(server: ServerProcess) -> None:
    plain, cached = draw(server), draw(server, cache={"method": "tea", "threshold": 0.5})
    assert plain["metrics"]["num_rows"] == cached["metrics"]["num_rows"] == 10
    assert plain["metrics"]["num_skipped_rows"] == 0
    assert 2 <= cached["metrics"]["num_skipped_rows"] <= 8
    with_cache, without = read_pixels(get_png(cached)), read_pixels(get_png(plain))
    assert 0 < np.abs(with_cache.astype(int) - without.astype(int)).mean() < 10


def test_a_cached_picture_can_be_made_again(server: ServerProcess) -> None:
    png = get_png(draw(server, cache={"method": "first_block", "threshold": 0.3}))
    body = read_parameters(png)
    cache = StepCacheParams(**body["cache"])
    assert (cache.method, cache.threshold) == ("first_block", 0.3)
    assert cache.warmup_steps is not None  # the model's own, as it was then
    again = get_png(draw(server, **body))
    assert np.array_equal(read_pixels(png), read_pixels(again))


@pytest.mark.parametrize("cache", ["none", None])
def test_no_cache(server: ServerProcess, cache: str | None) -> None:
    assert draw(server, cache=cache)["metrics"]["num_skipped_rows"] == 0


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ("magic", "cache.method='magic' is not allowed: one of first_block, tea, taylor"),
        ({"method": "tea", "threshold": -1}, "cache.threshold=-1 is not allowed: a number from"),
        ([], "cache=[] is not allowed"),
    ],
)
def test_what_is_not_allowed_is_named(server: ServerProcess, cache: Any, message: str) -> None:
    url = f"{server.url}/v1/images/generations"
    response = httpx.post(url, json=BODY | {"cache": cache}, trust_env=False)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "cache"
    assert error["message"].startswith(message)


def test_the_server_has_a_default() -> None:
    assert ServerConfig().read_cache() is None
    assert ServerConfig(cache="tea").read_cache() == StepCacheParams(method="tea")
    given = '{"method": "taylor", "order": 2}'
    assert ServerConfig(cache=given).read_cache() == StepCacheParams(method="taylor", order=2)
    for wrong in ("magic", "{", '{"method": "tea", "colour": 1}'):
        with pytest.raises(ConfigError, match="cache="):
            ServerConfig(cache=wrong)
