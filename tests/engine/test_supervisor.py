"""The supervisor of a process: real processes, small enough to die often."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from tests.ending import is_gone
from vllm_omni.config import OmniConfig
from vllm_omni.engine.black_box import BlackBox
from vllm_omni.engine.supervisor import Death, Supervisor
from vllm_omni.errors import EngineDeadError, ModelLoadError
from vllm_omni.processes import end_with_parent, show_stacks_when_asked

CONTEXT = multiprocessing.get_context("fork")  # starts in no time
CONFIG = OmniConfig(max_restarts=3)
QUICK = OmniConfig(max_restarts=3, hang_timeout=1.0, step_timeout=4.0)  # to see a hang

Main = Callable[["Ready", BlackBox], None]


class Ready:
    """The process's end of its pipe."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def say(self, text: str = "ready") -> None:
        self.connection.send_bytes(text.encode())


class SmallProcess:
    """What `StageProcess` is to a supervisor, without an engine."""

    def __init__(self, main: Main) -> None:
        self.black_box = BlackBox.make(CONTEXT)
        self.released = threading.Event()
        self.lifeline, theirs = CONTEXT.Pipe(duplex=False)
        self.process: BaseProcess = CONTEXT.Process(
            target=_run, args=(main, theirs, self.black_box)
        )
        self.process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        try:
            text = self.lifeline.recv_bytes().decode()
        except EOFError:
            self.process.join()
            raise EngineDeadError(f"exit code {self.process.exitcode}") from None
        if text != "ready":
            raise ModelLoadError(text)

    def release_client(self) -> None:
        self.released.set()

    def shutdown(self) -> None:
        self.process.kill()
        self.process.join()


def _run(main: Main, connection: Connection, black_box: BlackBox) -> None:
    show_stacks_when_asked()
    main(Ready(connection), black_box)


def beat(ready: Ready, black_box: BlackBox) -> None:
    """All is well."""
    ready.say()
    while True:
        black_box.beat()
        time.sleep(0.05)


class Watcher:
    """A supervisor, and what it has said."""

    def __init__(self, main: Main, config: OmniConfig, waits_for_release: bool) -> None:
        self.num_started = 0
        self.waits_for_release = waits_for_release
        self.deaths: list[Death] = []
        self.failures: list[EngineDeadError] = []
        self.news = threading.Condition()
        self.supervisor: Supervisor[SmallProcess] = Supervisor(
            "stage 7 (test)",
            config,
            lambda: SmallProcess(main),
            self._note_start,
            self._note_death,
            self._note_failure,
        )

    def _note_start(self, process: SmallProcess) -> None:
        if self.waits_for_release:
            self.waits_for_release = False
            assert process.released.wait(timeout=30)
        with self.news:
            self.num_started += 1
            self.news.notify_all()

    def _note_death(self, death: Death) -> None:
        with self.news:
            self.deaths.append(death)
            self.news.notify_all()

    def _note_failure(self, error: EngineDeadError) -> None:
        with self.news:
            self.failures.append(error)
            self.news.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.news:
            assert self.news.wait_for(condition, timeout=30)

    def wait_for_start(self, number: int) -> None:
        self.wait(lambda: self.num_started == number)

    def wait_for_death(self, number: int) -> None:
        self.wait(lambda: len(self.deaths) == number)

    @property
    def pid(self) -> int:
        assert self.supervisor.pid is not None
        return self.supervisor.pid


@pytest.fixture
def watch() -> Iterator[Callable[..., Watcher]]:
    watchers: list[Watcher] = []

    def make(main: Main, config: OmniConfig = CONFIG, waits_for_release: bool = False) -> Watcher:
        watchers.append(Watcher(main, config, waits_for_release))
        return watchers[-1]

    yield make
    for watcher in watchers:
        watcher.supervisor.shutdown()
        watcher.supervisor.shutdown()
        pid = watcher.supervisor.pid
        assert pid is None or not psutil.pid_exists(pid)


def test_a_killed_process_is_noticed_at_once_and_started_again(
    watch: Callable[..., Watcher],
) -> None:
    watcher = watch(beat)
    watcher.supervisor.wait_until_ready()
    assert watcher.supervisor.state == "ready"
    for number in (1, 2):
        watcher.wait_for_start(number)
        start = time.monotonic()
        os.kill(watcher.pid, signal.SIGKILL)
        watcher.wait_for_death(number)
        assert time.monotonic() - start < CONFIG.hang_timeout / 2  # by its exit, not its silence
    watcher.wait(lambda: watcher.num_started == 3)
    assert [death.cause for death in watcher.deaths] == ["killed by somebody (SIGKILL)"] * 2
    assert all(death.is_external for death in watcher.deaths)
    deadline = time.monotonic() + 5
    while watcher.supervisor.num_restarts < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert watcher.supervisor.num_restarts == 2 and watcher.failures == []


def test_it_gives_up_with_the_cause(watch: Callable[..., Watcher]) -> None:
    def die(ready: Ready, black_box: BlackBox) -> None:
        ready.say()
        with black_box.work(["a", "b"]):
            os._exit(7)

    watcher = watch(die)
    watcher.supervisor.wait_until_ready()
    watcher.wait(lambda: bool(watcher.failures))
    assert len(watcher.deaths) == CONFIG.max_restarts + 1
    assert watcher.deaths[0] == Death("ended with exit code 7", False, ("a", "b"))
    [error] = watcher.failures
    assert "stage 7 (test) is given up: it died 4 times within 600 s" in str(error)
    assert "ended with exit code 7" in str(error)
    assert watcher.supervisor.state == "failed"


def test_deaths_long_ago_do_not_count(watch: Callable[..., Watcher]) -> None:
    watcher = watch(beat, OmniConfig(max_restarts=1, restart_window=1e-6))
    watcher.supervisor.wait_until_ready()
    for number in (1, 2, 3):
        watcher.wait_for_start(number)
        watcher.supervisor.note_answer()
        os.kill(watcher.pid, signal.SIGTERM)
    watcher.wait(lambda: watcher.num_started == 4)
    assert watcher.failures == []


def test_what_it_says_at_the_first_start_is_final(watch: Callable[..., Watcher]) -> None:
    watcher = watch(lambda ready, black_box: ready.say("there is no checkpoint"))
    with pytest.raises(ModelLoadError, match="there is no checkpoint"):
        watcher.supervisor.wait_until_ready()
    assert watcher.deaths == []


def test_a_crash_loop_at_the_start_is_given_up(watch: Callable[..., Watcher]) -> None:
    def die(ready: Ready, black_box: BlackBox) -> None:
        os.kill(os.getpid(), signal.SIGUSR2)

    watcher = watch(die)
    with pytest.raises(ModelLoadError, match=r"it died 4 times .* exit code -12"):
        watcher.supervisor.wait_until_ready()
    assert len(watcher.failures) == 1


def test_one_that_dies_once_while_it_starts_is_started_again(
    watch: Callable[..., Watcher], tmp_path: Path
) -> None:
    def die_once(ready: Ready, black_box: BlackBox) -> None:
        if not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        beat(ready, black_box)

    watcher = watch(die_once)
    watcher.supervisor.wait_until_ready()
    assert len(watcher.deaths) == 1


def test_one_that_is_stopped_while_it_starts_is_killed(
    watch: Callable[..., Watcher], tmp_path: Path
) -> None:
    def stop_once(ready: Ready, black_box: BlackBox) -> None:
        if not (tmp_path / "stopped").exists():
            (tmp_path / "stopped").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        beat(ready, black_box)

    watcher = watch(stop_once, QUICK)
    watcher.supervisor.wait_until_ready()
    assert len(watcher.deaths) == 1


def test_one_that_dies_while_its_client_connects_is_started_again(
    watch: Callable[..., Watcher], tmp_path: Path
) -> None:
    def die_once(ready: Ready, black_box: BlackBox) -> None:
        if not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            ready.say()
            os.kill(os.getpid(), signal.SIGKILL)
        beat(ready, black_box)

    watcher = watch(die_once, waits_for_release=True)
    watcher.wait_for_start(2)
    assert len(watcher.deaths) == 1


def _wait_in_a_step(ready: Ready, black_box: BlackBox) -> None:
    ready.say()
    with black_box.work(["slow"]):
        for _ in range(1000):
            black_box.beat()
            time.sleep(0.05)


def _compute_for_ever(ready: Ready, black_box: BlackBox) -> None:
    ready.say()
    with black_box.work(["busy"]):
        while True:
            black_box.beat()


def _say_nothing(ready: Ready, black_box: BlackBox) -> None:
    ready.say()
    black_box.beat()
    time.sleep(1000)


@pytest.mark.parametrize(
    ("main", "cause", "request_ids", "seconds"),
    [
        (_wait_in_a_step, "a step makes no progress", ("slow",), 1.0),
        (_compute_for_ever, "one step takes longer than step_timeout=4 s", ("busy",), 4.0),
        (_say_nothing, "no sign of life", (), 1.0),
    ],
)
def test_a_hang_is_noticed_and_shown(
    watch: Callable[..., Watcher],
    main: Main,
    cause: str,
    request_ids: tuple[str, ...],
    seconds: float,
    capfd: pytest.CaptureFixture[str],
) -> None:
    start = time.monotonic()
    watcher = watch(main, QUICK)
    watcher.wait(lambda: bool(watcher.deaths))
    assert seconds < time.monotonic() - start < seconds + 10
    death = watcher.deaths[0]
    assert death.cause.startswith(cause) and not death.is_external
    assert death.request_ids == request_ids
    assert f"in {main.__name__}" in capfd.readouterr().err


def test_a_stopped_process_is_nobodys_fault(watch: Callable[..., Watcher]) -> None:
    watcher = watch(beat, QUICK)
    watcher.supervisor.wait_until_ready()
    os.kill(watcher.pid, signal.SIGSTOP)
    watcher.wait(lambda: bool(watcher.deaths))
    assert watcher.deaths[0].is_external and "stopped" in watcher.deaths[0].cause
    watcher.wait(lambda: watcher.num_started == 2)


def _beat_with_parent(ready: Ready, black_box: BlackBox) -> None:
    end_with_parent()
    beat(ready, black_box)


def _supervise(connection: Connection) -> None:
    watcher = Watcher(_beat_with_parent, OmniConfig(hang_timeout=2.0), waits_for_release=False)
    watcher.supervisor.wait_until_ready()
    connection.send_bytes(str(watcher.pid).encode())
    time.sleep(1000)


def test_a_supervisor_that_was_stopped_too_takes_nobody_for_dead() -> None:
    """Ctrl-Z, or a container that is paused, stops all processes at once."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    supervising = CONTEXT.Process(target=_supervise, args=(theirs,))
    supervising.start()
    try:
        watched = psutil.Process(int(ours.recv_bytes()))
        processes = [psutil.Process(supervising.pid), watched]
        for process in processes:
            process.suspend()
        time.sleep(2.5)  # longer than anybody may be silent
        for process in processes:
            process.resume()
            time.sleep(0.4)  # the supervisor looks first
        assert not is_gone(watched)
    finally:
        supervising.kill()
        supervising.join()


def _sleep() -> None:
    end_with_parent()
    time.sleep(1000)


def _beat_with_child(ready: Ready, black_box: BlackBox) -> None:
    CONTEXT.Process(target=_sleep).start()
    beat(ready, black_box)


def test_a_stopped_child_of_a_process_that_idles_is_noticed(watch: Callable[..., Watcher]) -> None:
    watcher = watch(_beat_with_child, QUICK)
    watcher.supervisor.wait_until_ready()
    [child] = psutil.Process(watcher.pid).children()
    child.suspend()
    watcher.wait_for_death(1)
    assert watcher.deaths[0].is_external and "stopped" in watcher.deaths[0].cause
    watcher.wait_for_start(2)
    assert is_gone(child)


def test_a_process_that_talks_nonsense_is_killed(watch: Callable[..., Watcher]) -> None:
    watcher = watch(beat)
    watcher.supervisor.wait_until_ready()
    watcher.supervisor.condemn("it sent what cannot be read")
    watcher.wait(lambda: bool(watcher.deaths))
    assert watcher.deaths[0].cause == "it sent what cannot be read"


def test_a_slow_step_that_computes_is_left_alone(watch: Callable[..., Watcher]) -> None:
    def compute(ready: Ready, black_box: BlackBox) -> None:
        ready.say()
        end = time.monotonic() + 2.5
        with black_box.work(["slow"]):
            while time.monotonic() < end:
                black_box.beat()
        while True:
            black_box.beat()
            time.sleep(0.05)

    watcher = watch(compute, QUICK)
    watcher.supervisor.wait_until_ready()
    time.sleep(3)
    assert watcher.deaths == [] and watcher.supervisor.seconds_since_beat is not None
