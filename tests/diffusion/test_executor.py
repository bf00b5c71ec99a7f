"""Worker processes: how requests are spread, and what a death does."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.drawing import (
    Case,
    MakeCheckpoint,
    MakeEngineCore,
    inputs_of,
    latents_of,
    load_tokenizer,
    run_engine,
)
from tests.ending import wait_until_gone
from vllm_omni.config import DiTConfig
from vllm_omni.diffusion.engine_core import DiffusionEngineCore
from vllm_omni.diffusion.executor import MultiProcDiffusionExecutor, UniProcDiffusionExecutor
from vllm_omni.diffusion.messages import DiffusionRequest, DiffusionSchedulerOutput
from vllm_omni.errors import EngineDeadError, EngineError, ModelLoadError
from vllm_omni.outputs import EngineCoreOutput


@pytest.fixture
def core(checkpoint: MakeCheckpoint) -> Iterator[DiffusionEngineCore]:
    core = DiffusionEngineCore(
        DiTConfig(model=str(checkpoint(0)), device="cpu", worker_processes=2)
    )
    yield core
    core.shutdown()


def workers_of(core: DiffusionEngineCore) -> MultiProcDiffusionExecutor:
    assert isinstance(core.executor, MultiProcDiffusionExecutor)
    return core.executor


def test_a_death_costs_only_the_requests_on_that_worker(core: DiffusionEngineCore) -> None:
    executor = workers_of(core)
    tokenizer = load_tokenizer(core)
    inputs = [inputs_of(Case(f"cat {i}", 64, 64, 6, None, i), tokenizer) for i in range(4)]
    expected = run_engine(core, inputs)

    for index, one in enumerate(inputs):
        core.add_request(DiffusionRequest(request_id=str(index), custom_inputs=one))
    core.step()
    assert [len(worker.request_tokens) for worker in executor.workers] == [2, 2]
    victim = executor.workers[0]
    assert psutil.Process(victim.process.pid).cmdline()[0] == "vllm-omni diffusion:1 worker 0"
    lost = set(victim.request_tokens)
    victim.process.kill()

    finals: dict[str, EngineCoreOutput] = {}
    while core.has_requests():
        news, _ = core.step()
        finals |= {o.request_id: o for o in news[0].outputs if o.finished} if news else {}
    assert set(finals) == {"0", "1", "2", "3"}
    for request_id, output in finals.items():
        if request_id in lost:
            assert output.error is not None
            assert "diffusion worker 0 ended with exit code -9" in output.error.message
        else:
            assert latents_of(output).equal(latents_of(expected[int(request_id)]))

    # The rest goes on; without any worker the engine says so.
    assert run_engine(core, inputs[:1])[0].error is None
    executor.workers[0].process.kill()
    assert run_engine(core, inputs[:1])[0].error is not None
    with pytest.raises(EngineDeadError, match="no diffusion worker is left"):
        run_engine(core, inputs[:1])


def test_a_call_that_meets_a_dead_worker_leaves_no_reply_behind(
    core: DiffusionEngineCore,
) -> None:
    executor = workers_of(core)
    inputs = inputs_of(Case("cat", 64, 64, 2, None, 1), load_tokenizer(core))
    [expected] = run_engine(core, [inputs])
    executor.workers[0].process.kill()
    with pytest.raises(EngineDeadError, match="diffusion worker 0 ended with exit code -9"):
        executor.collective_rpc("get_stats")
    outputs = run_engine(core, [inputs, inputs])
    assert [output.error is None for output in outputs] == [False, True]
    assert latents_of(outputs[1]).equal(latents_of(expected))


def test_the_memory_of_workers_counts_that_have_nothing_to_do(core: DiffusionEngineCore) -> None:
    executor = workers_of(core)
    for worker in executor.workers:
        worker.max_num_tokens = 100
    inputs = inputs_of(Case("cat", 64, 64, 2, None, 1), load_tokenizer(core))
    core.add_request(DiffusionRequest(request_id="a", custom_inputs=inputs))
    output = executor.execute_model(core.scheduler.schedule())
    assert output.max_num_tokens is None  # the one that stepped does not know
    executor.workers[0].max_num_tokens = 50
    assert executor.execute_model(DiffusionSchedulerOutput()).max_num_tokens == 150


def test_workers_end_with_the_engine(core: DiffusionEngineCore) -> None:
    processes = [worker.process for worker in workers_of(core).workers]
    core.shutdown()
    assert [process.exitcode for process in processes] == [0, 0]
    core.shutdown()


def test_workers_end_with_a_killed_parent(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import time
        from vllm_omni.config import DiTConfig
        from vllm_omni.diffusion.executor import MultiProcDiffusionExecutor

        if __name__ == "__main__":
            config = DiTConfig(model={str(checkpoint(0))!r}, device="cpu", worker_processes=1)
            executor = MultiProcDiffusionExecutor(config)
            executor.wait_until_ready()
            print(executor.workers[0].process.pid, flush=True)
            time.sleep(600)
        """)
    )
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
    wait_until_gone(worker)


def test_a_worker_that_cannot_start(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    subprocess.run(["cp", "-r", checkpoint(0), broken], check=True)
    weights = broken / "vae" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match=r"vae/diffusion_pytorch_model\.safetensors is broken"):
        DiffusionEngineCore(DiTConfig(model=str(broken), device="cpu", worker_processes=1))
    with pytest.raises(ModelLoadError, match=r"vae/diffusion_pytorch_model\.safetensors is broken"):
        DiffusionEngineCore(DiTConfig(model=str(broken), device="cpu"))


def test_sleep_and_wake(engine_core: MakeEngineCore) -> None:
    core = engine_core(0)
    inputs = [inputs_of(Case("cat", 64, 64, 2, 3.0, 1), load_tokenizer(core))] * 2
    before = run_engine(core, inputs)
    for level in (1, 2):
        core.executor.collective_rpc("sleep", level)
        [asleep, _] = run_engine(core, inputs)
        core.executor.collective_rpc("wake")
        assert asleep.error is not None
        assert "call load() or wake() first" in asleep.error.message
        for output, expected in zip(run_engine(core, inputs), before, strict=True):
            assert latents_of(output).equal(latents_of(expected))


def test_weights_are_given_back_at_the_end(checkpoint: MakeCheckpoint) -> None:
    core = DiffusionEngineCore(DiTConfig(model=str(checkpoint(0)), device="cpu"))
    run_engine(core, [inputs_of(Case("cat", 64, 64, 2, 3.0, 1), load_tokenizer(core))])
    assert isinstance(core.executor, UniProcDiffusionExecutor)
    pipeline = core.executor.worker.pipeline_manager
    held = [weakref.ref(module) for module in (pipeline.transformer, pipeline.vae)]
    core.shutdown()
    core.shutdown()
    gc.collect()
    assert [module() for module in held] == [None, None]


def test_only_some_methods_may_be_called(engine_core: MakeEngineCore) -> None:
    with pytest.raises(EngineError, match="unknown method '__init__': one of sleep, wake"):
        engine_core(0).executor.collective_rpc("__init__")
