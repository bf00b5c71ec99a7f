"""Stock diffusers in this process, with the face of a server: what servers are compared with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from vllm_omni.benchmark.client import Answer, Failure
from vllm_omni.benchmark.workload import DIFFUSERS, PictureRequest
from vllm_omni.params import make_guidance

_STOCK_STEPS = 50


class DiffusersClient:
    """Draws one request after another, as diffusers does; the others wait. A context manager.

    Args:
        url: "diffusers:" and the path of a checkpoint.
        body: of every request: `n`, `true_cfg_scale`, `negative_prompt`; others do not count.
        timeout: seconds for one request, waiting included.
    """

    def __init__(self, url: str, body: Mapping[str, Any], timeout: float) -> None:
        self.body = {"n": 1, **body}
        self._model = Path(url.removeprefix(DIFFUSERS))
        self._timeout = timeout
        self._thread = ThreadPoolExecutor(1)
        self._pipeline: Any = None
        self._default_steps = read_default_steps(self._model)

    async def __aenter__(self) -> DiffusersClient:
        self._pipeline = await self._run(load_pipeline, self._model)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    async def find_model(self) -> str | None:
        """The checkpoint's folder."""
        return self._model.name

    async def draw(self, request: PictureRequest) -> Answer:
        """All pictures of a request."""
        try:
            async with asyncio.timeout(self._timeout):
                return Answer(num_images=await self._run(self._draw, request))
        except TimeoutError:
            return Answer(failure=Failure("timed out", ""))
        except (RuntimeError, ValueError) as error:  # out of memory, a size that is refused
            return Answer(failure=Failure(type(error).__name__, str(error)))

    async def _run(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _draw(self, request: PictureRequest) -> int:
        body = self.body
        guidance = make_guidance(body.get("true_cfg_scale"), body.get("negative_prompt"))
        if guidance["negative_prompt"] is None:
            guidance = {"true_cfg_scale": 1.0}  # or diffusers warns that its own has no effect
        pictures = self._pipeline(
            prompt=request.prompt,
            width=request.picture.width,
            height=request.picture.height,
            num_inference_steps=request.picture.num_steps or self._default_steps,
            num_images_per_prompt=body["n"],
            **guidance,
        ).images
        return len(pictures)


def load_pipeline(model: Path) -> Any:
    """On a GPU in bfloat16, where there is one, as a server's engine runs."""
    import torch
    from diffusers import DiffusionPipeline
    from diffusers.utils.logging import disable_progress_bar
    from transformers.utils.logging import disable_progress_bar as disable_weights_bar

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", None)
    disable_progress_bar()
    disable_weights_bar()
    pipeline = DiffusionPipeline.from_pretrained(model, dtype=dtype or torch.float32).to(device)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def read_default_steps(model: Path) -> int:
    """The checkpoint's own number, if it has one; else diffusers' own."""
    path = model / "generation_config.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    steps: int = content.get("num_inference_steps", _STOCK_STEPS)
    return steps
