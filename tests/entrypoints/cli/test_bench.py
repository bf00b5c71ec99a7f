"""`vllm-omni bench serve` as a user runs it, against a server that speaks plain OpenAI."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.benchmark.plain_server import KEY, PlainServer, serving
from vllm_omni.entrypoints.cli.bench import make_config
from vllm_omni.entrypoints.cli.main import main, make_parser

COMMAND = [sys.executable, "-m", "vllm_omni.entrypoints.cli.main", "bench", "serve"]


@pytest.fixture(scope="module")
def server() -> Iterator[PlainServer]:
    with serving(PlainServer(seconds_per_megapixel=0.5)) as server:
        yield server


@pytest.fixture
def secret_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlainServer]:
    monkeypatch.delenv("VLLM_OMNI_API_KEY", raising=False)
    with serving(PlainServer(key=KEY)) as server:
        yield server


def bench(url: str, *arguments: str) -> int:
    return main(["bench", "serve", "--url", url, *arguments])


def test_a_plain_server_under_poisson_load(
    server: PlainServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.bodies.clear()
    files = tmp_path / "new" / "run.json", tmp_path / "new" / "run.png"
    load = ["--request-rate", "40", "--num-requests", "40", "--warmup", "1", "--mix", "demo"]
    written = ["--json", str(files[0]), "--plot", str(files[1])]
    assert bench(server.url, *load, "--plain", *written) == 0

    for body in server.bodies:  # nothing that is not OpenAI's
        assert body.keys() == {"prompt", "model", "size", "n", "response_format"}
        assert (body["model"], body["n"], body["response_format"]) == ("plain", 1, "b64_json")
    assert len(server.bodies) == 44  # four classes warm up

    report = json.loads(files[0].read_text())
    results = report["results"]
    assert report["server"] == {"url": server.url, "model": "plain"}
    assert (results["num_ok"], results["num_failed"]) == (40, 0)
    rows = {row["name"]: row for row in results["classes"]}
    assert {name: row["num_ok"] for name, row in rows.items()} == {
        "128x128": 6,
        "192x192": 10,
        "256x256": 18,
        "384x384": 6,
        "all": 40,
    }
    # The server sleeps half a second for a megapixel: 74 ms for the largest.
    assert rows["384x384"]["latency"]["p50"] >= 0.0737
    assert rows["384x384"]["alone_seconds"] >= 0.0737
    assert rows["384x384"]["slo_seconds"] == pytest.approx(3 * rows["384x384"]["alone_seconds"])
    in_time = [r["latency"] <= rows[r["class"]]["slo_seconds"] for r in report["requests"]]
    assert rows["all"]["slo_attainment"] == sum(in_time) / 40
    assert 5 < results["arrivals"]["actual_rate"] < 80
    assert len(report["requests"]) == 40
    assert {row["failure"] for row in report["requests"]} == {None}

    printed = capsys.readouterr().out
    title = f"{server.url}, model plain: 40 requests, Poisson, 40 per second, mix demo\n"
    assert printed.startswith(title)
    assert "requests    40 ok, 0 failed" in printed
    with Image.open(files[1]) as image:
        assert image.size == (1320, 900)


def test_the_shares_and_times_of_two_runs_are_the_same(server: PlainServer, tmp_path: Path) -> None:
    rows = []
    for name in ("first", "second"):
        file = tmp_path / name
        load = ["--request-rate", "200", "--num-requests", "20", "--warmup", "0", "--seed", "7"]
        assert bench(server.url, *load, "--mix", "demo", "--plain", "--json", str(file)) == 0
        requests = json.loads(file.read_text())["requests"]
        rows.append(sorted((r["index"], r["class"], r["prompt"], r["arrival"]) for r in requests))
    assert rows[0] == rows[1]


def test_closed_loop(server: PlainServer, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    load = ["--concurrency", "3", "--num-requests", "9", "--size", "320x256", "--slo", "0.001"]
    assert bench(server.url, *load, "-n", "2", "--json", str(file)) == 0
    results = json.loads(file.read_text())["results"]
    assert results["arrivals"]["max_in_flight"] == 3
    assert results["arrivals"]["requested_rate"] is None
    assert results["throughput"]["images"] == pytest.approx(2 * results["throughput"]["requests"])
    assert results["classes"][0]["name"] == "320x256"
    assert results["classes"][-1]["slo_attainment"] == 0.0


def test_previews(server: PlainServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    load = ["--concurrency", "2", "--num-requests", "4", "--warmup", "0"]
    stream = ["--stream", "--partial-images", "2"]
    assert bench(server.url, *load, *stream, "--json", str(file)) == 0
    overall = json.loads(file.read_text())["results"]["classes"][-1]
    assert 0 < overall["first_preview"]["p50"] < overall["latency"]["p50"]
    assert "first preview" in capsys.readouterr().out
    assert server.bodies[-1]["partial_images"] == 2


def test_what_is_asked_for_is_sent(server: PlainServer, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--cfg", "4", "--negative", "grey", "--extra-body", '{"quality": "low"}']
    more += ["--steps", "7", "--response-format", "none", "--model", "mine"]
    # This server refuses it, and one line says so.
    assert bench(server.url, "--concurrency", "1", "--warmup", "1", *more) == 1
    body = server.bodies[-1]
    del body["prompt"]
    assert body == {
        "model": "mine",
        "size": "256x256",
        "n": 1,
        "num_inference_steps": 7,
        "true_cfg_scale": 4.0,
        "negative_prompt": "grey",
        "quality": "low",
    }
    message = f"error: {server.url}: HTTP 400: unknown parameter: negative_prompt\n"
    assert capsys.readouterr().err == message


def test_failures_are_counted_by_kind(
    server: PlainServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, file = tmp_path / "prompts.txt", tmp_path / "run.json"
    prompts.write_text("429\n\n500\ncut\ngarbage\na cat\na dog\n")
    load = ["--request-rate", "inf", "--num-requests", "12", "--prompts", str(prompts)]
    assert bench(server.url, *load, "--warmup", "0", "--json", str(file)) == 0
    results = json.loads(file.read_text())["results"]
    assert results["failures"] == {
        "HTTP 429": 2,
        "HTTP 500": 2,
        "connection cut": 2,
        "bad answer": 2,
    }
    assert (results["num_ok"], results["num_failed"]) == (4, 8)
    printed = capsys.readouterr().out
    assert "requests    4 ok, 8 failed" in printed
    assert "2 x HTTP 429: queue full" in printed


def test_nothing_succeeds(
    server: PlainServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    load = ["--concurrency", "2", "--num-requests", "4", "--warmup", "0", "--prompts", str(prompts)]
    prompts.write_text("429")
    assert bench(server.url, *load) == 1
    message = f"error: {server.url}: 4 of 4 requests failed: HTTP 429: queue full\n"
    assert capsys.readouterr() == ("", message)
    prompts.write_text("429\n500")
    assert bench(server.url, *load) == 1
    assert "requests    0 ok, 4 failed" in capsys.readouterr().out


def test_a_server_with_keys(
    secret_server: PlainServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = ["--concurrency", "1", "--num-requests", "1", "--warmup", "0"]
    refused = f"error: {secret_server.url}: HTTP 401: wrong key\n"
    assert bench(secret_server.url, *load) == 1
    assert capsys.readouterr() == ("", refused)
    assert bench(secret_server.url, *load, "--model", "mine", "--warmup", "1") == 1
    assert capsys.readouterr() == ("", refused)

    key_file, report = tmp_path / "key", tmp_path / "run.json"
    key_file.write_text(f"{KEY}\n")
    written = ["--json", str(report)]
    assert bench(secret_server.url, *load, "--api-key-file", str(key_file), *written) == 0
    monkeypatch.setenv("VLLM_OMNI_API_KEY", KEY)
    assert bench(secret_server.url, *load) == 0
    assert KEY not in report.read_text() + capsys.readouterr().out


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("http://127.0.0.1:1", "--concurrency", "1") == 1
    expected = "error: http://127.0.0.1:1: no connection: Connection refused\n"
    assert capsys.readouterr() == ("", expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "0"], "--concurrency=0 is not allowed: at least 1"),
        (["--request-rate", "0"], "--request-rate=0.0 is not allowed: more than 0"),
        (["--request-rate", "nan"], "--request-rate=nan is not allowed: more than 0"),
        (["--concurrency", "1", "-n", "0"], "-n=0 is not allowed: at least 1"),
        (["--concurrency", "1", "--size", "big"], "--size='big' is not allowed"),
        (["--concurrency", "1", "--json", "."], "--json='.' is not allowed: a file that can be"),
        (["--concurrency", "1", "--plot", "x.gif"], "--plot='x.gif' is not allowed: one of .png"),
        (["--concurrency", "1", "--prompts", "nowhere"], "--prompts='nowhere' is not allowed"),
        (["--concurrency", "1", "--partial-images", "1"], "--partial-images=1 is not allowed"),
        (["--concurrency", "1", "--plain", "--steps", "3"], "--steps=3 is not allowed"),
        (["--concurrency", "1", "--extra-body", "[]"], "--extra-body='[]' is not allowed"),
        (["--concurrency", "1", "--extra-body", "{"], "--extra-body='{' is not allowed"),
        (["--concurrency", "1", "--url", "host:80"], "--url='host:80' is not allowed"),
        (["--concurrency", "1", "--url", "http://a:b@c"], "--url='c' is not allowed: no password"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}") and captured.err.count("\n") == 1
    assert captured.out == ""


def test_commands_of_the_documentation() -> None:
    document = Path(__file__).parents[3] / "docs" / "bench.md"
    text = document.read_text().replace("\\\n", " ")
    commands = [line for line in text.splitlines() if line.startswith("vllm-omni bench serve")]
    assert len(commands) >= 5
    for command in commands:
        arguments = make_parser().parse_args(shlex.split(command, comments=True)[1:])
        assert make_config(arguments).num_requests > 0


def test_how_requests_arrive_must_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "serve"])
    assert "one of the arguments --request-rate --concurrency is required" in (
        capsys.readouterr().err
    )


def start(*arguments: str) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )


def interrupt(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code and what was printed after Ctrl-C."""
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def wait_for_bodies(server: PlainServer, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(server.bodies) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_prints_what_there_is(server: PlainServer, tmp_path: Path) -> None:
    prompts, file = tmp_path / "prompts.txt", tmp_path / "run.json"
    prompts.write_text("429\na cat\nslow\n500\n")
    load = ["--request-rate", "inf", "--num-requests", "4", "--warmup", "0"]
    load += ["--url", server.url, "--prompts", str(prompts), "--json", str(file)]
    server.bodies.clear()
    process = start(*load)
    wait_for_bodies(server, 4)
    time.sleep(2.0)  # for the answers: one takes half a minute, the others next to nothing
    exit_code, out, err = interrupt(process)
    assert exit_code == 130, err
    assert "requests    1 ok, 2 failed, 1 unfinished" in out
    report = json.loads(file.read_text())
    assert report["command"].startswith("vllm-omni bench serve --request-rate inf")
    assert report["config"]["request_rate"] == "inf"
    assert report["results"]["num_unfinished"] == 1


def test_ctrl_c_in_the_warm_up(server: PlainServer, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("slow")
    server.bodies.clear()
    process = start("--url", server.url, "--concurrency", "1", "--prompts", str(prompts))
    wait_for_bodies(server, 1)
    assert interrupt(process) == (130, "", "error: stopped before the first answer\n")
