"""`vllm-omni bench serve`: find the model, warm up, put the load on, report."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import vllm_omni
from vllm_omni.benchmark.client import ImagesClient, RequestFailed
from vllm_omni.benchmark.diffusers_client import DiffusersClient
from vllm_omni.benchmark.load import Load, Outcome
from vllm_omni.benchmark.report import LoadReport, Slo, fastest_of_each_class, make_report
from vllm_omni.benchmark.workload import (
    DIFFUSERS,
    PROMPTS,
    PictureClass,
    PictureRequest,
    make_requests,
    poisson_arrivals,
)

_MAX_OPEN_FILES = 65_536  # a connection is one


@dataclass(frozen=True)
class ServeBenchConfig:
    """What is measured, and how."""

    url: str  # of a server, or "diffusers:" and a checkpoint's path
    mix: Sequence[PictureClass]
    mix_name: str  # in titles
    num_requests: int
    request_rate: float | None = None  # per second, open loop; may be infinite
    concurrency: int | None = None  # closed loop; exactly one of the two is set
    warmup: int = 2  # requests of each class, one at a time
    seed: int = 0  # of arrivals, order and prompts
    model: str | None = None  # None: the first that the server lists
    body: Mapping[str, Any] = field(default_factory=dict)  # further parameters
    prompts: Sequence[str] = PROMPTS
    slo: Slo = field(default_factory=Slo)  # none, unless set
    timeout: float = 600.0  # seconds, one request

    @property
    def load_name(self) -> str:
        """The way requests arrive, in words."""
        if self.concurrency is not None:
            return f"{self.concurrency} at a time"
        assert self.request_rate is not None
        if math.isinf(self.request_rate):
            return "all at once"
        return f"Poisson, {self.request_rate:g} per second"


class ServeBench:
    """One run. What it has seen can be reported at any time, also when it was cut short.

    Args:
        on_outcome: called after each request that counts.
    """

    def __init__(
        self,
        config: ServeBenchConfig,
        api_key: str | None = None,
        on_outcome: Callable[[], object] = lambda: None,
    ) -> None:
        self.config = config
        self.model = config.model
        self.alone: dict[str, float] = {}  # seconds by class, on the idle server
        self.outcomes: list[Outcome] = []
        self._api_key = api_key
        self._on_outcome = on_outcome
        self._load: Load | None = None
        self._began = datetime.now(UTC)

    async def run(self) -> None:
        """Warm up, then put the load on.

        Raises:
            RequestFailed: the server cannot be used, so there is nothing to measure.
        """
        config = self.config
        allow_connections()
        async with self._make_client() as client:
            if self.model is None:
                self.model = await client.find_model()
            if self.model is not None:
                client.body["model"] = self.model
            await self._warm_up(client)
            self._load = load = Load(client.draw, self._on_outcome)
            self.outcomes = load.outcomes
            requests = make_requests(config.mix, config.num_requests, config.seed, config.prompts)
            if config.concurrency is not None:
                await load.run_closed_loop(requests, config.concurrency)
            else:
                assert config.request_rate is not None
                arrivals = poisson_arrivals(config.request_rate, config.num_requests, config.seed)
                await load.run_open_loop(requests, arrivals)

    def _make_client(self) -> ImagesClient | DiffusersClient:
        config = self.config
        if config.url.startswith(DIFFUSERS):
            return DiffusersClient(config.url, config.body, config.timeout)
        return ImagesClient(config.url, self._api_key, config.body, config.timeout)

    async def _warm_up(self, client: ImagesClient | DiffusersClient) -> None:
        """Every class alone on the server: what its SLO is a multiple of."""
        if not self.config.warmup:
            return
        warm_up = Load(client.draw)
        pictures = [picture for picture in self.config.mix for _ in range(self.config.warmup)]
        # Prompts from the other end of the list: the server should not know those of the run.
        prompts = self.config.prompts[::-1]
        requests = [
            PictureRequest(index, picture, prompts[index % len(prompts)])
            for index, picture in enumerate(pictures)
        ]
        await warm_up.run_closed_loop(requests, concurrency=1)
        self.alone = fastest_of_each_class(warm_up.outcomes)
        failures = [outcome.failure for outcome in warm_up.outcomes]
        if not self.alone and failures[0] is not None:
            raise RequestFailed(failures[0].kind, failures[0].message)

    def report(self) -> LoadReport:
        """The figures so far."""
        return make_report(
            self.outcomes,
            self.alone,
            self.config.slo,
            num_sent=None if self._load is None else self._load.num_sent,
            requested_rate=self.config.request_rate,
        )

    @property
    def title(self) -> str:
        """What was measured, in a line."""
        config = self.config
        return (
            f"{config.url}, model {self.model or 'not named'}: {config.num_requests} requests, "
            f"{config.load_name}, {config.mix_name}"
        )

    def to_json(self, command: str) -> dict[str, Any]:
        """Everything about the run, each request included."""
        config = asdict(self.config)
        del config["prompts"]
        if self.config.request_rate is not None and math.isinf(self.config.request_rate):
            config["request_rate"] = "inf"  # JSON has no such number
        return {
            "command": command,
            "date": self._began.isoformat(timespec="seconds"),
            "versions": {
                "python": platform.python_version(),
                "vllm_omni": vllm_omni.__version__,
                "httpx": importlib.metadata.version("httpx"),
            },
            "server": {"url": self.config.url, "model": self.model},
            "config": config,
            "results": asdict(self.report()),
            "requests": [to_row(outcome) for outcome in self.outcomes],
        }


def to_row(outcome: Outcome) -> dict[str, Any]:
    """One request for the JSON file."""
    return {
        "index": outcome.request.index,
        "class": outcome.request.picture.name,
        "prompt": outcome.request.prompt,
        "arrival": outcome.arrival,
        "sent": outcome.sent,
        "first_preview": outcome.first_preview,
        "end": outcome.end,
        "latency": outcome.latency,
        "num_images": outcome.num_images,
        "failure": None if outcome.failure is None else str(outcome.failure),
    }


def allow_connections() -> None:
    """Let this process open as many connections as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
