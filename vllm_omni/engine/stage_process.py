"""`StageProcess`: the process of one stage, from its start to its end.

Seams, checked against vLLM 0.32.0: `CoreEngineProcManager` apart from its `__init__`, and
`wait_for_engine_startup`.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import zmq
from vllm.config import VllmConfig
from vllm.utils.network_utils import make_zmq_socket
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.utils import (
    CoreEngine,
    CoreEngineLaunch,
    CoreEngineProcManager,
    EngineZmqAddresses,
    wait_for_engine_startup,
)
from vllm.v1.executor.abstract import Executor
from vllm.v1.utils import shutdown as shutdown_processes

from vllm_omni.config import StageConfig
from vllm_omni.engine.black_box import BlackBox
from vllm_omni.engine.core_proc import run_core_proc
from vllm_omni.engine.forkserver import start_forkserver
from vllm_omni.engine.sockets import SocketFolder
from vllm_omni.errors import EngineDeadError, ModelLoadError
from vllm_omni.run_folder import get_run_folder

_RELEASE_TIME = 200  # milliseconds


class StageProcess(CoreEngineProcManager):  # type: ignore[misc]  # Any, in a cycle of vLLM's
    """The process of one engine core. vLLM's manager, apart from what it starts and how.

    One thread starts it and waits until it is ready; `shutdown` may come from any.
    """

    def __init__(
        self,
        stage: StageConfig,
        core_class: type[EngineCoreProc],
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool = False,
    ) -> None:
        self._request_shutdown_timeout = 0
        self.manager_stopped = threading.Event()
        self.failed_proc_name: str | None = None
        self.stage = stage
        self.vllm_config = vllm_config
        context = start_forkserver()
        self.black_box = BlackBox.make(context)
        self.sockets = SocketFolder()
        self.addresses = EngineZmqAddresses(
            inputs=[self.sockets.make_address("input")],
            outputs=[self.sockets.make_address("output")],
        )
        handshake_address = self.sockets.make_address("handshake")
        # The other end is the process's alone: this one ends with it.
        self.lifeline, theirs = context.Pipe(duplex=False)
        title = f"vllm-omni {stage.engine_type}:{stage.stage_id}"
        self.process = context.Process(
            target=run_core_proc,
            name=title,
            args=(core_class, title, theirs, self.black_box, str(get_run_folder())),
            kwargs={
                "vllm_config": vllm_config,
                "local_client": True,
                "handshake_address": handshake_address,
                "executor_class": executor_class,
                "log_stats": log_stats,
            },
        )
        self.processes = [self.process]
        self._finalizer = weakref.finalize(self, shutdown_processes, self.processes)
        self._context = zmq.Context()
        self._handshake = make_zmq_socket(self._context, handshake_address, zmq.ROUTER, bind=True)
        try:
            self.process.start()
        except BaseException:
            self._finalizer.detach()
            self._close_handshake()
            self.sockets.remove()
            raise
        finally:
            theirs.close()

    @property
    def client_addresses(self) -> dict[str, Any]:
        return {
            "input_address": self.addresses.inputs[0],
            "output_address": self.addresses.outputs[0],
        }

    def wait_until_ready(self) -> None:
        """Raises `ModelLoadError` if it says why it cannot start, else `EngineDeadError`."""
        try:
            wait_for_engine_startup(
                self._handshake,
                [CoreEngine(0, True)],
                self.vllm_config.parallel_config,
                False,
                self.vllm_config.cache_config,
                CoreEngineLaunch(self, None, self.addresses, None),
            )
        except RuntimeError as error:
            self.process.join(timeout=5)
            about = (
                f"stage {self.stage.stage_id} ({self.stage.engine_type}) cannot start with "
                f"{self.stage.model_path}"
            )
            if cause := self._read_failure():
                raise ModelLoadError(f"{about}: {cause}") from error
            raise EngineDeadError(f"{about}: exit code {self.process.exitcode}") from error
        finally:
            self._close_handshake()

    def release_client(self) -> None:
        """Say in the name of a process that has died that it is ready.

        vLLM's client waits for that word while it connects, and looks at nothing else.
        """
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.IDENTITY, CoreEngine(0, True).identity)
            socket.setsockopt(zmq.LINGER, _RELEASE_TIME)
            socket.connect(self.addresses.inputs[0])
            socket.send(b"")

    def shutdown(self, timeout: float | None = None) -> None:
        """May be called twice."""
        super().shutdown(timeout)
        self.sockets.remove()

    def _read_failure(self) -> str:
        try:
            return self.lifeline.recv_bytes().decode() if self.lifeline.poll() else ""
        except EOFError:  # not a word
            return ""

    def _close_handshake(self) -> None:
        self._handshake.close(linger=0)
        self._context.term()
