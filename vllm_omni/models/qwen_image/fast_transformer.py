"""The fast packed step: `packed_forward`, with everything that a GPU gains from.

- query, key and value in one product, and fp8 if the weights are (`weights.py`);
- modulation looked up, not computed (`modulation.py`);
- blocks compiled as a few functions, for any number of tokens (`fast_blocks.py`);
- the text stream beside the image stream: its products are too small to fill a GPU;
- small batches as CUDA graphs (`step_graphs.py`).

Nothing compiles while a request waits: until the functions are there, steps take the simple loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor

from vllm_omni.diffusion.step_cache import Signal
from vllm_omni.layers.attention import attend_by_segment, attend_together, best_kernels
from vllm_omni.layers.compiling import whole_rows
from vllm_omni.layers.linear import round_up_rows
from vllm_omni.models.qwen_image.fast_blocks import (
    advance,
    finish,
    join,
    make_velocity,
    norm_attention,
    project,
)
from vllm_omni.models.qwen_image.fast_plan import FastPlan, fill_up, make_fast_plan
from vllm_omni.models.qwen_image.modulation import MIN_SLOTS, ModulationTable
from vllm_omni.models.qwen_image.step_graphs import Outputs, Part, StepGraphs
from vllm_omni.models.qwen_image.transformer import (
    PackPlan,
    RowShape,
    StepCachePlan,
    make_plan,
    packed_forward,
    select_rows,
)
from vllm_omni.models.qwen_image.weights import pack_weights, read_block

logger = logging.getLogger(__name__)

# What compiles first is what kernels are tuned for; any other batch runs in the same code.
_TUNING_ROWS = (RowShape(((1, 48, 64),), 61), RowShape(((1, 24, 32),), 13))


class FastTransformer:
    """Qwen-Image's transformer for packed steps on a GPU.

    Args:
        transformer: its weights are packed here; the module works as before.
        max_rows: most rows in a step.
        max_graph_tokens: most tokens of a step that runs as a CUDA graph; 0: none does.
        backend: what compiles; empty: nothing is compiled.
    """

    def __init__(
        self,
        transformer: QwenImageTransformer2DModel,
        max_rows: int,
        max_graph_tokens: int = 0,
        backend: str = "inductor",
    ) -> None:
        self.transformer = transformer
        pack_weights(transformer)
        self.blocks = [read_block(block) for block in transformer.transformer_blocks]
        self.is_quantized = self.blocks[0].text.qkv.scale is not None
        weight = transformer.proj_out.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.table = ModulationTable(transformer, max(MIN_SLOTS, max_rows))
        self.graphs = StepGraphs(self.device, self.dtype, max_graph_tokens)
        # Slot of each row, of the whole batch and of the rows that run all blocks. Fixed tensors,
        # because graphs read them.
        self._row_slots = torch.zeros(max_rows, dtype=torch.long, device=self.device)
        self._tail_slots = torch.zeros_like(self._row_slots)
        self._plans: WeakKeyDictionary[PackPlan, FastPlan] = WeakKeyDictionary()

        def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, fullgraph=True, backend=backend) if backend else function

        self._project = compiled(project)
        self._join = compiled(join)
        self._advance = compiled(advance)
        self._finish = compiled(finish)
        self._velocity = compiled(make_velocity)
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._ready = threading.Event()
        self._compiling = threading.Lock()
        self._thread: threading.Thread | None = None
        if not backend:
            self._ready.set()

    # --- getting ready ---

    @property
    def is_ready(self) -> bool:
        """Whether everything is compiled."""
        return self._ready.is_set()

    def compile(self) -> None:
        """Compile for any number of tokens, and wait for it.

        Kernels are tuned on the way, which wants a GPU that has nothing else to do.
        """
        with self._compiling:
            if self.is_ready:
                return
            start = time.perf_counter()
            with torch.no_grad(), whole_rows():
                self._compile()
            self._ready.set()
            logger.info("compiled the blocks in %.1f s", time.perf_counter() - start)

    def try_to_compile(self) -> None:
        """`compile`; if that fails, steps stay with the simple loop."""
        try:
            self.compile()
        except Exception:  # whatever the compiler stumbles over
            logger.exception("the blocks do not compile: steps go on in the simple loop")

    def _compile(self) -> None:
        plan = make_fast_plan(make_plan(self.transformer, _TUNING_ROWS))
        # No tensor twice: code that was compiled for one in two places is for that case only.
        block, modulation = self.blocks[0].image, self.table.of_blocks[:, 0, 0]
        other, other_modulation = self.blocks[0].text, self.table.of_blocks[:, 0, 1]
        image, text = (
            _dynamic(self._zeros(count, self.transformer.inner_dim).normal_())
            for count in (plan.num_image_tokens, plan.num_text_tokens)
        )
        slots = _dynamic(plan.image_rows.clone())
        projected = _dynamic(self._project(image, slots, modulation, block.qkv))
        of_text = _dynamic(projected[: text.shape[0]].clone())
        to_segments, rope = _dynamic(plan.to_segments), _dynamic(plan.rope)
        self._join(of_text, projected, to_segments, rope, other.norms, block.norms)
        attended = _dynamic(torch.zeros_like(image))
        self._finish(image, attended, slots, modulation, block)
        self._advance(image, attended, slots, modulation, block, other_modulation, other.qkv)
        proj = self.transformer.proj_out
        self._velocity(image, slots, self.table.of_output, proj.weight, proj.bias)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def start_compiling(self) -> None:
        """`try_to_compile` in a thread; steps take the simple loop until it is done."""
        if self._thread is None and not self.is_ready:
            self._thread = threading.Thread(target=self.try_to_compile, daemon=True)
            self._thread.start()

    @torch.no_grad()
    def capture(self, plan: PackPlan) -> None:
        """Make the graphs of a batch before one comes."""
        width = self.transformer.inner_dim
        latents = self._zeros(sum(plan.image_lens), self.transformer.config.in_channels)
        text = self._zeros(sum(plan.text_lens), width)
        self.table.find([1.0])
        with best_kernels(self.device):
            for name, part, image in (
                ("all", self._all, latents),
                ("head", self._head, latents),
                ("tail", self._tail, self._zeros(sum(plan.image_lens), width)),
            ):
                if self.graphs.run(name, part, plan, image, text, is_awaited=True) is None:
                    self._run_plain(part, plan, image, text)  # at least kernels are loaded

    def prepare(self, timesteps: Tensor) -> None:
        """Make the modulation of the timesteps of a request, all at once."""
        if self.is_ready:
            self.table.find(timesteps.tolist()[: self.table.num_slots])

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device, dtype=self.dtype)

    # --- a step ---

    def forward(
        self,
        plan: PackPlan,
        latents: Tensor,
        text: Tensor,
        timesteps: Tensor,
        step_cache: StepCachePlan | None = None,
    ) -> Tensor:
        """Predicted velocity [N_img, channels]; arguments as `packed_forward` has them.

        Args:
            timesteps: [rows] on the host, from 0 to 1, in the model's dtype.
        """
        if not self.is_ready or min(latents.shape[0], text.shape[0]) < 2:
            self.start_compiling()
            on_device = timesteps.to(self.device)
            return packed_forward(self.transformer, plan, latents, text, on_device, step_cache)
        slots = self.table.find(timesteps.tolist())
        self._set_slots(self._row_slots, slots)
        with best_kernels(self.device):
            if step_cache is None:
                (velocity,), _ = self._run("all", self._all, plan, latents, text)
                return velocity
            image = self._run_cached(plan, latents, text, slots, step_cache)
            image_slots = self._row_slots[plan.image_rows]
            return self._make_velocity(image, image_slots)

    def _run_cached(
        self,
        plan: PackPlan,
        latents: Tensor,
        text: Tensor,
        slots: Sequence[int],
        step_cache: StepCachePlan,
    ) -> Tensor:
        """The first block for all rows, the others for rows that miss; [N_img, D]."""
        (image, after_head), (text_after_head,) = self._run("head", self._head, plan, latents, text)
        signals = {}
        if Signal.HEAD_RESIDUAL in step_cache.cache.signals:
            signals[Signal.HEAD_RESIDUAL] = after_head - image
        if Signal.MODULATED_INPUT in step_cache.cache.signals:
            image_slots = self._row_slots[plan.image_rows]
            signals[Signal.MODULATED_INPUT] = norm_attention(
                image, image_slots, self.table.of_blocks[:, 0, 0]
            )

        def run_tail(rows: list[int]) -> Tensor:
            row_plan, of_image, of_text = plan, after_head, text_after_head
            if len(rows) < len(plan.image_lens):
                row_plan = step_cache.plan_rows(rows)
                of_image = select_rows(after_head, plan.image_lens, rows)
                of_text = select_rows(text_after_head, plan.text_lens, rows)
            self._set_slots(self._tail_slots, [slots[row] for row in rows])
            (of_image,), _ = self._run("tail", self._tail, row_plan, of_image, of_text)
            return of_image

        return step_cache.cache.apply(signals, after_head, run_tail)

    def _run(self, name: str, part: Part, plan: PackPlan, image: Tensor, text: Tensor) -> Outputs:
        outputs = self.graphs.run(name, part, plan, image, text)
        return self._run_plain(part, plan, image, text) if outputs is None else outputs

    def _run_plain(self, part: Part, plan: PackPlan, image: Tensor, text: Tensor) -> Outputs:
        """Without a graph."""
        num_image, num_text = image.shape[0], text.shape[0]
        if (fast := self._plans.get(plan)) is None:
            # Image tokens are many as a rule: only where they are too few does fp8 need more.
            # Compiled code is for two tokens or more; rows that miss a cache may have fewer.
            least = (round_up_rows(num_text), round_up_rows(1)) if self.is_quantized else (2, 2)
            fast = self._plans[plan] = make_fast_plan(plan, *least)
        of_image, of_text = part(
            fast, fill_up(image, fast.num_image_tokens), fill_up(text, fast.num_text_tokens)
        )
        return (
            tuple(output[:num_image] for output in of_image),
            tuple(output[:num_text] for output in of_text),
        )

    def _set_slots(self, tensor: Tensor, slots: Sequence[int]) -> None:
        tensor[: len(slots)].copy_(torch.tensor(slots), non_blocking=True)

    # --- the parts of a step: each can be a graph ---

    def _all(self, plan: FastPlan, latents: Tensor, text: Tensor) -> Outputs:
        slots = self._row_slots[plan.image_rows], self._row_slots[plan.text_rows]
        image: Tensor = self.transformer.img_in(latents)
        image, _ = self._run_blocks(plan, image, text, slots, range(len(self.blocks)))
        return (self._make_velocity(image, slots[0]),), ()

    def _head(self, plan: FastPlan, latents: Tensor, text: Tensor) -> Outputs:
        slots = self._row_slots[plan.image_rows], self._row_slots[plan.text_rows]
        image: Tensor = self.transformer.img_in(latents)
        after_head, text = self._run_blocks(plan, image, text, slots, range(1))
        return (image, after_head), (text,)

    def _tail(self, plan: FastPlan, image: Tensor, text: Tensor) -> Outputs:
        slots = self._tail_slots[plan.image_rows], self._tail_slots[plan.text_rows]
        image, _ = self._run_blocks(plan, image, text, slots, range(1, len(self.blocks)))
        return (image,), ()

    def _run_blocks(
        self,
        plan: FastPlan,
        image: Tensor,
        text: Tensor,
        slots: tuple[Tensor, Tensor],
        layers: range,
    ) -> tuple[Tensor, Tensor]:
        """The blocks of some layers; slots: of image tokens and of text tokens."""
        of_image, of_text = self.table.of_blocks[:, :, 0], self.table.of_blocks[:, :, 1]
        first, last = layers[0], layers[-1]
        with self._beside() as beside:
            with beside:
                text_qkv = self._project(
                    text, slots[1], of_text[:, first], self.blocks[first].text.qkv
                )
            image_qkv = self._project(
                image, slots[0], of_image[:, first], self.blocks[first].image.qkv
            )
        for layer in layers:
            block = self.blocks[layer]
            heads = self._join(
                text_qkv,
                image_qkv,
                plan.to_segments,
                plan.rope,
                block.text.norms,
                block.image.norms,
            )
            image_attended, text_attended = _attend(plan, *heads)
            # Whatever one stream reads and the other one made is held until both have met again.
            with self._beside() as beside:
                if layer == last:
                    with beside:
                        text = self._finish(
                            text, text_attended, slots[1], of_text[:, layer], block.text
                        )
                    image = self._finish(
                        image, image_attended, slots[0], of_image[:, layer], block.image
                    )
                    continue
                following = self.blocks[layer + 1]
                with beside:
                    text, text_qkv = self._advance(
                        text,
                        text_attended,
                        slots[1],
                        of_text[:, layer],
                        block.text,
                        of_text[:, layer + 1],
                        following.text.qkv,
                    )
                image, image_qkv = self._advance(
                    image,
                    image_attended,
                    slots[0],
                    of_image[:, layer],
                    block.image,
                    of_image[:, layer + 1],
                    following.image.qkv,
                )
        return image, text

    @contextmanager
    def _beside(self) -> Iterator[AbstractContextManager[object]]:
        """Gives a context whose kernels run beside those outside of it; both meet at the end."""
        if self._side is None:
            yield nullcontext()
            return
        main = torch.cuda.current_stream(self.device)
        self._side.wait_stream(main)
        try:
            yield torch.cuda.stream(self._side)
        finally:
            main.wait_stream(self._side)

    def _make_velocity(self, image: Tensor, slots: Tensor) -> Tensor:
        proj = self.transformer.proj_out
        velocity: Tensor = self._velocity(
            image, slots, self.table.of_output, proj.weight, proj.bias
        )
        return velocity


def _attend(plan: FastPlan, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What image tokens and text tokens attended to, [N_img, D] and [N_txt, D]."""
    if plan.is_filled:
        attended = attend_together(query, key, value, plan.segments)[plan.from_segments].flatten(1)
        text, image = attended.split((plan.num_text_tokens, plan.num_image_tokens))
        return image, text
    by_segment = attend_by_segment(query, key, value, plan.segments)
    num_rows = len(plan.segment_rows)  # behind theirs are those that fill up text, then image
    by_row: dict[int, Tensor] = dict(zip(plan.segment_rows, by_segment[:num_rows], strict=True))
    pieces = [
        by_row[row].flatten(1).split((text_len, image_len))
        for row, (text_len, image_len) in enumerate(
            zip(plan.text_lens, plan.image_lens, strict=True)
        )
    ]
    texts, images = zip(*pieces, strict=True)
    filling = [segment.flatten(1) for segment in by_segment[num_rows:]]
    num_of_text = int(plan.num_text_tokens > sum(plan.text_lens))
    return (
        torch.cat((*images, *filling[num_of_text:])),
        torch.cat((*texts, *filling[:num_of_text])),
    )


def _dynamic(tensor: Tensor) -> Tensor:
    """The same, with a first dimension that compiled code takes as open."""
    torch._dynamo.mark_dynamic(tensor, 0)
    return tensor
