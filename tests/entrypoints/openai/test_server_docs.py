"""docs/server.md says what the code does."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from tests.inner_server import Served
from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.entrypoints.openai.errors import ERROR_RESPONSES
from vllm_omni.entrypoints.openai.image_params import QUALITY_STEPS, get_quality
from vllm_omni.entrypoints.openai.protocol import ImageGenerationRequest, Quality

# Options that are not the server's own.
OTHERS = ("policy", "help", "max_num_seqs", "max_restarts", "stage_configs")
PAGE = (Path(__file__).parents[3] / "docs" / "server.md").read_text()


def read_rows(heading: str) -> list[list[str]]:
    """The cells of all tables under a heading, less their own headings."""
    _, *parts = re.split(r"^##? (.*)$", PAGE, flags=re.MULTILINE)
    section = dict(zip(parts[::2], parts[1::2], strict=True))[heading]
    rows = re.findall(r"^\|(.*)\|$", section, re.MULTILINE)
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    return [row for row in cells if "`" in row[0] or row[0][:1].isdecimal()]


def read_names(heading: str) -> list[str]:
    """Everything in backticks in the first cells of its tables."""
    return [name for row in read_rows(heading) for name in re.findall(r"`([^`]+)`", row[0])]


def test_routes(served: Served) -> None:
    paths = served.app.api.openapi()["paths"]
    routes = {f"{method.upper()} {path}" for path in paths for method in paths[path]}
    assert set(read_names("The server")) == routes


def test_parameters() -> None:
    names = [name for name in read_names("Pictures") if name in ImageGenerationRequest.model_fields]
    assert sorted(names) == sorted(ImageGenerationRequest.model_fields)


def test_qualities() -> None:
    told = {
        quality: float(row[1])
        for row in read_rows("Pictures")
        for quality in re.findall(r"`([^`]+)`", row[0])
        if len(row) == 2
    }
    assert told == {
        quality: QUALITY_STEPS[
            get_quality(ImageGenerationRequest.model_validate({"prompt": "a", "quality": quality}))
        ]
        for quality in get_args(Quality)
    }


def test_errors() -> None:
    told = [int(status) for row in read_rows("Errors") for status in row[0].split(", ")]
    assert sorted(told) == sorted(ERROR_RESPONSES)


def test_limits_and_options() -> None:
    settings = {field.name: field.default for field in fields(ServerConfig)}
    limits = read_names("Limits")
    assert set(limits) <= set(settings)
    assert {name for name in settings if name.startswith("max_")} - set(limits) == {
        "max_files_bytes",
        "max_jobs",
    }
    singular = {name.removesuffix("s") for name in settings}
    for option in re.findall(r"`--([a-z-]+)", PAGE):
        name = option.replace("-", "_")
        assert name in settings or name in singular or name in OTHERS, option


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_n", 10),
        ("max_num_queued", 256),
        ("max_prompt_chars", 16384),
        ("max_body_bytes", 16 * 2**20),
        ("max_header_bytes", 64 * 2**10),
        ("max_connections", 10_000),
        ("idempotency_ttl", 3600),
        ("max_input_images", 4),
        ("max_input_pixels", 4096 * 4096),
        ("max_tokens", 4096),
        ("request_timeout", 600),
        ("job_timeout", 86_400),
        ("receive_timeout", 60),
        ("send_timeout", 60),
        ("url_ttl", 3600),
        ("job_ttl", 3600),
        ("shutdown_timeout", 30),
    ],
)
def test_defaults_are_those_of_the_page(name: str, value: float) -> None:
    assert getattr(ServerConfig(), name) == value
