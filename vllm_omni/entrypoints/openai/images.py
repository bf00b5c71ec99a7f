"""`ImageService`: from a body to pictures, for the routes here, for jobs and for chats."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import PIL.Image

from vllm_omni.engine.async_llm import OmniAsyncLLM
from vllm_omni.entrypoints.openai.admission import Admission, Ticket
from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.entrypoints.openai.encoding import ImageEncoder
from vllm_omni.entrypoints.openai.errors import APIError, engine_down
from vllm_omni.entrypoints.openai.files import FileStore
from vllm_omni.entrypoints.openai.image_params import (
    BODY_NAMES,
    check_output,
    get_preview_period,
    get_quality,
    read_params,
    write_body,
)
from vllm_omni.entrypoints.openai.limits import check_cost, check_prompt, get_cost
from vllm_omni.entrypoints.openai.protocol import (
    CompletedEvent,
    Image,
    ImageGenerationRequest,
    ImageJobRequest,
    ImageParameters,
    ImagesResponse,
    Metrics,
    PartialImageEvent,
    TokenDetails,
    Usage,
)
from vllm_omni.entrypoints.openai.streams import run_ahead
from vllm_omni.entrypoints.openai.tracing import Tracer
from vllm_omni.errors import InvalidParameterError
from vllm_omni.outputs import FinishReason, OmniOutput
from vllm_omni.params import SIZE_MULTIPLE, DiffusionParams
from vllm_omni.request import OmniRequest

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""


@dataclass(frozen=True)
class StepsDone:
    """How far a request is, over all its pictures."""

    step: int
    num_steps: int


Event = PartialImageEvent | CompletedEvent | StepsDone


@dataclass(frozen=True)
class ImageTask:
    """A body that was found good: what to ask the engine for, and how to give the answer."""

    request: OmniRequest
    body: ImageParameters
    params: DiffusionParams  # complete
    cost: int
    base_url: str  # of urls to pictures
    headers: Mapping[str, str]  # of HTTP
    owner: str  # whose key it came with

    @property
    def size(self) -> str:
        return f"{self.params.width}x{self.params.height}"

    @property
    def place(self) -> tuple[int, str, int, int]:
        """What `Admission.enter` wants to know."""
        return self.cost, self.owner, self.params.priority, self.params.num_outputs_per_prompt

    @property
    def seconds_left(self) -> float:
        """Until its deadline, which counts from its arrival."""
        arrival, deadline = self.request.arrival_time, self.params.deadline
        assert arrival is not None and deadline is not None
        return arrival + deadline - time.monotonic()

    @property
    def looks(self) -> dict[str, Any]:
        """What answers and events say about a picture."""
        return {
            "size": self.size,
            "quality": get_quality(self.body),
            "background": "opaque",
            "output_format": self.body.output_format,
        }


class ImageService:
    """Draws for clients: checks, queues, generates, encodes."""

    def __init__(
        self,
        config: ServerConfig,
        llm: OmniAsyncLLM,
        model_name: str,
        admission: Admission,
        encoder: ImageEncoder,
        files: FileStore,
        tracer: Tracer | None = None,
    ) -> None:
        self.config = config
        self.llm = llm
        self.model_name = model_name
        self.admission = admission
        self.encoder = encoder
        self.files = files
        self.tracer = tracer
        self._default_cache = config.read_cache()

    # --- what a body asks for ---

    def check_model(self, model: str | None) -> None:
        """404 for a model that is not the one served here."""
        if model is not None and model != self.model_name:
            message = f"no such model: {model[:200]!r}; this server has {self.model_name!r}"
            raise APIError(404, message, "model", "model_not_found")

    def make_params(self, body: ImageParameters) -> DiffusionParams:
        """Complete parameters, within this server's limits."""
        check_prompt("prompt", body.prompt, self.config)
        check_prompt("negative_prompt", body.negative_prompt, self.config)
        check_output(body)
        complete, is_job = self.llm.processor.complete_params, isinstance(body, ImageJobRequest)
        default_steps = complete(DiffusionParams()).num_inference_steps
        assert default_steps
        longest = self.config.job_timeout if is_job else self.config.request_timeout
        try:
            params = complete(read_params(body, default_steps, self._default_cache, longest))
        except InvalidParameterError as error:
            param = error.param.partition(".")[0]  # of which a field may be at fault
            param = BODY_NAMES.get(param, param)
            raise APIError(400, str(error), param, "invalid_value") from error
        check_cost(params, self.config)
        return params

    def make_task(
        self,
        body: ImageParameters,
        request_id: str,
        base_url: str = "",
        headers: Mapping[str, str] = MappingProxyType({}),
        owner: str = "",
    ) -> ImageTask:
        """Everything that can be refused before anything is queued is refused here.

        Args:
            base_url: of urls to pictures.
            headers: of HTTP, for a trace that the client may be in.
            owner: whose key it came with.
        """
        self.check_model(body.model)
        params = self.make_params(body)
        if isinstance(body, ImageGenerationRequest) and body.partial_images:
            assert params.num_inference_steps
            every = get_preview_period(params.num_inference_steps, body.partial_images)
            params = replace(params, preview_every=every)
        request = OmniRequest(
            prompt=body.prompt,
            output_format="text+image" if body.rewrite_prompt else "image",
            params=params,
            request_id=request_id,
            arrival_time=time.monotonic(),
        )
        return ImageTask(request, body, params, get_cost(params), base_url, headers, owner)

    # --- the way to an answer ---

    def admit(self, task: ImageTask) -> AbstractContextManager[Ticket]:
        """A place in the queue for as long as it is under way; 429 when there is none."""
        return self.admission.admit(*task.place)

    async def generate(self, task: ImageTask) -> ImagesResponse:
        """The whole answer at once."""
        with self.admit(task) as ticket:
            return await self.run(task, ticket)

    async def run(
        self, task: ImageTask, ticket: Ticket, progress: Progress | None = None
    ) -> ImagesResponse:
        """The whole answer to a request that has its place in the queue."""
        async with aclosing(self.outputs(task, ticket)) as outputs:
            async for output in outputs:
                if progress is not None and output.num_steps:
                    progress(output.step, output.num_steps)
        return await self._make_response(task, output)

    def stream(self, task: ImageTask) -> AsyncGenerator[Event, None]:
        """Previews while they form, then the pictures; a slow reader does not hold its place."""
        return run_ahead(self._draw(task))

    async def _draw(self, task: ImageTask) -> AsyncGenerator[Event, None]:
        assert isinstance(task.body, ImageGenerationRequest)
        num_shown = [0] * task.params.num_outputs_per_prompt  # previews, by picture
        with self.admit(task) as ticket:
            async with aclosing(self.outputs(task, ticket)) as outputs:
                async for output in outputs:
                    if output.step and not output.finished:
                        yield StepsDone(output.step, output.num_steps)
                    index = output.preview_index
                    if output.preview is not None and num_shown[index] < task.body.partial_images:
                        yield await self._make_partial(task, output, num_shown[index])
                        num_shown[index] += 1
            response = await self._make_response(task, output)
        for index, image in enumerate(response.data):
            yield CompletedEvent(
                **image.model_dump(),
                **task.looks,
                image_index=index,
                created_at=response.created,
                usage=response.usage,
                metrics=response.metrics,
            )

    async def outputs(self, task: ImageTask, ticket: Ticket) -> AsyncGenerator[OmniOutput, None]:
        """News of a request that has its place in the queue, then the answer, or an error."""
        await self.admission.wait_turn(ticket, task.seconds_left)
        if self.tracer is not None:
            request = task.request
            request.trace_headers = self.tracer.start(request.request_id, task.headers)
        try:
            async with aclosing(self.llm.generate(task.request)) as outputs:
                async for output in outputs:
                    ticket.note_step(output.step, output.num_steps)
                    yield output
            if output.error is not None:
                raise output.error
            if output.finish_reason is FinishReason.ABORT:
                raise engine_down()  # nobody else aborts while somebody is listening
            self.admission.finish(ticket)
        finally:
            self.admission.end_turn(ticket)

    async def _make_partial(
        self, task: ImageTask, output: OmniOutput, index: int
    ) -> PartialImageEvent:
        assert output.preview is not None and task.params.width and task.params.height
        size = (task.params.width, task.params.height)
        body = task.body
        data = await self.encoder.encode(
            output.preview, body.output_format, body.output_compression, size=size
        )
        return PartialImageEvent(
            b64_json=await self.encoder.to_base64(data),
            partial_image_index=index,
            image_index=output.preview_index,
            step=output.step,
            num_steps=output.num_steps,
            created_at=int(time.time()),
            **task.looks,
        )

    async def _make_response(self, task: ImageTask, output: OmniOutput) -> ImagesResponse:
        prompt = output.text if task.body.rewrite_prompt else None
        pairs = zip(output.images, output.seeds, strict=True)
        images = [self._make_image(task, image, seed, prompt) for image, seed in pairs]
        metrics = output.metrics
        return ImagesResponse(
            created=int(time.time()),
            data=await asyncio.gather(*images),
            usage=_make_usage(task, output),
            metrics=Metrics(
                num_steps=metrics.num_steps,
                num_rows=metrics.num_rows,
                num_skipped_rows=metrics.num_skipped_rows,
                queue_time=metrics.queue_time,
                total_time=metrics.total_time,
            ),
            **task.looks,
        )

    async def _make_image(
        self, task: ImageTask, image: PIL.Image.Image, seed: int, revised_prompt: str | None
    ) -> Image:
        data = await self.encode(task.body, task.params, image, seed, revised_prompt)
        made = Image(revised_prompt=revised_prompt, seed=seed)
        if task.body.response_format == "url":
            made.url = task.base_url + self.files.add(data, task.body.output_format)
        else:
            made.b64_json = await self.encoder.to_base64(data)
        return made

    async def encode(
        self,
        body: ImageParameters,
        params: DiffusionParams,
        image: PIL.Image.Image,
        seed: int,
        revised_prompt: str | None = None,
    ) -> bytes:
        """A picture as the file that was asked for; a PNG holds what makes it again."""
        prompt = revised_prompt or body.prompt
        parameters = write_body(self.model_name, prompt, params, seed)
        return await self.encoder.encode(
            image, body.output_format, body.output_compression, parameters
        )


def _make_usage(task: ImageTask, output: OmniOutput) -> Usage:
    params = task.params
    assert params.height and params.width
    tokens = (params.height // SIZE_MULTIPLE) * (params.width // SIZE_MULTIPLE)
    image_tokens = tokens * len(output.images)
    num_read, num_written = output.metrics.num_prompt_tokens, 0
    if output.request_output is not None:  # a prompt that was rewritten
        num_read += len(output.request_output.prompt_token_ids or ())
        num_written = sum(len(completion.token_ids) for completion in output.outputs)
    return Usage(
        input_tokens=num_read,
        input_tokens_details=TokenDetails(text_tokens=num_read),
        output_tokens=num_written + image_tokens,
        output_tokens_details=TokenDetails(text_tokens=num_written, image_tokens=image_tokens),
        total_tokens=num_read + num_written + image_tokens,
    )
