"""`SupervisedCore`: an engine core that does not lose a request when its process dies.

To whoever uses it, it is one of vLLM's clients of an engine core that lives on: behind it, one
process follows another, and what was not answered by one is given to the next. It keeps what it was
given until it has been answered.

Seams, checked against vLLM 0.32.0: what `AsyncLLM` uses of `EngineCoreClient`; `AsyncMPClient`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from vllm_omni.engine.journal import MAX_STRIKES, DrawingEntry, Entry, TextEntry
from vllm_omni.engine.supervisor import Death
from vllm_omni.errors import EngineDeadError

logger = logging.getLogger(__name__)


class SupervisedCore:
    """Everything happens in the event loop of whoever uses it first; `attach` and the like post.

    Args:
        name: of the stage, for messages.
        on_news: called when a process has said something for the first time.
        on_answer: called when a request has been answered.
        on_garbage: what the process that runs now says cannot be read.
    """

    engine_ranks_managed = (0,)

    def __init__(
        self,
        name: str,
        on_news: Callable[[], None],
        on_answer: Callable[[], None],
        on_garbage: Callable[[str], None],
    ) -> None:
        self.name = name
        self.journal: dict[str, Entry] = {}  # in the order of arrival
        self.error: EngineDeadError | None = None  # why there is no process, and will be none
        self.num_replayed = 0
        self.num_refused = 0
        self.resources = SimpleNamespace(engine_dead=False)  # `AsyncLLM` looks here
        self._on_news, self._on_answer = on_news, on_answer
        self._on_garbage = on_garbage
        self._is_up = asyncio.Event()  # or never will be
        self._client: AsyncMPClient | None = None
        self._outputs: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()
        self._calls: set[asyncio.Future[Any]] = set()  # into the process that runs now
        self._reader: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()  # of the loop: nobody may post to none while it is set

    # --- the supervisor's side: from any thread ---

    def attach(self, client: AsyncMPClient) -> None:
        """A process works: give it everything that has not been answered."""
        self._post(partial(self._attach, client))

    def detach(self, death: Death) -> None:
        """The process is dead."""
        self._post(partial(self._detach, death))

    def fail(self, error: EngineDeadError) -> None:
        """There will be no other."""
        self._post(partial(self._fail, error))

    # --- the user's side, as vLLM's client has it ---

    async def add(self, entry: Entry) -> None:
        """Take a request; if there is no process for it now, it waits for the next."""
        self._enter()
        self.journal[entry.request_id] = entry
        await self._send_due(entry)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        await self.add(TextEntry(request))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self._enter(is_checked=False)
        known = [id for id in request_ids if id in self.journal]
        sent = [id for id in known if self.journal[id].is_sent]
        for request_id in known:
            entry = self.journal[request_id]
            if not isinstance(entry, DrawingEntry):
                del self.journal[request_id]  # nobody waits for its end
            elif entry.is_sent:
                entry.is_aborted = True  # the process will say so
            else:
                self._end(entry)
        if sent and self._client is not None:
            await self._client.abort_requests_async(sent)
        await self._send_due()

    async def get_output_async(self) -> EngineCoreOutputs:
        self._enter(is_checked=False)
        outputs = await self._outputs.get()
        if isinstance(outputs, Exception):
            raise outputs
        return outputs

    def ensure_alive(self) -> None:
        """Raise vLLM's `EngineDeadError` unless there is a process that works."""
        if self.error is not None or self._client is None:
            raise VllmEngineDeadError

    async def get_supported_tasks_async(self) -> Any:
        while True:
            try:
                return await self._call("get_supported_tasks_async")
            except VllmEngineDeadError:
                if self.error is not None:
                    raise

    def __getattr__(self, name: str) -> Any:
        """Whatever else can be called in a process."""
        if not name.endswith("_async"):
            raise AttributeError(name)
        return partial(self._call, name)

    def dp_engines_running(self) -> bool:
        return False

    def get_kv_event_sources(self) -> dict[int, Any]:
        return {}

    def shutdown(self, timeout: float | None = None) -> None:
        """Let go of the process that runs now; whoever supervises it ends it."""
        self.resources.engine_dead = True
        if self.error is None:
            self.error = EngineDeadError("the engine was shut down")
        self._close()
        self._is_up.set()  # for calls that wait for the next process

    # --- in the loop ---

    def _enter(self, is_checked: bool = True) -> None:
        """Somebody uses it, in this loop."""
        if is_checked and self.error is not None:
            raise VllmEngineDeadError
        with self._lock:
            self._loop = asyncio.get_running_loop()
        self._read_on()

    def _post(self, function: Callable[[], None]) -> None:
        with self._lock:
            loop = self._loop
            if loop is None or loop.is_closed():
                function()  # nobody uses it yet, or any more
                return
        loop.call_soon_threadsafe(function)

    def _attach(self, client: AsyncMPClient) -> None:
        if self.error is not None:
            _close(client)
            return
        self._client = client
        self._is_up.set()
        if self._loop is not None and not self._loop.is_closed():
            self._read_on()
            self._send_soon()

    def _detach(self, death: Death) -> None:
        self._close()
        held = [entry for entry in self.journal.values() if entry.is_sent]
        if not death.is_external:
            ids = None if death.request_ids is None else set(death.request_ids)
            self._blame([e for e in held if ids is None or e.request_id in ids], death)
        for entry in held:
            entry.lose()
            if entry.is_aborted and entry.request_id in self.journal:
                self._end(entry)
        if num_left := sum(entry.is_replayed for entry in self.journal.values()):
            logger.warning("%s: %d requests will be run again", self.name, num_left)

    def _blame(self, held: Sequence[Entry], death: Death) -> None:
        """Of those in the step that died, who runs alone next time, and who is refused.

        Whoever has been suspected before was the only such one in the step.
        """
        for entry in [entry for entry in held if entry.is_suspect] or held:
            entry.strike()
            if entry.num_strikes >= MAX_STRIKES:
                logger.error(
                    "request %s is refused: %s died twice with it (%s)",
                    entry.request_id,
                    self.name,
                    death.cause,
                )
                self.num_refused += 1
                reason = f"the stage died twice while it worked on this request: {death.cause}"
                self._refuse(entry, reason)

    def _fail(self, error: EngineDeadError) -> None:
        self.error = error
        self.resources.engine_dead = True
        self._close()
        self._is_up.set()
        self.journal.clear()
        self._outputs.put_nowait(VllmEngineDeadError())

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        for call in self._calls:
            if not call.done():
                call.set_exception(VllmEngineDeadError())
        self._calls.clear()
        self._is_up.clear()
        if self._client is not None:
            _close(self._client)
            self._client = None

    # --- requests ---

    def _send_soon(self) -> None:
        task = asyncio.ensure_future(self._send_due())
        task.add_done_callback(_log_failure)

    async def _send_due(self, new: Entry | None = None) -> None:
        """Give the process what it has not got: all, or one suspect at a time.

        Raises if one cannot be written down for which somebody still stands here.
        """
        for entry in self._get_due():
            client = self._client
            if client is None:
                return
            entry.is_sent = True
            self.num_replayed += entry.is_replayed
            try:
                await client.add_request_async(entry.make_request())
            except VllmEngineDeadError:
                return  # it will be lost with the process, and sent to the next
            except Exception as error:  # of whatever kind: only this request has been touched
                if entry is new:
                    del self.journal[entry.request_id]
                    raise
                self._refuse(entry, f"it cannot be sent: {type(error).__name__}: {error}")

    def _get_due(self) -> list[Entry]:
        suspects = [entry for entry in self.journal.values() if entry.is_suspect]
        if not suspects:
            return [entry for entry in self.journal.values() if not entry.is_sent]
        return [] if any(entry.is_sent for entry in suspects) else suspects[:1]

    def _refuse(self, entry: Entry, reason: str) -> None:
        del self.journal[entry.request_id]
        self._outputs.put_nowait(_make_outputs(entry.refuse(reason)))

    def _end(self, entry: Entry) -> None:
        """Say of an aborted request what its process cannot say any more."""
        del self.journal[entry.request_id]
        if isinstance(entry, DrawingEntry):
            self._outputs.put_nowait(_make_outputs(entry.end()))

    # --- news ---

    def _read_on(self) -> None:
        if self._reader is None and self._client is not None:
            self._reader = asyncio.ensure_future(self._read(self._client))

    async def _read(self, client: AsyncMPClient) -> None:
        try:
            self._take(await client.get_output_async())
            self._on_news()
            while True:
                self._take(await client.get_output_async())
        except VllmEngineDeadError:
            return  # the supervisor sees it too
        except Exception as error:  # of whatever kind: what came could not be read
            self._on_garbage(f"it sent what cannot be read: {type(error).__name__}")

    def _take(self, outputs: EngineCoreOutputs) -> None:
        kept = []
        for output in outputs.outputs:
            if (entry := self.journal.get(output.request_id)) is None:
                continue  # nobody waits for it any more
            if output.finish_reason is VllmFinishReason.ABORT and not entry.is_aborted:
                continue  # the process is being ended: the next one will take it
            if entry.take(output):
                kept.append(output)
            if output.finished:
                del self.journal[output.request_id]
                self._on_answer()
            if output.finished or entry.clear():
                self._send_soon()
        outputs.outputs = kept
        self._outputs.put_nowait(outputs)

    # --- everything else ---

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A call into the process, which ends with it; vLLM's would wait on."""
        self._enter()
        await self._is_up.wait()
        if self._client is None:
            raise VllmEngineDeadError
        call = asyncio.ensure_future(getattr(self._client, name)(*args, **kwargs))
        end: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls.add(end)
        try:
            await asyncio.wait({call, end}, return_when=asyncio.FIRST_COMPLETED)
            return call.result() if call.done() else end.result()
        finally:
            self._calls.discard(end)
            end.cancel()
            call.cancel()


def _make_outputs(output: Any) -> Any:
    from vllm_omni.engine.core_proc import OmniEngineCoreOutput, OmniEngineCoreOutputs

    is_ours = isinstance(output, OmniEngineCoreOutput)
    return (OmniEngineCoreOutputs if is_ours else EngineCoreOutputs)(outputs=[output])


def _close(client: AsyncMPClient) -> None:
    """Close its sockets, and let go of ZMQ, which vLLM leaves to the garbage collector."""
    client.shutdown()
    sockets = (client.resources.input_socket, client.resources.output_socket)
    # In another thread than the event loop's vLLM only asks for them to be closed.
    if all(socket.closed for socket in sockets):
        client.resources.ctx.term()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("requests could not be sent", exc_info=error)
