"""Stock diffusers as a server that `vllm-omni bench serve` measures."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.drawing import MakeCheckpoint
from vllm_omni.benchmark.diffusers_client import DiffusersClient
from vllm_omni.benchmark.workload import PictureClass, PictureRequest
from vllm_omni.entrypoints.cli.main import main


def test_in_this_process(
    checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, report = f"diffusers:{checkpoint(0)}", tmp_path / "run.json"
    load = ["--concurrency", "2", "--num-requests", "3", "--warmup", "1", "--json", str(report)]
    asked = ["--size", "64x64", "--steps", "2", "--cfg", "2", "-n", "2"]
    assert main(["bench", "serve", "--url", url, *load, *asked]) == 0
    assert capsys.readouterr().out.startswith(f"{url}, model {checkpoint(0).name}: 3 requests")
    rows = json.loads(report.read_text())["requests"]
    assert [(row["num_images"], row["failure"]) for row in rows] == [(2, None)] * 3


def test_time_is_over_and_values_are_refused(checkpoint: MakeCheckpoint) -> None:
    async def draw(prompt: str, timeout: float) -> str:
        request = PictureRequest(0, PictureClass(64, 64, num_steps=1), prompt)
        async with DiffusersClient(f"diffusers:{checkpoint(0)}", {}, timeout) as client:
            return str((await client.draw(request)).failure)

    assert asyncio.run(draw("a cat", timeout=1e-6)) == "timed out"
    no_text: Any = 7
    assert "`prompt` has to be of type" in asyncio.run(draw(no_text, timeout=60.0))


def test_what_diffusers_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--url", "diffusers:nowhere"], "model 'nowhere' is not a folder"),
        (["--url", "diffusers:demo", "--stream"], "diffusers has no --stream"),
    ):
        assert main(["bench", "serve", "--concurrency", "1", *arguments]) in (1, 2)
        assert message in capsys.readouterr().err
