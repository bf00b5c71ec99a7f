"""What HTTP costs: the same pictures from the engine itself and through `vllm-omni serve`.

    python benchmarks/serving.py [--rounds 5] [--large-rounds 3] [--out benchmarks/results]

Both run in process mode and both stay loaded; they work in turn, a round each, eight requests at a
time. While the server works, a thread asks for /health every 250 ms, and a call's time counts from
when it was due, so that calls held up by a slow one count as well. The second part draws large
pictures of one step, where writing PNGs weighs most. Server, engine and client share the cores.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import asyncio
import http.client
import json
import platform
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm_omni import DiffusionParams, OmniAsyncLLM, OmniRequest, envs
from vllm_omni.benchmark.client import Answer, ImagesClient
from vllm_omni.benchmark.load import Draw, Load
from vllm_omni.benchmark.report import Percentiles
from vllm_omni.benchmark.workload import PictureClass, PictureRequest, make_requests

CONCURRENCY = 8
PROBE_EVERY = 0.25  # seconds; the probe shares the cores with what it watches
MIN_RATIO, MAX_HEALTH_P99 = 0.95, 0.2  # what has to be reached
START_TIMEOUT = 300.0  # seconds


@dataclass(frozen=True)
class Work:
    """What a round draws."""

    name: str
    picture: PictureClass
    num_pictures: int
    num_rounds: int


@dataclass
class Figures:
    """What a kind of work has shown, a value for each round."""

    work: Work
    engine: list[float] = field(default_factory=list)  # pictures per second
    http: list[float] = field(default_factory=list)  # pictures per second, same rounds
    health: list[float] = field(default_factory=list)  # seconds, every call

    @property
    def ratio(self) -> float:
        """Of the medians, HTTP over engine."""
        return statistics.median(self.http) / statistics.median(self.engine)

    @property
    def health_percentiles(self) -> Percentiles:
        percentiles = Percentiles.of(self.health)
        assert percentiles is not None
        return percentiles


def main() -> None:
    args = parse_args()
    envs.set_log_level("error")
    works = [
        Work("small", PictureClass(256, 256, args.steps), args.pictures, args.rounds),
        Work("large", PictureClass(512, 512, 1), args.large_pictures, args.large_rounds),
    ]
    with serving(args.model) as url:
        figures = asyncio.run(measure(args.model, url, works))
    text = to_text(figures)
    print(text)
    if args.out is not None:
        write_results(args.out, args.model, figures, text)


async def measure(model: str, url: str, works: list[Work]) -> list[Figures]:
    llm = OmniAsyncLLM.from_pretrained(model, mode="process")
    all_figures = [Figures(work) for work in works]
    try:
        async with ImagesClient(url) as client:
            for figures in all_figures:
                warm_up = Figures(replace(figures.work, num_pictures=CONCURRENCY))
                await run_round(llm, client, warm_up, url, index=-1)
                for index in range(figures.work.num_rounds):
                    await run_round(llm, client, figures, url, index)
    finally:
        llm.shutdown()
    return all_figures


async def run_round(
    llm: OmniAsyncLLM, client: ImagesClient, figures: Figures, url: str, index: int
) -> None:
    """The same requests both ways; each goes first in turn, as who follows whom may matter."""
    for way in ("engine", "http") if index % 2 else ("http", "engine"):
        if way == "engine":
            speed = await time_round(partial(draw_with_engine, llm), figures.work, index)
            figures.engine.append(speed)
        else:
            with Probe(url) as probe:
                speed = await time_round(client.draw, figures.work, index)
            figures.http.append(speed)
            figures.health += probe.seconds
        print(f"{figures.work.name} round {index}: {way} {speed:.3f}/s", file=sys.stderr)


async def draw_with_engine(llm: OmniAsyncLLM, request: PictureRequest) -> Answer:
    picture = request.picture
    params = DiffusionParams(
        width=picture.width, height=picture.height, num_inference_steps=picture.num_steps
    )
    outputs = llm.generate(OmniRequest(prompt=request.prompt, params=params))
    async for output in outputs:  # noqa: B007
        pass
    if output.error is not None:
        raise output.error
    return Answer(num_images=len(output.images))


async def time_round(draw: Draw, work: Work, index: int) -> float:
    """Pictures per second."""
    load = Load(draw)
    requests = make_requests([work.picture], work.num_pictures, seed=index)
    await load.run_closed_loop(requests, CONCURRENCY)
    for outcome in load.outcomes:
        assert outcome.failure is None, outcome.failure
    return work.num_pictures / max(outcome.end for outcome in load.outcomes)


class Probe:
    """Asks for /health all the time, in a thread that is cheap for the cores it shares."""

    def __init__(self, url: str) -> None:
        self.seconds: list[float] = []
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"))
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        due = time.perf_counter()
        while not self._is_over.wait(max(0.0, due - time.perf_counter())):
            self._connection.request("GET", "/health")
            response = self._connection.getresponse()
            response.read()
            assert response.status == 200, response.status
            self.seconds.append(time.perf_counter() - due)
            due += PROBE_EVERY


@contextmanager
def serving(model: str) -> Iterator[str]:
    """`vllm-omni serve` as a user starts it; gives its address when it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "vllm_omni.entrypoints.cli.main", "serve", model]
    with tempfile.TemporaryFile() as log:  # a line for every request
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log)
        try:
            wait_until_ready(process, port)
            yield f"http://127.0.0.1:{port}"
        except BaseException:
            log.seek(0)
            print(log.read()[-4000:].decode(errors="replace"), file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait(timeout=60)


def wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with exit code {process.returncode}")
        connection = http.client.HTTPConnection("127.0.0.1", port)
        try:
            connection.request("GET", "/health/ready")
            if connection.getresponse().status == 200:
                return
        except ConnectionError:
            pass  # not listening yet
        finally:
            connection.close()
        time.sleep(0.2)
    raise SystemExit(f"the server was not ready within {START_TIMEOUT:.0f} s")


def to_text(all_figures: list[Figures]) -> str:
    lines = [
        f"{'work of a round':<28}{'engine':>10}{'HTTP':>10}{'ratio':>9}"
        f"{'/health P50':>14}{'P99':>10}{'max':>10}",
    ]
    for figures in all_figures:
        work, health = figures.work, figures.health_percentiles
        name = f"{work.num_pictures} of {work.picture.size}, {work.picture.num_steps} steps"
        lines.append(
            f"{name:<28}{statistics.median(figures.engine):>8.3f}/s"
            f"{statistics.median(figures.http):>8.3f}/s{100 * figures.ratio:>7.1f} %"
            f"{1e3 * health.p50:>11.1f} ms{1e3 * health.p99:>7.1f} ms{1e3 * health.max:>7.1f} ms"
        )
    lines.append(f"pictures per second, {CONCURRENCY} requests at a time, medians of rounds")
    return "\n".join(lines)


def write_results(folder: Path, model: str, all_figures: list[Figures], text: str) -> None:
    """`serving.json` with every round, `serving.md` to read."""
    command = shlex.join(["python", "benchmarks/serving.py", *sys.argv[1:]])
    about = {
        "command": command,
        "model": model,
        "date": datetime.now(UTC).date().isoformat(),
        "num_cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("vllm-omni", "torch", "uvicorn", "httpx")},
        },
        "load_average_after": os.getloadavg()[0],
    }
    rows: list[dict[str, Any]] = [
        {
            "work": asdict(figures.work),
            "engine": figures.engine,
            "http": figures.http,
            "ratio": figures.ratio,
            "num_health_calls": len(figures.health),
            "health": asdict(figures.health_percentiles),
        }
        for figures in all_figures
    ]
    content = json.dumps({**about, "results": rows}, indent=2)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "serving.json").write_text(content + "\n")
    (folder / "serving.md").write_text(to_markdown(about, all_figures, text))


def to_markdown(about: dict[str, Any], all_figures: list[Figures], text: str) -> str:
    small, large = all_figures
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    health, large_health = small.health_percentiles, large.health_percentiles
    paragraphs = [
        "# What HTTP costs",
        f"    {about['command']}",
        f"{about['date']}, {about['num_cores']} cores, OMP_NUM_THREADS {about['threads']}; "
        f"{versions}; model {about['model']}. "
        f"Load average at the end: {about['load_average_after']:.2f}.",
        f"```\n{text}\n```",
        f"- **Throughput.** {CONCURRENCY} requests at a time through `vllm-omni serve` (PNG, "
        f"base64) give {100 * small.ratio:.1f} % of the pictures that `OmniAsyncLLM` in the same "
        f"mode gives as PIL images. Goal: at least {100 * MIN_RATIO:.0f} %, "
        f"{in_words(small.ratio >= MIN_RATIO)}. Server, engine, client and probe share the cores.",
        f"- **Health.** Meanwhile `/health` was asked for every {1e3 * PROBE_EVERY:.0f} ms, "
        f"{len(small.health)} times: P99 {1e3 * health.p99:.1f} ms from when a call was due. Goal: "
        f"below {1e3 * MAX_HEALTH_P99:.0f} ms, {in_words(health.p99 < MAX_HEALTH_P99)}.",
        f"- **Large pictures of one step**, {large.work.picture.size}, where writing PNGs weighs "
        f"most: {100 * large.ratio:.1f} %; P99 of `/health` is {1e3 * large_health.p99:.1f} ms.",
    ]
    return "\n\n".join(paragraphs) + "\n"


def in_words(is_reached: bool) -> str:
    return "reached" if is_reached else "missed"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="demo", help="demo or a checkpoint's path")
    parser.add_argument("--rounds", type=int, default=5, help="of each way; one more warms up")
    parser.add_argument("--pictures", type=int, default=24, help="256 x 256, in a round")
    parser.add_argument("--steps", type=int, default=10, help="of a 256 x 256 picture")
    parser.add_argument("--large-rounds", type=int, default=3)
    parser.add_argument("--large-pictures", type=int, default=16, help="512 x 512, in a round")
    parser.add_argument("--out", type=Path, help="folder to write serving.json and serving.md to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
