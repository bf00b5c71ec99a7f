"""Modulation: shift, scale and gate of every block. It depends on the timestep only.

A third of the transformer's weights do nothing but make it, and requests with as many steps meet
the same timesteps again and again. So the values are kept: a *slot* for each timestep, for all
blocks, and tokens find theirs through their row's slot. New timesteps are made together, for which
the weights are read once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from diffusers import QwenImageTransformer2DModel
from torch import Tensor

MIN_SLOTS = 256  # of full-size Qwen-Image 4.4 MB each


class ModulationTable:
    """The modulation of the timesteps that were used last."""

    def __init__(self, transformer: QwenImageTransformer2DModel, num_slots: int) -> None:
        self.transformer = transformer
        weight = transformer.proj_out.weight
        layers, width = len(transformer.transformer_blocks), transformer.inner_dim
        # Of blocks: image and text; shift, scale and gate of the attention, then of the MLP.
        self.of_blocks = weight.new_zeros(num_slots, layers, 2, 6, width)
        self.of_output = weight.new_zeros(num_slots, 2, width)  # scale, then shift
        self.num_slots = num_slots
        self._slots: OrderedDict[float, int] = OrderedDict()  # the latest last

    def find(self, timesteps: Sequence[float]) -> list[int]:
        """The slot of each timestep, from 0 to 1; makes those that are not there."""
        assert len(set(timesteps)) <= self.num_slots
        missing = []
        for timestep in dict.fromkeys(timesteps):
            if timestep in self._slots:
                self._slots.move_to_end(timestep)
            else:
                missing.append(timestep)
        if missing:
            self._make(missing, len(set(timesteps)))
        return [self._slots[timestep] for timestep in timesteps]

    def clear(self) -> None:
        """Forget all timesteps."""
        self._slots.clear()

    def _make(self, timesteps: list[float], num_wanted: int) -> None:
        # First, because it can run out of memory: a slot without its values is never found.
        of_blocks, of_output = compute_modulation(self.transformer, timesteps)
        slots = []
        for timestep in timesteps:
            free = len(self._slots)
            # The oldest give way; those of this call are the latest.
            slot = self._slots.popitem(last=False)[1] if free == self.num_slots else free
            self._slots[timestep] = slot
            slots.append(slot)
        assert len(self._slots) >= num_wanted
        index = torch.tensor(slots, device=of_output.device)
        self.of_blocks.index_copy_(0, index, of_blocks)
        self.of_output.index_copy_(0, index, of_output)


def compute_modulation(
    transformer: QwenImageTransformer2DModel, timesteps: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Of all blocks [timesteps, layers, 2, 6, D], and of the output [timesteps, 2, D]."""
    like = transformer.proj_out.weight
    steps = torch.tensor(timesteps, dtype=like.dtype).to(like.device)
    temb = F.silu(transformer.time_text_embed(steps, like))
    of_blocks = torch.stack(
        [
            mod[1](temb)
            for block in transformer.transformer_blocks
            for mod in (block.img_mod, block.txt_mod)
        ],
        1,
    )
    of_output = transformer.norm_out.linear(temb)
    layers, width = len(transformer.transformer_blocks), transformer.inner_dim
    return of_blocks.view(-1, layers, 2, 6, width), of_output.view(-1, 2, width)
