"""The way of a request over the stages: which hops, which refusals, and several outputs as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image
from vllm import CompletionOutput, RequestOutput

from tests.drawing import MakeCheckpoint
from vllm_omni.config import StageConfig
from vllm_omni.engine.coordinator import CrossEngineCoordinator, ParentRequest
from vllm_omni.engine.output_processor import MultimodalOutputProcessor
from vllm_omni.engine.processor import OmniProcessor, ProcessedInput
from vllm_omni.engine.stage_client import StageClient, StageHealth
from vllm_omni.engine.stages import complete_stage_configs
from vllm_omni.errors import (
    EngineDeadError,
    InvalidParameterError,
    ModalityNotSupportedError,
    StageExecutionError,
)
from vllm_omni.outputs import EngineCoreOutput, FinishReason, OmniOutput, RequestError
from vllm_omni.params import MAX_SEED, DiffusionParams
from vllm_omni.request import OmniRequest, OutputKind

TEXT = ProcessedInput(prompt="a cat")
PICTURE = ProcessedInput(prompt="a cat", images=(Image.new("RGB", (4, 4)),))
PARAMS = DiffusionParams(height=16, width=16, num_inference_steps=3, seed=5)

Answer = Callable[[Any], Sequence[EngineCoreOutput]]


class StubClient(StageClient):
    """A stage that says what a test tells it to."""

    def __init__(self, stage: StageConfig, answer: Answer = lambda request: ()) -> None:
        super().__init__(stage)
        self.answer = answer
        self.added: list[Any] = []
        self.aborted: list[str] = []

    async def add_request(self, request: Any) -> None:
        self.added.append(request)
        for output in self.answer(request):
            self.deliver(output)

    async def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in list(request_ids):
            self.aborted.append(request_id)
            self.deliver(EngineCoreOutput(request_id, finish_reason=FinishReason.ABORT))

    @property
    def health(self) -> StageHealth:
        return StageHealth("ready")

    async def check_health(self) -> None:
        return

    async def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        return []

    def shutdown(self) -> None:
        self.fail(EngineDeadError("the engine was shut down"))


def create_stage(stage_id: int, engine_type: Any, **modalities: Any) -> StageConfig:
    return StageConfig(stage_id=stage_id, engine_type=engine_type, model_path="m", **modalities)


DIFFUSION_ALONE = [create_stage(0, "diffusion")]
AR_ALONE = [create_stage(0, "ar")]
TWO = [create_stage(0, "ar"), create_stage(1, "diffusion")]
THREE = [
    create_stage(0, "ar", output_modalities=["text"]),
    create_stage(1, "ar", input_modalities=["text"]),
    create_stage(2, "diffusion"),
]


@pytest.fixture(scope="module")
def processor(checkpoint: MakeCheckpoint) -> OmniProcessor:
    return OmniProcessor(checkpoint(0))


@pytest.fixture
def create_coordinator(
    processor: OmniProcessor,
) -> Callable[[Sequence[StageConfig]], CrossEngineCoordinator]:
    def create(stages: Sequence[StageConfig]) -> CrossEngineCoordinator:
        clients = [StubClient(stage) for stage in complete_stage_configs(stages)]
        return CrossEngineCoordinator(clients, processor, MultimodalOutputProcessor())

    return create


CreateCoordinator = Callable[[Sequence[StageConfig]], CrossEngineCoordinator]


def plan(
    coordinator: CrossEngineCoordinator,
    output_format: str,
    inputs: ProcessedInput = TEXT,
    **fields: Any,
) -> list[tuple[int, str]]:
    """(stage, what it makes) of each hop."""
    request = OmniRequest(output_format=output_format, **fields)
    hops = coordinator.plan(request, inputs)
    return [(hop.client.stage.stage_id, hop.modality) for hop in hops]


# --- the way ---


@pytest.mark.parametrize(
    ("stages", "output_format", "expected"),
    [
        (DIFFUSION_ALONE, "image", [(0, "image")]),
        (DIFFUSION_ALONE, "latents", [(0, "latents")]),
        (DIFFUSION_ALONE, "hidden_states", [(0, "hidden_states")]),
        (AR_ALONE, "text", [(0, "text")]),
        (AR_ALONE, "hidden_states", [(0, "hidden_states")]),
        (TWO, "text", [(0, "text")]),
        (TWO, "hidden_states", [(0, "hidden_states")]),
        (TWO, "image", [(0, "hidden_states"), (1, "image")]),
        (TWO, "latents", [(0, "hidden_states"), (1, "latents")]),
        (TWO, "text+image", [(0, "text"), (0, "hidden_states"), (1, "image")]),
        (THREE, "text", [(0, "text")]),
        (THREE, "hidden_states", [(0, "text"), (1, "hidden_states")]),
        (THREE, "image", [(0, "text"), (1, "hidden_states"), (2, "image")]),
        (THREE, "latents", [(0, "text"), (1, "hidden_states"), (2, "latents")]),
        (THREE, "text+image", [(0, "text"), (1, "hidden_states"), (2, "image")]),
    ],
    ids=lambda value: f"{len(value)}" if isinstance(value, list) else value,
)
def test_way_to_every_format(
    create_coordinator: CreateCoordinator,
    stages: list[StageConfig],
    output_format: str,
    expected: list[tuple[int, str]],
) -> None:
    assert plan(create_coordinator(stages), output_format) == expected


def test_stages_are_walked_in_the_order_of_their_ids(create_coordinator: CreateCoordinator) -> None:
    stages = [create_stage(9, "diffusion"), create_stage(3, "ar")]
    assert plan(create_coordinator(stages), "image") == [(3, "hidden_states"), (9, "image")]


def test_request_may_leave_out_stages(create_coordinator: CreateCoordinator) -> None:
    coordinator = create_coordinator(THREE)
    without_rewriter = plan(coordinator, "image", stage_configs=THREE[:0:-1])
    assert without_rewriter == [(1, "hidden_states"), (2, "image")]
    assert plan(coordinator, "text", stage_configs=[THREE[1], THREE[1]]) == [(1, "text")]


@pytest.mark.parametrize(
    ("output_format", "expected"),
    [
        ("text", [(0, "text")]),
        ("hidden_states", [(0, "hidden_states")]),
        ("text+image", [(0, "text"), (0, "hidden_states"), (1, "image")]),
    ],
)
def test_pictures_are_read_on_the_way_to(
    create_coordinator: CreateCoordinator, output_format: str, expected: list[tuple[int, str]]
) -> None:
    assert plan(create_coordinator(TWO), output_format, PICTURE) == expected


def test_tokens_are_read_on_the_way_to_text(create_coordinator: CreateCoordinator) -> None:
    tokens = ProcessedInput(prompt_token_ids=(5, 6))
    assert plan(create_coordinator(TWO), "text", tokens) == [(0, "text")]


@pytest.mark.parametrize("output_format", ["text", "text+image"])
def test_chats_are_read_on_the_way_to_text(
    create_coordinator: CreateCoordinator, output_format: str
) -> None:
    chat = ProcessedInput(messages=[{"role": "user", "content": "a cat"}])
    assert plan(create_coordinator(TWO), output_format, chat)[0] == (0, "text")


# --- refusals ---


@pytest.mark.parametrize(
    ("stages", "formats", "refused"),
    [
        (DIFFUSION_ALONE, "hidden_states, image, latents", ["text", "text+image"]),
        (AR_ALONE, "hidden_states, text", ["image", "latents", "text+image"]),
        (
            TWO,
            "hidden_states, image, latents, text, text+image",
            [
                "video",
                "",
                "+",
                "IMAGE",
                "image+text",
                "text+text",
                "text+latents",
                "text+hidden_states",
                "text+text+image",
                "text+",
                "+image",
                " image",
            ],
        ),
    ],
    ids=["diffusion alone", "AR alone", "two stages"],
)
def test_format_that_no_stage_makes_is_refused(
    create_coordinator: CreateCoordinator,
    stages: list[StageConfig],
    formats: str,
    refused: list[str],
) -> None:
    coordinator = create_coordinator(stages)
    for output_format in refused:
        with pytest.raises(ModalityNotSupportedError) as caught:
            plan(coordinator, output_format)
        assert str(caught.value) == (
            f"output_format={output_format!r} is not supported: one of {formats}"
        )


def test_format_of_stages_that_were_left_out_is_refused(
    create_coordinator: CreateCoordinator,
) -> None:
    with pytest.raises(ModalityNotSupportedError, match=r"one of hidden_states, text$"):
        plan(create_coordinator(TWO), "image", stage_configs=TWO[:1])


def test_stages_that_do_not_fit_are_refused(create_coordinator: CreateCoordinator) -> None:
    stages = [
        create_stage(0, "ar", output_modalities=["text"]),
        create_stage(1, "diffusion", input_modalities=["hidden_states"]),
    ]
    with pytest.raises(ModalityNotSupportedError) as caught:
        plan(create_coordinator(stages), "image")
    assert str(caught.value) == (
        "stage 0 makes text, of which stage 1 takes none: it takes hidden_states"
    )


def test_text_before_a_picture_needs_a_stage_that_writes(
    create_coordinator: CreateCoordinator,
) -> None:
    """The one that writes comes after the one that draws."""
    stages = [
        create_stage(0, "ar", output_modalities=["hidden_states"]),
        create_stage(1, "diffusion"),
        create_stage(2, "ar", output_modalities=["text"]),
    ]
    with pytest.raises(ModalityNotSupportedError) as caught:
        plan(create_coordinator(stages), "text+image")
    assert str(caught.value) == "text+image is not supported: stage 0 makes hidden_states"


def test_unknown_stage_is_refused(create_coordinator: CreateCoordinator) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        plan(create_coordinator(TWO), "image", stage_configs=[*TWO, create_stage(7, "diffusion")])
    assert str(caught.value) == "stage_configs=[7] is not allowed: stages that run here: [0, 1]"


def test_request_cannot_begin_with_hidden_states(create_coordinator: CreateCoordinator) -> None:
    with pytest.raises(ModalityNotSupportedError) as caught:
        plan(create_coordinator(TWO), "image", stage_configs=TWO[1:])
    assert str(caught.value) == "a request cannot begin at stage 1: it takes hidden_states"


@pytest.mark.parametrize("output_format", ["image", "latents"])
def test_picture_from_a_picture_is_refused(
    create_coordinator: CreateCoordinator, output_format: str
) -> None:
    with pytest.raises(ModalityNotSupportedError, match="the model does not edit"):
        plan(create_coordinator(TWO), output_format, PICTURE)


def test_picture_for_a_stage_that_reads_none_is_refused(
    create_coordinator: CreateCoordinator,
) -> None:
    message = "^images are not supported as input: stage 0 takes text$"
    blind = [create_stage(0, "ar", input_modalities=["text"])]
    for stages, output_format in ((DIFFUSION_ALONE, "image"), (blind, "text")):
        with pytest.raises(ModalityNotSupportedError, match=message):
            plan(create_coordinator(stages), output_format, PICTURE)


@pytest.mark.parametrize("stages", [DIFFUSION_ALONE, TWO], ids=["1", "2"])
@pytest.mark.parametrize("output_format", ["image", "latents", "hidden_states"])
@pytest.mark.parametrize(
    ("inputs", "name"),
    [
        (ProcessedInput(prompt_token_ids=(5, 6)), "prompt_token_ids"),
        (ProcessedInput(messages=[{"role": "user", "content": "a cat"}]), "messages"),
    ],
    ids=["tokens", "chat"],
)
def test_tokens_and_chats_are_not_drawn(
    create_coordinator: CreateCoordinator,
    stages: list[StageConfig],
    output_format: str,
    inputs: ProcessedInput,
    name: str,
) -> None:
    """Rather than a picture of nothing."""
    with pytest.raises(ModalityNotSupportedError, match=f"^{name} are not supported"):
        plan(create_coordinator(stages), output_format, inputs)


@pytest.mark.parametrize(
    "inputs",
    [
        replace(PICTURE, messages=[{"role": "user", "content": "a cat"}]),
        replace(PICTURE, prompt_token_ids=(5, 6)),
    ],
    ids=["chat", "tokens"],
)
def test_pictures_beside_a_chat_or_tokens_are_refused(
    create_coordinator: CreateCoordinator, inputs: ProcessedInput
) -> None:
    """Rather than left out."""
    with pytest.raises(
        InvalidParameterError, match=r"image='1 beside (messages|prompt_token_ids)'"
    ):
        plan(create_coordinator(TWO), "text", inputs)


def test_tokens_are_not_rewritten(create_coordinator: CreateCoordinator) -> None:
    with pytest.raises(ModalityNotSupportedError, match=r"^prompt_token_ids are not supported"):
        plan(create_coordinator(THREE), "image", ProcessedInput(prompt_token_ids=(5, 6)))


# --- several outputs of one prompt ---


def create_params(num_outputs: int, **changes: Any) -> DiffusionParams:
    fields: dict[str, Any] = {"seed": 5, "num_inference_steps": 3}
    return DiffusionParams(num_outputs_per_prompt=num_outputs, **(fields | changes))


def create_progress(request_id: str, step: int, queue_time: float = 0.0) -> EngineCoreOutput:
    metadata = {"step": step, "num_steps": 3, "queue_time": queue_time}
    return EngineCoreOutput(request_id, output_metadata=metadata)


def create_final(request_id: str, seed: int = 0) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id,
        finish_reason=FinishReason.STOP,
        output_type="image",
        output_metadata={"step": 3},
        pooling_output=torch.full((3, 4, 4), seed, dtype=torch.uint8),
    )


def create_failure(request_id: str, message: str) -> EngineCoreOutput:
    error = RequestError("StageExecutionError", message)
    return EngineCoreOutput(request_id, finish_reason=FinishReason.ERROR, error=error)


def test_one_output_keeps_the_id_of_the_request() -> None:
    parent = ParentRequest("r", create_params(1))
    assert parent.child_ids == ["r"]
    assert parent.child_params == {"r": create_params(1)}


def test_each_output_is_a_request_with_a_seed_of_its_own() -> None:
    parent = ParentRequest("r", create_params(3, height=64, priority=2))
    assert parent.child_ids == ["0_r", "1_r", "2_r"]
    assert list(parent.child_params.values()) == [
        create_params(1, height=64, priority=2, seed=seed) for seed in (5, 6, 7)
    ]


def test_seeds_begin_again_after_the_last() -> None:
    parent = ParentRequest("r", create_params(3, seed=MAX_SEED - 1))
    seeds = [params.seed for params in parent.child_params.values()]
    assert seeds == [MAX_SEED - 1, MAX_SEED, 0]


def test_progress_is_the_sum_over_all_outputs() -> None:
    parent = ParentRequest("r", create_params(2))
    assert (parent.step, parent.num_steps) == (0, 6)
    seen = []
    for request_id, step in (("0_r", 1), ("1_r", 1), ("1_r", 2), ("0_r", 2), ("1_r", 3)):
        parent.take(create_progress(request_id, step))
        seen.append(parent.step)
    assert seen == [1, 2, 3, 4, 5]
    parent.take(create_final("1_r"))
    parent.take(create_final("0_r"))
    assert parent.step == 6


def test_end_without_a_step_count_keeps_the_last_one() -> None:
    parent = ParentRequest("r", create_params(2))
    parent.take(create_progress("0_r", 2))
    parent.take(create_failure("0_r", "it broke"))
    assert parent.step == 2


def test_queue_time_is_that_of_the_slowest() -> None:
    parent = ParentRequest("r", create_params(3))
    for request_id, queue_time in (("0_r", 0.25), ("1_r", 4.0), ("2_r", 1.0)):
        parent.take(create_progress(request_id, 1, queue_time))
    assert parent.queue_time == 4.0


def test_outputs_come_in_the_order_of_their_seeds() -> None:
    parent = ParentRequest("r", create_params(3))
    for request_id in ("2_r", "0_r", "1_r"):
        parent.take(create_final(request_id))
    assert [output.request_id for output in parent.outputs] == ["0_r", "1_r", "2_r"]
    assert parent.seeds == [5, 6, 7]
    assert parent.error is None


def test_failed_output_leaves_the_others() -> None:
    parent = ParentRequest("r", create_params(3))
    parent.take(create_final("2_r"))
    parent.take(create_failure("1_r", "it broke"))
    parent.take(create_failure("0_r", "it broke later"))
    assert [output.request_id for output in parent.outputs] == ["2_r"]
    assert parent.seeds == [7]
    assert isinstance(parent.error, StageExecutionError)
    assert str(parent.error) == "it broke"


def test_aborted_output_is_no_output() -> None:
    parent = ParentRequest("r", create_params(2))
    parent.take(EngineCoreOutput("0_r", finish_reason=FinishReason.ABORT))
    parent.take(create_final("1_r"))
    assert (parent.seeds, parent.error) == ([6], None)


# --- a walk over stages that say what they are told to ---


def answer_by_seed(request: Any) -> list[EngineCoreOutput]:
    """Progress and a picture in the colour of the seed; of seed 6 an error instead."""
    seed = request.custom_inputs.seed
    if seed == 6:
        return [create_failure(request.request_id, "seed 6 broke")]
    return [create_progress(request.request_id, 2), create_final(request.request_id, seed)]


def create_walker(
    processor: OmniProcessor, answer: Answer
) -> tuple[CrossEngineCoordinator, StubClient]:
    """One diffusion stage."""
    client = StubClient(complete_stage_configs(DIFFUSION_ALONE)[0], answer)
    return CrossEngineCoordinator([client], processor, MultimodalOutputProcessor()), client


async def collect(coordinator: CrossEngineCoordinator, request: OmniRequest) -> list[OmniOutput]:
    return [output async for output in coordinator.generate(request)]


def create_request(num_outputs: int, seed: int = 5) -> OmniRequest:
    params = create_params(num_outputs, seed=seed, height=16, width=16)
    return OmniRequest(prompt="a cat", request_id="r", params=params)


def test_partial_failure_gives_the_rest_and_the_error(processor: OmniProcessor) -> None:
    coordinator, _ = create_walker(processor, answer_by_seed)
    *news, answer = asyncio.run(collect(coordinator, create_request(3)))
    assert [(output.step, output.num_steps, output.finished) for output in news] == [
        (2, 9, False),
        (5, 9, False),
    ]
    assert answer.finished and answer.finish_reason is FinishReason.STOP
    assert [image.getpixel((0, 0)) for image in answer.images] == [(5, 5, 5), (7, 7, 7)]
    assert answer.seeds == [5, 7]
    assert isinstance(answer.error, StageExecutionError) and str(answer.error) == "seed 6 broke"
    assert answer.metrics.num_steps == 6


def test_whole_failure_is_raised(processor: OmniProcessor) -> None:
    coordinator, _ = create_walker(processor, answer_by_seed)
    for _ in range(2):  # its id is free again
        with pytest.raises(StageExecutionError, match="seed 6 broke"):
            asyncio.run(collect(coordinator, create_request(1, seed=6)))


def test_answer_alone(processor: OmniProcessor) -> None:
    coordinator, client = create_walker(processor, answer_by_seed)
    answer = asyncio.run(coordinator.generate_image_async(create_request(1)))
    assert answer.images[0].getpixel((0, 0)) == (5, 5, 5)
    assert [request.request_id for request in client.added] == ["r"]


def test_each_stages_outputs_stay_with_the_request(processor: OmniProcessor) -> None:
    coordinator, _ = create_walker(processor, answer_by_seed)
    request = create_request(2, seed=7)
    asyncio.run(collect(coordinator, request))
    finals = request.get_stage_output(-1)
    assert [output.request_id for output in finals] == ["0_r", "1_r"]


def test_id_in_use_is_refused(processor: OmniProcessor) -> None:
    coordinator, client = create_walker(processor, lambda request: ())

    async def twice() -> list[OmniOutput]:
        first = asyncio.create_task(collect(coordinator, create_request(1)))
        await asyncio.sleep(0)
        with pytest.raises(InvalidParameterError, match="request_id='r'"):
            await collect(coordinator, create_request(1))
        await coordinator.abort("r")
        await coordinator.abort("never heard of")
        return await first

    [answer] = asyncio.run(twice())
    assert answer.finished and answer.finish_reason is FinishReason.ABORT
    assert client.aborted == ["r"]


def test_who_stops_listening_takes_the_request_out(processor: OmniProcessor) -> None:
    coordinator, client = create_walker(
        processor, lambda request: [create_progress(request.request_id, 1)]
    )

    async def leave() -> None:
        stream = coordinator.generate(create_request(2))
        assert not (await anext(stream)).finished
        await stream.aclose()

    asyncio.run(leave())
    assert sorted(client.aborted) == ["0_r", "1_r"]
    asyncio.run(leave())  # its id is free again


def test_request_that_cannot_be_planned_adds_nothing(processor: OmniProcessor) -> None:
    coordinator, client = create_walker(processor, answer_by_seed)
    request = OmniRequest(prompt="a cat", output_format="video")
    with pytest.raises(ModalityNotSupportedError, match="output_format='video'"):
        asyncio.run(collect(coordinator, request))
    assert client.added == []


def test_abort_while_prompts_are_encoded_shows_nothing_of_them(processor: OmniProcessor) -> None:
    """One of two prompts is there; what the stage made of it was not asked for."""
    clients = [StubClient(stage) for stage in complete_stage_configs(TWO)]
    clients[0].answer = lambda request: (
        [create_text(0, "", FinishReason.STOP)] if request.request_id == "r" else []
    )
    coordinator = CrossEngineCoordinator(clients, processor, MultimodalOutputProcessor())

    async def abort() -> list[OmniOutput]:
        params = create_params(1, height=16, width=16, negative_prompt="ugly")
        request = OmniRequest(prompt="a cat", request_id="r", params=params)
        walk = asyncio.create_task(collect(coordinator, request))
        while len(clients[0].added) < 2:
            await asyncio.sleep(0)
        await coordinator.abort("r")
        return await walk

    [answer] = asyncio.run(abort())
    assert answer.finish_reason is FinishReason.ABORT
    assert (answer.text, answer.request_output, answer.images) == (None, None, [])


def test_hidden_states_are_the_users_own(processor: OmniProcessor) -> None:
    """Whoever writes into them does not change those that are kept for the next request."""
    rows = torch.arange(40.0).view(40, 1)
    client = StubClient(
        complete_stage_configs(AR_ALONE)[0],
        lambda request: [
            EngineCoreOutput("r", finish_reason=FinishReason.STOP, pooling_output=rows.clone())
        ],
    )
    coordinator = CrossEngineCoordinator(
        [client], processor, MultimodalOutputProcessor(), prompt_cache_bytes=10_000
    )
    for _ in range(3):
        request = OmniRequest(prompt="a cat", request_id="r", output_format="hidden_states")
        [answer] = asyncio.run(collect(coordinator, request))
        assert answer.hidden_states is not None and answer.hidden_states[0] > 0
        assert torch.equal(answer.hidden_states, rows[-len(answer.hidden_states) :])
        answer.hidden_states.zero_()
    assert len(client.added) == 1


def create_text(index: int, text: str, finish_reason: FinishReason | None) -> EngineCoreOutput:
    """As vLLM streams: about one completion."""
    completion = CompletionOutput(index, text, [1], None, None)
    request_output = RequestOutput("r", "a cat", [1], None, [completion], finish_reason is not None)
    return EngineCoreOutput(
        "r", finish_reason=finish_reason, output_type="text", request_output=request_output
    )


@pytest.mark.parametrize(
    ("kind", "texts", "seen"),
    [
        (
            OutputKind.CUMULATIVE,
            [(0, "on"), (1, "tw"), (0, "one"), (1, "two")],
            ["on", None, "one", "one"],
        ),
        (OutputKind.DELTA, [(0, "on"), (1, "tw"), (0, "e"), (1, "o")], ["on", None, "e", None]),
        (OutputKind.DELTA, [(0, "on"), (1, "two"), (0, "e")], ["on", None, "e"]),
    ],
    ids=["cumulative", "delta", "delta that ends with the first"],
)
def test_text_of_several_completions_is_that_of_the_first(
    processor: OmniProcessor,
    kind: OutputKind,
    texts: list[tuple[int, str]],
    seen: list[str | None],
) -> None:
    ends = [None] * (len(texts) - 1) + [FinishReason.STOP]
    client = StubClient(
        complete_stage_configs(AR_ALONE)[0],
        lambda request: [
            create_text(index, text, end) for (index, text), end in zip(texts, ends, strict=True)
        ],
    )
    coordinator = CrossEngineCoordinator([client], processor, MultimodalOutputProcessor())
    request = OmniRequest(prompt="a cat", request_id="r", output_format="text", output_kind=kind)
    outputs = asyncio.run(collect(coordinator, request))
    assert [output.text for output in outputs] == seen
    assert [output.outputs[0].index for output in outputs] == [index for index, _ in texts]
    assert outputs[-1].finished
