"""Clients that ask, and remember exactly what they were told."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from PIL import Image

CONNECTED = ("answer", "stream")  # kinds that wait at a connection
TIMEOUT = 300.0  # seconds without a word, after which nobody answers any more
MAX_DIFFERENCE = 1  # of 255, in any pixel: what a picture's company may change by rounding
_ENDS = ("completed", "failed", "cancelled")  # of a job
_JOB_PERIOD = 0.1  # seconds between two looks at a job


@dataclass(frozen=True)
class Ask:
    """One request. Two with the same key must have the same answer."""

    kind: str  # answer, stream, job, text
    key: str
    body: Mapping[str, Any]


@dataclass
class Answer:
    """What became of a request."""

    ask: Ask
    status: int = 0  # 0: none came
    results: list[bytes] = field(default_factory=list, repr=False)  # every final one
    error: str = ""  # code or message, or how the connection ended
    retry_after: str | None = None
    seconds: float = 0.0
    sent_at: float = 0.0
    is_whole: bool = False  # it came to its end

    def judge(self, expected: Mapping[str, bytes]) -> str:
        """One word."""
        if not self.is_whole:
            return "truncated" if self.status == 200 else "lost"
        if len(self.results) > 1:
            return "duplicated"
        if self.results:
            if self.ask.kind == "text":  # whose result is how it ended
                return "right" if self.results[0] == expected[self.ask.key] else "truncated"
            return "right" if self.compare(expected) <= MAX_DIFFERENCE else "wrong"
        if self.status in (429, 503) and self.retry_after:
            return "refused"
        return "failed"

    def compare(self, expected: Mapping[str, bytes]) -> int:
        """The largest difference of any byte from the right result."""
        [own], right = self.results, expected[self.ask.key]
        if len(own) != len(right):
            return 255
        a, b = (np.frombuffer(data, np.uint8).astype(int) for data in (own, right))
        return int(np.abs(a - b).max(initial=0))


JUDGEMENTS = ("right", "lost", "truncated", "duplicated", "wrong", "refused", "failed")
NEVER = {"lost": 0, "truncated": 0, "duplicated": 0, "wrong": 0}  # whatever happens


def judge_all(answers: Sequence[Answer], expected: Mapping[str, bytes]) -> dict[str, int]:
    """How many of each kind there are, for the table."""
    counts = Counter(answer.judge(expected) for answer in answers)
    return {"requests": len(answers), **{name: counts[name] for name in JUDGEMENTS}}


def create_asks(
    num: int,
    kinds: Sequence[str] = (*CONNECTED, "job"),
    num_keys: int = 12,
    side: int = 64,
    steps: int = 4,
) -> list[Ask]:
    """Requests for pictures, of which `num_keys` are different."""
    asks = []
    for i in range(num):
        key = i % num_keys
        body = {
            "prompt": f"a circle, number {key % 5}",
            "size": f"{side}x{side}",
            "num_inference_steps": steps,
            "seed": key,
        }
        if key % 3 == 0:
            body["true_cfg_scale"] = 2.0
        # Not in step with the keys, so that each is asked for in every way.
        kind = kinds[(i // num_keys + i) % len(kinds)]
        asks.append(Ask(kind, f"{key} {side} {steps}", body))
    return asks


def learn(url: str, asks: Sequence[Ask]) -> dict[str, bytes]:
    """What the answers are when nothing happens: each different request once, alone."""
    different = list({ask.key: ask for ask in asks}.values())
    expected = {}
    for answer in Load(url, different, 1).run():
        assert answer.is_whole and len(answer.results) == 1, answer
        expected[answer.ask.key] = answer.results[0]
    return expected


class Load:
    """Requests, so many at once, sent from a thread of their own."""

    def __init__(
        self, url: str, asks: Sequence[Ask], num_at_once: int, timeout: float = TIMEOUT
    ) -> None:
        self.url = url
        self.timeout = timeout
        self.answers: list[Answer] = []
        self._left = list(reversed(asks))
        self._num_at_once = num_at_once
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def start(self) -> Load:
        self._thread.start()
        return self

    def run(self) -> list[Answer]:
        """From the first to the last answer."""
        return self.start().join()

    def join(self) -> list[Answer]:
        self._thread.join()
        return self.answers

    def wait_for_answers(self, num: int) -> None:
        """Until so many are answered, or there are no more."""
        while len(self.answers) < num and self._thread.is_alive():
            time.sleep(0.005)

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._num_at_once)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=self.timeout, limits=limits
        ) as client:
            await asyncio.gather(*(self._ask_on(client) for _ in range(self._num_at_once)))

    async def _ask_on(self, client: httpx.AsyncClient) -> None:
        while self._left:
            self.answers.append(await send(client, self._left.pop()))


async def send(client: httpx.AsyncClient, ask: Ask) -> Answer:
    """Ask once, and not again."""
    answer = Answer(ask, sent_at=time.monotonic())
    try:
        await _KINDS[ask.kind](client, ask, answer)
    except httpx.TransportError as error:
        answer.error = type(error).__name__
    answer.seconds = time.monotonic() - answer.sent_at
    return answer


async def _send_answer(client: httpx.AsyncClient, ask: Ask, answer: Answer) -> None:
    response = await client.post("/v1/images/generations", json=ask.body)
    if _note_status(response, answer):
        answer.results = [read_pixels(image["b64_json"]) for image in response.json()["data"]]


async def _send_text(client: httpx.AsyncClient, ask: Ask, answer: Answer) -> None:
    response = await client.post("/v1/completions", json=ask.body)
    if _note_status(response, answer):
        # Which tokens a random model finds best depends on its company; how many does not.
        [choice] = response.json()["choices"]
        num_tokens = response.json()["usage"]["completion_tokens"]
        answer.results = [f"{choice['finish_reason']} {num_tokens}".encode()]


async def _send_stream(client: httpx.AsyncClient, ask: Ask, answer: Answer) -> None:
    body = {**ask.body, "stream": True}
    async with client.stream("POST", "/v1/images/generations", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            _note_status(response, answer)
            return
        answer.status = 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                _note_event(json.loads(line.removeprefix("data: ")), answer)
    answer.is_whole = bool(answer.results or answer.error)


def _note_event(event: Mapping[str, Any], answer: Answer) -> None:
    if event.get("type") == "image_generation.completed":
        answer.results.append(read_pixels(event["b64_json"]))
    elif "error" in event:
        answer.status = 0  # the status line promised nothing yet
        answer.error = str(event["error"]["code"] or event["error"]["message"])


async def _send_job(client: httpx.AsyncClient, ask: Ask, answer: Answer) -> None:
    response = await client.post("/v1/images/jobs", json=ask.body)
    if response.status_code != 202:
        _note_status(response, answer)
        return
    job = response.json()
    while job["status"] not in _ENDS:
        await asyncio.sleep(_JOB_PERIOD)
        job = (await client.get(f"/v1/images/jobs/{job['id']}")).json()
    answer.status, answer.is_whole = 200, True
    if job["status"] == "completed":
        answer.results = [read_pixels(image["b64_json"]) for image in job["result"]["data"]]
    else:
        answer.error = str(job["error"])


def _note_status(response: httpx.Response, answer: Answer) -> bool:
    """Note how it was answered; the answer is whether there is a result."""
    answer.status, answer.is_whole = response.status_code, True
    answer.retry_after = response.headers.get("retry-after")
    if answer.status != 200:
        answer.error = response.text[:200]
    return answer.status == 200


def read_pixels(data: str) -> bytes:
    """Of a PNG in base64."""
    with Image.open(io.BytesIO(b64decode(data))) as image:
        return image.convert("RGB").tobytes()


_Send = Callable[[httpx.AsyncClient, Ask, Answer], Awaitable[None]]
_KINDS: dict[str, _Send] = {
    "answer": _send_answer,
    "stream": _send_stream,
    "job": _send_job,
    "text": _send_text,
}
