"""`vllm-omni serve` as a process of its own, for tests that speak HTTP to it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

START_TIMEOUT = 300.0  # seconds; two imports of vLLM on a machine that is busy


def get_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class ServerProcess:
    """A running server; what it says goes to a file."""

    command: tuple[str, ...] = (sys.executable, "-m", "vllm_omni.entrypoints.cli.main", "serve")
    ready_path = "/health/ready"
    starts_session = False  # whether it and all it starts are a session of their own

    def __init__(self, log: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.port = get_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [*self.command, *arguments, "--port", str(self.port)],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=os.environ | (env or {}),
                start_new_session=self.starts_session,
            )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while not self.is_ready:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)

    def stop(self) -> int:
        """End it as an operator does; the answer is its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    @property
    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}{self.ready_path}", timeout=5).status_code == 200
        except httpx.TransportError:
            return False
