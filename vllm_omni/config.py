"""Settings of the system: frozen, checked when made, each field described once for code and CLI."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from vllm_omni.errors import ConfigError

EngineType = Literal["ar", "diffusion"]
Mode = Literal["embedded", "process"]
Policy = Literal["fcfs", "priority", "shortest"]
DType = Literal["auto", "float32", "bfloat16"]
Offload = Literal["none", "text_encoder", "transformer"]
Quantization = Literal["none", "fp8"]
T = TypeVar("T")

DEMO = "demo"  # the one model that goes by a name, not by its path
GPU = "settings for GPUs"  # headings of settings
PROMPTS = "cache of prompts"
SUPERVISION = "supervision of stages, in process mode"
SYSTEM = (PROMPTS, SUPERVISION)  # of the whole system, for whoever starts one
_TOKEN_SIDE = 16  # pixels, as `params.SIZE_MULTIPLE` says, which is above this module
TILE_MULTIPLE = 4 * _TOKEN_SIDE  # pixels: a tile and three quarters of it are whole tokens
MAX_SECONDS = 1e9  # of any time limit: more than anybody waits, and exact in a float


def setting(default: Any, help: str, group: str = "", is_secret: bool = False) -> Any:
    """A field with a default and the one line that `--help` and readers get.

    Args:
        group: the heading under which `--help` lists it; empty: that of its class.
        is_secret: it is left out where the config is shown.
    """
    return field(default=default, repr=not is_secret, metadata={"help": help, "group": group})


@dataclass(frozen=True)
class DiTCacheTensor:
    """A buffer that the cache manager reserves at start and lends to requests."""

    size: int  # bytes

    def __post_init__(self) -> None:
        check_whole("DiTCacheTensor.size", self.size, 1)


@dataclass(frozen=True)
class DiTCacheConfig:
    """What `DiTCacheManager` may hold."""

    dit_cache_tensors: Sequence[DiTCacheTensor] = setting((), "buffers reserved for DiT caches")
    kv_cache_groups: Sequence[DiTCacheTensor] = setting((), "buffers reserved for attention caches")
    max_cache_size: int = setting(1024**3, "bytes, over everything the manager holds")
    cache_cleanup_interval: float = setting(60.0, "seconds after which an unused entry expires")

    def __post_init__(self) -> None:
        for name in ("dit_cache_tensors", "kv_cache_groups"):
            object.__setattr__(self, name, check_each(name, getattr(self, name), DiTCacheTensor))
        check_whole("max_cache_size", self.max_cache_size, 1)
        check_seconds("cache_cleanup_interval", self.cache_cleanup_interval)
        if self.reserved_size > self.max_cache_size:
            raise ConfigError(
                "max_cache_size",
                self.max_cache_size,
                f"the reserved buffers alone take {self.reserved_size} bytes",
            )

    @property
    def reserved_tensors(self) -> tuple[DiTCacheTensor, ...]:
        return (*self.dit_cache_tensors, *self.kv_cache_groups)

    @property
    def reserved_size(self) -> int:
        return sum(tensor.size for tensor in self.reserved_tensors)


@dataclass(frozen=True)
class WarmupSize:
    """Pictures of one size that are drawn together before the first request."""

    width: int
    height: int
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> WarmupSize:
        """From "1024x1024", or "512x512x4" for four at once."""
        if not re.fullmatch(r"[1-9]\d{0,4}x[1-9]\d{0,4}(x[1-9]\d{0,2})?", text):
            raise ConfigError("warmup_sizes", text, "width x height, or width x height x count")
        size = cls(*(int(part) for part in text.split("x")))
        if size.width % _TOKEN_SIDE or size.height % _TOKEN_SIDE:
            raise ConfigError("warmup_sizes", text, f"sides that are multiples of {_TOKEN_SIDE}")
        return size


@dataclass(frozen=True)
class DiTConfig:
    """A diffusion engine core: its model, where it runs, and how it batches."""

    model: str = setting("", "path of a checkpoint in diffusers layout")
    model_type: str = setting("dit", "kind of diffusion model")
    stage_id: int = setting(1, "number of the stage, by which its processes call themselves")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N; auto takes a GPU if there is one")
    dtype: DType = setting("auto", "of weights and activations; auto is bfloat16 on GPUs")
    worker_processes: int = setting(
        0, "worker processes, one per device, requests spread over them; 0 runs in this process"
    )
    max_num_seqs: int = setting(32, "most requests in one step")
    max_num_resident: int = setting(
        256, "most requests that hold latents, in the step or passed over; a further one waits"
    )
    max_num_batched_tokens: int = setting(
        32768, "most image and text tokens in one step, over all requests and guidance branches"
    )
    policy: Policy = setting("fcfs", "which request goes first")
    saturating_num_tokens: int = setting(
        4096, "tokens that keep the device busy; with shortest, longer requests wait beyond them"
    )
    ageing_steps: int = setting(
        1000, "steps a request may be passed over before it goes ahead of every policy"
    )
    decode_batch_size: int = setting(4, "most pictures in one VAE decode")
    vae_tile_size: int = setting(
        0, "side in pixels of the tiles in which larger pictures are decoded; 0: in one piece", GPU
    )
    gpu_memory_utilization: float = setting(
        0.9, "share of the GPU that weights, requests and steps may take, as in vLLM", GPU
    )
    enforce_eager: bool = setting(
        False, "compile nothing and use no CUDA graphs, as always on CPUs", GPU
    )
    max_cudagraph_capture_size: int = setting(
        8192, "most tokens of a step that runs as a CUDA graph; 0: none does", GPU
    )
    quantization: Quantization = setting(
        "none", "of the transformer's large layers; fp8 takes half the memory", GPU
    )
    cpu_offload: Offload = setting(
        "none", "weights kept in host memory and fetched for each use; transformer is both", GPU
    )
    warmup_sizes: Sequence[str] = setting(
        (), "what to draw before being ready, as 1024x1024 or, 4 at once, 512x512x4", GPU
    )
    load_text_encoder: bool = setting(True, "encode prompts in the diffusion workers")
    snapshot_steps: int = 0  # from one to the next; `OmniConfig.snapshot_every` in process mode
    cache_config: DiTCacheConfig = field(default_factory=DiTCacheConfig)

    def __post_init__(self) -> None:
        check_choice("policy", self.policy, get_args(Policy))
        check_choice("dtype", self.dtype, get_args(DType))
        check_choice("model_type", self.model_type, ("dit",))
        check_is("device", self.device, str)
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError("device", self.device, "one of auto, cpu, cuda, cuda:N")
        check_whole("stage_id", self.stage_id, 0)
        check_whole("worker_processes", self.worker_processes, 0)
        for name in (
            "max_num_seqs",
            "max_num_resident",
            "max_num_batched_tokens",
            "saturating_num_tokens",
            "ageing_steps",
            "decode_batch_size",
        ):
            check_whole(name, getattr(self, name), 1)
        check_is("load_text_encoder", self.load_text_encoder, bool)
        check_is("enforce_eager", self.enforce_eager, bool)
        check_whole("max_cudagraph_capture_size", self.max_cudagraph_capture_size, 0)
        check_choice("quantization", self.quantization, get_args(Quantization))
        check_choice("cpu_offload", self.cpu_offload, get_args(Offload))
        if self.quantization != "none" and self.cpu_offload == "transformer":
            # Layers are packed for fp8 after they are loaded, and those are not fetched.
            raise ConfigError(
                "quantization", self.quantization, "none with cpu_offload=transformer"
            )
        check_share("gpu_memory_utilization", self.gpu_memory_utilization)
        check_whole("vae_tile_size", self.vae_tile_size, 0)
        if self.vae_tile_size % TILE_MULTIPLE:
            allowed = f"0, or a multiple of {TILE_MULTIPLE}"
            raise ConfigError("vae_tile_size", self.vae_tile_size, allowed)
        sizes = check_each("warmup_sizes", self.warmup_sizes, str)
        object.__setattr__(self, "warmup_sizes", sizes)
        for size in sizes:
            if WarmupSize.parse(size).count > self.max_num_seqs:
                allowed = f"no more at once than max_num_seqs={self.max_num_seqs}"
                raise ConfigError("warmup_sizes", size, allowed)
        check_whole("snapshot_steps", self.snapshot_steps, 0)
        check_is("cache_config", self.cache_config, DiTCacheConfig)


@dataclass(frozen=True)
class StageConfig:
    """One stage of the way of a request."""

    stage_id: int
    engine_type: EngineType
    model_path: str
    input_modalities: Sequence[str] = ()
    output_modalities: Sequence[str] = ()
    vllm_config: Any = None  # AR stages: a VllmConfig, engine arguments or a dict of them
    dit_config: DiTConfig | None = None  # diffusion stages
    cache_config: DiTCacheConfig | None = None  # diffusion; overrides dit_config.cache_config

    def __post_init__(self) -> None:
        check_choice("engine_type", self.engine_type, get_args(EngineType))
        check_whole("stage_id", self.stage_id, 0)
        check_model("model_path", self.model_path)
        for name in ("input_modalities", "output_modalities"):
            object.__setattr__(self, name, check_each(name, getattr(self, name), str))
        if self.engine_type == "ar":
            self._check_ar()
        else:
            self._check_diffusion()

    def _check_ar(self) -> None:
        if self.dit_config is not None:
            raise ConfigError("dit_config", self.dit_config, "an AR stage takes vllm_config")
        if self.cache_config is not None:
            raise ConfigError("cache_config", self.cache_config, "an AR stage has no DiT cache")
        # vLLM's own classes cannot be named here: this file is read where vLLM is not installed.
        if isinstance(self.vllm_config, dict):
            is_allowed = all(isinstance(key, str) for key in self.vllm_config)
        else:
            plain = (str, bytes, int, float, list, tuple, set)
            is_allowed = not isinstance(self.vllm_config, plain)
        if not is_allowed:
            allowed = "a VllmConfig, engine arguments or a dict of them"
            raise ConfigError("vllm_config", self.vllm_config, allowed)

    def _check_diffusion(self) -> None:
        if self.vllm_config is not None:
            raise ConfigError("vllm_config", self.vllm_config, "a diffusion stage takes dit_config")
        if self.dit_config is not None:
            check_is("dit_config", self.dit_config, DiTConfig)
        if self.cache_config is not None:
            check_is("cache_config", self.cache_config, DiTCacheConfig)


@dataclass(frozen=True)
class OmniConfig:
    """The whole system."""

    model: str = setting(DEMO, "demo, or path of a checkpoint in diffusers layout")
    mode: Mode = setting(
        "embedded", "where stages run: embedded is in this process, process in one for each stage"
    )
    seed: int | None = setting(
        None, "requests without a seed draw theirs from this one, so that a run can be repeated"
    )
    prompt_cache_bytes: int = setting(
        128 * 2**20, "most bytes of hidden states kept of earlier prompts; 0: none", PROMPTS
    )
    log_stats: bool = setting(False, "keep vLLM's own metrics of AR stages; in process mode")
    otlp_traces_endpoint: str = setting(
        "", "where vLLM sends OpenTelemetry spans of AR stages, empty: nowhere; in process mode"
    )
    max_restarts: int = setting(
        5, "how often a stage may die within restart_window before all is given up", SUPERVISION
    )
    restart_window: float = setting(600.0, "seconds over which deaths are counted", SUPERVISION)
    hang_timeout: float = setting(
        8.0, "seconds without a sign of life after which a stage is restarted", SUPERVISION
    )
    step_timeout: float = setting(
        300.0, "seconds after which a stage is restarted though it computes", SUPERVISION
    )
    start_timeout: float = setting(600.0, "seconds that a stage may take to load", SUPERVISION)
    snapshot_every: int = setting(
        8, "steps after which latents are kept to go on from if a stage dies; 0: never", SUPERVISION
    )
    vllm_config: Any = None  # of AR stages without their own
    stage_configs: Sequence[StageConfig] = ()  # empty: those of the model's checkpoint

    def __post_init__(self) -> None:
        check_model("model", self.model)
        check_whole("prompt_cache_bytes", self.prompt_cache_bytes, 0)
        check_whole("max_restarts", self.max_restarts, 0)
        check_whole("snapshot_every", self.snapshot_every, 0)
        for name in ("restart_window", "hang_timeout", "step_timeout", "start_timeout"):
            check_seconds(name, getattr(self, name))
        check_choice("mode", self.mode, get_args(Mode))
        check_is("log_stats", self.log_stats, bool)
        check_is("otlp_traces_endpoint", self.otlp_traces_endpoint, str)
        for name in ("log_stats", "otlp_traces_endpoint"):
            if getattr(self, name) and self.mode != "process":
                raise ConfigError(name, getattr(self, name), "only with mode='process'")
        if self.seed is not None:
            check_whole("seed", self.seed, 0)
        stages = check_each("stage_configs", self.stage_configs, StageConfig)
        object.__setattr__(self, "stage_configs", stages)
        stage_ids = [stage.stage_id for stage in self.stage_configs]
        if len(set(stage_ids)) != len(stage_ids):
            raise ConfigError("stage_configs", stage_ids, "each stage_id may appear once")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuse what is none of the choices."""
    if value not in choices:
        raise ConfigError(name, value, f"one of {', '.join(choices)}")


def check_model(name: str, value: object) -> None:
    """Refuse what can name no model."""
    if not isinstance(value, str) or not value:
        raise ConfigError(name, value, "the path of a checkpoint, or demo")


def check_whole(name: str, value: object, low: int) -> None:
    """Refuse what is no whole number from `low` on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(name, value, f"a whole number, at least {low}")


def check_share(name: str, value: object) -> None:
    """Refuse what is no part of a whole."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= 1:  # type: ignore[operator]
        raise ConfigError(name, value, "a number above 0, at most 1")


def check_seconds(name: str, value: object) -> None:
    """Refuse what is no time limit."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= MAX_SECONDS:  # type: ignore[operator]
        raise ConfigError(name, value, f"a number of seconds above 0, at most {MAX_SECONDS:.0f}")


def check_is(name: str, value: object, kind: type) -> None:
    """Refuse what is of another type."""
    if not isinstance(value, kind):
        raise ConfigError(name, value, f"a {kind.__name__}")


def check_each(name: str, values: object, kind: type[T]) -> tuple[T, ...]:
    """A list whose members all have a type, as a tuple."""
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, kind) for v in values):
        raise ConfigError(name, values, f"a list of {kind.__name__}")
    return tuple(values)
