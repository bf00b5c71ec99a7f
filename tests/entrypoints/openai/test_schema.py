"""The served OpenAPI document is true: thousands of requests drawn from it, good ones and bad."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from schemathesis import Case, CheckContext, Response
from schemathesis.engine import Status, events, from_schema

from tests.asking import LEAKS
from tests.drawing import MakeCheckpoint
from tests.narrowing import Known, narrow
from tests.serving import ServerProcess

MODEL = "tiny"
HEADERS = {"Authorization": "Bearer schema-key"}
MIN_CASES = 5000
EDITS = "POST /v1/images/edits"
METHODS = {"get", "post", "delete"}

# By contract a job that is deleted while it runs stays, as cancelled.
_NOT_CHECKED = ("use_after_free", "ensure_resource_availability")


@dataclass
class Report:
    """What a run sent and what it found."""

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)  # by operation and status
    failures: list[str] = field(default_factory=list)

    def add(self, scenario: events.ScenarioFinished) -> None:
        recorder = scenario.recorder
        for case_id, interaction in recorder.interactions.items():
            label = recorder.cases[case_id].value.operation.label
            status = interaction.response.status_code if interaction.response else 0
            self.answers[label, status] += 1
        for case_id, checks in recorder.checks.items():
            for check in checks:
                if check.status is not Status.SUCCESS:
                    self.failures.append(_tell(recorder, case_id, check))

    def __add__(self, other: Report) -> Report:
        return Report(self.answers + other.answers, self.failures + other.failures)


def _tell(recorder: Any, case_id: str, check: Any) -> str:
    label = recorder.cases[case_id].value.operation.label
    if check.failure_info is None:
        return f"{label}: {check.name} did not work"
    info = check.failure_info
    return (
        f"{label}: {check.name}: {info.failure.title}: {info.failure.message}\n{info.code_sample}"
    )


# --- what every answer has to be, beyond what the document says ---


@schemathesis.check
def is_answered_well(ctx: CheckContext, response: Response, case: Case) -> None:
    """An id on every answer; every error OpenAI's error object, and no more."""
    assert response.headers.get("x-request-id"), "no x-request-id"
    if response.status_code < 400:
        return
    error = _check_error(response.content)
    needed = {401: "www-authenticate", 405: "allow", 429: "retry-after", 503: "retry-after"}
    name = needed.get(response.status_code)
    assert name is None or response.headers.get(name), f"no {name}"
    if response.status_code == 504:
        assert error["param"] == "timeout" and _has_timeout(case), "nobody asked for a time-out"


@schemathesis.check
def streams_well(ctx: CheckContext, response: Response, case: Case) -> None:
    """No error of ours hides in a stream, and every stream ends as such streams do."""
    content_type = response.headers.get("content-type", [""])[0]
    if not content_type.startswith("text/event-stream"):
        return
    data = [line[6:] for line in response.content.decode().split("\n") if line.startswith("data: ")]
    if '{"error"' in data[-1][:20]:
        kind = _check_error(data[-1].encode())["type"]
        assert kind == "invalid_request_error" or (kind == "timeout_error" and _has_timeout(case))
    elif case.path.endswith("/completions"):
        assert data[-1] == "[DONE]", data[-1]
    else:
        assert json.loads(data[-1])["type"] == "image_generation.completed"


def _check_error(content: bytes) -> dict[str, Any]:
    answer = json.loads(content)
    assert set(answer) == {"error"}, answer
    error: dict[str, Any] = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["message"] and not LEAKS.search(content.decode()), error
    return error


def _has_timeout(case: Case) -> bool:
    return isinstance(case.body, dict) and case.body.get("timeout") is not None


# --- the server and its document ---


@pytest.fixture(scope="module")
def fuzzed(
    checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of small limits over a model of small pictures: what is accepted costs little."""
    root = tmp_path_factory.mktemp("schema")
    model = Path(shutil.copytree(checkpoint(0), root / MODEL))
    defaults = {"height": 32, "width": 32, "num_inference_steps": 2}
    (model / "generation_config.json").write_text(json.dumps(defaults))
    limits = ("--max-n", "2", "--max-pixels", "4096", "--max-cost", "100000", "--max-tokens", "8")
    server = ServerProcess(root / "log", str(model), *limits, "--api-key", "schema-key")
    server.wait_until_ready()
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def http(fuzzed: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fuzzed.url, headers=HEADERS, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> dict[str, Any]:
    document: dict[str, Any] = http.get("/openapi.json").json()
    return document


@pytest.fixture(scope="module")
def report(fuzzed: ServerProcess, http: httpx.Client, document: dict[str, Any]) -> Report:
    """Two runs: the document as it is, and narrowed to what this server accepts."""
    as_served = _run(
        fuzzed.url, document, "all", ["coverage", "fuzzing"], 200, ["positive_data_acceptance"]
    )
    good = _run(
        fuzzed.url, narrow(document, _ask_for_some(http)), "positive", ["fuzzing", "stateful"], 60
    )
    good.failures = [  # no model here edits
        each for each in good.failures if not each.startswith(f"{EDITS}: positive_data_acceptance")
    ]
    return as_served + good


def _ask_for_some(http: httpx.Client) -> Known:
    """Jobs, pictures and requests to ask for."""
    jobs = [http.post("/v1/images/jobs", json={"prompt": "a star"}).json()["id"] for _ in range(9)]
    body = {"prompt": "a star", "n": 2, "response_format": "url"}
    answer = http.post("/v1/images/generations", json=body)
    names = [image["url"].rsplit("/", 1)[1] for image in answer.json()["data"]]
    return Known(MODEL, jobs[:3], jobs[3:], names, [answer.headers["x-request-id"]])


def _run(
    url: str,
    document: dict[str, Any],
    mode: str,
    phases: list[str],
    max_examples: int,
    not_checked: list[str] | None = None,
) -> Report:
    config = schemathesis.Config.from_dict(
        {
            "base-url": url,
            "headers": HEADERS,
            "continue-on-failure": True,
            "request-timeout": 120,
            "max-stream-events": 10_000,
            "generation": {
                "mode": mode,
                "max-examples": max_examples,
                "deterministic": True,
                "no-shrink": True,
                "database": "none",
            },
            "checks": {
                "not_a_server_error": {"expected-statuses": ["2xx", "4xx", "504"]},
                **{name: {"enabled": False} for name in (*_NOT_CHECKED, *(not_checked or ()))},
            },
            "phases": {"enabled": False, **{name: {"enabled": True} for name in phases}},
            "output": {"sanitization": {"enabled": False}},
        }
    )
    report = Report()
    for event in from_schema(schemathesis.openapi.from_dict(document, config=config)).execute():
        assert not isinstance(event, events.FatalError), event.exception
        if isinstance(event, events.NonFatalError):
            report.failures.append(f"{event.label}: {event.info.message}")
        elif isinstance(event, events.ScenarioFinished):
            report.add(event)
    return report


# --- the tests ---


def test_every_answer_is_as_documented(report: Report) -> None:
    shown = "\n\n".join(report.failures[:5])
    assert not report.failures, f"{len(report.failures)} failures, such as\n\n{shown}"


def test_there_are_enough_cases(report: Report) -> None:
    assert report.answers.total() >= MIN_CASES


def test_every_operation_is_answered_and_refused(report: Report, document: dict[str, Any]) -> None:
    for path, item in document["paths"].items():
        for method in item:
            label = f"{method.upper()} {path}"
            statuses = {status for operation, status in report.answers if operation == label}
            assert any(status < 300 for status in statuses) == (label != EDITS), (label, statuses)
            assert any(400 <= status < 500 for status in statuses), (label, statuses)


def test_no_job_failed(report: Report, http: httpx.Client) -> None:
    """A job's error has no status of its own: it is told when somebody asks."""
    after: dict[str, str] = {}
    kinds: Counter[str] = Counter()
    while True:
        page = http.get("/v1/images/jobs", params={"limit": "100", **after}).json()
        kinds.update(job["error"]["type"] for job in page["data"] if job["error"])
        if not page["has_more"]:
            break
        after = {"after": page["data"][-1]["id"]}
    assert set(kinds) <= {"timeout_error"}, kinds
