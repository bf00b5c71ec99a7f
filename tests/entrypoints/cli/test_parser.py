"""What a command line may look like, and what is said of one that is wrong."""

from __future__ import annotations

import pytest

from vllm_omni.entrypoints.cli.main import main, make_parser


@pytest.mark.parametrize(
    ("arguments", "message", "command"),
    [
        ([], "the following arguments are required: COMMAND", ""),
        (["draw"], "argument COMMAND: invalid choice: 'draw' (choose from 'generate'", ""),
        (["generate"], "the following arguments are required: PROMPT", " generate"),
        (["generate", "a cat", "--stpes=2"], "unknown option: --stpes; did you mean", " generate"),
        (["serve", "--prot", "80"], "unknown option: --prot; did you mean --port?", " serve"),
        (["serve", "a", "b"], "unexpected argument: 'b'", " serve"),
        (["bench", "cache", "--xyzzy"], "unknown option: --xyzzy", " bench cache"),
        (["serve", "--port", "x"], "argument --port: invalid int value: 'x'", " serve"),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    first, usage, more = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {message}")
    assert usage.startswith(f"usage: vllm-omni{command} ")
    assert more == f"help: vllm-omni{command} --help"


@pytest.mark.parametrize(
    ("arguments", "level"),
    [
        (["doctor"], "error"),
        (["--log-level", "info", "doctor"], "info"),
        (["doctor", "--log-level", "debug"], "debug"),
        (["bench", "serve", "--concurrency", "1", "--log-level", "debug"], "debug"),
    ],
)
def test_log_level_stands_anywhere(arguments: list[str], level: str) -> None:
    assert make_parser().parse_args(arguments).log_level == level


def test_guidance_of_generate(capsys: pytest.CaptureFixture[str]) -> None:
    from vllm_omni.entrypoints.cli.generate import _params

    for options, is_guided, scale in (
        ([], False, 4.0),
        (["--negative", "ugly"], True, 4.0),
        (["--cfg", "3"], True, 3.0),
        (["--cfg", "1"], False, 1.0),
    ):
        params = _params(make_parser().parse_args(["generate", "a cat", *options]))
        assert (params.do_true_cfg, params.true_cfg_scale) == (is_guided, scale), options


def test_no_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", " "]) == 2
    assert (
        capsys.readouterr().err == "error: PROMPT=' ' is not allowed: words that say what to draw\n"
    )
