"""`Omni`: everything in one process, for scripts and notebooks."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import torch
from PIL import Image
from torch import Tensor

from vllm_omni.config import DiTConfig, Mode, OmniConfig
from vllm_omni.diffusion.engine_core import DiffusionEngineCore
from vllm_omni.diffusion.messages import DiffusionRequest
from vllm_omni.errors import (
    EngineDeadError,
    InvalidParameterError,
    OmniRequestError,
    StageExecutionError,
)
from vllm_omni.models.demo import find_model
from vllm_omni.models.registry import get_model_spec, load_class
from vllm_omni.outputs import EngineCoreOutput, FinishReason, OmniOutput, RequestMetrics
from vllm_omni.params import MAX_SEED, DiffusionParams

Progress = Callable[[int, int], None]
"""Called after every step with (steps done, steps in all) over all requests of a call."""


@dataclass(eq=False)
class _Child:
    """One output of a prompt: a request of its own in the engine."""

    inputs: Any
    params: DiffusionParams
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    arrival_time: float = field(default_factory=time.monotonic)
    finish_time: float = 0.0
    num_computed_steps: int = 0
    output: EngineCoreOutput | None = None  # the final one
    error: OmniRequestError | None = None


@dataclass(eq=False)
class _Parent:
    """One prompt and all outputs asked for."""

    prompt: str
    children: list[_Child] = field(default_factory=list)
    error: OmniRequestError | None = None  # refused before it reached the engine


class Omni:
    """A model in this process.

    Example:
        with Omni(model="demo") as omni:
            [out] = omni.generate("a red circle", DiffusionParams(seed=1))
            out.images[0].save("out.png")

    Args:
        model: "demo" or the path of a checkpoint in diffusers layout.
        mode: "embedded": all stages run in this process.
        seed: requests without a seed draw theirs from this one, so that a run can be repeated.
        settings: fields of `DiTConfig`, such as `device`, `dtype` or `worker_processes`.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        mode: Mode = "embedded",
        seed: int | None = None,
        **settings: Any,
    ) -> None:
        self.config = OmniConfig(model=str(model), mode=mode, seed=seed)
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)
        path = find_model(self.config.model)
        config = DiTConfig(model=str(path), **settings)
        self.input_processor = load_class(get_model_spec(path).input_processor)(path)
        self._engine_core: DiffusionEngineCore | None = DiffusionEngineCore(config)
        self._lock = threading.Lock()  # one call steps the engine at a time

    @property
    def engine_core(self) -> DiffusionEngineCore:
        if self._engine_core is None:
            raise EngineDeadError("this Omni is closed: make a new one")
        return self._engine_core

    def generate(
        self,
        prompts: str | Sequence[str],
        params: DiffusionParams | Sequence[DiffusionParams] | None = None,
        progress: Progress | None = None,
    ) -> list[OmniOutput]:
        """One output per prompt, all of them batched together.

        Args:
            params: for all prompts, or one for each.
            progress: called after every step.

        A prompt that fails gives an output with `.error`; it does not touch the others.
        """
        prompts = _as_list(prompts)
        parents = [
            _make_parent(prompt, self.input_processor.process, self._fan_out(prompt_params))
            for prompt, prompt_params in zip(prompts, _one_each(params, prompts), strict=True)
        ]
        return self._run(parents, progress)

    def encode(self, prompts: str | Sequence[str]) -> list[OmniOutput]:
        """The hidden states that condition the picture of each prompt."""
        process = self.input_processor.process_text
        parents = [
            _make_parent(prompt, process, [DiffusionParams()]) for prompt in _as_list(prompts)
        ]
        return self._run(parents, progress=None)

    def close(self) -> None:
        """Let go of the model. May be called twice."""
        with self._lock:
            if self._engine_core is not None:
                self._engine_core.shutdown()
                self._engine_core = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _fan_out(self, params: DiffusionParams) -> list[DiffusionParams]:
        """The parameters of each output of a prompt: output i is drawn with seed + i."""
        seed = self._seeds.randrange(2**32) if params.seed is None else params.seed
        return [
            replace(params, seed=(seed + index) % (MAX_SEED + 1), num_outputs_per_prompt=1)
            for index in range(params.num_outputs_per_prompt)
        ]

    def _run(self, parents: list[_Parent], progress: Progress | None) -> list[OmniOutput]:
        with self._lock:
            core = self.engine_core
            children = {child.request_id: child for p in parents for child in p.children}
            num_steps = sum(child.inputs.num_steps for child in children.values())
            try:
                for child in children.values():
                    _add_request(core, child)
                while core.has_requests():
                    news, _ = core.step()
                    for outputs in news.values():
                        for output in outputs.outputs:
                            _take(children[output.request_id], output)
                    if progress is not None:
                        done = sum(child.num_computed_steps for child in children.values())
                        progress(done, num_steps)
            except BaseException:
                # Ctrl-C, say: leave nothing of this call in the engine.
                core.abort_requests(children)
                core.step()  # which tells the workers
                raise
        return [_output(parent) for parent in parents]


def _make_parent(
    prompt: str,
    process: Callable[[str, DiffusionParams], Any],
    params: Sequence[DiffusionParams],
) -> _Parent:
    """A prompt with one child for each of `params`, or with the error that refuses it."""
    try:
        return _Parent(prompt, [_Child(process(prompt, one), one) for one in params])
    except OmniRequestError as error:
        return _Parent(prompt, error=error)


def _add_request(core: DiffusionEngineCore, child: _Child) -> None:
    try:
        core.add_request(
            DiffusionRequest(
                request_id=child.request_id,
                custom_inputs=child.inputs,
                priority=child.params.priority,
                deadline=child.params.deadline,
                arrival_time=child.arrival_time,
            )
        )
    except OmniRequestError as error:
        child.error = error


def _take(child: _Child, output: EngineCoreOutput) -> None:
    child.num_computed_steps = output.output_metadata.get("step", child.num_computed_steps)
    if not output.finished:
        return
    child.output = output
    child.finish_time = time.monotonic()
    if output.error is not None:
        child.error = output.error.to_exception()
    elif output.finish_reason is FinishReason.ABORT:
        child.error = StageExecutionError("the request was aborted")


def _output(parent: _Parent) -> OmniOutput:
    """What the user gets for a prompt: the outputs that came, and the first error, if any."""
    done = [c.output for c in parent.children if c.error is None and c.output is not None]
    errors = [parent.error, *(child.error for child in parent.children)]
    answer = OmniOutput(
        request_id=parent.children[0].request_id if parent.children else uuid.uuid4().hex,
        prompt=parent.prompt,
        finished=True,
        error=next((error for error in errors if error is not None), None),
        seeds=[child.inputs.seed for child in parent.children if child.error is None],
    )
    if not done:
        return answer
    main = [output.pooling_output for output in done if output.pooling_output is not None]
    if done[0].output_type == "image":
        answer.images = [_to_pil(image) for image in main]
        answer.latents = _stack(done, "latents")
        answer.masks = _stack(done, "mask")
    elif done[0].output_type == "latents":
        answer.latents = torch.stack(main)
    else:
        answer.hidden_states = main[0]
        answer.seeds = []
    answer.metrics = RequestMetrics(
        num_steps=sum(output.output_metadata["step"] for output in done),
        queue_time=max(output.output_metadata["queue_time"] for output in done),
        total_time=max(child.finish_time - child.arrival_time for child in parent.children),
    )
    return answer


def _stack(outputs: Sequence[EngineCoreOutput], name: str) -> Tensor | None:
    tensors = [o.additional_outputs[name] for o in outputs if name in o.additional_outputs]
    return torch.stack(tensors) if tensors else None


def _to_pil(image: Tensor) -> Image.Image:
    """[3 or 4, H, W] uint8 to a PIL image, RGB or RGBA."""
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def _as_list(prompts: str | Sequence[str]) -> list[str]:
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise InvalidParameterError("prompts", prompt, "each must be a string")
    return prompts


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
