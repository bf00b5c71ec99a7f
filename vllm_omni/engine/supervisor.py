"""`Supervisor`: keeps the process of one stage running, and says so when it no longer can.

A thread for each stage. It starts the process, watches it, and starts another when it has died:
by its exit, by the pipe that only it holds, by the beats it writes, and by whoever reads from it
and cannot make sense of what comes. When that has happened too often, it gives up.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Generic, Literal, Protocol, TypeVar

import psutil

from vllm_omni.config import OmniConfig
from vllm_omni.engine.black_box import BlackBox
from vllm_omni.errors import EngineDeadError, EngineError, ModelLoadError
from vllm_omni.processes import (
    SHOW_STACKS,
    cpu_seconds,
    find_tree,
    is_stopped,
    kill_tree,
    waits_for_disk,
)

logger = logging.getLogger(__name__)

_PERIOD = 0.2  # seconds between looks at a process that is there
_LOOK_PERIOD = 1.0  # and between closer ones, which take longer
_BACK_OFF = 0.2  # seconds before the second start in a row, doubled for each one more
_MAX_BACK_OFF = 10.0
_IDLE_CPU = 0.02  # of one processor: whoever uses less waits for something
_LAST_WORD = 1.0  # seconds to learn that the end of a start was the end of everything
_STACKS_TIME = 0.5  # seconds to write the stacks down

State = Literal["starting", "ready", "restarting", "failed"]


@dataclass(frozen=True)
class Death:
    """What a process died of, and who may be to blame."""

    cause: str
    is_external: bool = True  # somebody killed or stopped it: no request is to blame
    request_ids: tuple[str, ...] | None = ()  # in the step it died in; None: too many to name


class Watched(Protocol):
    """What a supervisor must know of a process."""

    process: BaseProcess
    lifeline: Connection  # ends with the process; and carries why it could not start
    black_box: BlackBox

    def wait_until_ready(self) -> None: ...

    def release_client(self) -> None:
        """Let whoever connects to it go on, though it will not answer any more."""

    def shutdown(self) -> None: ...


ProcessT = TypeVar("ProcessT", bound=Watched)


class Supervisor(Generic[ProcessT]):
    """Callbacks come from its thread.

    Args:
        name: of the stage, for messages: "stage 1 (diffusion)".
        config: says when it is taken for dead, and when there is no more hope for it.
        start: starts a process.
        on_ready: the process works.
        on_death: it does not any more; another will be started.
        on_failed: there will be no other.
    """

    def __init__(
        self,
        name: str,
        config: OmniConfig,
        start: Callable[[], ProcessT],
        on_ready: Callable[[ProcessT], None],
        on_death: Callable[[Death], None],
        on_failed: Callable[[EngineDeadError], None],
    ) -> None:
        self.name = name
        self.config = config
        self.state: State = "starting"
        self.num_restarts = 0
        self.cause = ""  # of the last death
        self.process: ProcessT | None = None
        self._start, self._on_ready = start, on_ready
        self._on_death, self._on_failed = on_death, on_failed
        self._error: EngineError | None = None  # why it has never come up
        self._deaths: deque[float] = deque()  # when; within the window
        self._back_off = 0.0  # seconds before the next start
        self._verdict = ""  # of somebody else: the process is to be killed for it
        self._stop = threading.Event()
        self._is_settled = threading.Event()  # up for the first time, or never
        self._last_beat: tuple[int, float] = (0, time.monotonic())
        self._idle: tuple[int, float, float] | None = None  # step, since when, processor time then
        self._looked_at = 0.0
        self._awake_since = 0.0  # this process: if it was stopped, so was the other, perhaps
        self._next_look = 0.0
        self._next_stop_look = 0.0
        self._was_stopped = False
        # When this process ends, its children are taken away: that is no reason to start others.
        atexit.register(self._stop.set)
        self._thread = threading.Thread(target=self._run, name=f"supervisor {name}", daemon=True)
        self._thread.start()

    # --- for others ---

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.process.pid

    @property
    def seconds_since_beat(self) -> float | None:
        return time.monotonic() - self._last_beat[1] if self.state == "ready" else None

    def wait_until_ready(self) -> None:
        """Wait for the first start; raises `ModelLoadError`."""
        self._is_settled.wait()
        if self._error is not None:
            raise self._error

    def note_answer(self) -> None:
        """The process has done what it is there for: when it dies, it is started at once."""
        self._back_off = 0.0

    def condemn(self, cause: str) -> None:
        """Have the process killed: it does not say what it should."""
        self._verdict = cause

    def shutdown(self) -> None:
        """End the process, and watch no more. May be called twice."""
        self._stop.set()
        atexit.unregister(self._stop.set)
        if (process := self.process) is not None:
            process.shutdown()
        self._thread.join()

    # --- the thread ---

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                death = self._live()
                if self._stop.is_set() or self._error is not None:
                    return
                self._bury(death)
        except Exception as error:  # a mistake of ours must not leave a stage that nobody watches
            logger.exception("the supervisor of %s failed", self.name)
            self._give_up(f"its supervisor failed: {type(error).__name__}: {error}")
        finally:
            if self._stop.is_set() and self.process is not None:
                self.process.shutdown()  # one that was started meanwhile
            self._is_settled.set()

    def _live(self) -> Death:
        """One life of the process, from its start on."""
        num_oom_kills = _count_oom_kills()
        try:
            self._verdict = ""
            self.process = process = self._start()
            if self._stop.is_set():
                return Death("shut down")
            with _StartWatch(process, self.config):
                process.wait_until_ready()
                self._on_ready(process)
        except ModelLoadError as error:
            if not self._is_settled.is_set():
                self._error = error  # it has said why; the same would happen again
            return Death(str(error))
        except (EngineDeadError, OSError, EOFError) as error:
            # Who ends a whole group of processes ends this one too, which may hear of it last.
            self._stop.wait(_LAST_WORD)
            return Death(f"it cannot start: {error}")
        self._last_beat = (process.black_box.read().num_beats, time.monotonic())
        self._idle, self._was_stopped = None, False
        if self.state == "restarting":
            self.num_restarts += 1
            logger.info("%s is back", self.name)
        self.state = "ready"
        self._is_settled.set()
        death = self._watch(process)
        if death is not None:
            return death
        return self._examine(process, num_oom_kills)

    def _bury(self, death: Death) -> None:
        """Tell everybody, count it, and wait a little before the next start."""
        logger.error("%s is dead: %s", self.name, death.cause)
        self.cause = death.cause
        if self._is_settled.is_set():
            self.state = "restarting"
        if self.process is not None:
            kill_tree(self.process.process)
        self._on_death(death)
        if self.process is not None:
            self.process.shutdown()
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - self.config.restart_window:
            self._deaths.popleft()
        if len(self._deaths) > self.config.max_restarts:
            self._give_up(
                f"it died {len(self._deaths)} times within {self.config.restart_window:g} s, "
                f"at last of this: {death.cause}"
            )
            return
        self._stop.wait(self._back_off)
        self._back_off = min(max(2 * self._back_off, _BACK_OFF), _MAX_BACK_OFF)

    def _give_up(self, cause: str) -> None:
        error = EngineDeadError(f"{self.name} is given up: {cause}")
        logger.critical("%s", error)
        self.state = "failed"
        if not self._is_settled.is_set():
            self._error = ModelLoadError(str(error))
        self._on_failed(error)
        self._stop.set()

    def _watch(self, process: ProcessT) -> Death | None:
        """Until it dies; what it died of, if that is not its own doing."""
        while not self._stop.is_set():
            if connection.wait([process.lifeline, process.process.sentinel], timeout=_PERIOD):
                return None
            if self._verdict:
                return self._kill(process, self._verdict)
            if hang := self._find_hang(process):
                return self._kill(process, hang)
        return None

    def _find_hang(self, process: ProcessT) -> str | None:
        now, reading = time.monotonic(), process.black_box.read()
        config = self.config
        if now - self._looked_at >= config.hang_timeout / 2:
            self._awake_since, self._idle, self._was_stopped = now, None, False
        self._looked_at = now
        if reading.num_beats != self._last_beat[0]:
            self._last_beat = (reading.num_beats, now)
        if (silence := now - max(self._last_beat[1], self._awake_since)) >= config.hang_timeout:
            return f"no sign of life for {silence:.1f} s"
        if self._stays_stopped(process, now):
            return "one of its processes does not run"
        if reading.busy_since is None:
            return None
        busy = now - max(reading.busy_since, self._awake_since)
        if busy >= config.step_timeout:
            return f"one step takes longer than step_timeout={config.step_timeout:g} s"
        if self._is_waiting(process, reading.num_steps, busy, now):
            return f"a step makes no progress for {busy:.1f} s"
        return None

    def _stays_stopped(self, process: ProcessT, now: float) -> bool:
        """Whether a process of the stage is stopped in two looks; also a worker that idles."""
        if now < self._next_stop_look:
            return False
        self._next_stop_look = now + self.config.hang_timeout / 2
        was_stopped, self._was_stopped = self._was_stopped, is_stopped(_tree_of(process))
        return was_stopped and self._was_stopped

    def _is_waiting(self, process: ProcessT, step: int, busy: float, now: float) -> bool:
        """Whether a step has used no processor for the second half of the time it is given."""
        limit = self.config.hang_timeout
        if busy < limit / 2 or now < self._next_look:
            return False
        self._next_look = now + _LOOK_PERIOD
        tree = _tree_of(process)
        used = cpu_seconds(tree)
        if self._idle is None or self._idle[0] != step:
            self._idle = (step, now, used)
        _, since, used_before = self._idle
        if used - used_before > _IDLE_CPU * max(now - since, 1.0) or waits_for_disk(tree):
            self._idle = (step, now, used)  # it does something
            return False
        return now - since >= limit / 2

    def _kill(self, process: ProcessT, cause: str) -> Death:
        """End a process that hangs, after a look at where it does."""
        tree = _tree_of(process)
        reading = process.black_box.read()
        if is_external := is_stopped(tree):
            cause += ": somebody has stopped it, so that it cannot show its stacks"
        else:
            logger.error("%s hangs: %s; its stacks follow", self.name, cause)
            for one in tree:
                _send(one.pid, SHOW_STACKS)
            time.sleep(_STACKS_TIME)
        kill_tree(process.process)
        return Death(cause, is_external, reading.request_ids if reading.busy_since else ())

    def _examine(self, process: ProcessT, num_oom_kills: int) -> Death:
        """What a process died of that has ended by itself."""
        process.process.join(timeout=1)  # the pipe may say it earlier than the exit code comes
        reading, code = process.black_box.read(), process.process.exitcode
        request_ids = reading.request_ids if reading.busy_since else ()
        if code in (-signal.SIGKILL, None):
            is_oom = _count_oom_kills() > num_oom_kills
            killer = "the kernel, for want of memory" if is_oom else "somebody"
            return Death(f"killed by {killer} (SIGKILL)", not is_oom, request_ids)
        if code in (-signal.SIGTERM, 0, _UNKNOWN):
            return Death(f"ended from outside (exit code {code})", True, request_ids)
        if code < 0:
            return Death(f"killed by {signal.Signals(-code).name}", False, request_ids)
        return Death(f"ended with exit code {code}", False, request_ids)


_UNKNOWN = 255  # the forkserver, which would know the exit code, is gone too


class _StartWatch:
    """Kills a process that is stopped, or takes too long, before it is ready.

    If it has died, nobody waits for it.
    """

    def __init__(self, process: Watched, config: OmniConfig) -> None:
        self._process, self._config = process, config
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        started = stopped_since = next_look = time.monotonic()
        process = self._process.process
        while not self._is_over.wait(_PERIOD):
            if connection.wait([process.sentinel], timeout=0):
                self._process.release_client()
                continue
            if (now := time.monotonic()) < next_look:
                continue
            next_look = now + _LOOK_PERIOD
            if not is_stopped(_tree_of(self._process)):
                stopped_since = now
            if now - stopped_since >= self._config.hang_timeout:
                logger.error("%s is stopped while it starts", process.name)
                kill_tree(process)
            elif now - started >= self._config.start_timeout:
                logger.error("%s has not started in time", process.name)
                kill_tree(process)


def _tree_of(process: Watched) -> list[psutil.Process]:
    return find_tree(process.process.pid or 0)


def _send(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return


def _count_oom_kills() -> int:
    """How often the kernel has killed for want of memory since the machine started."""
    try:
        with open("/proc/vmstat") as lines:
            counts = dict(line.split() for line in lines)
    except OSError:
        return 0
    return int(counts.get("oom_kill", 0))
