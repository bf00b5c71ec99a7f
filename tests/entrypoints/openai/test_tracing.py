"""OpenTelemetry spans: of a timeline, and with vLLM's own in one trace at a real collector."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tests.drawing import MakeCheckpoint
from tests.timelines import WALL_ARRIVAL, create_timeline
from vllm_omni.entrypoints.openai import tracing
from vllm_omni.entrypoints.openai.tracing import Tracer
from vllm_omni.outputs import FinishReason

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Iterator[Tracer]:
    tracer = Tracer("", exporter)
    yield tracer
    tracer.shutdown()


def spans_of(tracer: Tracer, exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    tracer.shutdown()  # sends what there is
    return {span.name: span for span in exporter.get_finished_spans()}


def parent_id(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    span_id: int = span.context.span_id
    return span_id


def seconds(nanoseconds: int | None) -> float:
    assert nanoseconds is not None
    return nanoseconds / 1e9 - WALL_ARRIVAL


def test_spans_of_a_picture(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    tracer.finish(create_timeline())
    spans = spans_of(tracer, exporter)
    root, encode, draw = (
        spans[name] for name in ("request", "stage 0 ar: hidden_states", "stage 1 diffusion: image")
    )
    assert parent_id(root) is None
    assert parent_id(encode) == parent_id(draw) == id_of(root)
    inner = [spans[name] for name in ("queue", "denoise", "decode")]
    assert [parent_id(span) for span in inner] == [id_of(draw)] * 3
    times = [(seconds(span.start_time), seconds(span.end_time)) for span in (root, *inner)]
    assert times == [pytest.approx(t) for t in ((0, 4.5), (0.5, 2), (2, 4), (4, 4.25))]
    assert root.attributes == {
        "vllm_omni.request_id": "a",
        "vllm_omni.output_format": "image",
        "vllm_omni.outcome": "stop",
        "vllm_omni.num_images": 1,
        "vllm_omni.num_pixels": 65536,
    }
    assert encode.attributes is not None and encode.attributes["vllm_omni.num_prompt_tokens"] == 80
    events = spans["denoise"].events
    assert [event.name for event in events] == ["step", "step"]
    assert [seconds(event.timestamp) for event in events] == pytest.approx([2.0, 3.0])
    assert root.resource.attributes["service.name"] == "vllm-omni"
    assert root.status.status_code is StatusCode.UNSET


def test_the_client_s_trace_goes_on(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    headers = tracer.start("a", SAMPLED | {"authorization": "Bearer secret"})
    assert set(headers) == {"traceparent"}
    _, trace_id, span_id, flags = headers["traceparent"].split("-")
    assert (trace_id, flags) == (TRACE_ID, "01") and span_id != PARENT_ID
    tracer.finish(create_timeline("a"))
    spans = spans_of(tracer, exporter)
    assert len(spans) == 6
    root = spans["request"]
    assert id_of(root) == int(span_id, 16) and parent_id(root) == int(PARENT_ID, 16)
    assert {f"{span.context.trace_id:032x}" for span in spans.values() if span.context} == {
        TRACE_ID
    }


@pytest.mark.parametrize("headers", [{}, {"traceparent": "nonsense"}, {"traceparent": "00-0-0-01"}])
def test_without_a_trace_of_the_client_a_new_one_begins(
    tracer: Tracer, exporter: InMemorySpanExporter, headers: dict[str, str]
) -> None:
    own = tracer.start("a", headers)
    tracer.finish(create_timeline("a"))
    root = spans_of(tracer, exporter)["request"]
    assert parent_id(root) is None
    assert own["traceparent"].split("-")[2] == f"{id_of(root):016x}"


def test_what_the_client_does_not_sample_is_not_sent(
    tracer: Tracer, exporter: InMemorySpanExporter
) -> None:
    headers = tracer.start("a", {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"})
    assert headers["traceparent"].endswith("-00")
    tracer.finish(create_timeline("a"))
    assert spans_of(tracer, exporter) == {}


def test_a_failure_is_a_status(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    tracer.finish(
        create_timeline(outcome=FinishReason.ERROR, error="DeadlineExceededError", spans=[])
    )
    root = spans_of(tracer, exporter)["request"]
    assert root.status.status_code is StatusCode.ERROR
    assert root.status.description == "DeadlineExceededError"


def test_requests_that_never_end_are_not_kept_for_ever(
    tracer: Tracer, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_MAX_OPEN", 3)
    for index in range(5):
        tracer.start(str(index), {})
    tracer.shutdown()
    assert [span.name for span in exporter.get_finished_spans()] == ["request"] * 2


# --- with vLLM, at a collector ---


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP, as a real one does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


SCRIPT = """
import asyncio, json, sys
from vllm_omni import DiffusionParams, OmniRequest
from vllm_omni.config import DiTConfig, OmniConfig
from vllm_omni.engine.async_llm import OmniAsyncLLM
from vllm_omni.engine.stages import derive_stage_configs
from vllm_omni.entrypoints.openai.metrics import ServerMetrics
from vllm_omni.entrypoints.openai.tracing import Tracer

async def main(model, endpoint, headers):
    stages = derive_stage_configs(model, dit_config=DiTConfig(device="cpu"))
    llm = OmniAsyncLLM(OmniConfig(
        model=model, mode="process", stage_configs=stages, log_stats=True,
        otlp_traces_endpoint=endpoint,
    ))
    tracer, metrics = Tracer(endpoint), ServerMetrics(llm.stage_configs)
    llm.coordinator.on_finished = tracer.finish
    request = OmniRequest(
        prompt="a cat", request_id="a", trace_headers=tracer.start("a", headers),
        params=DiffusionParams(height=64, width=64, num_inference_steps=2, seed=1),
    )
    async for output in llm.generate(request):
        pass
    print("METRICS", json.dumps(metrics.render().decode()))
    tracer.shutdown()
    llm.shutdown()

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
"""


@pytest.mark.slow
def test_vllm_joins_the_trace_and_keeps_its_metrics(
    checkpoint: MakeCheckpoint, collector: Collector, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: vLLM's tracer is the whole process'."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    script = tmp_path / "traced.py"
    script.write_text(textwrap.dedent(SCRIPT))
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    result = subprocess.run(
        [sys.executable, script, checkpoint(0), endpoint, json.dumps(SAMPLED)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    ours = {span.name: span for span in collector.spans if span.trace_id.hex() == TRACE_ID}
    assert set(ours) == {
        "llm_request",
        "request",
        "stage 0 ar: hidden_states",
        "stage 1 diffusion: image",
        "queue",
        "denoise",
        "decode",
    }
    root = ours["request"]
    assert root.parent_span_id.hex() == PARENT_ID
    assert ours["llm_request"].parent_span_id == root.span_id
    encode = ours["stage 0 ar: hidden_states"]
    assert encode.start_time_unix_nano <= ours["llm_request"].start_time_unix_nano
    [line] = [line for line in result.stdout.splitlines() if line.startswith("METRICS ")]
    text = json.loads(line.removeprefix("METRICS "))
    assert (
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="ar:0"} 1.0'
        in (text)
    )
    assert str(checkpoint(0)) not in text
