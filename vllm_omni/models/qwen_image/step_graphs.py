"""CUDA graphs of steps, one for each bucket.

Under a few thousand tokens a step waits for the host to launch its kernels. A graph is launched at
once. It reads its inputs from tensors of its own, so a batch is copied in, and whatever mix of
requests has as many tokens runs in the same graph.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm_omni.diffusion.isolation import is_out_of_memory
from vllm_omni.layers.attention import can_attend_together
from vllm_omni.models.qwen_image.fast_plan import Bucket, FastPlan, fill_bucket, find_bucket
from vllm_omni.models.qwen_image.transformer import PackPlan

logger = logging.getLogger(__name__)

MAX_GRAPHS = 64
_NUM_RECENT = 8  # runs among which a bucket has to come back to be worth a graph

Outputs = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Tensors over image tokens, and tensors over text tokens."""

Part = Callable[[FastPlan, Tensor, Tensor], Outputs]
"""A part of a step: its plan, image [N_img, …] and text [N_txt, D] to outputs."""


@dataclass(eq=False)
class StepGraph:
    """A captured part of a step, with its inputs and outputs."""

    graph: torch.cuda.CUDAGraph
    plan: FastPlan
    image: Tensor
    text: Tensor
    outputs: Outputs
    loaded: PackPlan | None = None  # whose indices are in `plan`

    def run(self, plan: PackPlan, bucket: Bucket, image: Tensor, text: Tensor) -> Outputs:
        if self.loaded is not plan:
            filled = fill_bucket(plan, bucket)
            for mine, new in zip(self.plan.tensors(), filled.tensors(), strict=True):
                mine.copy_(new)
            self.loaded = plan
        self.image[: image.shape[0]].copy_(image)
        self.text[: text.shape[0]].copy_(text)
        self.graph.replay()
        # The next graph that runs may use the same memory.
        return (
            tuple(output[: image.shape[0]].clone() for output in self.outputs[0]),
            tuple(output[: text.shape[0]].clone() for output in self.outputs[1]),
        )


class StepGraphs:
    """The graphs that were used last, all in one pool of memory.

    Args:
        max_tokens: of a batch; 0: no graphs.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, max_tokens: int) -> None:
        self.max_tokens = max_tokens if can_attend_together(device, dtype) else 0
        self.device = device
        self.num_captures = 0
        self._graphs: OrderedDict[tuple[str, Bucket], StepGraph] = OrderedDict()
        self._recent: deque[tuple[str, Bucket]] = deque(maxlen=_NUM_RECENT)
        self._refused: set[tuple[str, Bucket]] = set()
        self._pool: Any = None  # torch's handle of a memory pool
        self._stream: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        return len(self._graphs)

    def run(
        self,
        name: str,
        part: Part,
        plan: PackPlan,
        image: Tensor,
        text: Tensor,
        is_awaited: bool = False,
    ) -> Outputs | None:
        """What the part gives; None: it has no graph, and is not to have one now.

        Args:
            name: of the part.
            is_awaited: make a graph even if no batch of this size was there lately.
        """
        bucket = find_bucket(plan, self.max_tokens)
        if bucket is None or (name, bucket) in self._refused:
            return None
        key = name, bucket
        is_worth_it = is_awaited or key in self._recent
        self._recent.append(key)
        if key not in self._graphs:
            if not is_worth_it:
                return None
            try:
                graph = self._capture(part, plan, bucket, image, text)
            except RuntimeError as error:  # mostly no memory; it may as well be a kernel that waits
                is_unknown = not is_out_of_memory(error)
                logger.warning(
                    "no CUDA graph of %s: this size runs without", bucket, exc_info=is_unknown
                )
                self._refused.add(key)
                return None
            self._graphs[key] = graph
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key].run(plan, bucket, image, text)

    def _capture(
        self, part: Part, plan: PackPlan, bucket: Bucket, image: Tensor, text: Tensor
    ) -> StepGraph:
        filled = fill_bucket(plan, bucket)
        # `plan` may share tensors with it, and this one is written to.
        segments = replace(filled.segments, starts=filled.segments.starts.clone())
        mine = replace(
            filled,
            image_rows=filled.image_rows.clone(),
            text_rows=filled.text_rows.clone(),
            segments=segments,
        )
        static_image = image.new_zeros(bucket.num_image_tokens, *image.shape[1:])
        static_text = text.new_zeros(bucket.num_text_tokens, *text.shape[1:])
        static_image[: image.shape[0]].copy_(image)
        static_text[: text.shape[0]].copy_(text)

        if self._stream is None:
            # One for all: memory of the pool is reused on the stream that it was taken on.
            self._stream = torch.cuda.Stream(self.device)
            self._pool = torch.cuda.graph_pool_handle()
        stream = self._stream
        # What is set up at a first call, such as workspaces, must not be captured.
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                part(mine, static_image, static_text)
        finally:  # if it fails, what it was to read is given back, and not before it is done
            current.wait_stream(stream)

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            outputs = part(mine, static_image, static_text)
        self.num_captures += 1
        logger.debug("captured a CUDA graph of %s", bucket)
        return StepGraph(graph, mine, static_image, static_text, outputs, loaded=plan)
