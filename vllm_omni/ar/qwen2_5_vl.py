"""vLLM's Qwen2.5-VL with a processor of images only: that of video needs torchvision.

Checked against vLLM 0.32.0. Without torchvision, `plugin.register()` must run before the import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Qwen2_5_VLProcessor
from transformers.processing_utils import ProcessorMixin
from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLMultiModalProcessor,
    Qwen2_5_VLProcessingInfo,
)
from vllm.model_executor.models.qwen2_vl import Qwen2VLDummyInputsBuilder
from vllm.multimodal import MULTIMODAL_REGISTRY


class ImageOnlyProcessor(Qwen2_5_VLProcessor):
    """Hugging Face's processor; it loads what the arguments of `__init__` name, so no video."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None
    ) -> None:
        self.image_token = "<|image_pad|>"
        self.video_token = "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        # Not super(): its __init__ insists on a video processor.
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


class ImageOnlyProcessingInfo(Qwen2_5_VLProcessingInfo):
    def get_hf_processor(self, **kwargs: object) -> ImageOnlyProcessor:
        processor: ImageOnlyProcessor = self.ctx.get_hf_processor(ImageOnlyProcessor, **kwargs)
        return processor

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}


@MULTIMODAL_REGISTRY.register_processor(
    Qwen2_5_VLMultiModalProcessor,
    info=ImageOnlyProcessingInfo,
    dummy_inputs=Qwen2VLDummyInputsBuilder,
)
class ImageOnlyQwen2_5_VL(Qwen2_5_VLForConditionalGeneration):
    """The stock model; only the decorator differs."""
