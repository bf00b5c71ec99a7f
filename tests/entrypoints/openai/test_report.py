"""The start-up report; a whole one is in tests/entrypoints/cli/test_serve.py."""

from __future__ import annotations

import shlex

import pytest

from vllm_omni.entrypoints.openai.report import make_curl_line, make_url


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("10.0.0.7", "http://10.0.0.7:80"),
    ],
)
def test_url_can_be_connected_to(address: str, url: str) -> None:
    assert make_url(address, 80) == url


@pytest.mark.parametrize("needs_key", [True, False])
def test_curl_line_is_a_command(needs_key: bool) -> None:
    words = shlex.split(make_curl_line("http://localhost:1", needs_key))
    assert words[:2] == ["curl", "http://localhost:1/v1/images/generations"]
    assert words[-1] == '{"prompt": "a red circle", "response_format": "url"}'
    assert ("Authorization: Bearer $VLLM_OMNI_API_KEY" in words) == needs_key
