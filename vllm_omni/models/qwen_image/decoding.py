"""`QwenImageDecoding`: from latents to what a request gets back, previews on the way included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_omni.config import DiTConfig
from vllm_omni.diffusion.decode_manager import ParallelDecodeManager, PendingPicture, apply_mask
from vllm_omni.diffusion.messages import RequestResult
from vllm_omni.diffusion.model_clock import ModelClock
from vllm_omni.diffusion.pipeline_manager import PipelineManager
from vllm_omni.diffusion.sampling import estimate_final
from vllm_omni.errors import InvalidParameterError
from vllm_omni.models.qwen_image.inputs import TASK_TEXT_ENCODING, QwenImageCustomInputs
from vllm_omni.models.qwen_image.state import QwenImageState, unpack_latents
from vllm_omni.models.qwen_image.vae import PictureDecoder


@dataclass(frozen=True, eq=False)
class PendingImage:
    """The result of a request, whose picture may be in the making; without one, its latents."""

    picture: PendingPicture | None
    latents: Tensor | None  # on the CPU, if they were asked for
    mask: Tensor | None  # [H, W] uint8

    def is_ready(self) -> bool:
        return self.picture is None or self.picture.is_ready()

    def wait(self) -> RequestResult:
        if self.picture is None:
            assert self.latents is not None
            return RequestResult(self.latents)
        image = self.picture.wait()
        additional: dict[str, Tensor] = {}
        if self.latents is not None:
            additional["latents"] = self.latents
        if self.mask is not None:
            additional["mask"] = self.mask
            image = apply_mask(image, self.mask)
        return RequestResult(image, additional)


class QwenImageDecoding:
    """Decodes the requests of an adapter, with the pipeline's VAE as it is at the time."""

    def __init__(self, pipeline: PipelineManager, config: DiTConfig, clock: ModelClock) -> None:
        self.pipeline = pipeline
        self.config = config
        self.manager = ParallelDecodeManager(
            self.decode_vae, config.decode_batch_size, pipeline.device
        )
        self._clock = clock
        self._decoder: PictureDecoder | None = None

    def start(self, states: Sequence[QwenImageState]) -> list[PendingImage]:
        """The results of requests that have taken all their steps, now or a little later."""
        with_pixels = [
            state
            for state in states
            if state.inputs.task != TASK_TEXT_ENCODING and state.inputs.output_mode.has_pixels
        ]
        pictures = self.manager.start_decode(
            [unpack_latents(state.latents, *state.inputs.grid) for state in with_pixels]
        )
        picture_of = dict(zip(with_pixels, pictures, strict=True))
        return [_pending_image(state, picture_of.get(state)) for state in states]

    def preview(self, states: Sequence[QwenImageState], stepped: Sequence[Tensor]) -> list[Tensor]:
        """Small pictures of where the step from `states` to `stepped` is heading."""
        estimates = []
        for state, after in zip(states, stepped, strict=True):
            step = state.num_computed_steps
            estimate = estimate_final(
                state.latents, after, state.sigmas[step], state.sigmas[step + 1]
            )
            estimates.append(unpack_latents(estimate, *state.inputs.grid))
        return self.manager.batch_decode_previews(estimates)

    def warm_up(self, states: Sequence[QwenImageState]) -> None:
        """Compile what decodes of these requests need, together and alone."""
        latents = [unpack_latents(state.latents, *state.inputs.grid) for state in states]
        for batch in (latents[: self.manager.max_batch], latents[:1]):
            self._get_decoder().warm_up(torch.stack(batch))

    def sleep(self) -> None:
        """Let go of the VAE."""
        self._decoder = None

    def decode_vae(self, latents: Tensor) -> Tensor:
        """Latents [batch, channels, 1, h, w] to pictures [batch, 3, H, W] from -1 to 1."""
        if latents.device.type == "cuda":
            return self._get_decoder().decode(latents)
        with self._clock.running():
            return self._get_decoder().decode(latents)

    def _get_decoder(self) -> PictureDecoder:
        if self._decoder is None or self._decoder.vae is not self.pipeline.vae:  # newly loaded
            is_compiled = self.pipeline.device.type == "cuda" and not self.config.enforce_eager
            self._decoder = PictureDecoder(
                self.pipeline.vae, self.config.vae_tile_size, "inductor" if is_compiled else ""
            )
        return self._decoder


def _pending_image(state: QwenImageState, picture: PendingPicture | None) -> PendingImage:
    # The buffer behind `state.latents` is given back with the request: copy what leaves.
    inputs = state.inputs
    leaves = picture is None or inputs.output_mode.has_latents
    latents = state.latents.to("cpu", copy=True) if leaves else None
    mask = _mask_of(inputs) if picture is not None and inputs.output_mode.has_mask else None
    return PendingImage(picture, latents, mask)


def _mask_of(inputs: QwenImageCustomInputs) -> Tensor:
    if inputs.mask is None:
        return torch.full((inputs.height, inputs.width), 255, dtype=torch.uint8)
    if inputs.mask.shape != (inputs.height, inputs.width):
        raise InvalidParameterError(
            "mask", list(inputs.mask.shape), f"[{inputs.height}, {inputs.width}]"
        )
    return inputs.mask.to("cpu", torch.uint8)
