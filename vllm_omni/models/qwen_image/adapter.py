"""`QwenImageRunnerAdapter`: Qwen-Image cut into prepare, step, preview and decode."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from vllm_omni.cache_dit_params import CacheDiTParams
from vllm_omni.config import DiTConfig
from vllm_omni.diffusion.block_manager import DiffusionBlockManager
from vllm_omni.diffusion.cache_manager import DiTCacheManager
from vllm_omni.diffusion.decode_manager import ParallelDecodeManager
from vllm_omni.diffusion.external_cache import ExternalCache, make_external_cache
from vllm_omni.diffusion.messages import RequestResult
from vllm_omni.diffusion.pipeline_manager import PipelineManager
from vllm_omni.diffusion.sampling import estimate_final, euler_step
from vllm_omni.diffusion.step_cache import PackedStepCache, RowCache, make_row_caches
from vllm_omni.errors import InvalidParameterError
from vllm_omni.models.qwen_image.inputs import TASK_TEXT_ENCODING, QwenImageCustomInputs
from vllm_omni.models.qwen_image.transformer import (
    PackPlan,
    RowShape,
    StepCachePlan,
    make_plan,
    make_single_row_module,
    packed_forward,
    project_text,
    single_row_forward,
)
from vllm_omni.models.qwen_image.vae import decode_images, keep_first_frame_only

_MAX_PLANS = 32


@dataclass(eq=False)
class QwenImageState:
    """One request in a worker. Its tensors belong to the cache manager."""

    inputs: QwenImageCustomInputs
    latents: Tensor  # [image tokens, channels] float32; hidden states for a text encoding
    branches: list[Tensor]  # projected text [tokens, D], conditional first, then unconditional
    sigmas: list[float]  # [steps + 1], float32 values
    row_caches: list[RowCache] = field(default_factory=list)  # of each branch, if it has any
    external_cache: ExternalCache | None = None  # if it has one, its rows run by themselves
    num_computed_steps: int = 0
    row: int = -1

    @property
    def num_steps(self) -> int:
        return self.inputs.num_steps

    @property
    def preview_every(self) -> int:
        return self.inputs.preview_every

    @property
    def is_guided(self) -> bool:
        return len(self.branches) == 2

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


Row = tuple[QwenImageState, int]
"""A request and its guidance branch."""


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The rows of a batch that share a forward."""

    rows: list[Row]
    indices: list[int]  # of these among all rows of the batch
    plan: PackPlan
    text: Tensor  # [N_txt, D]


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """What stays the same from step to step while the same requests run together."""

    states: list[QwenImageState]  # guided ones first
    rows: list[Row]  # the conditional one of every state, then the others
    packed: PackedRows | None  # all rows but those that run by themselves
    row_states: Tensor  # [rows] index into states of each row
    token_states: Tensor  # [tokens of states] index into states of each token
    guidance_scale: Tensor  # [tokens of guided states, 1]

    @property
    def num_guided_tokens(self) -> int:
        return self.guidance_scale.shape[0]


class QwenImageRunnerAdapter:
    """Runs any mix of Qwen-Image requests, one packed forward a step."""

    def __init__(
        self, pipeline: PipelineManager, cache_manager: DiTCacheManager, config: DiTConfig
    ) -> None:
        self.pipeline = pipeline
        self.cache_manager = cache_manager
        self.block_manager = DiffusionBlockManager(pipeline.scheduler_config)
        self.decode_manager = ParallelDecodeManager(self._decode_vae, config.decode_batch_size)
        self.model_time = 0.0
        self._vae: AutoencoderKLQwenImage | None = None
        self._plans: OrderedDict[tuple[RowShape, ...], PackPlan] = OrderedDict()
        self._batch: PackedBatch | None = None

    @torch.no_grad()
    def generate(self, custom_inputs: QwenImageCustomInputs) -> RequestResult:
        """One request alone, from beginning to end."""
        request_id = f"generate-{id(custom_inputs)}"
        try:
            state = self.prepare(request_id, custom_inputs)
            for _ in self.block_manager.schedule_denoising_steps(0, state.num_steps):
                [latents] = self.step([state])
                state.advance(latents)
            return self.decode([state])[0]
        finally:
            self._batch = None
            self.cache_manager.release_cache(request_id)

    # --- prepare ---

    def prepare(self, request_id: str, inputs: QwenImageCustomInputs) -> QwenImageState:
        cond = self._encode(inputs, inputs.prompt_token_ids, inputs.prompt_embeds)
        if inputs.task == TASK_TEXT_ENCODING:
            return QwenImageState(inputs, cond, branches=[], sigmas=[0.0])
        embeds = [cond]
        if inputs.do_true_cfg:
            negative = inputs.negative_prompt_embeds
            embeds.append(self._encode(inputs, inputs.negative_prompt_token_ids, negative))
        branches = [
            self.cache_manager.cache_tensor(
                request_id, f"text.{index}", project_text(self.pipeline.transformer, branch)
            )
            for index, branch in enumerate(embeds)
        ]
        return QwenImageState(
            inputs=inputs,
            latents=self.cache_manager.cache_latents(request_id, self._initial_latents(inputs)),
            branches=branches,
            sigmas=self.block_manager.get_sigmas(
                inputs.num_inference_steps, inputs.num_image_tokens, inputs.sigmas
            ).tolist(),
            row_caches=make_row_caches(request_id, inputs.cache, len(branches), self.cache_manager),
            external_cache=self._external_cache(request_id, inputs),
        )

    def _external_cache(
        self, request_id: str, inputs: QwenImageCustomInputs
    ) -> ExternalCache | None:
        if not isinstance(inputs.cache, CacheDiTParams):
            return None
        return make_external_cache(
            request_id,
            inputs.cache,
            make_single_row_module(self.pipeline.transformer),
            is_guided=inputs.do_true_cfg,
            num_steps=inputs.num_steps,
            manager=self.cache_manager,
        )

    def _encode(
        self, inputs: QwenImageCustomInputs, token_ids: list[int] | None, embeds: Tensor | None
    ) -> Tensor:
        if embeds is not None:
            width = self.pipeline.transformer.config.joint_attention_dim
            if embeds.ndim != 2 or embeds.shape[1] != width:
                raise InvalidParameterError("prompt_embeds", list(embeds.shape), f"[N, {width}]")
            return embeds.to(self.pipeline.device, self.pipeline.dtype)
        assert token_ids is not None
        key = (inputs.num_prefix_tokens, tuple(token_ids))
        if (cached := self.cache_manager.get_cached_prompt(key)) is not None:
            return cached
        with self._timed():
            encoded = self.pipeline.encode_text(token_ids, inputs.num_prefix_tokens)
        self.cache_manager.cache_prompt(key, encoded)
        return encoded

    def _initial_latents(self, inputs: QwenImageCustomInputs) -> Tensor:
        """Noise as the stock pipeline draws it: on the CPU, in the model's dtype, then packed."""
        channels = self.pipeline.transformer.config.in_channels
        height, width = inputs.grid
        if inputs.latents is not None:
            if inputs.latents.shape != (height * width, channels):
                raise InvalidParameterError(
                    "latents", list(inputs.latents.shape), f"[{height * width}, {channels}]"
                )
            return inputs.latents.to(self.pipeline.device, torch.float32)
        noise = randn_tensor(
            (1, 1, channels // 4, 2 * height, 2 * width),
            generator=torch.Generator("cpu").manual_seed(inputs.seed),
            device=self.pipeline.device,
            dtype=self.pipeline.dtype,
        )
        return pack_latents(noise[0, 0]).float()

    # --- step ---

    def step(self, states: Sequence[QwenImageState]) -> list[Tensor]:
        batch = self._pack(states)
        device, dtype = self.pipeline.device, self.pipeline.dtype
        latents = torch.cat([state.latents for state in batch.states])  # [tokens, channels]
        sigma, sigma_next = (
            torch.tensor([[s.sigmas[s.num_computed_steps + ahead]] for s in batch.states]).to(
                device
            )
            for ahead in (0, 1)
        )  # [states, 1]

        # Rows: the conditional branch of every request, then the guided ones' unconditional one.
        num_train = self.block_manager.num_train_timesteps
        timesteps = (sigma.squeeze(1) * num_train).to(dtype) / num_train
        model_input = torch.cat((latents, latents[: batch.num_guided_tokens])).to(dtype)
        with self._timed():
            velocity = self._predict(batch, model_input, timesteps[batch.row_states])
        velocity = self.block_manager.apply_classifier_free_guidance(
            velocity.float(), batch.guidance_scale
        )
        stepped = euler_step(
            latents, velocity, sigma[batch.token_states], sigma_next[batch.token_states]
        )
        by_state = dict(
            zip(
                batch.states,
                stepped.split([state.latents.shape[0] for state in batch.states]),
                strict=True,
            )
        )
        return [by_state[state] for state in states]

    def _predict(self, batch: PackedBatch, model_input: Tensor, timesteps: Tensor) -> Tensor:
        """Velocity [tokens of all rows, channels], given the latents and timesteps of all rows."""
        packed = batch.packed
        if packed is not None and len(packed.rows) == len(batch.rows):
            return self._predict_packed(packed, model_input, timesteps)
        inputs = model_input.split([state.latents.shape[0] for state, _ in batch.rows])
        velocities: dict[int, Tensor] = {}
        if packed is not None:
            of_packed = self._predict_packed(
                packed,
                torch.cat([inputs[row] for row in packed.indices]),
                timesteps[packed.indices],
            )
            by_row = of_packed.split(packed.plan.image_lens)
            velocities.update(zip(packed.indices, by_row, strict=True))
        for state in batch.states:
            if state.external_cache is not None:
                rows = [row for row, (owner, _) in enumerate(batch.rows) if owner is state]
                alone = state.predict_alone(inputs[rows[0]], timesteps[rows[0]])
                velocities.update(zip(rows, alone, strict=True))
        return torch.cat([velocities[row] for row in range(len(batch.rows))])

    def _predict_packed(self, packed: PackedRows, latents: Tensor, timesteps: Tensor) -> Tensor:
        return packed_forward(
            self.pipeline.transformer,
            packed.plan,
            latents,
            packed.text,
            timesteps,
            self._step_cache(packed),
        )

    def _step_cache(self, packed: PackedRows) -> StepCachePlan | None:
        if not any(state.row_caches for state, _ in packed.rows):
            return None
        cache = PackedStepCache(
            [
                state.row_caches[branch] if state.row_caches else None
                for state, branch in packed.rows
            ],
            packed.plan.image_lens,
            [state.sigmas[state.num_computed_steps] for state, _ in packed.rows],
        )
        return StepCachePlan(
            cache, lambda rows: self._plan(_shapes_of([packed.rows[row] for row in rows]))
        )

    def _pack(self, states: Sequence[QwenImageState]) -> PackedBatch:
        ordered = sorted(states, key=lambda state: not state.is_guided)  # stable: guided first
        if self._batch is not None and self._batch.states == ordered:
            return self._batch
        device = self.pipeline.device
        guided = [state for state in ordered if state.is_guided]
        rows = [(state, 0) for state in ordered] + [(state, 1) for state in guided]
        token_counts = torch.tensor([state.latents.shape[0] for state in ordered])
        token_states = torch.repeat_interleave(torch.arange(len(ordered)), token_counts)
        scales = torch.tensor([state.inputs.true_cfg_scale for state in guided])
        guidance_scale = torch.repeat_interleave(scales, token_counts[: len(guided)])
        self._batch = PackedBatch(
            states=ordered,
            rows=rows,
            packed=self._pack_rows(rows),
            row_states=torch.tensor([*range(len(ordered)), *range(len(guided))]).to(device),
            token_states=token_states.to(device),
            guidance_scale=guidance_scale.unsqueeze(1).to(device),
        )
        return self._batch

    def _pack_rows(self, rows: Sequence[Row]) -> PackedRows | None:
        indices = [row for row, (state, _) in enumerate(rows) if state.external_cache is None]
        if not indices:
            return None
        packed = [rows[row] for row in indices]
        return PackedRows(
            rows=packed,
            indices=indices,
            plan=self._plan(_shapes_of(packed)),
            text=torch.cat([state.branches[branch] for state, branch in packed]),
        )

    def _plan(self, rows: tuple[RowShape, ...]) -> PackPlan:
        if (plan := self._plans.get(rows)) is None:
            plan = self._plans[rows] = make_plan(self.pipeline.transformer, rows)
            if len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(rows)
        return plan

    def release(self, state: QwenImageState) -> None:
        if self._batch is not None and state in self._batch.states:
            self._batch = None

    # --- decode ---

    def preview(self, states: Sequence[QwenImageState], stepped: Sequence[Tensor]) -> list[Tensor]:
        estimates = []
        for state, after in zip(states, stepped, strict=True):
            step = state.num_computed_steps
            estimate = estimate_final(
                state.latents, after, state.sigmas[step], state.sigmas[step + 1]
            )
            estimates.append(unpack_latents(estimate, *state.inputs.grid))
        return self.decode_manager.batch_decode_previews(estimates)

    def decode(self, states: Sequence[QwenImageState]) -> list[RequestResult]:
        with_pixels = [
            state
            for state in states
            if state.inputs.task != TASK_TEXT_ENCODING and state.inputs.output_mode.has_pixels
        ]
        images = self.decode_manager.batch_decode_latents(
            [unpack_latents(state.latents, *state.inputs.grid) for state in with_pixels]
        )
        image_of = dict(zip(with_pixels, images, strict=True))
        return [self._result(state, image_of.get(state)) for state in states]

    def _result(self, state: QwenImageState, image: Tensor | None) -> RequestResult:
        # The buffer behind `state.latents` is given back with the request: copy what leaves.
        latents = state.latents.to("cpu", copy=True)
        if image is None:
            return RequestResult(latents)
        additional: dict[str, Tensor] = {}
        if state.inputs.output_mode.has_latents:
            additional["latents"] = latents
        if state.inputs.output_mode.has_mask:
            additional["mask"] = self._mask(state.inputs)
            [image] = self.decode_manager.apply_masks_batch([image], [additional["mask"]])
        return RequestResult(image, additional)

    def _mask(self, inputs: QwenImageCustomInputs) -> Tensor:
        if inputs.mask is None:
            return torch.full((inputs.height, inputs.width), 255, dtype=torch.uint8)
        if inputs.mask.shape != (inputs.height, inputs.width):
            raise InvalidParameterError(
                "mask", list(inputs.mask.shape), f"[{inputs.height}, {inputs.width}]"
            )
        return inputs.mask.to("cpu", torch.uint8)

    def _decode_vae(self, latents: Tensor) -> Tensor:
        if self.pipeline.vae is not self._vae:  # newly loaded
            self._vae = self.pipeline.vae
            keep_first_frame_only(self._vae)
        with self._timed():
            return decode_images(self._vae, latents)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.model_time += time.perf_counter() - start


def _shapes_of(rows: Sequence[Row]) -> tuple[RowShape, ...]:
    return tuple(state.row_shape(branch) for state, branch in rows)


def pack_latents(latents: Tensor) -> Tensor:
    """[channels, 2h, 2w] to tokens [h * w, channels * 4]: each 2x2 patch is a token."""
    channels, height, width = latents.shape
    patches = latents.view(channels, height // 2, 2, width // 2, 2)
    return patches.permute(1, 3, 0, 2, 4).reshape(-1, channels * 4)


def unpack_latents(tokens: Tensor, height: int, width: int) -> Tensor:
    """Tokens [h * w, channels * 4] to [channels, 1, 2h, 2w], as the VAE takes them."""
    patches = tokens.view(height, width, -1, 2, 2)
    return patches.permute(2, 0, 3, 1, 4).reshape(-1, 1, 2 * height, 2 * width)
