"""The page of `vllm-omni serve --ui`. Gradio is imported when it is mounted."""

from __future__ import annotations

from vllm_omni.apps.gradio.gate import Page
from vllm_omni.apps.gradio.mount import mount_page, require_gradio

__all__ = ["Page", "mount_page", "require_gradio"]
