"""Bytes that are no message: every decoder refuses them, and nobody dies of them."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from multiprocessing import Pipe
from typing import Any

import msgspec
import pytest
import torch
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.drawing import MakeCheckpoint
from vllm_omni.config import DiTConfig
from vllm_omni.diffusion.executor import MultiProcDiffusionExecutor
from vllm_omni.diffusion.messages import (
    DiffusionModelRunnerOutput,
    DiffusionRequest,
    DiffusionSchedulerOutput,
    NewRequestData,
    RequestResult,
)
from vllm_omni.diffusion.worker import WorkerCall, WorkerReply
from vllm_omni.engine.core_proc import OmniEngineCoreOutputs, to_wire
from vllm_omni.errors import EngineDeadError
from vllm_omni.models.qwen_image.inputs import QwenImageCustomInputs
from vllm_omni.outputs import EngineCoreOutput, FinishReason, RequestError
from vllm_omni.serial import MessageDecoder, encode

NUM_FRAMES = 10_000  # of each decoder
MARK = "this was run"


class Canary:
    """A pickle that raises where it is read."""

    def __reduce__(self) -> Any:
        return exec, (f"raise SystemExit({MARK!r})",)


def make_inputs() -> QwenImageCustomInputs:
    return QwenImageCustomInputs(
        prompt_embeds=torch.arange(32.0).view(4, 8), height=64, width=64, num_inference_steps=2
    )


def make_call() -> WorkerCall[Any]:
    step = DiffusionSchedulerOutput(
        scheduled_new_reqs=[NewRequestData("a", make_inputs())], num_scheduled_steps={"a": 1}
    )
    return WorkerCall(method="execute_model", scheduler_output=step)


def make_reply() -> WorkerReply:
    result = RequestResult(torch.zeros(3, 4, 4, dtype=torch.uint8), {"mask": torch.ones(4, 4)})
    output = DiffusionModelRunnerOutput(
        num_computed_steps={"a": 2}, results={"a": result}, errors={"b": RequestError("E", "no")}
    )
    return WorkerReply(model_output=output)


MESSAGES: dict[str, tuple[Any, Any]] = {
    "request": (
        DiffusionRequest[QwenImageCustomInputs],
        DiffusionRequest(request_id="a", custom_inputs=make_inputs()),
    ),
    "call": (WorkerCall[QwenImageCustomInputs], make_call()),
    "reply": (WorkerReply, make_reply()),
}


def make_frames(good: bytes, num_frames: int, seed: int) -> Iterator[bytes]:
    """Noise, pickles, and good messages that were cut, changed, doubled or grown."""
    rng = random.Random(seed)
    pickled = pickle.dumps({"canary": Canary()})
    for index in range(num_frames):
        start, stop = sorted(rng.randrange(len(good) + 1) for _ in range(2))
        changed = bytearray(good)
        for _ in range(rng.randint(1, 6)):
            changed[rng.randrange(len(good))] = rng.randrange(256)
        yield (
            rng.randbytes(rng.randrange(300)),
            bytes(changed),
            good[:start] + good[stop:],
            good[:stop] + good[start:],
            good[:start] + rng.randbytes(8) + good[start:],
            good[:start] + pickled + good[start:],
            bytes(changed),
            pickled[rng.randrange(3) :],
        )[index % 8]


@pytest.mark.parametrize("kind", MESSAGES)
def test_frames_are_read_or_refused(kind: str) -> None:
    message_type, message = MESSAGES[kind]
    decoder: MessageDecoder[Any] = MessageDecoder(message_type)
    good = encode(message)
    assert encode(decoder.decode(good)) == good
    num_read = 0
    for frame in make_frames(good, NUM_FRAMES, seed=0):
        try:
            decoder.decode(frame)
            num_read += 1
        except msgspec.DecodeError:
            continue
    assert 0 < num_read < NUM_FRAMES / 2  # a changed number is a number


def test_outputs_of_a_stage_are_read_or_refused() -> None:
    """vLLM's decoder: refused is whatever is raised, and nothing is run."""
    output = EngineCoreOutput(
        request_id="a",
        finish_reason=FinishReason.STOP,
        pooling_output=torch.zeros(3, 4, 4, dtype=torch.uint8),
        output_type="image",
    )
    frames = MsgpackEncoder().encode(OmniEngineCoreOutputs(outputs=[to_wire(output)]))
    decoder = MsgpackDecoder(OmniEngineCoreOutputs)
    num_refused = 0
    for frame in make_frames(bytes(frames[0]), NUM_FRAMES, seed=1):
        try:
            decoder.decode([frame, *frames[1:]])
        except Exception:
            num_refused += 1
    assert num_refused > NUM_FRAMES / 2


@pytest.mark.parametrize("code", [1, 2, 3, 4])
def test_vllm_does_not_unpickle(code: int) -> None:
    data = msgspec.msgpack.encode(msgspec.msgpack.Ext(code, pickle.dumps(Canary())))
    decoder = MsgpackDecoder()
    if code == 3:  # bytes as they are
        assert bytes(decoder.decode(data)).startswith(b"\x80")
    else:
        with pytest.raises(NotImplementedError, match="not supported"):
            decoder.decode(data)


def is_call(frame: bytes) -> bool:
    try:
        MessageDecoder(WorkerCall[QwenImageCustomInputs]).decode(frame)
    except msgspec.DecodeError:
        return False
    return True


def test_a_worker_and_its_executor_survive_what_they_cannot_read(
    checkpoint: MakeCheckpoint,
) -> None:
    config = DiTConfig(model=str(checkpoint(0)), device="cpu", worker_processes=1)
    executor = MultiProcDiffusionExecutor(config)
    try:
        executor.wait_until_ready()
        [worker] = executor.workers
        frames = list(make_frames(encode(make_call()), 60, seed=2))
        refused = [frame for frame in frames if not is_call(frame)]
        assert len(refused) > 30
        for frame in (*refused, b"", b"\xc1" * 2**26):
            worker.connection.send_bytes(frame)
            assert "cannot be read" in str(worker.receive().error)
        assert executor.collective_rpc("get_stats")[0]["num_requests"] == 0

        # The other way round: a worker that cannot be understood is ended.
        pipe, ours = worker.connection, Pipe()
        worker.connection = ours[0]
        ours[1].send_bytes(pickle.dumps(Canary()))
        with pytest.raises(EngineDeadError):
            worker.receive()
        assert not worker.process.is_alive()
        for connection in (pipe, ours[1]):
            connection.close()
    finally:
        executor.shutdown()
