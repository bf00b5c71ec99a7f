"""`vllm-omni serve` as an operator meets it: its help, what it refuses, what it says."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.asking import Got, make_head, talk
from tests.drawing import MakeCheckpoint
from tests.serving import ServerProcess
from vllm_omni.config import DiTConfig, OmniConfig
from vllm_omni.entrypoints.cli.main import main, make_parser
from vllm_omni.entrypoints.cli.serve import INTERRUPTED, _make_omni_config
from vllm_omni.entrypoints.openai.config import ServerConfig

COMMAND = [sys.executable, "-m", "vllm_omni.entrypoints.cli.main", "serve"]
AT_ONCE = 20.0  # seconds, on a machine where everybody waits; alone it takes less than one
CLI_KEY, ENV_KEY = "key-of-the-command-line", "key-of-the-environment"
PROMPT = "a secret plan of a castle"


# --- help and arguments ---


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    headings = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert headings == [
        "positional arguments",
        "options",
        "where it listens",
        "who may use it",
        "how much one request may ask for",
        "how long things last",
        "what it tells",
        "cache of prompts",
        "supervision of stages, in process mode",
        "diffusion engine",
        "settings for GPUs",
        "examples",
    ]
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "usage: vllm-omni serve [MODEL] [options]\n" in text
    assert "default: 16777216 (16 MiB)" in text and "default: 600" in text


@pytest.mark.parametrize("config_class", [ServerConfig, DiTConfig])
def test_every_setting_has_an_option(
    config_class: type, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    left_out = {"model", "model_type", "stage_id", "load_text_encoder", "cache_config"}
    left_out.add("snapshot_steps")  # what --snapshot-every says
    for field in fields(config_class):
        option = "--" + field.name.replace("_", "-")
        found = re.search(rf"^  {option.removesuffix('s')}s?[ ,\n]", text, re.MULTILINE)
        assert (found is not None) == (field.name not in left_out), field.name


def test_the_system_has_its_options() -> None:
    given = ["--max-restarts", "0", "--hang-timeout", "2.5", "--prompt-cache-bytes", "7"]
    config = _make_omni_config(make_parser().parse_args(["serve", *given]))
    assert (config.max_restarts, config.hang_timeout, config.prompt_cache_bytes) == (0, 2.5, 7)
    assert config.snapshot_every == OmniConfig().snapshot_every


def test_priorities_count_by_default() -> None:
    """Where nobody gives any, it is first come, first served."""
    for arguments, policy in (([], "priority"), (["--policy", "fcfs"], "fcfs")):
        config = _make_omni_config(make_parser().parse_args(["serve", *arguments]))
        [dit_config] = [stage.dit_config for stage in config.stage_configs if stage.dit_config]
        assert dit_config.policy == policy


def run_serve(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str, float]:
    """Exit code, what it wrote, and seconds, of a command that should end by itself."""
    start = time.monotonic()
    run = subprocess.run(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        env=os.environ | (env or {}),
    )
    return run.returncode, run.stdout, time.monotonic() - start


def test_help_imports_nothing_large() -> None:
    code = (
        "import sys; from vllm_omni.entrypoints.cli.main import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "large = {'torch', 'vllm', 'diffusers', 'transformers', 'fastapi', 'gradio', 'uvicorn'}\n"
        "print(sorted(large & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["--host", "0.0.0.0"], 2, "there is no API key: give --api-key, or --allow-no-key"),
        (["--host", "192.0.2.1"], 1, "cannot listen on 192.0.2.1:8000: Cannot assign requested"),
        (["--max-n", "0"], 2, "max_n=0 is not allowed: a whole number, at least 1"),
        (["--port", "70000"], 2, "port=70000 is not allowed: at most 65535"),
        (["--request-timeout", "nan"], 2, "request_timeout=nan is not allowed"),
        (["--host", "0.0.0.0", "--api-key", "short"], 2, "each has at least 8 characters"),
        (["--allowed-origin", "*"], 2, "no wildcard"),
        (["--device", "tpu"], 2, "device='tpu' is not allowed"),
        (["--vllm-arg", "max_num_seqs"], 2, "NAME=VALUE"),
        (["--vllm-arg", "max_num_seqs={"], 2, "a value that YAML can read"),
        (["--stage-configs", "x.yaml", "--max-num-seqs", "2"], 2, "belong in a stage's file"),
        (["--stage-configs", "nowhere.yaml"], 2, "nowhere.yaml"),
        (["nowhere"], 1, "model 'nowhere' is not a folder"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str], exit_code: int, message: str, tmp_path: Path
) -> None:
    code, output, seconds = run_serve(*arguments)
    assert code == exit_code and output.startswith("error: ") and message in output
    assert output.count("\n") == 1 and seconds < AT_ONCE
    assert "short" not in output


def test_broken_checkpoint_is_one_line(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    model = Path(shutil.copytree(checkpoint(0), tmp_path / "model"))
    weights = model / "transformer/diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    code, output, seconds = run_serve(str(model), "--port", "0")
    assert code == 1 and output.count("\n") == 1 and seconds < AT_ONCE
    assert output.startswith(f"error: {weights} is broken: it has ")


@pytest.mark.slow
def test_checkpoint_that_only_the_engine_finds_broken(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """All files are whole, and do not fit together: the process of a stage says so."""
    model = Path(shutil.copytree(checkpoint(0), tmp_path / "model"))
    config = model / "vae/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"z_dim": "many"}))
    code, output, _ = run_serve(str(model), "--port", "0")
    assert code == 1 and "Traceback" not in output
    [line] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: stage 1 (diffusion) cannot start with ")


def test_port_in_use(checkpoint: MakeCheckpoint) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code, output, seconds = run_serve(str(checkpoint(0)), "--port", str(port))
    why = "Address already in use; --port takes another, and 0 a free one"
    assert (code, output) == (1, f"error: cannot listen on 127.0.0.1:{port}: {why}\n")
    assert seconds < AT_ONCE


# --- while it loads ---


@pytest.mark.parametrize(
    ("signum", "delay"), [(signal.SIGINT, 0.5), (signal.SIGTERM, 6.0)], ids=["early", "later"]
)
def test_signal_while_it_loads(checkpoint: MakeCheckpoint, signum: int, delay: float) -> None:
    with subprocess.Popen(
        [*COMMAND, str(checkpoint(0)), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        while not Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"vllm-omni api"):
            time.sleep(0.05)
        time.sleep(delay)
        family = [*psutil.Process(process.pid).children(recursive=True)]
        os.killpg(process.pid, signum)  # as a terminal does
        output, _ = process.communicate(timeout=60)
    # Where everything is slow, it had not got as far as to handle it.
    expected = 0 if signum == signal.SIGTERM else INTERRUPTED
    assert process.returncode in (expected, -signum)
    assert b"Traceback" not in output and b"error" not in output.lower()
    assert psutil.wait_procs(family, timeout=30)[1] == []


# --- a server with keys, small limits and JSON lines ---


@pytest.fixture(scope="module")
def guarded(
    checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    server = ServerProcess(
        tmp_path_factory.mktemp("guarded") / "log",
        str(checkpoint(0)),
        *("--served-model-name", "tiny", "--api-key", CLI_KEY, "--max-num-queued", "1"),
        *("--log-format", "json", "--ui", "--shutdown-timeout", "5"),
        env={"VLLM_OMNI_API_KEYS": f"{ENV_KEY}, another-key"},
    )
    server.wait_until_ready()
    yield server
    assert server.stop() == 0
    assert CLI_KEY not in server.log.read_text() and ENV_KEY not in server.log.read_text()


@pytest.fixture(scope="module")
def client(guarded: ServerProcess) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {CLI_KEY}"}
    with httpx.Client(base_url=guarded.url, headers=headers, timeout=60) as client:
        yield client


def read_report(server: ServerProcess) -> dict[str, str]:
    lines = server.log.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("vLLM-omni "))
    report = {}
    for line in lines[start + 1 :]:
        if not line.startswith("  "):
            break
        report[line[2:10].strip()] = line[11:]
    return report


def test_report(guarded: ServerProcess) -> None:
    report = read_report(guarded)
    assert list(report) == [
        *("model", "stage 0", "stage 1", "memory", "limits", "access", "url", "page", "try")
    ]
    assert report["model"] == "tiny" and report["url"] == guarded.url
    assert re.fullmatch(r"vLLM on cpu: text, hidden_states; \d\.\d GiB", report["stage 0"])
    assert report["stage 1"].startswith("diffusion on cpu, float32: image, latents; at most 32 ")
    assert re.fullmatch(r"\d+\.\d GiB in all .* of \d+\.\d GiB are free", report["memory"])
    assert report["limits"].endswith("10 pictures a request, 1 requests at once")
    assert report["access"] == "this machine only, 3 API keys"


def test_line_to_paste(guarded: ServerProcess, client: httpx.Client) -> None:
    run = subprocess.run(
        ["bash", "-c", read_report(guarded)["try"]],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"VLLM_OMNI_API_KEY": ENV_KEY, "no_proxy": "*"},
    )
    url = json.loads(run.stdout)["data"][0]["url"]
    assert url.startswith(guarded.url)
    assert client.get(url).content.startswith(b"\x89PNG")
    assert httpx.get(url).status_code == 401


def test_key_cannot_be_seen(guarded: ServerProcess) -> None:
    process = psutil.Process(guarded.process.pid)
    for one in (process, *process.children(recursive=True)):
        shown = Path(f"/proc/{one.pid}/cmdline").read_bytes()
        assert CLI_KEY.encode() not in shown and b"another-key" not in shown
        if one != process:
            assert ENV_KEY.encode() not in Path(f"/proc/{one.pid}/environ").read_bytes()
    assert Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"vllm-omni api")


def test_keys_of_all_sources(guarded: ServerProcess) -> None:
    for key, status in ((CLI_KEY, 200), (ENV_KEY, 200), ("another-key", 200), ("wrong-key", 401)):
        headers = {"authorization": f"Bearer {key}"}
        assert httpx.get(f"{guarded.url}/v1/models", headers=headers).status_code == status


def test_page_opens_with_the_key_as_password(guarded: ServerProcess) -> None:
    url = f"{guarded.url}/ui/"
    assert httpx.get(url).status_code == 401
    response = httpx.get(url, auth=("anybody", CLI_KEY), follow_redirects=True, timeout=60)
    assert response.status_code == 200 and "html" in response.headers["content-type"]
    assert httpx.get(url, auth=("anybody", "wrong-key")).status_code == 401


def read_log(server: ServerProcess) -> list[dict[str, Any]]:
    """All lines after the report: each is an object."""
    lines = server.log.read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if line.startswith("  try "))
    return [json.loads(line) for line in lines[end + 1 :]]


def find_line(server: ServerProcess, request_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 10
    while True:
        found = [line for line in read_log(server) if line.get("request_id") == request_id]
        if found or time.monotonic() > deadline:
            [line] = found
            return line
        time.sleep(0.05)


def test_access_log(guarded: ServerProcess, client: httpx.Client) -> None:
    body = {"prompt": PROMPT, "size": "64x64", "num_inference_steps": 1, "user": "somebody"}
    own_id = {"x-request-id": "mine 1"}
    response = client.post("/v1/images/generations", json=body, headers=own_id)
    line = find_line(guarded, response.headers["x-request-id"])
    assert line["message"] == "POST /v1/images/generations 200"
    assert (line["level"], line["client"]) == ("info", "127.0.0.1")
    assert line["bytes"] == len(response.content) and 0 < line["seconds"] < 60
    assert line["client_request_id"] == "mine 1"
    response = client.post("/v1/images/generations", json=body | {"size": "7x7"})
    assert find_line(guarded, response.headers["x-request-id"])["message"].endswith(" 400")
    assert PROMPT not in guarded.log.read_text()


def test_log_cannot_be_written_into(guarded: ServerProcess) -> None:
    """Whatever a client sends: it stays one line, and shows as what it is."""
    got = talk(
        guarded.port,
        make_head(
            "GET",
            "/%0a%1b[31mINFO%20fake%E2%80%A8%00" + "x" * 1000,
            "X-Request-Id: \x80\x85\xff" + "y" * 1000,
            'User-Agent: "}\\n{"level": "fake"}',
            "X-Forwarded-For: \xe2\x80\xa8 fake " + "z" * 1000,
        ),
    )
    assert got.status == 401
    line = find_line(guarded, got.headers["x-request-id"])
    assert line["message"].startswith("GET /%0A%1B%5B31mINFO%20fake%E2%80%A8%00xxx")
    assert len(line["message"]) < 200 and len(line["client_request_id"]) == 128
    assert len(line["client"]) <= 128
    raw = next(
        line for line in guarded.log.read_text().splitlines() if got.headers["x-request-id"] in line
    )
    assert raw.isascii() and raw.isprintable()


# --- when the queue is full ---


def test_full_queue(guarded: ServerProcess, client: httpx.Client) -> None:
    small = {"prompt": "a cat", "size": "64x64", "num_inference_steps": 1}
    endless = small | {"size": "256x256", "num_inference_steps": 1000}
    job = client.post("/v1/images/jobs", json=endless).json()
    for path, more in (
        ("/v1/images/generations", {}),
        ("/v1/images/generations", {"stream": True}),
        ("/v1/images/jobs", {}),
    ):
        response = client.post(path, json=small | more)
        got = Got(response.status_code, dict(response.headers), response.content)
        assert (got.status, got.error["code"]) == (429, "queue_full")
        assert got.error["type"] == "rate_limit_error"
        assert 1 <= int(got.headers["retry-after"]) <= 600
        assert response.elapsed.total_seconds() < 5
    assert client.get("/health").status_code == 200
    queue = client.get("/v1/queue").json()
    assert queue["running"] + queue["waiting"] == 1
    assert client.delete(f"/v1/images/jobs/{job['id']}").json()["status"] == "cancelled"
    assert client.post("/v1/images/generations", json=small).status_code == 200


# --- when a stage dies ---


def find_stage(server: ServerProcess, name: str) -> psutil.Process:
    family = psutil.Process(server.process.pid).children(recursive=True)
    [found] = [child for child in family if child.cmdline()[:1] == [name]]
    return found


def wait_until_running(client: httpx.Client, num_requests: int) -> None:
    """Until the engine works on so many pictures' requests."""
    deadline = time.monotonic() + 60
    while client.get("/v1/queue").json()["running"] < num_requests:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_stage_that_is_killed(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Clients see a pause; once it has died too often, an error, and the server ends with it."""
    server = ServerProcess(tmp_path / "log", str(checkpoint(0)), "--max-restarts", "1")
    server.wait_until_ready()
    family = psutil.Process(server.process.pid).children(recursive=True)
    small = {"prompt": "a cat", "size": "64x64", "num_inference_steps": 1, "seed": 1}
    long = small | {"num_inference_steps": 1000}
    images = "/v1/images/generations"
    with httpx.Client(base_url=server.url, timeout=120) as client, ThreadPoolExecutor() as pool:
        undisturbed = client.post(images, json=long).json()["data"]
        under_way = pool.submit(client.post, images, json=long)
        wait_until_running(client, 1)
        find_stage(server, "vllm-omni diffusion:1").kill()
        while (report := client.get("/health/ready")).status_code == 200:
            time.sleep(0.02)
        assert report.json()["stages"] == {"ar:0": "ok", "diffusion:1": "restarting"}
        assert int(report.headers["retry-after"]) > 0
        assert client.get("/health/live").json()["status"] == "ok"
        assert client.post("/v1/chat/completions", json=_chat()).status_code == 200
        new = pool.submit(client.post, images, json=small)  # is let in, and waits
        assert under_way.result(timeout=120).json()["data"] == undisturbed
        assert new.result(timeout=120).status_code == 200
        report = client.get("/health/stages/1")
        assert report.status_code == 200 and report.json()["num_restarts"] == 1
        assert report.json()["num_replayed"] >= 1
        assert client.get("/health/ready").status_code == 200
        lines = client.get("/metrics").text.splitlines()
        assert 'vllm_omni_stage_restarts_total{stage="diffusion:1"} 1.0' in lines

        endless = small | {"num_inference_steps": 1000, "n": 8}
        under_way = pool.submit(client.post, images, json=endless)
        wait_until_running(client, 1)
        find_stage(server, "vllm-omni diffusion:1").kill()
        response = under_way.result(timeout=120)
        got = Got(response.status_code, dict(response.headers), response.content)
        assert got.status == 503 and int(got.headers["retry-after"]) > 0 and got.error
    assert server.process.wait(timeout=60) == 1
    log = server.log.read_text()
    assert log.splitlines()[-1].startswith("error: ") and "diffusion" in log.splitlines()[-1]
    assert "Traceback" not in log
    assert psutil.wait_procs(family, timeout=30)[1] == []


def _chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **more}


# --- when it is told to end ---


@pytest.mark.slow
def test_end(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """What is under way may finish; at the second signal it is told that it cannot."""
    before = set(os.listdir("/dev/shm"))
    folder = tmp_path / "files"
    folder.mkdir()
    server = ServerProcess(tmp_path / "log", str(checkpoint(0)), env={"TMPDIR": str(folder)})
    server.wait_until_ready()
    this = psutil.Process(server.process.pid)
    family = [this, *this.children(recursive=True)]
    long = {"prompt": "a cat", "size": "64x64", "num_inference_steps": 1000, "n": 8}
    short = {"prompt": "a cat", "size": "64x64", "num_inference_steps": 150}
    with httpx.Client(base_url=server.url, timeout=120) as client, ThreadPoolExecutor() as pool:
        images = "/v1/images/generations"
        is_told = pool.submit(client.post, images, json=long)
        in_events = pool.submit(client.post, images, json=long | {"n": 1, "stream": True})
        has_begun = threading.Event()

        def read_chat() -> str:
            chat = _chat(max_tokens=4000, ignore_eos=True, stream=True)
            with client.stream("POST", "/v1/chat/completions", json=chat) as response:
                has_begun.set()
                return response.read().decode()

        in_chat = pool.submit(read_chat)
        assert has_begun.wait(60)
        wait_until_running(client, 2)
        finishes = pool.submit(client.post, images, json=short)
        wait_until_running(client, 3)
        server.process.send_signal(signal.SIGINT)
        while client.get("/health/ready").status_code != 503:
            time.sleep(0.02)
        assert client.get("/health/ready").json()["status"] == "stopping"
        response = client.post(images, json=short)
        assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
        assert response.json()["error"]["code"] == "shutting_down"

        assert finishes.result(timeout=60).status_code == 200
        assert not is_told.done() and server.process.poll() is None
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        response = is_told.result(timeout=30)
        assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
        assert response.json()["error"]["code"] == "shutting_down"
        events = in_events.result(timeout=30)
        assert events.status_code == 200
        name, data = events.text.rstrip().splitlines()[-2:]
        assert name == "event: error" and '"code":"shutting_down"' in data
        chat_events = in_chat.result(timeout=30).split("\n\n")
        assert '"code":"shutting_down"' in chat_events[-2] and chat_events[-1] == ""
    assert server.process.wait(timeout=60) == 0
    assert time.monotonic() - start < AT_ONCE
    log = server.log.read_text()
    assert "Traceback" not in log and "leaked" not in log, log
    assert psutil.wait_procs(family, timeout=30)[1] == []
    # What torch compiles is kept on purpose.
    assert [p for p in folder.iterdir() if not p.name.startswith("torchinductor")] == []
    assert [name for name in set(os.listdir("/dev/shm")) - before if not _is_used(name)] == []


@pytest.mark.faults
def test_jobs_outlive_the_server(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Killed in the middle of things; what it had accepted is done by the next, each once."""
    arguments = (str(checkpoint(0)), "--state-dir", str(tmp_path / "state"), "--max-num-seqs", "1")
    first = ServerProcess(tmp_path / "first", *arguments)
    first.wait_until_ready()
    job = {"prompt": "a cat", "size": "64x64", "num_inference_steps": 400, "seed": 1}
    with httpx.Client(base_url=first.url, timeout=60) as client:
        ids = [client.post("/v1/images/jobs", json=job).json()["id"] for _ in range(3)]
        while client.get(f"/v1/images/jobs/{ids[0]}").json()["status"] != "in_progress":
            time.sleep(0.02)
    code, output, seconds = run_serve(*arguments, "--port", "0")
    assert code == 2 and "one that no other server is using" in output and seconds < AT_ONCE
    first.process.kill()
    first.process.wait(timeout=60)
    second = ServerProcess(tmp_path / "second", *arguments)
    second.wait_until_ready()
    with httpx.Client(base_url=second.url, timeout=60) as client:
        jobs = []
        for job_id in ids:
            while (got := client.get(f"/v1/images/jobs/{job_id}").json())["completed_at"] is None:
                time.sleep(0.05)
            jobs.append(got)
        assert [job["status"] for job in jobs] == ["completed"] * 3
        assert len({job["result"]["data"][0]["b64_json"] for job in jobs}) == 1
        for _ in range(2):
            assert client.post("/v1/images/jobs", json=job | {"n": 8}).status_code == 202
    start = time.monotonic()
    assert second.stop() == 0
    assert time.monotonic() - start < 40  # the second of them was not waited for


def _is_used(name: str) -> bool:
    """Whether a segment belongs to somebody who is still there."""
    for process in psutil.process_iter():
        try:
            if any(name in region.path for region in process.memory_maps()):
                return True
        except psutil.Error:
            continue
    return False
