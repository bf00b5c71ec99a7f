"""`CrossEngineCoordinator`: the way of a request from stage to stage.

A way is a list of hops; a hop is a stage and what it is to make. A picture from a prompt is
(AR, hidden_states), (diffusion, image). With "text+image" the AR stage is there twice: first it
writes the text, then it encodes what it wrote.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from vllm_omni.engine.output_processor import MultimodalOutputProcessor, to_pil
from vllm_omni.engine.processor import OmniProcessor, ProcessedInput
from vllm_omni.engine.prompt_cache import PromptCache
from vllm_omni.engine.stage_client import StageClient, notify
from vllm_omni.engine.timeline import TimelineRecorder
from vllm_omni.errors import InvalidParameterError, ModalityNotSupportedError, OmniRequestError
from vllm_omni.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    OmniOutput,
    RequestMetrics,
)
from vllm_omni.params import MAX_SEED, DiffusionParams, OutputMode
from vllm_omni.request import OmniRequest, OutputKind
from vllm_omni.timeline import RequestTimeline


@dataclass(frozen=True)
class Hop:
    """A stage, and what it is to make."""

    client: StageClient
    modality: str


@dataclass(eq=False)
class Walk:
    """A request on its way."""

    request: OmniRequest
    inputs: ProcessedInput
    params: DiffusionParams
    recorder: TimelineRecorder
    is_text_shown: bool = False
    arrival_time: float = field(default_factory=time.monotonic)
    embeds: list[Tensor] = field(default_factory=list)  # of the prompt, and of the negative one
    text: str = ""  # that was written for the picture
    parent: ParentRequest | None = None
    results: list[EngineCoreOutput] = field(default_factory=list)  # what the answer is made of
    held: tuple[StageClient, list[str]] | None = None  # the requests it has in a stage now
    is_aborted: bool = False

    @property
    def expires_at(self) -> float | None:
        deadline = self.params.deadline
        return None if deadline is None else self.arrival_time + deadline


class ParentRequest:
    """One prompt with several outputs: a child request for each, and one answer from all."""

    def __init__(self, request_id: str, params: DiffusionParams) -> None:
        assert params.seed is not None
        num_children = params.num_outputs_per_prompt
        self.child_ids = (
            [request_id]
            if num_children == 1
            else [f"{index}_{request_id}" for index in range(num_children)]
        )
        # Output i is drawn with seed + i, so that each can be made again alone.
        self.child_params = {
            child_id: replace(
                params, seed=(params.seed + index) % (MAX_SEED + 1), num_outputs_per_prompt=1
            )
            for index, child_id in enumerate(self.child_ids)
        }
        self._steps = dict.fromkeys(self.child_ids, 0)
        self._finals: dict[str, EngineCoreOutput] = {}
        self.queue_time = 0.0

    def take(self, output: EngineCoreOutput) -> None:
        """Note the news of a child."""
        self._steps[output.request_id] = output.output_metadata.get(
            "step", self._steps[output.request_id]
        )
        self.queue_time = max(self.queue_time, output.output_metadata.get("queue_time", 0.0))
        if output.finished:
            self._finals[output.request_id] = output

    @property
    def step(self) -> int:
        return sum(self._steps.values())

    def count(self, name: str) -> int:
        """A number of all children that have ended, summed up."""
        return sum(output.output_metadata.get(name, 0) for output in self._finals.values())

    @property
    def num_steps(self) -> int:
        return sum(params.num_inference_steps or 0 for params in self.child_params.values())

    @property
    def outputs(self) -> list[EngineCoreOutput]:
        """Of the children that came through, in the order of their seeds."""
        finals = [self._finals[child_id] for child_id in self.child_ids if child_id in self._finals]
        return [output for output in finals if output.finish_reason is FinishReason.STOP]

    @property
    def seeds(self) -> list[int]:
        params = [self.child_params[output.request_id] for output in self.outputs]
        return [one.seed for one in params if one.seed is not None]

    @property
    def error(self) -> OmniRequestError | None:
        """The first that went wrong."""
        errors = [output.error for output in self._finals.values() if output.error is not None]
        return errors[0].to_exception() if errors else None


class CrossEngineCoordinator:
    """Walks requests through the stages; one request id all the way."""

    def __init__(
        self,
        clients: Sequence[StageClient],
        processor: OmniProcessor,
        output_processor: MultimodalOutputProcessor,
        prompt_cache_bytes: int = 0,
    ) -> None:
        self.clients = {client.stage.stage_id: client for client in clients}
        self.processor = processor
        self.output_processor = output_processor
        self.prompt_cache = PromptCache(prompt_cache_bytes)
        # Called once for each request, however it ends, before its last output is given.
        self.on_finished: Callable[[RequestTimeline], None] | None = None
        self._walks: dict[str, Walk] = {}

    @property
    def num_requests(self) -> int:
        """Requests on their way."""
        return len(self._walks)

    async def generate(self, request: OmniRequest) -> AsyncGenerator[OmniOutput, None]:
        """Everything there is to say of a request; the last output, and no other, is finished.

        Raises an `OmniRequestError` if nothing of what was asked for can be given.
        """
        if request.request_id in self._walks:
            raise InvalidParameterError("request_id", request.request_id, "one that is not in use")
        recorder = TimelineRecorder(
            request.request_id, request.output_format, arrival_time=request.arrival_time
        )
        try:
            walk = self._start(request, recorder)
            hops = self.plan(request, walk.inputs)
            self._walks[request.request_id] = walk
            for hop in hops:
                if walk.is_aborted:
                    break
                async with aclosing(self._take_hop(hop, walk)) as outputs:
                    async for output in outputs:
                        yield output
            answer = self._finish(walk)
            answer.timeline = recorder.finish(answer)
            notify(self.on_finished, answer.timeline)
            yield answer
        except BaseException as error:
            if not recorder.is_finished:
                notify(self.on_finished, recorder.fail(error))
            raise
        finally:
            self._walks.pop(request.request_id, None)

    async def generate_image_async(self, request: OmniRequest) -> OmniOutput:
        """The answer alone."""
        async for output in self.generate(request):  # noqa: B007
            pass
        return output

    async def abort(self, request_id: str) -> None:
        """End a request wherever it is; its stream ends with an output that says so."""
        if (walk := self._walks.get(request_id)) is None:
            return
        walk.is_aborted = True
        if walk.held is not None:
            client, request_ids = walk.held
            await client.abort(request_ids)

    def plan(self, request: OmniRequest, inputs: ProcessedInput) -> list[Hop]:
        """The hops that lead to what the request asks for."""
        clients = self._get_clients(request)
        made = sorted({m for c in clients for m in c.stage.output_modalities})
        formats = made + (["text+image"] if {"text", "image"} <= set(made) else [])
        if request.output_format not in formats:
            raise ModalityNotSupportedError(
                f"output_format={request.output_format!r} is not supported: "
                f"one of {', '.join(formats)}"
            )
        *before, target = request.output_format.split("+")
        makers = [i for i, c in enumerate(clients) if target in c.stage.output_modalities]
        way = clients[: makers[0] + 1]
        hops = [Hop(client, _connect(client, after)) for client, after in pairwise(way)]
        hops.append(Hop(way[-1], target))
        if before and all(hop.modality != "text" for hop in hops):
            hops.insert(0, Hop(hops[0].client, "text"))
        _check_inputs(hops, inputs)
        return hops

    def _get_clients(self, request: OmniRequest) -> list[StageClient]:
        """The stages that a request names, or all."""
        stage_ids = [stage.stage_id for stage in request.stage_configs] or list(self.clients)
        if unknown := sorted(set(stage_ids) - set(self.clients)):
            raise InvalidParameterError(
                "stage_configs", unknown, f"stages that run here: {sorted(self.clients)}"
            )
        return [self.clients[stage_id] for stage_id in sorted(set(stage_ids))]

    def _start(self, request: OmniRequest, recorder: TimelineRecorder) -> Walk:
        inputs = self.processor.process_input(request)
        params = request.params
        is_drawn = request.output_format.split("+")[-1] in ("image", "latents")
        if is_drawn:
            if request.output_format == "latents":
                params = replace(params, output_mode=OutputMode.LATENTS)
            params = self.processor.complete_params(params)
        walk = Walk(
            request, inputs, params, recorder, is_text_shown="text" in request.output_format
        )
        if request.arrival_time is not None:
            walk.arrival_time = request.arrival_time
        return walk

    async def _take_hop(self, hop: Hop, walk: Walk) -> AsyncGenerator[OmniOutput, None]:
        requests = self._make_requests(hop, walk)
        request_ids = [request.request_id for request in requests]
        walk.held = (hop.client, request_ids)
        walk.recorder.begin_hop(hop.client.stage, hop.modality, request_ids)
        finals: list[EngineCoreOutput] = []
        async with aclosing(self._get_outputs(hop, requests, walk.expires_at)) as outputs:
            async for output in outputs:
                walk.recorder.take(output)
                if output.finished:
                    finals.append(output)
                elif walk.is_aborted:  # before the stage had the request, so that it knew of none
                    await hop.client.abort([output.request_id])
                if (news := self._process_news(hop, walk, output)) is not None:
                    yield news
        walk.held = None
        walk.recorder.end_hop()
        if any(output.finish_reason is FinishReason.ABORT for output in finals):
            walk.is_aborted = True
        self._take_results(hop, walk, finals)

    def _get_outputs(
        self, hop: Hop, requests: Sequence[Any], expires_at: float | None
    ) -> AsyncGenerator[EngineCoreOutput, None]:
        if hop.modality == "hidden_states" and hop.client.stage.engine_type == "ar":
            return self.prompt_cache.outputs(hop.client, requests, expires_at)
        return hop.client.outputs(requests, expires_at)

    def _make_requests(self, hop: Hop, walk: Walk) -> list[Any]:
        request, processor = walk.request, self.processor
        is_diffusion = hop.client.stage.engine_type == "diffusion"
        if is_diffusion and hop.modality == "hidden_states":
            return [processor.make_text_encoding_request(request, walk.inputs)]
        if is_diffusion:
            walk.parent = ParentRequest(request.request_id, walk.params)
            cond = walk.embeds[0] if walk.embeds else walk.inputs.prompt
            uncond = walk.embeds[1] if len(walk.embeds) > 1 else None
            return [
                processor.make_diffusion_request(id, cond, uncond, params, walk.arrival_time)
                for id, params in walk.parent.child_params.items()
            ]
        if hop.modality == "hidden_states":
            is_last = request.output_format == "hidden_states"
            return processor.make_encode_requests(request, walk.inputs, with_negative=not is_last)
        if request.output_format == "text":
            return [processor.make_text_request(request, walk.inputs)]
        return [processor.make_rewrite_request(request, walk.inputs)]

    def _process_news(self, hop: Hop, walk: Walk, output: EngineCoreOutput) -> OmniOutput | None:
        """What the user gets to know of a stage's output before the answer is there."""
        if walk.parent is not None:
            return _process_progress(walk, walk.parent, output)
        if hop.modality != "text" or output.request_output is None:
            return None
        # With n > 1 vLLM's outputs take turns; the text is that of the first completion.
        for completion in output.request_output.outputs:
            if completion.index == 0:
                is_delta = _is_delta(walk.request)
                walk.text = walk.text + completion.text if is_delta else completion.text
        # The end of a text request is its answer; on the way to a picture it is news.
        is_answer = output.finished and walk.request.output_format == "text"
        if is_answer or not walk.is_text_shown:
            return None
        return self.output_processor.process_output(
            EngineCoreOutputs(outputs=[output]), walk.request
        )

    def _take_results(self, hop: Hop, walk: Walk, finals: Sequence[EngineCoreOutput]) -> None:
        """Keep what the answer needs, and what the next stage needs."""
        walk.request.set_stage_output(hop.client.stage.stage_id, finals)
        if walk.parent is not None:
            if not walk.parent.outputs and walk.parent.error is not None:
                raise walk.parent.error
            walk.results += walk.parent.outputs
            return
        for output in finals:
            if output.error is not None:
                raise output.error.to_exception()
        if hop.modality == "text":
            if walk.is_text_shown:  # one that was aborted may have none
                walk.results += [o for o in finals if o.request_output is not None]
            walk.inputs = ProcessedInput(prompt=walk.text)
        elif not walk.is_aborted:
            self._take_embeds(hop, walk, finals)

    def _take_embeds(self, hop: Hop, walk: Walk, finals: Sequence[EngineCoreOutput]) -> None:
        by_id = {output.request_id: output for output in finals}
        cond = by_id.pop(walk.request.request_id)
        for output in (cond, *by_id.values()):
            assert output.pooling_output is not None
            embeds = output.pooling_output
            if hop.client.stage.engine_type == "ar":
                embeds = self.processor.drop_prefix(embeds, walk.inputs)
            walk.embeds.append(embeds)
        if walk.request.output_format == "hidden_states" or walk.request.hidden_state_output:
            walk.results.append(
                EngineCoreOutput(
                    request_id=walk.request.request_id,
                    finish_reason=FinishReason.STOP,
                    # A copy: the user may write into it, and the prompt cache keeps the rest.
                    pooling_output=walk.embeds[0].clone(),
                    output_type="hidden_states",
                )
            )

    def _finish(self, walk: Walk) -> OmniOutput:
        answer = self.output_processor.process_output(
            EngineCoreOutputs(outputs=walk.results), walk.request
        )
        answer.finished = True
        answer.finish_reason = FinishReason.ABORT if walk.is_aborted else FinishReason.STOP
        total_time = time.monotonic() - walk.arrival_time
        answer.metrics = RequestMetrics(total_time=total_time)
        is_other = all(completion.index != 0 for completion in answer.outputs)
        if walk.is_text_shown and walk.request.output_format != "text":
            answer.text = walk.text  # the whole, also where the news were deltas
        elif answer.outputs and is_other and not _is_delta(walk.request):
            answer.text = walk.text  # the last to end was not the first completion
        if (parent := walk.parent) is not None:
            answer.seeds = parent.seeds
            answer.error = parent.error
            answer.step, answer.num_steps = parent.step, parent.num_steps
            answer.metrics = RequestMetrics(
                num_steps=parent.step,
                num_prompt_tokens=sum(len(embeds) for embeds in walk.embeds),
                num_rows=parent.count("num_rows"),
                num_skipped_rows=parent.count("num_skipped_rows"),
                queue_time=parent.queue_time,
                total_time=total_time,
            )
        return answer


def _connect(client: StageClient, after: StageClient) -> str:
    """What a stage is to make for the next one: of what that takes, the first it can make."""
    takes = after.stage.input_modalities
    for modality in takes:
        if modality in client.stage.output_modalities:
            return modality
    raise ModalityNotSupportedError(
        f"stage {client.stage.stage_id} makes {', '.join(client.stage.output_modalities)}, "
        f"of which stage {after.stage.stage_id} takes none: it takes {', '.join(takes)}"
    )


def _check_inputs(hops: Sequence[Hop], inputs: ProcessedInput) -> None:
    """Refuse what the first stage cannot read, rather than leave it out."""
    first, stage = hops[0], hops[0].client.stage
    takes = ", ".join(stage.input_modalities)
    if first.modality not in stage.output_modalities:
        raise ModalityNotSupportedError(
            f"text+image is not supported: stage {stage.stage_id} makes "
            f"{', '.join(stage.output_modalities)}"
        )
    if set(stage.input_modalities) == {"hidden_states"}:
        raise ModalityNotSupportedError(
            f"a request cannot begin at stage {stage.stage_id}: it takes {takes}"
        )
    if inputs.messages is not None and first.modality != "text":
        raise ModalityNotSupportedError(
            "messages are not supported as input of a picture or of hidden states: give a prompt"
        )
    if inputs.prompt_token_ids is not None and (first.modality != "text" or len(hops) > 1):
        raise ModalityNotSupportedError(
            "prompt_token_ids are not supported as input of a picture or of hidden states: "
            "give a prompt"
        )
    for name in ("messages", "prompt_token_ids"):
        if inputs.images and getattr(inputs, name) is not None:
            raise InvalidParameterError(
                "image", f"{len(inputs.images)} beside {name}", "a chat holds its own; tokens none"
            )
    if inputs.images and "image" not in stage.input_modalities:
        raise ModalityNotSupportedError(
            f"images are not supported as input: stage {stage.stage_id} takes {takes}"
        )
    if inputs.images and first.modality == "hidden_states" and len(hops) > 1:
        raise ModalityNotSupportedError(
            "a picture made from a picture is not supported: the model does not edit; "
            "ask for text, hidden_states or text+image"
        )


def _process_progress(
    walk: Walk, parent: ParentRequest, output: EngineCoreOutput
) -> OmniOutput | None:
    parent.take(output)
    if output.finished:
        return None
    news = OmniOutput(
        request_id=walk.request.request_id,
        prompt=walk.request.prompt,
        step=parent.step,
        num_steps=parent.num_steps,
    )
    if (preview := output.additional_outputs.get("preview")) is not None:
        news.preview = to_pil(preview)
        news.preview_index = parent.child_ids.index(output.request_id)
    return news


def _is_delta(request: OmniRequest) -> bool:
    """Whether each output of text holds only what is new."""
    kind: Any = request.output_kind
    if kind is None:
        params = request.sampling_params
        kind = (
            params.get("output_kind")
            if isinstance(params, Mapping)
            else getattr(params, "output_kind", None)
        )
    return getattr(kind, "name", kind) in ("DELTA", OutputKind.DELTA)
