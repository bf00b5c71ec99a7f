"""The served OpenAPI document is true: thousands of requests drawn from it, good ones and bad."""

from __future__ import annotations

import json
import os
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
MIN_CASES = int(os.environ.get("SCHEMA_CASES", "5000"))  # `make faults` asks for more
EDITS = "POST /v1/images/edits"
METHODS = {"get", "post", "delete"}

# No model here edits; a list may begin after a job that is gone.
_MAY_BE_REFUSED = tuple(
    f"{label}: positive_data_acceptance" for label in (EDITS, "GET /v1/images/jobs")
)
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
def is_answered_well(ctx: CheckContext, response: Response, case: Case[Any]) -> None:
    """Every error is OpenAI's error object, and nothing else."""
    if response.status_code < 400:
        return
    error = _check_error(response.content, case)
    if response.status_code == 401:
        assert response.headers.get("www-authenticate"), "no WWW-Authenticate"
    if response.status_code == 504:
        assert error["param"] == "timeout" and _has_timeout(case), "nobody asked for a time-out"


@schemathesis.check
def streams_well(ctx: CheckContext, response: Response, case: Case[Any]) -> None:
    """No error of ours hides in a stream, and every stream ends as such streams do."""
    content_type = response.headers.get("content-type", [""])[0]
    if not content_type.startswith("text/event-stream"):
        return
    data = [line[6:] for line in response.content.decode().split("\n") if line.startswith("data: ")]
    if '{"error"' in data[-1][:20]:
        kind = _check_error(data[-1].encode(), case)["type"]
        assert kind == "invalid_request_error" or (kind == "timeout_error" and _has_timeout(case))
    elif case.path.endswith("/completions"):
        assert data[-1] == "[DONE]", data[-1]
    else:
        assert json.loads(data[-1])["type"] == "image_generation.completed"


def _check_error(content: bytes, case: Case[Any]) -> dict[str, Any]:
    answer = json.loads(content)
    assert set(answer) == {"error"}, answer
    error: dict[str, Any] = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    sent = f"{case.path_parameters} {case.query} {case.body!r}"  # what was sent may be said back
    leaks = [found for found in LEAKS.finditer(content.decode()) if found[0] not in sent]
    assert error["message"] and not leaks, error
    return error


def _has_timeout(case: Case[Any]) -> bool:
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
    times = (MIN_CASES / 5000) ** 1.3  # the more are drawn, the fewer of them are new
    most, most_good = round(230 * times), round(60 * times)
    as_served = _run(
        fuzzed.url, document, "all", ["coverage", "fuzzing"], most, ["positive_data_acceptance"]
    )
    known = narrow(document, _ask_for_some(http))
    good = _run(fuzzed.url, known, "positive", ["fuzzing", "stateful"], most_good)
    good.failures = [each for each in good.failures if not each.startswith(_MAY_BE_REFUSED)]
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


# --- what is drawn from it ---


def test_every_answer_is_as_documented(report: Report) -> None:
    shown = "\n\n".join(report.failures[:5])
    assert not report.failures, f"{len(report.failures)} failures, such as\n\n{shown}"


def test_there_are_enough_cases(report: Report) -> None:
    print(f"{report.answers.total()} cases: {_count_by_status(report)}")
    assert report.answers.total() >= MIN_CASES


def _count_by_status(report: Report) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for (_, status), number in report.answers.items():
        counts[status] += number
    return dict(sorted(counts.items()))


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


# --- what nobody draws ---


def _nest(num_levels: int, left: str = "[", right: str = "]") -> str:
    return left * num_levels + "1" + right * num_levels


@pytest.mark.parametrize("num_levels", [40, 900, 5000])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("images/generations", '{"prompt": "a star", "cache": %s}'),
        ("images/generations", '{"prompt": "a star", "n": %s}'),
        ("images/jobs", "%s"),
        ("completions", '{"prompt": %s}'),
        ("chat/completions", '{"messages": [{"role": "user", "content": %s}]}'),
        ("chat/completions", '{"messages": [], "tools": [{"function": {"parameters": %s}}]}'),
    ],
)
@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_nested_bodies_are_refused(
    http: httpx.Client, path: str, body: str, num_levels: int, brackets: str
) -> None:
    nested = _nest(num_levels) if brackets == "[]" else _nest(num_levels, '{"a":', "}")
    headers = {"Content-Type": "application/json"}
    answer = http.post(f"/v1/{path}", content=body % nested, headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("arguments", [_nest(40), _nest(900), _nest(5000), "1" * 5000])
def test_arguments_of_calls_that_python_cannot_read_are_refused(
    http: httpx.Client, arguments: str
) -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    answer = http.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages.0.tool_calls.0.function.arguments"


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"true_cfg_scale": False}, "true_cfg_scale"),
        ({"timeout": "60"}, "timeout"),
        ({"n": True}, "n"),
        ({"n": 1.5}, "n"),
        ({"seed": 1e300}, "seed"),
    ],
)
def test_numbers_are_numbers(http: httpx.Client, parameters: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/images/generations", json={"prompt": "a star", **parameters})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_whole_numbers_may_have_a_point(http: httpx.Client) -> None:
    body = {"prompt": "a star", "n": 2.0, "seed": 5.0, "true_cfg_scale": 1}
    data = http.post("/v1/images/generations", json=body).json()["data"]
    assert [image["seed"] for image in data] == [5, 6]
    body = {"prompt": [1.0, 2], "max_tokens": 1.0}
    assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 1


def test_a_completion_that_says_nothing_of_its_length_fits(http: httpx.Client) -> None:
    body = {"prompt": "a star", "ignore_eos": True}
    usage = http.post("/v1/completions", json=body).json()["usage"]
    assert usage["completion_tokens"] == 8  # OpenAI's default, 16, is more than this server writes


def test_405_names_all_methods_of_the_path(http: httpx.Client) -> None:
    for path, methods in (
        ("/v1/images/jobs/x", "DELETE, GET, HEAD"),
        ("/v1/images/jobs", "GET, HEAD, POST"),
        ("/v1/completions", "POST"),
    ):
        answer = http.patch(path)
        assert (answer.status_code, answer.headers["Allow"]) == (405, methods)


# --- the document itself ---


def test_every_operation_is_described(document: dict[str, Any]) -> None:
    error = {"$ref": "#/components/schemas/ErrorResponse"}
    for path, item in document["paths"].items():
        assert set(item) <= METHODS
        for operation in item.values():
            assert operation["summary"] and "422" not in operation["responses"], path
            for status, response in operation["responses"].items():
                assert response["description"] and "x-request-id" in response["headers"]
                if status[0] == "4":
                    assert response["content"] == {"application/json": {"schema": error}}, path
                assert response["content"], (path, status)
            assert ("Retry-After" in json.dumps(operation)) == ("503" in operation["responses"])
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_the_key_is_described_where_it_is_needed(document: dict[str, Any]) -> None:
    assert document["components"]["securitySchemes"] == {
        "key": {"type": "http", "scheme": "bearer"}
    }
    for path, item in document["paths"].items():
        for operation in item.values():
            is_open = path in ("/health/live", "/health/ready")
            assert operation.get("security") == (None if is_open else [{"key": []}]), path
            assert ("401" in operation["responses"]) == (not is_open), path


def test_a_server_without_keys_and_with_the_page_has_the_same_routes(
    server: ServerProcess, document: dict[str, Any]
) -> None:
    other = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    assert set(other["paths"]) == set(document["paths"])
    assert "securitySchemes" not in other["components"]
    assert "401" not in other["paths"]["/v1/models"]["get"]["responses"]
