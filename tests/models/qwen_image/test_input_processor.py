"""What a user asks for reaches the engine."""

import pytest

from tests.drawing import MakeCheckpoint
from vllm_omni.models.qwen_image.input_processor import QwenImageInputProcessor
from vllm_omni.params import DiffusionParams


@pytest.mark.parametrize(("preview_every", "expected"), [(None, 0), (1, 1), (5, 5)])
def test_previews_are_passed_on(
    checkpoint: MakeCheckpoint, preview_every: int | None, expected: int
) -> None:
    processor = QwenImageInputProcessor(checkpoint(0))
    params = DiffusionParams(seed=1, preview_every=preview_every)
    assert processor.process("a cat", params).preview_every == expected
    assert processor.process_text("a cat").preview_every == 0
