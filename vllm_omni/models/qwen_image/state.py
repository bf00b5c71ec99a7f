"""`QwenImageState`: one request in a worker, between its steps; and how its latents lie."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from vllm_omni.diffusion.external_cache import ExternalCache
from vllm_omni.diffusion.step_cache import RowCache
from vllm_omni.models.qwen_image.inputs import QwenImageCustomInputs
from vllm_omni.models.qwen_image.transformer import RowShape, single_row_forward


@dataclass(eq=False)
class QwenImageState:
    """Its tensors belong to the cache manager."""

    inputs: QwenImageCustomInputs
    latents: Tensor  # [image tokens, channels] float32; hidden states for a text encoding
    branches: list[Tensor]  # projected text [tokens, D], conditional first, then unconditional
    sigmas: list[float]  # [steps + 1], float32 values
    row_caches: list[RowCache] = field(default_factory=list)  # of each branch, if it has any
    external_cache: ExternalCache | None = None  # if it has one, its rows run by themselves
    num_blocks: int = 0  # of the transformer
    num_computed_steps: int = 0
    row: int = -1

    @property
    def num_steps(self) -> int:
        return self.inputs.num_steps

    @property
    def preview_every(self) -> int:
        return self.inputs.preview_every

    @property
    def num_tokens(self) -> int:
        return self.inputs.num_tokens

    @property
    def is_guided(self) -> bool:
        return len(self.branches) == 2

    @property
    def is_resumable(self) -> bool:
        return not self.row_caches and self.external_cache is None

    @property
    def num_cached_rows(self) -> int:
        has_cache = bool(self.row_caches) or self.external_cache is not None
        return len(self.branches) if has_cache else 0

    @property
    def num_skipped_blocks(self) -> int:
        of_rows = sum(cache.num_skipped for cache in self.row_caches) * (self.num_blocks - 1)
        return of_rows + (self.external_cache.num_skipped_blocks if self.external_cache else 0)

    @property
    def num_skipped_rows(self) -> int:
        of_rows = sum(cache.num_skipped for cache in self.row_caches)
        return of_rows + (self.external_cache.num_skipped if self.external_cache else 0)

    def advance(self, latents: Tensor) -> None:
        self.latents.copy_(latents)
        self.num_computed_steps += 1
        for cache in self.row_caches:
            cache.commit()
        if self.external_cache is not None:
            self.external_cache.commit()

    def predict_alone(self, latents: Tensor, timestep: Tensor) -> list[Tensor]:
        """Velocity [tokens, channels] of each branch, by a forward of its own."""
        assert self.external_cache is not None
        with self.external_cache.take_step() as module:
            return [
                single_row_forward(module, self.row_shape(branch), latents, text, timestep)
                for branch, text in enumerate(self.branches)
            ]

    def row_shape(self, branch: int) -> RowShape:
        return RowShape(((1, *self.inputs.grid),), self.branches[branch].shape[0])


def pack_latents(latents: Tensor) -> Tensor:
    """[channels, 2h, 2w] to tokens [h * w, channels * 4]: each 2x2 patch is a token."""
    channels, height, width = latents.shape
    patches = latents.view(channels, height // 2, 2, width // 2, 2)
    return patches.permute(1, 3, 0, 2, 4).reshape(-1, channels * 4)


def unpack_latents(tokens: Tensor, height: int, width: int) -> Tensor:
    """Tokens [h * w, channels * 4] to [channels, 1, 2h, 2w], as the VAE takes them."""
    patches = tokens.view(height, width, -1, 2, 2)
    return patches.permute(2, 0, 3, 1, 4).reshape(-1, 1, 2 * height, 2 * width)
