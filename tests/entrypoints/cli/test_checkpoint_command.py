"""`vllm-omni checkpoint`: arguments, output, exit codes."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_omni.entrypoints.cli import checkpoint
from vllm_omni.models.qwen_image.checkpoint import CHECKPOINT_SIZES, MARKER


def create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-omni")
    checkpoint.add_parser(parser.add_subparsers(required=True))
    return parser


def run_command(*arguments: str) -> int:
    args = create_parser().parse_args(["checkpoint", *arguments])
    return int(args.run(args))


def test_writes_the_checkpoint_and_prints_its_path(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiny"
    assert run_command(str(path), "--seed", "5") == 0
    assert capfd.readouterr() == (f"{path}\n", "")
    assert (
        f'"{MARKER}": {{\n    "size": "tiny",\n    "seed": 5\n  }}'
        in (path / "model_index.json").read_text()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["new", "--size", "huge"], "size='huge' is not allowed: one of tiny, small"),
        (["new", "--seed", "-1"], "seed=-1 is not allowed: a whole number from 0 to"),
        (["."], "is not empty and was not written by this command"),
        (["file"], "is a file"),
        (["file/below"], "exists: "),
    ],
)
def test_user_errors_go_to_stderr(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert run_command(*arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_help_names_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        create_parser().parse_args(["checkpoint", "--help"])
    assert exit_info.value.code == 0
    help_text = capsys.readouterr().out
    for size in CHECKPOINT_SIZES:
        assert f"{size} (" in help_text


def test_parsing_does_not_import_torch() -> None:
    code = (
        "import argparse, sys\n"
        "from vllm_omni.entrypoints.cli import checkpoint\n"
        "parser = argparse.ArgumentParser()\n"
        "checkpoint.add_parser(parser.add_subparsers())\n"
        "parser.parse_args(['checkpoint', 'x'])\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
