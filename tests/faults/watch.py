"""Somebody who asks all the time whether a server is ready, as a load balancer does."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import TracebackType

import httpx

from tests.serving import ServerProcess

_PERIOD = 0.05  # seconds between two questions
_TIMEOUT = 5.0  # seconds, of one question


@dataclass(frozen=True)
class Look:
    """One question and its answer."""

    at: float
    status: int  # 0: nobody answered
    seconds: float


class Watch:
    """Looks at a server until the `with` ends."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self.looks: list[Look] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def wait_until(self, is_ready: bool, since: float, timeout: float) -> float | None:
        """Seconds from `since` until it said so; None if it did not."""
        deadline = since + timeout
        while time.monotonic() < deadline:
            for look in self.looks:
                if look.at >= since and (look.status == 200) == is_ready:
                    return round(look.at + look.seconds - since, 2)
            if is_ready and self._server.process.poll() is not None:
                break  # it never will be
            time.sleep(_PERIOD)
        return None

    def wait_for_pause(self, since: float, timeout: float) -> tuple[float | None, float | None]:
        """Seconds from `since` until it was not ready, and until it was ready again."""
        noticed = self.wait_until(False, since, timeout)
        if noticed is None:
            return None, None
        ready = self.wait_until(True, since + noticed, timeout)
        return noticed, None if ready is None else round(noticed + ready, 2)

    def get_p99(self) -> float:
        """Milliseconds, of questions that were answered."""
        times = sorted(look.seconds for look in self.looks if look.status)
        return round(1000 * times[int(0.99 * (len(times) - 1))], 1) if times else 0.0

    def _run(self) -> None:
        url = f"{self._server.url}{self._server.ready_path}"
        with httpx.Client(timeout=_TIMEOUT) as client:
            while not self._is_over.wait(_PERIOD):
                start = time.monotonic()
                try:
                    status = client.get(url).status_code
                except httpx.TransportError:
                    status = 0
                self.looks.append(Look(start, status, time.monotonic() - start))
