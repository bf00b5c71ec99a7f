"""`QwenImageRunnerAdapter`: Qwen-Image cut into prepare, step, preview and decode."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from vllm_omni.cache_dit_params import CacheDiTParams
from vllm_omni.config import DiTConfig
from vllm_omni.diffusion.block_manager import DiffusionBlockManager
from vllm_omni.diffusion.cache_manager import DiTCacheManager
from vllm_omni.diffusion.external_cache import ExternalCache, make_external_cache
from vllm_omni.diffusion.messages import RequestResult
from vllm_omni.diffusion.model_clock import ModelClock
from vllm_omni.diffusion.pipeline_manager import PipelineManager
from vllm_omni.diffusion.sampling import euler_step
from vllm_omni.diffusion.step_cache import PackedStepCache, make_row_caches
from vllm_omni.errors import InvalidParameterError
from vllm_omni.models.interface import PendingResult
from vllm_omni.models.qwen_image.decoding import QwenImageDecoding
from vllm_omni.models.qwen_image.fast_transformer import FastTransformer
from vllm_omni.models.qwen_image.inputs import TASK_TEXT_ENCODING, QwenImageCustomInputs
from vllm_omni.models.qwen_image.state import QwenImageState, pack_latents
from vllm_omni.models.qwen_image.transformer import (
    PackPlan,
    RowShape,
    StepCachePlan,
    make_plan,
    make_single_row_module,
    packed_forward,
    project_text,
    select_plan,
)
from vllm_omni.models.qwen_image.weights import quantize_weights

_MAX_PLANS = 32
_DUMMY_TEXT_TOKENS = 64


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
    row_states: Tensor  # [rows] index into states of each row, on the host
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
        self.config = config
        self.block_manager = DiffusionBlockManager(pipeline.scheduler_config)
        self._clock = ModelClock(pipeline.device)
        self.decoding = QwenImageDecoding(pipeline, config, self._clock)
        self._plans: OrderedDict[tuple[RowShape, ...], PackPlan] = OrderedDict()
        self._batch: PackedBatch | None = None
        self._transformer: QwenImageTransformer2DModel | None = None
        self._fast: FastTransformer | None = None  # where steps are compiled

    @property
    def transformer(self) -> QwenImageTransformer2DModel:
        """The pipeline's, with its weights as this adapter wants them."""
        if self.pipeline.transformer is not self._transformer:  # newly loaded
            self._transformer = self.pipeline.transformer
            self._plans.clear()
            if self.config.quantization == "fp8":
                quantize_weights(self._transformer)
            self._fast = self._make_fast() if self._is_compiled else None
        return self._transformer

    @property
    def _is_compiled(self) -> bool:
        # Offloaded weights come to the device when a layer is called, and compiled code calls none.
        is_offloaded = self.config.cpu_offload == "transformer"
        return self.pipeline.device.type == "cuda" and not (
            self.config.enforce_eager or is_offloaded
        )

    def _make_fast(self) -> FastTransformer:
        fast = FastTransformer(
            self.pipeline.transformer,
            max_rows=2 * self.config.max_num_seqs,
            max_graph_tokens=self.config.max_cudagraph_capture_size,
        )
        fast.try_to_compile()  # while the worker loads, and nothing else is on the device
        return fast

    def sleep(self) -> None:
        """Keep nothing on the device that can be made again: weights are about to leave it."""
        self._transformer = self._fast = self._batch = None
        self._plans.clear()
        self.decoding.sleep()

    @property
    def model_time(self) -> float:
        """Seconds inside the networks; a GPU's decodes are left out, they run beside steps."""
        return self._clock.read()

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
                request_id, f"text.{index}", project_text(self.transformer, branch)
            )
            for index, branch in enumerate(embeds)
        ]
        sigmas = self.block_manager.get_sigmas(
            inputs.num_inference_steps, inputs.num_image_tokens, inputs.sigmas
        )
        if self._fast is not None:
            self._fast.prepare(self._timesteps(sigmas[:-1]))
        return QwenImageState(
            inputs=inputs,
            latents=self.cache_manager.cache_latents(request_id, self._initial_latents(inputs)),
            branches=branches,
            sigmas=sigmas.tolist(),
            row_caches=make_row_caches(request_id, inputs.cache, len(branches), self.cache_manager),
            external_cache=self._external_cache(request_id, inputs),
            num_blocks=len(self.transformer.transformer_blocks),
        )

    def _external_cache(
        self, request_id: str, inputs: QwenImageCustomInputs
    ) -> ExternalCache | None:
        if not isinstance(inputs.cache, CacheDiTParams):
            return None
        return make_external_cache(
            request_id,
            inputs.cache,
            make_single_row_module(self.transformer),
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
        with self._clock.running():
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
        dtype = self.pipeline.dtype
        latents = torch.cat([state.latents for state in batch.states])  # [tokens, channels]
        levels = torch.tensor(
            [s.sigmas[s.num_computed_steps : s.num_computed_steps + 2] for s in batch.states]
        )  # [states, 2] on the host
        sigma, sigma_next = levels.to(self.pipeline.device).split(1, dim=1)  # [states, 1]

        # Rows: the conditional branch of every request, then the guided ones' unconditional one.
        timesteps = self._timesteps(levels[:, 0])
        model_input = torch.cat((latents, latents[: batch.num_guided_tokens])).to(dtype)
        with self._clock.running():
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

    def warm_up_step(self, states: Sequence[QwenImageState]) -> list[Tensor]:
        """`step`, after everything is compiled and captured that steps like this one need."""
        packed = self._pack(states).packed
        if self._fast is not None and self._fast.is_ready and packed is not None:
            self._fast.capture(packed.plan)
        return self.step(states)

    def _timesteps(self, sigmas: Tensor) -> Tensor:
        """What the transformer is told, from 0 to 1, rounded as in the stock pipeline."""
        num_train = self.block_manager.num_train_timesteps
        return (sigmas * num_train).to(self.pipeline.dtype) / num_train

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
                timestep = timesteps[rows[0]].to(self.pipeline.device)
                alone = state.predict_alone(inputs[rows[0]], timestep)
                velocities.update(zip(rows, alone, strict=True))
        return torch.cat([velocities[row] for row in range(len(batch.rows))])

    def _predict_packed(self, packed: PackedRows, latents: Tensor, timesteps: Tensor) -> Tensor:
        transformer, step_cache = self.transformer, self._step_cache(packed)
        if self._fast is not None:
            return self._fast.forward(packed.plan, latents, packed.text, timesteps, step_cache)
        on_device = timesteps.to(self.pipeline.device)
        return packed_forward(transformer, packed.plan, latents, packed.text, on_device, step_cache)

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
        return StepCachePlan(cache, lambda rows: self._plan_subset(packed, rows))

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
            row_states=torch.tensor([*range(len(ordered)), *range(len(guided))]),
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
        transformer, device = self.transformer, self.pipeline.device
        return self._find_plan(rows, lambda: make_plan(transformer, rows, device))

    def _plan_subset(self, packed: PackedRows, rows: Sequence[int]) -> PackPlan:
        shapes = _shapes_of([packed.rows[row] for row in rows])
        return self._find_plan(shapes, lambda: select_plan(packed.plan, rows))

    def _find_plan(self, rows: tuple[RowShape, ...], make: Callable[[], PackPlan]) -> PackPlan:
        if (plan := self._plans.get(rows)) is None:
            plan = self._plans[rows] = make()
            if len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(rows)
        return plan

    def release(self, state: QwenImageState) -> None:
        if self._batch is not None and state in self._batch.states:
            self._batch = None

    # --- decode ---

    def preview(self, states: Sequence[QwenImageState], stepped: Sequence[Tensor]) -> list[Tensor]:
        return self.decoding.preview(states, stepped)

    def decode(self, states: Sequence[QwenImageState]) -> list[RequestResult]:
        return [image.wait() for image in self.start_decode(states)]

    def start_decode(self, states: Sequence[QwenImageState]) -> Sequence[PendingResult]:
        return self.decoding.start(states)

    def warm_up_decode(self, states: Sequence[QwenImageState]) -> None:
        self.decoding.warm_up(states)

    def limit_decode(self, max_latents: int) -> None:
        self.decoding.manager.max_latents = max_latents

    # --- dummies ---

    def make_dummy_inputs(self, width: int, height: int) -> QwenImageCustomInputs:
        embeds = torch.zeros(
            _DUMMY_TEXT_TOKENS, self.pipeline.transformer.config.joint_attention_dim
        )
        return QwenImageCustomInputs(
            prompt_embeds=embeds,
            negative_prompt_embeds=embeds,
            width=width,
            height=height,
            num_inference_steps=2,
        )


def _shapes_of(rows: Sequence[Row]) -> tuple[RowShape, ...]:
    return tuple(state.row_shape(branch) for state, branch in rows)
