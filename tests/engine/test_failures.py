"""What goes wrong in a stage: the documented error, with its cause, in both modes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.drawing import MakeCheckpoint
from tests.ending import is_gone
from tests.engine.conftest import MakeLLM
from vllm_omni import DiffusionParams, OmniAsyncLLM, OmniRequest, OutputMode
from vllm_omni.config import DiTCacheConfig, DiTConfig, StageConfig
from vllm_omni.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    InvalidParameterError,
    ModelLoadError,
    OmniRequestError,
    StageExecutionError,
)
from vllm_omni.outputs import OmniOutput

MODES = pytest.mark.parametrize("mode", ["embedded", "process"])
SMALL = DiffusionParams(
    height=64, width=64, num_inference_steps=3, seed=1, output_mode=OutputMode.LATENTS
)
LARGE = replace(SMALL, height=512, width=512)


async def answer(llm: OmniAsyncLLM, **fields: Any) -> OmniOutput:
    async for output in llm.generate(OmniRequest(prompt="a cat", **fields)):  # noqa: B007
        pass
    return output


def create_drawing_stage(model: Path, **settings: Any) -> StageConfig:
    """A diffusion stage that encodes prompts itself: the whole system in one stage."""
    return StageConfig(
        stage_id=1,
        engine_type="diffusion",
        model_path=str(model),
        dit_config=DiTConfig(device="cpu", **settings),
    )


@MODES
def test_a_stage_that_fails_in_its_work_fails_one_request(
    checkpoint: MakeCheckpoint, mode: Any
) -> None:
    stage = create_drawing_stage(checkpoint(0), cache_config=DiTCacheConfig(max_cache_size=100_000))

    async def main() -> None:
        llm = OmniAsyncLLM.from_vllm_config(stage_configs=[stage], mode=mode)
        try:
            [failed, drawn] = await asyncio.gather(
                answer(llm, params=LARGE), answer(llm, params=SMALL), return_exceptions=True
            )
            assert isinstance(failed, StageExecutionError)
            assert "CacheAllocationError" in str(failed) and "max_cache_size=100000" in str(failed)
            assert isinstance(drawn, OmniOutput) and drawn.latents is not None
            assert (await answer(llm, params=SMALL)).latents is not None
            await llm.check_health()
            async with asyncio.timeout(10):  # the worker lets go in its next step
                while (await llm.collective_rpc(1, "get_stats"))[0]["num_requests"]:
                    await asyncio.sleep(0.01)
            with pytest.raises(EngineError, match="unknown method 'explode'"):
                await llm.collective_rpc(1, "explode")
        finally:
            llm.shutdown()

    asyncio.run(main())


def swap_tokenizer(model: Path) -> None:
    """For one that writes the same texts with more tokens: every stage loads it."""
    path = model / "tokenizer" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["merges"] = []
    path.write_text(json.dumps(tokenizer))


@MODES
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: shutil.rmtree(path / "text_encoder"), "text_encoder/config.json"),
        (lambda path: (path / "text_encoder" / "config.json").write_text("{"), "(?i)json"),
        (
            lambda path: (path / "text_encoder" / "model.safetensors").write_bytes(b"nothing"),
            "(?i)safetensors|header",
        ),
        (lambda path: (path / "vae" / "config.json").unlink(), "vae"),
        (
            lambda path: next((path / "transformer").glob("*.safetensors")).write_bytes(b"no"),
            "transformer",
        ),
        (lambda path: (path / "model_index.json").unlink(), "model_index.json"),
        (swap_tokenizer, "is not this model's: the template has"),
    ],
    ids=[
        "no encoder",
        "encoder config",
        "encoder weights",
        "no vae",
        "weights",
        "no index",
        "another tokenizer",
    ],
)
def test_a_broken_checkpoint_says_what_is_broken(
    checkpoint: MakeCheckpoint,
    tmp_path: Path,
    mode: Any,
    damage: Callable[[Path], Any],
    message: str,
) -> None:
    model = shutil.copytree(checkpoint(0), tmp_path / "model")
    damage(model)
    children = set(psutil.Process().children(recursive=True))
    with pytest.raises(ModelLoadError, match=message):
        OmniAsyncLLM.from_pretrained(str(model), mode=mode, device="cpu")
    # Nothing is left running; the server that processes are forked from stays.
    started = set(psutil.Process().children(recursive=True)) - children
    running = [process for process in started if not is_gone(process)]
    assert [process for process in running if process.name().startswith("vllm-omni")] == []


def test_processes_have_names_and_end_with_their_parent(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Also one that is stopped, and so cannot see that its parent is gone; no file stays."""
    files = tmp_path / "files"  # a path longer than a socket's may be
    files.mkdir()
    script = tmp_path / "parent.py"
    script.write_text(
        "import time\n"
        "from vllm_omni import OmniAsyncLLM\n"
        "if __name__ == '__main__':\n"
        f"    llm = OmniAsyncLLM.from_pretrained({str(checkpoint(0))!r}, mode='process')\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(files)},
    ) as parent:
        assert parent.stdout is not None
        while "ready" not in parent.stdout.readline():
            assert parent.poll() is None
        children = psutil.Process(parent.pid).children(recursive=True)
        stages = {
            child.cmdline()[0]: child
            for child in children
            if child.cmdline()[0].startswith("vllm-omni")
        }
        assert sorted(stages) == ["vllm-omni ar:0", "vllm-omni diffusion:1"]
        stages["vllm-omni diffusion:1"].suspend()
        os.kill(parent.pid, signal.SIGKILL)
        killed = time.monotonic()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    while list(files.iterdir()) and time.monotonic() - killed < 10:
        time.sleep(0.02)
    assert list(files.iterdir()) == []


@pytest.mark.parametrize("stage_id", [0, 1])
def test_a_stage_that_may_not_be_restarted_ends_its_requests_and_no_others(
    checkpoint: MakeCheckpoint, stage_id: int
) -> None:
    async def main() -> None:
        llm = OmniAsyncLLM.from_pretrained(
            str(checkpoint(0)), mode="process", device="cpu", max_restarts=0
        )
        try:
            fields: list[dict[str, Any]] = [
                {
                    "output_format": "text",
                    "sampling_params": {"max_tokens": 2000, "ignore_eos": True},
                },
                {"params": replace(LARGE, num_inference_steps=500)},
            ]
            async with aclosing(
                llm.generate(OmniRequest(prompt="a cat", **fields[stage_id]))
            ) as stream:
                await anext(stream)
                pid = llm.stage_health()[stage_id].pid
                assert pid is not None and llm.failure is None
                os.kill(pid, signal.SIGKILL)
                start = time.monotonic()
                given_up = rf"stage {stage_id} .* is given up: .* killed by somebody \(SIGKILL\)"
                with pytest.raises(EngineDeadError, match=given_up):
                    async for _ in stream:
                        pass
                assert time.monotonic() - start < 5
            assert llm.stage_health()[stage_id].state == "failed"
            async with asyncio.timeout(5):
                assert str(await llm.wait_until_failed()) == str(llm.failure)
            with pytest.raises(EngineDeadError):
                await llm.check_health()
            with pytest.raises(EngineDeadError):
                await llm.collective_rpc(stage_id, "get_stats")
            with pytest.raises(EngineDeadError):
                await answer(llm, **fields[stage_id])
            if stage_id == 1:  # text does not need the stage that is gone
                text = await answer(
                    llm, output_format="text", sampling_params={"max_tokens": 3, "ignore_eos": True}
                )
                assert len(text.outputs[0].token_ids) == 3
        finally:
            llm.shutdown()

    asyncio.run(main())


def test_text_goes_on_after_what_vllm_cannot_read_or_write(
    make_llm: MakeLLM, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm("process")
    client: Any = llm.clients[0]
    text = {"output_format": "text", "sampling_params": {"max_tokens": 3, "ignore_eos": True}}

    def fail(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("a mistake in vLLM")

    async def main() -> None:
        await answer(llm, **text)  # vLLM makes what is to fail with the first request
        monkeypatch.setattr(client.llm.output_processor, "process_outputs", fail)
        with pytest.raises(StageExecutionError, match="a mistake in vLLM"):
            await answer(llm, **text)
        with pytest.raises(InvalidParameterError, match="not serializable"):
            await answer(llm, output_format="text", sampling_params={"extra_args": {"x": object()}})
        assert len((await answer(llm, **text)).outputs[0].token_ids) == 3
        assert not client.core.journal and not client.llm.output_processor.request_states

    runner.run(main())


@MODES
def test_after_the_shutdown(checkpoint: MakeCheckpoint, mode: Any) -> None:
    async def main() -> None:
        llm = OmniAsyncLLM.from_vllm_config(
            stage_configs=[create_drawing_stage(checkpoint(0))], mode=mode
        )
        task = asyncio.create_task(answer(llm, params=replace(LARGE, num_inference_steps=500)))
        await asyncio.sleep(0.5)
        llm.shutdown()
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await task
        with pytest.raises(EngineDeadError, match="shut down"):
            await answer(llm, params=SMALL)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mode": "cloud"}, ConfigError, "one of embedded, process"),
        ({"colour": "red"}, TypeError, "colour"),
        ({"vllm_config": {"max_num_seq": 3}}, ConfigError, "max_num_seq"),
        ({"vllm_config": {"model": "mine"}}, ConfigError, "the stage sets these itself"),
        ({"vllm_config": 3}, ConfigError, "a VllmConfig"),
        ({"policy": "random"}, ConfigError, "one of fcfs"),
    ],
)
def test_wrong_settings(
    checkpoint: MakeCheckpoint, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        OmniAsyncLLM.from_pretrained(str(checkpoint(0)), **arguments)


def test_no_stage_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one stage"):
        OmniAsyncLLM.from_vllm_config(stage_configs=[])


def test_what_is_not_a_request_is_refused(embedded_llm: OmniAsyncLLM) -> None:
    async def main() -> None:
        with pytest.raises(OmniRequestError, match="an OmniRequest"):
            await anext(embedded_llm.generate("a cat"))  # type: ignore[arg-type]

    asyncio.run(main())
