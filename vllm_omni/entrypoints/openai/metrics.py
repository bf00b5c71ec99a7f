"""`ServerMetrics`: what Prometheus is told. docs/metrics.md says what each one means."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from fastapi import APIRouter, Response
from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from vllm_omni.ar.stat_logger import VLLM_REGISTRY
from vllm_omni.config import StageConfig
from vllm_omni.engine.prompt_cache import PromptCache
from vllm_omni.engine.stage_client import StageClient, StageHealth
from vllm_omni.outputs import FinishReason, StepStats
from vllm_omni.timeline import RequestTimeline, Span

# Seconds of a step, of a part of a request, and of a whole one.
STEP_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
PART_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
ROW_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
TOKEN_BUCKETS = tuple(2**power for power in range(7, 18))
OCCUPANCY_BUCKETS = tuple(tenth / 10 for tenth in range(1, 11))

# What a client chooses is not a label unless it is one of these: every new value is kept for ever.
METHODS = ("GET", "POST", "DELETE", "OPTIONS", "HEAD", "PUT", "PATCH")
OUTPUT_FORMATS = ("image", "text", "text+image", "latents", "hidden_states")
OTHER = "other"
SHED_REASONS = ("places", "cost", "share", "jobs", "text")
EVICTABLE = ("step_cache", "prompt")  # kinds of entries in a worker's cache manager


class ServerMetrics:
    """Counts, gauges and histograms of one server, in a registry of their own.

    A stage's label is the name of its process: "ar:0", "diffusion:1".
    """

    def __init__(self, stages: Sequence[StageConfig]) -> None:
        self.registry = CollectorRegistry()
        self._names = {s.stage_id: f"{s.engine_type}:{s.stage_id}" for s in stages}
        self._drawing = [self._names[s.stage_id] for s in stages if s.engine_type == "diffusion"]
        self._make_stage_metrics()
        self._make_step_metrics()
        self._make_request_metrics()
        self._make_http_metrics()

    # --- what is told ---

    def observe_step(self, stage_id: int, stats: StepStats) -> None:
        """A diffusion stage has taken a step."""
        stage = self._names[stage_id]
        self.running.labels(stage).set(stats.num_running)
        self.waiting.labels(stage).set(stats.num_waiting)
        for worker, num_bytes in stats.memory_bytes.items():
            self.memory.labels(stage, str(worker)).set(num_bytes)
        for worker, by_kind in stats.cache_bytes.items():
            for kind, num_bytes in by_kind.items():
                self.cache_bytes.labels(stage, str(worker), kind).set(num_bytes)
        for kind, num_evictions in stats.num_evictions.items():
            self.cache_evictions.labels(stage, kind).inc(num_evictions)
        if not stats.num_requests:
            return  # it only took requests out
        self.step_seconds.labels(stage).observe(stats.step_time)
        self.step_rows.labels(stage).observe(stats.num_rows)
        self.step_tokens.labels(stage).observe(stats.num_tokens)
        self.occupancy.labels(stage).observe(stats.occupancy)
        self.computed.labels(stage).inc(stats.num_computed_steps)
        self.rows.labels(stage).inc(stats.num_rows)
        self.cached.labels(stage).inc(stats.num_cached_rows)
        self.skipped.labels(stage).inc(stats.num_skipped_rows)
        self.skipped_blocks.labels(stage).inc(stats.num_skipped_blocks)
        self.model_seconds.labels(stage).inc(stats.model_time)
        self.prepare_seconds.labels(stage).inc(stats.prepare_time)

    def observe_request(self, timeline: RequestTimeline) -> None:
        """A request has ended."""
        is_known = timeline.output_format in OUTPUT_FORMATS
        labels = (timeline.output_format if is_known else OTHER, timeline.outcome.value)
        self.requests.labels(*labels).inc()
        self.request_seconds.labels(*labels).observe(timeline.duration)
        if timeline.outcome is FinishReason.ABORT:
            self.aborts.inc()
        if timeline.error is not None:
            self.errors.labels(timeline.error).inc()
        self.images.inc(timeline.num_images)
        self.pixels.inc(timeline.num_pixels)
        if timeline.first_preview is not None:
            self.first_preview.observe(timeline.first_preview - timeline.start)
        for span in timeline.spans:
            # What was cut short says nothing about how long it takes; a wait is a wait.
            if timeline.outcome is FinishReason.STOP or span.name == "queue":
                self._observe_span(span)

    def observe_http(self, method: str, route: str, status: int, seconds: float) -> None:
        """An answer is out.

        Args:
            route: the path with its parameters' names, such as "/v1/images/jobs/{job_id}".
        """
        method = method if method in METHODS else OTHER
        self.http_requests.labels(method, route, str(status)).inc()
        self.http_seconds.labels(method, route).observe(seconds)

    def track_requests(self, get_num_requests: Callable[[], int]) -> None:
        """Where to ask how many requests are on their way."""
        self.in_progress.set_function(get_num_requests)

    def track_prompt_cache(self, cache: PromptCache) -> None:
        """Where to ask for hits, misses and bytes."""
        self.prompt_hits.set_function(lambda: cache.num_hits)
        self.prompt_misses.set_function(lambda: cache.num_misses)
        self.prompt_evictions.set_function(lambda: cache.num_evictions)
        self.prompt_bytes.set_function(lambda: cache.used_bytes)

    def set_stage_health(self, stage_id: int, health: StageHealth) -> None:
        """How a stage is, and what it has been through."""
        stage, before = self._names[stage_id], self._health[stage_id]
        is_up = health.state == "ready"
        if not is_up and stage in self._drawing:
            self.running.labels(stage).set(0)  # what it had waits to be run again
            self.waiting.labels(stage).set(0)
        self.up.labels(stage).set(is_up)
        self.restarts.labels(stage).inc(health.num_restarts - before.num_restarts)
        self.replayed.labels(stage).inc(health.num_replayed - before.num_replayed)
        self.refused.labels(stage).inc(health.num_refused - before.num_refused)
        self._health[stage_id] = health

    def observe_shed(self, reason: str) -> None:
        """A request was not let in."""
        self.shed.labels(reason).inc()

    def render(self) -> bytes:
        """Everything, in Prometheus' text format: ours, vLLM's, and those of this process."""
        registries = (self.registry, VLLM_REGISTRY, REGISTRY)
        return b"".join(generate_latest(registry) for registry in registries)

    def _observe_span(self, span: Span) -> None:
        assert span.stage_id is not None
        stage = self._names[span.stage_id]
        is_encoding = span.makes == "hidden_states" and span.attributes["engine_type"] == "ar"
        if is_encoding or span.name == "encode":
            self.encode_seconds.labels(stage).observe(span.duration)
        elif span.makes == "text":
            self.text_seconds.labels(stage).observe(span.duration)
        elif (part := self._parts.get(span.name)) is not None:
            part.labels(stage).observe(span.duration)

    # --- what there is ---

    def _make_stage_metrics(self) -> None:
        gauge = partial(Gauge, registry=self.registry)
        counter = partial(Counter, registry=self.registry)
        self.up = gauge("vllm_omni_stage_up", "1 if the stage works", ["stage"])
        self.restarts = counter("vllm_omni_stage_restarts", "Times it came back", ["stage"])
        self.replayed = counter(
            "vllm_omni_requests_replayed", "Requests run again because the stage died", ["stage"]
        )
        self.refused = counter(
            "vllm_omni_requests_refused", "Requests ended because the stage died of them", ["stage"]
        )
        self._health = dict.fromkeys(self._names, StageHealth("ready"))
        for stage_id, health in self._health.items():
            self.set_stage_health(stage_id, health)  # nobody is asked before all have started

        self.running = gauge(
            "vllm_omni_requests_running", "Requests that hold latents in the stage", ["stage"]
        )
        self.waiting = gauge(
            "vllm_omni_requests_waiting", "Requests in the stage's queue", ["stage"]
        )
        for name in self._drawing:
            self.running.labels(name)
            self.waiting.labels(name)
        self.in_progress = gauge(
            "vllm_omni_requests_in_progress", "Requests in any stage, or between two"
        )
        # Gauges, as they are read from the cache itself; they only grow, but for the bytes.
        self.prompt_hits = gauge("vllm_omni_prompt_cache_hits", "Prompts found encoded")
        self.prompt_misses = gauge("vllm_omni_prompt_cache_misses", "Prompts that were encoded")
        self.prompt_evictions = gauge("vllm_omni_prompt_cache_evictions", "Prompts given up")
        self.prompt_bytes = gauge("vllm_omni_prompt_cache_bytes", "Hidden states that are kept")
        self.memory = gauge(
            "vllm_omni_memory_bytes",
            "GPU memory of a worker; its resident memory where there is no GPU",
            ["stage", "worker"],
        )
        self.cache_bytes = gauge(
            "vllm_omni_cache_bytes",
            "What a worker's cache manager holds, by kind of entry",
            ["stage", "worker", "kind"],
        )
        self.cache_evictions = counter(
            "vllm_omni_cache_evictions", "Entries that gave way to others", ["stage", "kind"]
        )
        for name in self._drawing:
            for kind in EVICTABLE:
                self.cache_evictions.labels(name, kind)

    def _make_step_metrics(self) -> None:
        counter = partial(Counter, registry=self.registry, labelnames=["stage"])
        histogram = partial(Histogram, registry=self.registry, labelnames=["stage"])
        self.step_seconds = histogram(
            "vllm_omni_step_seconds", "Time of a denoising step", buckets=STEP_BUCKETS
        )
        self.step_rows = histogram(
            "vllm_omni_step_rows", "Rows in a step: guidance counts twice", buckets=ROW_BUCKETS
        )
        self.step_tokens = histogram(
            "vllm_omni_step_tokens", "Tokens in a step", buckets=TOKEN_BUCKETS
        )
        self.occupancy = histogram(
            "vllm_omni_batch_occupancy_ratio",
            "Tokens in a step, as a part of max_num_batched_tokens",
            buckets=OCCUPANCY_BUCKETS,
        )
        self.computed = counter("vllm_omni_steps_computed", "Denoising steps of requests")
        self.rows = counter("vllm_omni_rows", "Guidance branches of those steps")
        self.cached = counter(
            "vllm_omni_rows_cached", "Of the rows, those of requests with a step cache"
        )
        self.skipped = counter("vllm_omni_rows_skipped", "Of these, taken by it: hits")
        self.skipped_blocks = counter(
            "vllm_omni_blocks_skipped", "Blocks of the transformer that those rows left out"
        )
        self.model_seconds = counter(
            "vllm_omni_model_seconds", "Time inside the networks: what is left is the engine's own"
        )
        self.prepare_seconds = counter(
            "vllm_omni_prepare_seconds", "Time to start requests: text projected, noise drawn"
        )

    def _make_request_metrics(self) -> None:
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        part = partial(histogram, labelnames=["stage"], buckets=PART_BUCKETS)
        labels = ["output_format", "outcome"]
        self.requests = counter("vllm_omni_requests", "Requests that have ended", labels)
        self.request_seconds = histogram(
            "vllm_omni_request_seconds",
            "From arrival to the last output",
            labels,
            buckets=REQUEST_BUCKETS,
        )
        self.first_preview = histogram(
            "vllm_omni_time_to_first_preview_seconds",
            "From arrival to the first preview",
            buckets=REQUEST_BUCKETS,
        )
        self.aborts = counter("vllm_omni_aborts", "Requests that were aborted, cancelled or left")
        self.errors = counter("vllm_omni_errors", "Requests that failed, by class", ["kind"])
        self.images = counter("vllm_omni_images", "Pictures made")
        self.pixels = counter("vllm_omni_pixels", "Pixels of those")
        self.encode_seconds = part("vllm_omni_encode_seconds", "Prompt to hidden states")
        self.text_seconds = part("vllm_omni_text_seconds", "Time of a text, prompts included")
        self._parts = {
            "queue": part("vllm_omni_queue_wait_seconds", "Wait for the first denoising step"),
            "denoise": part("vllm_omni_denoise_seconds", "First denoising step to the last"),
            "decode": part("vllm_omni_decode_seconds", "Latents to pixels"),
        }

    def _make_http_metrics(self) -> None:
        self.shed = Counter(
            "vllm_omni_requests_shed",
            "Requests that were not let in, by what there was too much of",
            ["reason"],
            registry=self.registry,
        )
        for reason in SHED_REASONS:
            self.shed.labels(reason)
        self.http_requests = Counter(
            "vllm_omni_http_requests",
            "HTTP answers",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self.http_seconds = Histogram(
            "vllm_omni_http_request_seconds",
            "From a request's headers to the end of its answer",
            ["method", "route"],
            buckets=REQUEST_BUCKETS,
            registry=self.registry,
        )


class MetricsResponse(Response):
    """Prometheus' text format."""

    media_type = CONTENT_TYPE_PLAIN_0_0_4


def make_router(metrics: ServerMetrics, clients: Sequence[StageClient]) -> APIRouter:
    """/metrics."""
    router = APIRouter(tags=["metrics"])

    @router.get("/metrics", summary="Metrics for Prometheus", response_class=MetricsResponse)
    async def get_metrics() -> MetricsResponse:
        for client in clients:
            metrics.set_stage_health(client.stage.stage_id, client.health)
        # A hundred kilobytes of text: not in the thread that passes on everybody's pictures.
        return MetricsResponse(await asyncio.to_thread(metrics.render))

    return router
