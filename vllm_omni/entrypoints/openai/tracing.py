"""`Tracer`: OpenTelemetry spans of a request and its stages, made from its timeline.

A request's own span begins when it comes in, and its context goes with it: what vLLM says of an AR
stage hangs under it, as do the spans that are made here when it has ended.

Seams, checked against vLLM 0.32.0: `vllm.tracing`, and of `vllm.tracing.otel` the exporter that its
settings (`OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`) ask for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from vllm.tracing import SpanKind, extract_trace_context, extract_trace_headers
from vllm.tracing.otel import get_span_exporter

from vllm_omni.timeline import RequestTimeline, Span

_MAX_OPEN = 10_000  # requests that were begun and never came to an end in the engine


class Tracer:
    """Sends spans to a collector; not vLLM's tracer, which is the process' own."""

    def __init__(self, endpoint: str, exporter: SpanExporter | None = None) -> None:
        """Send to an OTLP collector, such as http://127.0.0.1:4317, or to the exporter given."""
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say otherwise, if they are set.
        resource = Resource({SERVICE_NAME: "vllm-omni"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter or get_span_exporter(endpoint))
        )
        self._tracer = self._provider.get_tracer("vllm_omni")
        self._open: OrderedDict[str, trace.Span] = OrderedDict()

    def start(self, request_id: str, headers: Mapping[str, str]) -> dict[str, str]:
        """Begin the span of a request; the answer is for `OmniRequest.trace_headers`.

        Args:
            headers: of HTTP; with a `traceparent`, the span is a part of the client's trace.
        """
        context = extract_trace_context(extract_trace_headers(headers))
        span = self._tracer.start_span("request", context, SpanKind.SERVER)
        self._open[request_id] = span
        if len(self._open) > _MAX_OPEN:
            _, oldest = self._open.popitem(last=False)
            oldest.end()
        own: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(own, trace.set_span_in_context(span))
        return own

    def finish(self, timeline: RequestTimeline) -> None:
        """End the span of a request, with one below it for each stage and what it did."""
        root = self._open.pop(timeline.request_id, None)
        if root is None:
            start = _nanoseconds(timeline, timeline.start)
            root = self._tracer.start_span("request", kind=SpanKind.SERVER, start_time=start)
        root.set_attributes(
            {
                "vllm_omni.request_id": timeline.request_id,
                "vllm_omni.output_format": timeline.output_format,
                "vllm_omni.outcome": timeline.outcome.value,
                "vllm_omni.num_images": timeline.num_images,
                "vllm_omni.num_pixels": timeline.num_pixels,
            }
        )
        if timeline.error is not None:
            root.set_status(trace.Status(trace.StatusCode.ERROR, timeline.error))
        hop = root
        for span in timeline.spans:
            if span.makes is None:
                self._add(timeline, span, parent=hop)
            else:
                hop = self._add(timeline, span, parent=root)
        root.end(_nanoseconds(timeline, timeline.end))

    def shutdown(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _add(self, timeline: RequestTimeline, span: Span, parent: trace.Span) -> trace.Span:
        made = self._tracer.start_span(
            span.name,
            trace.set_span_in_context(parent),
            start_time=_nanoseconds(timeline, span.start),
            attributes={f"vllm_omni.{name}": value for name, value in span.attributes.items()},
        )
        if span.output is not None:
            made.set_attribute("vllm_omni.output", span.output)
        for index, stats in enumerate(span.steps, start=1):
            made.add_event(
                "step",
                {"step": index, "num_requests": stats.num_requests, "num_rows": stats.num_rows},
                _nanoseconds(timeline, stats.start_time),
            )
        made.end(_nanoseconds(timeline, span.end))
        return made


def _nanoseconds(timeline: RequestTimeline, moment: float) -> int:
    return round(1e9 * timeline.to_wall(moment))
