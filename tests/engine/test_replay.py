"""What was accepted is answered, whatever happens to the process that works on it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import CompletionOutput, RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from tests.drawing import MakeCheckpoint
from tests.engine.conftest import MakeLLM
from tests.engine.faulty import RAISE, REFUSED, SEGFAULT, WAIT, FaultyCoreProc
from vllm_omni import DiffusionParams, OmniAsyncLLM, OmniRequest
from vllm_omni.ar.messages import ARRequest
from vllm_omni.ar.output_processor import HiddenStatesOutputProcessor
from vllm_omni.config import DiTConfig, StageConfig
from vllm_omni.engine import process_client
from vllm_omni.engine.journal import TextEntry
from vllm_omni.engine.supervised_core import SupervisedCore
from vllm_omni.errors import DeadlineExceededError, StageExecutionError
from vllm_omni.outputs import FinishReason, OmniOutput, RequestError, StepStats
from vllm_omni.request import OutputKind

Pixels = np.ndarray[Any, Any]
Run = Callable[[Coroutine[Any, Any, Any]], Any]

PARAMS = DiffusionParams(height=64, width=64, num_inference_steps=60)
LONG = 150  # steps, for who must not be done before somebody has seen the first of them
HANG_TIMEOUT = 3.0


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """A system belongs to one event loop."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def llm(checkpoint: MakeCheckpoint, run: Run) -> Iterator[OmniAsyncLLM]:
    """One stage that draws, and that dies when it is asked to."""
    stage = StageConfig(
        stage_id=1,
        engine_type="diffusion",
        model_path=str(checkpoint(0)),
        dit_config=DiTConfig(device="cpu"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_client, "OmniEngineCoreProc", FaultyCoreProc)
        llm = OmniAsyncLLM.from_vllm_config(
            stage_configs=[stage],
            mode="process",
            max_restarts=100,
            hang_timeout=HANG_TIMEOUT,
            snapshot_every=5,
        )
        yield llm

        async def shutdown() -> None:
            llm.shutdown()

        run(shutdown())


async def draw(llm: OmniAsyncLLM, seed: int, **changes: Any) -> OmniOutput:
    """The last output; progress never goes back, and no step is told twice."""
    params = replace(PARAMS, seed=seed, **changes)
    steps: list[int] = []
    async for output in llm.generate(OmniRequest(prompt=f"a cat, {seed}", params=params)):
        if not output.finished:
            steps.append(output.step)
    assert steps == sorted(set(steps))
    return output


async def draw_all(llm: OmniAsyncLLM, seeds: range, **changes: Any) -> list[Pixels]:
    answers = await asyncio.gather(*(draw(llm, seed, **changes) for seed in seeds))
    return [np.asarray(answer.images[0]) for answer in answers]


def assert_same(drawn: list[Pixels], expected: list[Pixels]) -> None:
    """In other company the last bit of a sum can be another, and a colour one of 255 brighter."""
    for one, other in zip(drawn, expected, strict=True):
        assert np.abs(one.astype(int) - other).max() <= 1


def get_pid(llm: OmniAsyncLLM) -> int:
    pid = llm.stage_health()[1].pid
    assert pid is not None
    return pid


async def wait_for_state(llm: OmniAsyncLLM, state: str, seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while llm.stage_health()[1].state != state:
            await asyncio.sleep(0.005)


def count_steps(llm: OmniAsyncLLM) -> list[int]:
    """A list to which the stage adds the steps that requests have taken."""
    counts: list[int] = []

    def note(stats: StepStats) -> None:
        counts.append(stats.num_computed_steps)

    [client] = llm.clients
    client.on_step = note
    return counts


async def reach(counts: list[int], num_steps: int) -> None:
    async with asyncio.timeout(60):
        while sum(counts) < num_steps:
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_pixels_of_a_stage_that_is_killed_are_those_of_one_that_is_not(
    llm: OmniAsyncLLM, run: Run, signum: signal.Signals
) -> None:
    async def main() -> None:
        seeds = range(8)
        before = llm.stage_health()[1]
        undisturbed = await draw_all(llm, seeds, num_inference_steps=LONG)
        counts = count_steps(llm)
        tasks = asyncio.create_task(draw_all(llm, seeds, num_inference_steps=LONG))
        await reach(counts, 8 * 22)
        os.kill(get_pid(llm), signum)
        killed = time.monotonic()
        await wait_for_state(llm, "restarting")
        # By its exit, not by its silence; told to end, it takes its leave.
        assert signum is signal.SIGTERM or time.monotonic() - killed < HANG_TIMEOUT
        await wait_for_state(llm, "ready")
        assert_same(await tasks, undisturbed)
        after = llm.stage_health()[1]
        assert after.num_restarts == before.num_restarts + 1
        assert after.num_replayed == before.num_replayed + 8
        assert after.num_refused == before.num_refused
        cause = "SIGKILL" if signum is signal.SIGKILL else "from outside"
        assert cause in after.cause and after.pid != before.pid
        # From their snapshots, not from the beginning.
        assert sum(counts) < 8 * (LONG + 15)

    run(main())


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.25])
def test_it_may_be_killed_at_any_moment_of_its_start(
    llm: OmniAsyncLLM, run: Run, seconds: float
) -> None:
    async def main() -> None:
        undisturbed = await draw_all(llm, range(2), num_inference_steps=10)
        first = get_pid(llm)
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(60):
            while llm.stage_health()[1].pid == first:
                await asyncio.sleep(0.005)
        await asyncio.sleep(seconds)
        os.kill(get_pid(llm), signal.SIGKILL)
        assert_same(await draw_all(llm, range(2), num_inference_steps=10), undisturbed)

    run(main())


def test_with_a_step_cache_it_begins_again(llm: OmniAsyncLLM, run: Run) -> None:
    """What a cache has stored is not in a snapshot; the picture is the same for all that."""

    async def main() -> None:
        changes = {"cache": "first_block", "num_inference_steps": LONG}
        undisturbed = await draw_all(llm, range(3), **changes)
        counts = count_steps(llm)
        tasks = asyncio.create_task(draw_all(llm, range(3), **changes))
        await reach(counts, 3 * 30)
        os.kill(get_pid(llm), signal.SIGKILL)
        assert_same(await tasks, undisturbed)
        assert sum(counts) > 3 * (LONG + 25)

    run(main())


@pytest.mark.parametrize("seed", [SEGFAULT, RAISE])
def test_a_request_that_kills_the_stage_twice_is_refused_and_no_other(
    llm: OmniAsyncLLM, run: Run, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        undisturbed = await draw_all(llm, range(3))
        before = llm.stage_health()[1]
        drawing = asyncio.create_task(draw_all(llm, range(3)))
        with pytest.raises(StageExecutionError, match="died twice while it worked on this"):
            await draw(llm, seed)
        assert_same(await drawing, undisturbed)
        after = llm.stage_health()[1]
        assert after.num_restarts == before.num_restarts + 2
        assert after.num_refused == before.num_refused + 1

    run(main())
    assert any("is refused" in record.message for record in caplog.records)


def test_a_step_that_waits_for_ever_is_noticed(llm: OmniAsyncLLM, run: Run) -> None:
    async def main() -> None:
        drawing = asyncio.create_task(draw_all(llm, range(2)))
        start = time.monotonic()
        waiting = asyncio.create_task(draw(llm, WAIT))
        await wait_for_state(llm, "restarting")
        assert time.monotonic() - start < HANG_TIMEOUT + 10
        assert "no progress" in llm.stage_health()[1].cause
        with pytest.raises(StageExecutionError, match="no progress"):
            await waiting
        assert len(await drawing) == 2

    run(main())


def test_a_stopped_process_is_noticed_and_no_request_is_to_blame(
    llm: OmniAsyncLLM, run: Run
) -> None:
    async def main() -> None:
        undisturbed = await draw_all(llm, range(2))
        before = llm.stage_health()[1]
        counts = count_steps(llm)
        drawing = asyncio.create_task(draw_all(llm, range(2)))
        await reach(counts, 20)
        os.kill(get_pid(llm), signal.SIGSTOP)
        stopped = time.monotonic()
        await wait_for_state(llm, "restarting")
        assert time.monotonic() - stopped < HANG_TIMEOUT + 2
        assert "stopped" in llm.stage_health()[1].cause
        assert_same(await drawing, undisturbed)
        assert llm.stage_health()[1].num_refused == before.num_refused

    run(main())


def test_a_request_that_the_stage_cannot_take_in_fails_alone(llm: OmniAsyncLLM, run: Run) -> None:
    async def main() -> None:
        before = llm.stage_health()[1].num_restarts
        drawing = asyncio.create_task(draw_all(llm, range(2)))
        with pytest.raises(StageExecutionError):
            await draw(llm, REFUSED)
        assert len(await drawing) == 2
        assert llm.stage_health()[1].num_restarts == before

    run(main())


def test_while_the_stage_restarts_requests_wait_are_aborted_and_run_out_of_time(
    llm: OmniAsyncLLM, run: Run
) -> None:
    async def main() -> None:
        counts = count_steps(llm)
        params = replace(PARAMS, seed=1, num_inference_steps=1000)
        started = OmniRequest(prompt="a cat", params=params)

        async def collect() -> OmniOutput:
            async for output in llm.generate(started):  # noqa: B007
                pass
            return output

        aborted = asyncio.create_task(collect())
        await reach(counts, 10)
        os.kill(get_pid(llm), signal.SIGKILL)
        await wait_for_state(llm, "restarting")
        late = asyncio.create_task(draw(llm, 2))
        with pytest.raises(DeadlineExceededError):
            await draw(llm, 3, deadline=0.01)
        await llm.abort(started.request_id)
        assert (await aborted).finish_reason is FinishReason.ABORT
        assert len((await late).images) == 1
        await llm.check_health()
        [client] = llm.clients
        assert not client.core.journal  # type: ignore[attr-defined]

    run(main())


def test_a_call_that_waits_for_the_next_process_ends_with_the_shutdown() -> None:
    async def main() -> None:
        core = SupervisedCore("stage 1", lambda: None, lambda: None, lambda cause: None)
        call = asyncio.create_task(core.collective_rpc_async("get_stats"))
        await asyncio.sleep(0)
        core.shutdown()
        with pytest.raises(VllmEngineDeadError):
            async with asyncio.timeout(10):
                await call

    asyncio.run(main())


class Process:
    """As much of vLLM's client as sending takes; what is named "bad" cannot be written down."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.resources = SimpleNamespace(
            input_socket=SimpleNamespace(closed=False), output_socket=SimpleNamespace(closed=False)
        )

    async def add_request_async(self, request: Any) -> None:
        if request.request_id == "bad":
            raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
        self.sent.append(request.request_id)

    async def get_output_async(self) -> None:
        await asyncio.Event().wait()

    def shutdown(self) -> None:
        return


def test_one_that_cannot_be_sent_does_not_hold_up_the_others() -> None:
    def create_entry(request_id: str) -> TextEntry:
        return TextEntry(SimpleNamespace(request_id=request_id, sampling_params=None))

    async def main() -> None:
        core = SupervisedCore("stage 0", lambda: None, lambda: None, lambda cause: None)
        for request_id in ("first", "bad", "last"):  # there is no process yet
            await core.add(create_entry(request_id))
        process: Any = Process()
        core.attach(process)
        async with asyncio.timeout(60):
            [refused] = (await core.get_output_async()).outputs
        assert refused.request_id == "bad" and "UnicodeEncodeError" in refused.stop_reason
        assert process.sent == ["first", "last"]
        with pytest.raises(UnicodeEncodeError):  # while there is one, the caller is told
            await core.add(create_entry("bad"))
        assert list(core.journal) == ["first", "last"]
        core.shutdown()

    asyncio.run(main())


def test_a_text_that_is_refused_says_why() -> None:
    completion = CompletionOutput(
        0, "", [], None, None, finish_reason="error", stop_reason="the stage died twice"
    )
    output = RequestOutput("r", "a cat", [1], None, [completion], True)
    processor = HiddenStatesOutputProcessor(None, log_stats=False)
    converted = processor.convert(ARRequest(request_id="r"), output)
    assert converted.error == RequestError("StageExecutionError", "the stage died twice")


# --- text ---

SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.0, "seed": 6, "presence_penalty": 0.5},
    {"temperature": 1.0, "seed": 7, "n": 2},
]


async def write(llm: OmniAsyncLLM, news: list[OmniOutput], **params: Any) -> list[int]:
    """The tokens of a text, from news that hold only what is new."""
    request = OmniRequest(
        prompt="a cat",
        output_format="text",
        output_kind=OutputKind.DELTA,
        sampling_params={"max_tokens": 200, "ignore_eos": True, **params},
    )
    tokens: dict[int, list[int]] = {}
    async for output in llm.generate(request):
        news.append(output)
        for completion in output.outputs:
            tokens.setdefault(completion.index, []).extend(completion.token_ids)
    return [token for _, of_one in sorted(tokens.items()) for token in of_one]


def test_streams_of_text_go_on_and_pictures_do_not_wait(
    make_llm: MakeLLM, runner: asyncio.Runner
) -> None:
    llm = make_llm("process")

    async def main() -> None:
        undisturbed = [await write(llm, [], **params) for params in SAMPLING]
        steps: list[OmniOutput] = []

        async def draw_meanwhile() -> None:
            params = DiffusionParams(height=256, width=256, num_inference_steps=400, seed=1)
            async for output in llm.generate(OmniRequest(prompt="a dog", params=params)):
                steps.append(output)

        drawing = asyncio.create_task(draw_meanwhile())
        while not steps:
            await asyncio.sleep(0.01)
        news: list[OmniOutput] = []
        begun = [asyncio.create_task(write(llm, news, **params)) for params in SAMPLING]
        unseeded = asyncio.create_task(write(llm, news, temperature=1.0))
        while len(news) < 100:
            await asyncio.sleep(0.001)
        pid = llm.stage_health()[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while llm.stage_health()[0].state == "ready":
            await asyncio.sleep(0.001)
        num_steps = len(steps)
        late = asyncio.create_task(write(llm, [], **SAMPLING[0]))
        async with asyncio.timeout(90):
            while llm.stage_health()[0].state != "ready":
                await asyncio.sleep(0.01)
        assert len(steps) > num_steps and llm.stage_health()[1].num_restarts == 0
        assert await asyncio.gather(*begun) == undisturbed
        assert len(await unseeded) == 200
        assert await late == undisturbed[0]
        await drawing
        assert len(steps[-1].images) == 1

    runner.run(main())
