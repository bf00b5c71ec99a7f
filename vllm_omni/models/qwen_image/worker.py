"""`QwenImageWorker`: a diffusion worker that hands out its Qwen-Image adapter."""

from __future__ import annotations

from vllm_omni.diffusion.worker import DiffusionWorker
from vllm_omni.models.qwen_image.adapter import QwenImageRunnerAdapter


class QwenImageWorker(DiffusionWorker):
    """Runs Qwen-Image on one device."""

    def get_qwen_image_adapter(self) -> QwenImageRunnerAdapter:
        assert isinstance(self.adapter, QwenImageRunnerAdapter)
        return self.adapter
