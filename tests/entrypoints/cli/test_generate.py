"""`vllm-omni generate`, in process and as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.drawing import MakeCheckpoint
from vllm_omni.entrypoints.cli.main import main

COMMAND = [sys.executable, "-m", "vllm_omni.entrypoints.cli.main"]
SMALL = ["--size", "96x64", "--steps", "2", "--seed", "1", "--device", "cpu"]


def read(path: Path) -> tuple[tuple[int, int], bytes]:
    """Size and pixels of a picture."""
    with Image.open(path) as image:
        return image.size, image.tobytes()


def test_prints_the_path_and_draws(
    checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "cat.png"
    assert main(["generate", "a cat", "-o", str(path), "--model", str(checkpoint(0)), *SMALL]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert read(path)[0] == (96, 64)


def test_several_prompts_and_n_are_numbered(
    checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.webp"
    arguments = ["generate", "a cat", "a dog", "-n", "2", "-o", str(path), "--json", *SMALL]
    assert main([*arguments, "--model", str(checkpoint(0)), "--negative", "ugly"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["prompt"] == "a cat" and first["seeds"] == [1, 2] and first["error"] is None
    assert first["files"] == [str(tmp_path / "x-1.webp"), str(tmp_path / "x-2.webp")]
    assert second["files"] == [str(tmp_path / "x-3.webp"), str(tmp_path / "x-4.webp")]
    assert first["metrics"]["num_steps"] == 4
    pictures = {read(Path(file))[1] for file in first["files"] + second["files"]}
    assert len(pictures) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--size", "100x64"],
            "width=100 is not allowed: it must be a multiple of 16; the nearest",
        ),
        (["--size", "big"], "--size='big' is not allowed: width x height in pixels"),
        (["--steps", "0"], "num_inference_steps=0 is not allowed: a whole number from 1 to 1000"),
        (["-o", "x.gif"], "-o='x.gif' is not allowed: one of .png"),
        (["-o", "/dev/null/x.png"], "-o='/dev/null/x.png' is not allowed: a file in a folder that"),
        (["--worker-processes", "-1"], "worker_processes=-1 is not allowed"),
        (["--model", "nowhere"], "model 'nowhere' is not a folder"),
    ],
)
def test_wrong_arguments(
    arguments: list[str],
    message: str,
    checkpoint: MakeCheckpoint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if "--model" not in arguments:
        arguments = [*arguments, "--model", str(checkpoint(0))]
    assert main(["generate", "a cat", *arguments]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}")
    assert captured.out == "" and list(tmp_path.iterdir()) == []


def test_a_failing_prompt_is_reported_and_the_others_drawn(
    checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.png"
    arguments = ["generate", "very " * 2000, "a cat", "-o", str(path), *SMALL]
    assert main([*arguments, "--model", str(checkpoint(0))]) == 1
    captured = capsys.readouterr()
    assert captured.out == f"{path}\n"
    assert "the most is 1024" in captured.err


def test_the_demo_model_from_a_shell(tmp_path: Path) -> None:
    path = tmp_path / "demo.png"
    done = subprocess.run(
        [*COMMAND, "generate", "a red star", "-o", str(path), *SMALL],
        env={
            "PATH": os.defpath,
            "VLLM_OMNI_CACHE": str(tmp_path / "cache"),
            "HOME": str(tmp_path),
            "OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"],
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{path}\n"
    assert read(path)[0] == (96, 64)
    assert "Warning" not in done.stderr and "Loading" not in done.stderr
    assert "| 2/2 [" in done.stderr  # how far it is


def test_text_and_image_in_processes_of_their_own(
    checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.png"
    arguments = ["generate", "a cat", "-o", str(path), "--output-format", "text+image", "--json"]
    model = ["--model", str(checkpoint(0)), "--mode", "process"]
    assert main([*arguments, *model, *SMALL]) == 0
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report["text"], str) and report["files"] == [str(path)]
    assert read(path)[0] == (96, 64)


def test_stages_from_a_file(
    checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = tmp_path / "stages.yaml"
    stages.write_text(
        "stage_configs:\n"
        "  - stage_id: 0\n"
        "    engine_type: diffusion\n"
        f"    model_path: {checkpoint(0)}\n"
        "    dit_config: {device: cpu}\n"
    )
    path = tmp_path / "x.png"
    arguments = ["generate", "a cat", "-o", str(path), "--size", "96x64", "--steps", "2"]
    assert main([*arguments, "--seed", "1", "--stage-configs", str(stages)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    stages.write_text(stages.read_text().replace("device: cpu", "devise: cpu"))
    assert main([*arguments, "--stage-configs", str(stages)]) == 2
    assert "stages.yaml:5: " in capsys.readouterr().err
