"""Every example of the software design's "API Interfaces" runs as it is written there.

Two things differ: paths of models, and `VllmConfig(model=…)`, which vLLM does not have; engine
arguments take its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.drawing import MakeCheckpoint
from vllm_omni import DiffusionParams, OmniAsyncLLM, OmniOutput, OmniRequest

EXAMPLE_SECONDS = 120


@pytest.fixture
def model(checkpoint: MakeCheckpoint) -> str:
    return str(checkpoint(0))


@pytest.fixture
def end(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], Any]]:
    """Shuts down what an example leaves running."""
    left: list[Any] = []

    def keep(llm: Any) -> Any:
        left.append(llm)
        return llm

    yield keep
    for llm in left:
        llm.shutdown()


def assert_is_picture(output: OmniOutput, size: tuple[int, int] = (256, 256)) -> None:
    assert output.finished and output.error is None
    [image] = output.images
    assert isinstance(image, Image.Image)
    assert (image.size, image.mode) == (size, "RGB")
    assert np.asarray(image).std() > 1  # something is on it


async def draw_small(llm: OmniAsyncLLM) -> OmniOutput:
    params = DiffusionParams(height=32, width=48, num_inference_steps=2)
    request = OmniRequest(prompt="a cat", params=params)
    return [output async for output in llm.generate(request)][-1]


def test_core_api(model: str, end: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Example 1. Its request has no parameters: the picture is of the model's default size."""
    vllm_config = {"max_model_len": 1024}
    ar_vllm_config = {"max_model_len": 512}

    async def example() -> list[OmniOutput]:
        # Main entry point - follows vLLM patterns
        from vllm_omni import OmniAsyncLLM, OmniRequest
        from vllm_omni.config import DiTConfig, OmniConfig, StageConfig

        dit_config = DiTConfig(device="cpu")

        # Create configuration
        config = OmniConfig(
            vllm_config=vllm_config,
            stage_configs=[
                StageConfig(
                    stage_id=0,
                    engine_type="ar",
                    model_path=model,
                    vllm_config=ar_vllm_config,
                ),
                StageConfig(
                    stage_id=1,
                    engine_type="diffusion",
                    model_path=model,
                    dit_config=dit_config,
                ),
            ],
        )

        # Create OmniAsyncLLM (extends vLLM's AsyncLLM)
        async_llm = end(
            OmniAsyncLLM.from_vllm_config(
                vllm_config=config.vllm_config,
                stage_configs=config.stage_configs,
            )
        )

        # Create multimodal request
        request = OmniRequest(
            prompt="Generate an image of a cat",
            input_modalities={"text": "Generate an image of a cat"},
            output_format="image",
            stage_configs=config.stage_configs,
        )

        # Generate (same interface as vLLM)
        outputs = []
        async for output in async_llm.generate(request):
            print(output)
            outputs.append(output)
        return outputs

    *news, answer = asyncio.run(asyncio.wait_for(example(), EXAMPLE_SECONDS))
    assert [output.step for output in news] == list(range(1, 20))
    assert [output.finished for output in news] == [False] * 19
    assert_is_picture(answer)
    assert answer.prompt == "Generate an image of a cat"
    assert capsys.readouterr().out.count("OmniOutput(") == 20


def test_configuration_api(model: str, end: Any) -> None:
    """Example 2, and that what it makes can be used."""
    base_vllm_config = {"max_num_seqs": 4}

    from vllm_omni.config import (
        DiTCacheConfig,
        DiTCacheTensor,
        DiTConfig,
        OmniConfig,
        StageConfig,
    )

    # Create stage-specific configurations
    ar_stage_config = StageConfig(
        stage_id=0,
        engine_type="ar",
        model_path=model,
        vllm_config={
            "model": model,
            "max_model_len": 512,
            # ... other vLLM config options
        },
    )

    diffusion_stage_config = StageConfig(
        stage_id=1,
        engine_type="diffusion",
        model_path=model,
        dit_config=DiTConfig(
            model_type="dit",
            cache_config=DiTCacheConfig(
                dit_cache_tensors=[DiTCacheTensor(size=1024)],
                kv_cache_groups=[DiTCacheTensor(size=512)],
            ),
        ),
    )

    # Create OmniConfig
    config = OmniConfig(
        vllm_config=base_vllm_config,
        stage_configs=[ar_stage_config, diffusion_stage_config],
    )

    assert config.stage_configs == (ar_stage_config, diffusion_stage_config)

    from vllm_omni import OmniAsyncLLM

    async def draw() -> OmniOutput:
        llm = end(OmniAsyncLLM(config))
        [stats] = await llm.collective_rpc(1, "get_stats")
        assert stats["cache_used_bytes"] == 1024 + 512  # reserved from the start
        return await draw_small(llm)

    answer = asyncio.run(asyncio.wait_for(draw(), EXAMPLE_SECONDS))
    assert_is_picture(answer, (48, 32))


@pytest.mark.parametrize("kind", ["engine arguments", "VllmConfig"])
def test_configuration_api_takes_vllms_own(checkpoint: MakeCheckpoint, end: Any, kind: str) -> None:
    """vLLM's own classes in the place of the dict, for the system and for a stage."""
    from vllm import EngineArgs

    from vllm_omni import OmniAsyncLLM
    from vllm_omni.ar.config import ARModel
    from vllm_omni.config import StageConfig

    path = str(checkpoint(0))
    engine_args = EngineArgs(model=path, max_model_len=512, max_num_seqs=3)
    model = ARModel(path, engine_args)
    vllm_config = engine_args if kind == "engine arguments" else model.vllm_config
    assert model.vllm_config.model_config.max_model_len == 512
    assert model.vllm_config.scheduler_config.max_num_seqs == 3
    stages = [StageConfig(0, "ar", path), StageConfig(1, "diffusion", path)]

    async def draw() -> OmniOutput:
        llm = end(OmniAsyncLLM.from_vllm_config(vllm_config=vllm_config, stage_configs=stages))
        return await draw_small(llm)

    answer = asyncio.run(asyncio.wait_for(draw(), EXAMPLE_SECONDS))
    assert_is_picture(answer, (48, 32))


@pytest.mark.parametrize("kind", ["folder", "engine arguments", "VllmConfig"])
def test_custom_processor_api(checkpoint: MakeCheckpoint, kind: str) -> None:
    """Example 3, for each thing that can stand for the model."""
    from vllm import EngineArgs

    from vllm_omni.ar.config import ARModel
    from vllm_omni.engine import (
        MultimodalInputProcessor,
        OmniProcessor,
        ProcessedInput,
        TokenizedData,
    )
    from vllm_omni.request import OmniRequest

    class CustomMultimodalProcessor(MultimodalInputProcessor):
        def process(self, data: Any) -> ProcessedInput:
            # Custom processing logic for specific modality
            return ProcessedInput(prompt=f"the number {data}")

        def tokenize(self, data: Any) -> TokenizedData:
            # Custom tokenization logic
            return TokenizedData(token_ids=(data,))

    vllm_config: Any = {
        "folder": checkpoint(0),
        "engine arguments": EngineArgs(model=str(checkpoint(0))),
        "VllmConfig": ARModel(checkpoint(0), {"max_model_len": 64}).vllm_config,
    }[kind]

    # Register custom processor
    processor = OmniProcessor(vllm_config)
    processor.register_modality_processor("custom_modality", CustomMultimodalProcessor())

    inputs = processor.process_input(OmniRequest(input_modalities={"custom_modality": 7}))
    assert inputs.prompt == "the number 7"


def test_examples_are_those_of_the_document() -> None:
    """Fails when the document has an example that is not here."""
    document = Path(__file__).parents[3] / "shared" / "seeds" / "5-software-design.md"
    if not document.is_file():
        pytest.skip("the design documents are not part of the repository")
    text = document.read_text(encoding="utf-8")
    part = text[text.index("## API Interfaces") : text.index("## Data Flow")]
    assert part.count("```python") == 3
