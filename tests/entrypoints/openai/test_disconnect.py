"""Clients that leave, at every point of their request's way: nothing of it stays behind."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest

from tests.inner_server import InnerServer, Served
from vllm_omni import DiffusionParams, OmniRequest
from vllm_omni.outputs import StepStats

NUM = 20  # clients that leave, in each phase
TIMEOUT = 60.0  # seconds to wait for anything
KINDS = ("answer", "stream", "chat", "chat stream")
AR, DIFFUSION = 0, 1  # stages

PROMPT = "a red circle"
ENDLESS = {"num_inference_steps": 1000, "size": "128x128"}
IN_VIEW = {"num_inference_steps": 2, "size": "192x192"}  # long to decode, and large to send


def make_body(kind: str, parameters: dict[str, Any], prompt: str = PROMPT) -> dict[str, Any]:
    body: dict[str, Any] = dict(parameters)
    if kind.startswith("chat"):
        messages = [{"role": "user", "content": prompt}]
        body |= {"messages": messages, "modalities": ["text", "image"], "max_tokens": 2}
    else:
        body["prompt"] = prompt
    if kind.endswith("stream"):
        body["stream"] = True
    if kind == "stream":
        body["partial_images"] = 3
    return body


class Clients:
    """Connections with a request each, that read nothing."""

    def __init__(self, served: Served, kind: str) -> None:
        self.served = served
        self.kind = kind
        self.sockets: list[socket.socket] = []

    def connect(self, parameters: dict[str, Any], prompt: str = PROMPT) -> None:
        body = json.dumps(make_body(self.kind, parameters, prompt)).encode()
        path = "/v1/chat/completions" if self.kind.startswith("chat") else "/v1/images/generations"
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", self.served.port))
        client.sendall(head.encode() + body)
        self.sockets.append(client)

    def leave(self) -> None:
        for client in self.sockets:
            client.close()
        self.sockets.clear()


class Inside:
    """What the server holds, for requests and for connections."""

    def __init__(self, inner: InnerServer, served: Served) -> None:
        self.inner = inner
        self.served = served
        self.process = psutil.Process()

    def count(self) -> dict[str, int]:
        [stats] = self.inner.call(self.inner.llm.collective_rpc(DIFFUSION, "get_stats"))
        queue = httpx.get(f"{self.served.url}/v1/queue").json()
        return {
            **self.inner.look(self._count),
            "queue, running": queue["running"],
            "queue, waiting": queue["waiting"],
            "requests in the worker": stats["num_requests"],
            "bytes in the worker": stats["cache_used_bytes"],
            "threads": sum(not _is_of_a_pool(thread) for thread in threading.enumerate()),
            "files": self.process.num_fds(),
        }

    def _count(self) -> dict[str, int]:
        ar, diffusion = self.inner.llm.clients
        app, state = self.served.app, self.served.server.server_state
        return {
            "walks": len(self.inner.llm.coordinator._walks),
            "requests of the AR client": len(ar._queues) + len(ar._readers),  # type: ignore[attr-defined]
            "requests of vLLM": len(ar.llm.output_processor.request_states),  # type: ignore[attr-defined]
            "requests of the diffusion client": len(diffusion._queues),
            "places": len(app.images.admission.tickets) + len(app.text.admission.tickets),
            "connections": len(state.connections),
            "requests of uvicorn": len(state.tasks),
            "tasks": len(asyncio.all_tasks()),
        }

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        assert self.is_soon(is_so, TIMEOUT), self.count()

    def is_soon(self, is_so: Callable[[], bool], timeout: float = 5.0) -> bool:
        deadline = time.monotonic() + timeout
        while not (is_true := self.inner.look(is_so)) and time.monotonic() < deadline:
            time.sleep(0.002)
        return is_true

    def wait_until_held(self, stage_id: int, num: int) -> None:
        """Until so many requests are in a stage."""

        def is_held() -> bool:
            held = [walk.held for walk in self.inner.llm.coordinator._walks.values()]
            stages = [one[0].stage.stage_id for one in held if one is not None]
            return stages.count(stage_id) == num

        self.wait_until(is_held)

    def wait_until_left(self, num_walks: int = 0) -> None:
        self.wait_until(lambda: len(self.inner.llm.coordinator._walks) == num_walks)

    @contextmanager
    def blocked(self, request: OmniRequest) -> Iterator[None]:
        """While a long request has a stage for itself, whose queue others wait in."""

        async def run() -> None:
            async for _ in self.inner.llm.generate(request):
                pass

        async def start() -> asyncio.Task[None]:
            return asyncio.create_task(run())

        task = self.inner.call(start())
        try:
            yield
        finally:
            assert self.inner.look(task.cancel)

    @contextmanager
    def steps(self) -> Iterator[list[StepStats]]:
        """The steps that the diffusion engine takes meanwhile."""
        client = self.inner.llm.clients[DIFFUSION]
        before, seen = client.on_step, list[StepStats]()

        def note(stats: StepStats) -> None:
            seen.append(stats)
            if before is not None:
                before(stats)

        client.on_step = note
        yield seen
        client.on_step = before


def _is_of_a_pool(thread: threading.Thread) -> bool:
    """Pools start their threads when they need them, and keep them: so many, and no more."""
    return re.search(r"_\d+$", thread.name) is not None


@pytest.fixture(scope="module")
def inside(inner: InnerServer, served: Served) -> Inside:
    """After everything has run once: caches are there."""
    for kind in KINDS:
        path = "/v1/chat/completions" if kind.startswith("chat") else "/v1/images/generations"
        body = make_body(kind, IN_VIEW)
        assert httpx.post(f"{served.url}{path}", json=body, timeout=TIMEOUT).status_code == 200
    gc.collect()  # what earlier tests have left
    return Inside(inner, served)


@pytest.fixture(autouse=True)
def nothing_is_left(inside: Inside) -> Iterator[None]:
    """After every test the server holds no more than before: nothing of the requests."""
    before = inside.count()
    assert before["walks"] == before["places"] == before["requests in the worker"] == 0
    yield
    deadline = time.monotonic() + TIMEOUT
    while more := {
        name: (before[name], after)
        for name, after in inside.count().items()
        if after > before[name]
    }:
        assert time.monotonic() < deadline, more
        time.sleep(0.05)


@pytest.fixture(params=KINDS)
def clients(served: Served, request: pytest.FixtureRequest) -> Iterator[Clients]:
    clients = Clients(served, request.param)
    yield clients
    clients.leave()


def test_while_they_wait(clients: Clients, inside: Inside) -> None:
    endless = DiffusionParams(height=256, width=256, num_inference_steps=1000, seed=1)
    with inside.blocked(OmniRequest(prompt=PROMPT, params=endless)), inside.steps() as steps:
        inside.wait_until_held(DIFFUSION, 1)
        for _ in range(NUM):
            clients.connect(ENDLESS)
        inside.wait_until_held(DIFFUSION, NUM + 1)
        inside.wait_until(lambda: bool(steps) and steps[-1].num_waiting == NUM)
        queue = httpx.get(f"{clients.served.url}/v1/queue").json()
        assert (queue["running"], queue["waiting"]) == (0, NUM)
        clients.leave()
        inside.wait_until_left(1)
        inside.wait_until(lambda: steps[-1].num_waiting == 0)
        assert steps[-1].num_running == 1


def test_while_their_prompts_are_read(clients: Clients, inside: Inside) -> None:
    text = {"temperature": 0.0, "max_tokens": 900, "ignore_eos": True}
    with inside.blocked(OmniRequest(prompt=PROMPT, output_format="text", sampling_params=text)):
        inside.wait_until_held(AR, 1)
        for _ in range(NUM):  # new ones: those that are known are not read again
            clients.connect(ENDLESS, prompt=f"prompt {uuid.uuid4()}")
        inside.wait_until_held(AR, NUM + 1)
        clients.leave()
        inside.wait_until_left(1)


def test_while_they_are_drawn(clients: Clients, inside: Inside) -> None:
    admission = clients.served.app.images.admission
    for _ in range(NUM):
        clients.connect(ENDLESS)
        inside.wait_until(lambda: admission.num_running == 1)
        clients.leave()
        inside.wait_until_left()


def test_while_they_are_decoded(clients: Clients, inside: Inside) -> None:
    """Whether a client left in the middle of it, the step tells afterwards: until enough did."""
    num_hits, delay = 0, 0.1
    with inside.steps() as steps:
        for _ in range(30 * NUM):
            steps.clear()
            clients.connect(IN_VIEW)
            inside.wait_until(lambda: len(steps) > 0)
            time.sleep(delay)  # from the step before the last
            clients.leave()
            left_at = time.monotonic()
            inside.wait_until_left()
            if not inside.is_soon(lambda: len(steps) == 2):
                continue  # it left before the last step
            last = steps[1]
            num_hits += last.end_time - last.decode_time < left_at < last.end_time
            delay = last.denoise_time + last.decode_time / 2
            if num_hits == NUM:
                break
    assert num_hits == NUM


def test_while_answers_are_sent(clients: Clients, inside: Inside) -> None:
    """To readers that do not read: what is left of the answer waits in the server."""
    for _ in range(NUM):
        clients.connect(IN_VIEW | {"num_inference_steps": 1})
    connections = clients.served.server.server_state.connections

    def is_sending() -> bool:
        waiting = [one.transport.get_write_buffer_size() > 0 for one in connections]
        return len(waiting) == NUM and all(waiting)

    inside.wait_until(is_sending)
    assert inside.count()["places"] == 0  # nobody waits for a slow reader
    clients.leave()
