"""`Omni`: a model for scripts and notebooks, without `async`."""

from __future__ import annotations

import asyncio
import queue
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from vllm_omni.config import Mode, StageConfig
from vllm_omni.engine.async_llm import OmniAsyncLLM
from vllm_omni.errors import EngineDeadError, InvalidParameterError, OmniRequestError
from vllm_omni.outputs import FinishReason, OmniOutput
from vllm_omni.params import DiffusionParams
from vllm_omni.request import OmniRequest, OutputKind

if TYPE_CHECKING:
    from vllm import SamplingParams

Progress = Callable[[int, int], None]
"""Called after every step with (steps done, steps in all) over all requests of a call."""

Message = Mapping[str, Any]
"""Of a chat, in OpenAI's form: `{"role": "user", "content": "…"}`."""


class Omni:
    """A model behind plain function calls; several threads may share it.

    Example:
        with Omni(model="demo") as omni:
            [out] = omni.generate("a red circle", DiffusionParams(seed=1))
            out.images[0].save("out.png")

    Args:
        model: "demo" or the path of a checkpoint in diffusers layout.
        mode: "embedded": all stages run in this process; "process": each in one of its own.
        seed: requests without a seed draw theirs from this one, so that a run can be repeated.
        stage_configs: instead of the stages that the checkpoint has by itself.
        vllm_config: of AR stages: a `VllmConfig`, engine arguments, or a dict of them.
        settings: as of `OmniAsyncLLM.from_pretrained`: `device`, `dtype`, `worker_processes`, …
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        mode: Mode = "embedded",
        seed: int | None = None,
        stage_configs: Sequence[StageConfig] = (),
        vllm_config: Any = None,
        **settings: Any,
    ) -> None:
        self.llm = OmniAsyncLLM.from_pretrained(
            model,
            mode=mode,
            seed=seed,
            stage_configs=stage_configs,
            vllm_config=vllm_config,
            **settings,
        )
        # A loop of its own: the caller's, if there is one as in notebooks, is busy with the caller.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="vllm-omni-loop", daemon=True
        )
        self._thread.start()

    def generate(
        self,
        prompts: str | Sequence[str],
        params: DiffusionParams | Sequence[DiffusionParams] | None = None,
        progress: Progress | None = None,
        output_format: str = "image",
    ) -> list[OmniOutput]:
        """One output per prompt, all of them batched together.

        Args:
            params: for all prompts, or one for each.
            progress: called after every step.
            output_format: what to make of each prompt; see `OmniRequest`.

        A prompt that fails gives an output with `.error`; it does not touch the others.
        """
        prompts = _as_list(prompts)
        made = [
            _make_request(prompt=prompt, params=prompt_params, output_format=output_format)
            for prompt, prompt_params in zip(prompts, _one_each(params, prompts), strict=True)
        ]
        return self._run_made(made, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
    ) -> list[OmniOutput]:
        """The answer to one chat, or to each of several; its words are in `.text`."""
        chats = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.run(
            [
                OmniRequest(
                    messages=chat,  # type: ignore[arg-type]
                    sampling_params=sampling_params,
                    output_format="text",
                    output_kind=OutputKind.FINAL_ONLY,
                )
                for chat in chats
            ]
        )

    def encode(self, prompts: str | Sequence[str]) -> list[OmniOutput]:
        """The hidden states that condition the picture of each prompt."""
        return self._run_made(
            [
                _make_request(prompt=prompt, output_format="hidden_states")
                for prompt in _as_list(prompts)
            ]
        )

    def run(
        self, requests: Sequence[OmniRequest], progress: Progress | None = None
    ) -> list[OmniOutput]:
        """The answers to any requests, all of them batched together."""
        if self._loop.is_closed():
            raise EngineDeadError("this Omni is closed: make a new one")
        # None: all have ended. The caller's thread is the one that calls `progress`.
        news: queue.SimpleQueue[OmniOutput | None] = queue.SimpleQueue()
        answers = asyncio.run_coroutine_threadsafe(self._collect(requests, news), self._loop)
        answers.add_done_callback(lambda _: news.put(None))
        done: dict[str, OmniOutput] = {}
        try:
            while (output := news.get()) is not None:
                done[output.request_id] = output
                if progress is not None and output.num_steps:
                    num_steps = sum(self._count_steps(request, done) for request in requests)
                    progress(sum(output.step for output in done.values()), num_steps)
        except BaseException:
            # Ctrl-C, say: leave nothing of this call in the engine.
            answers.cancel()
            while news.get() is not None:
                pass
            raise
        return answers.result()

    def _run_made(
        self, made: Sequence[OmniRequest | OmniOutput], progress: Progress | None = None
    ) -> list[OmniOutput]:
        """The same, where what could be no request is its own answer."""
        requests = [one for one in made if isinstance(one, OmniRequest)]
        answers = iter(self.run(requests, progress))
        return [one if isinstance(one, OmniOutput) else next(answers) for one in made]

    def collective_rpc(self, stage_id: int, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker of a stage."""
        call = self.llm.collective_rpc(stage_id, method, *args)
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def close(self) -> None:
        """Let go of the model. May be called twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._shutdown(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def _collect(
        self, requests: Sequence[OmniRequest], news: queue.SimpleQueue[OmniOutput | None]
    ) -> list[OmniOutput]:
        async def answer(request: OmniRequest) -> OmniOutput:
            output = OmniOutput(request_id=request.request_id, prompt=request.prompt)
            try:
                async for output in self.llm.generate(request):
                    news.put(output)
            except OmniRequestError as error:
                _fail(output, error)
            return output

        tasks = [asyncio.create_task(answer(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # when one has found the engine dead
                task.cancel()

    async def _shutdown(self) -> None:
        self.llm.shutdown()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*tasks, return_exceptions=True)

    def _count_steps(self, request: OmniRequest, done: Mapping[str, OmniOutput]) -> int:
        """Steps of a request, also of one that has not begun."""
        if (output := done.get(request.request_id)) is not None and output.num_steps:
            return output.num_steps
        try:
            params = self.llm.processor.complete_params(request.params)
        except OmniRequestError:  # it ends with this error
            return 0
        return (params.num_inference_steps or 0) * params.num_outputs_per_prompt


def _as_list(prompts: str | Sequence[str]) -> list[str]:
    return [prompts] if isinstance(prompts, str) else list(prompts)


def _make_request(prompt: str, **fields: Any) -> OmniRequest | OmniOutput:
    """A request, or its end where it can be none: the others of its call go on."""
    try:
        return OmniRequest(prompt=prompt, **fields)
    except OmniRequestError as error:
        output = OmniOutput(request_id=uuid.uuid4().hex, prompt=prompt)
        _fail(output, error)
        return output


def _fail(output: OmniOutput, error: OmniRequestError) -> None:
    output.error = error
    output.finished, output.finish_reason = True, FinishReason.ERROR


def _one_each(
    params: DiffusionParams | Sequence[DiffusionParams] | None, prompts: Sequence[str]
) -> Sequence[DiffusionParams]:
    if params is None or isinstance(params, DiffusionParams):
        return [params or DiffusionParams()] * len(prompts)
    if len(params) != len(prompts):
        raise InvalidParameterError(
            "params", f"{len(params)} of them", f"one, or one for each of {len(prompts)} prompts"
        )
    return params
