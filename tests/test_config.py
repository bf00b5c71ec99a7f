"""Settings are checked when they are made; a refusal names the setting, the value and the rule."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni.config import (
    DiTCacheConfig,
    DiTCacheTensor,
    DiTConfig,
    OmniConfig,
    StageConfig,
)
from vllm_omni.errors import ConfigError, EngineError

AT_LEAST_ONE = "a whole number, at least 1"
NOT_COUNTS = [0, -1, 1.0, "1", True, None, math.nan]
NOT_SECONDS = [0, -1.0, "60", True, math.nan, math.inf, None]
STAGE: dict[str, Any] = {"stage_id": 0, "engine_type": "diffusion", "model_path": "m"}
AR_STAGE = STAGE | {"engine_type": "ar"}

REFUSALS: list[tuple[type, dict[str, Any], str, Any, str]] = [
    *[
        (DiTConfig, {}, name, value, AT_LEAST_ONE)
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "saturating_num_tokens",
            "ageing_steps",
            "decode_batch_size",
        )
        for value in NOT_COUNTS
    ],
    *[
        (DiTConfig, {}, "gpu_memory_utilization", value, "a number above 0, at most 1")
        for value in (0, -0.5, 1.01, math.nan, "0.9", True, None)
    ],
    *[(DiTConfig, {}, "vae_tile_size", value, "0, or a multiple of 64") for value in (1, 32, 100)],
    *[
        (DiTConfig, {}, "cpu_offload", value, "one of none, text_encoder, transformer")
        for value in ("vae", None, True)
    ],
    *[
        (DiTConfig, {}, "worker_processes", value, "a whole number, at least 0")
        for value in (-1, 0.0, "0", False, None)
    ],
    *[
        (DiTConfig, {}, "policy", value, "one of fcfs, priority, shortest")
        for value in ("FCFS", "", None, 1)
    ],
    *[
        (DiTConfig, {}, "dtype", value, "one of auto, float32, bfloat16")
        for value in ("float16", "fp32", None)
    ],
    (DiTConfig, {}, "model_type", "unet", "one of dit"),
    *[
        (DiTConfig, {}, "quantization", value, "one of none, fp8")
        for value in ("int8", "FP8", "", None, True)
    ],
    (
        *(DiTConfig, {"cpu_offload": "transformer"}, "quantization", "fp8"),
        "none with cpu_offload=transformer",
    ),
    *[
        (DiTConfig, {}, "max_cudagraph_capture_size", value, "a whole number, at least 0")
        for value in (-1, 1.0, "8192", None, True)
    ],
    *[(DiTConfig, {}, "enforce_eager", value, "a bool") for value in (1, "yes", None)],
    *[
        (DiTConfig, {}, "device", value, "one of auto, cpu, cuda, cuda:N")
        for value in ("gpu", "", "cpu:0", "cudax")
    ],
    *[(DiTCacheConfig, {}, "max_cache_size", value, AT_LEAST_ONE) for value in NOT_COUNTS],
    *[
        (
            DiTCacheConfig,
            {},
            "cache_cleanup_interval",
            value,
            "a number of seconds above 0, at most 1000000000",
        )
        for value in NOT_SECONDS
    ],
    *[
        (DiTCacheConfig, {}, name, [5], "a list of DiTCacheTensor")
        for name in ("dit_cache_tensors", "kv_cache_groups")
    ],
    (StageConfig, STAGE, "engine_type", "text", "one of ar, diffusion"),
    *[
        (StageConfig, STAGE, "stage_id", value, "a whole number, at least 0")
        for value in (-1, "0", 0.0, True)
    ],
    *[
        (config_class, others, name, value, "the path of a checkpoint, or demo")
        for config_class, others, name in (
            (StageConfig, STAGE, "model_path"),
            (OmniConfig, {}, "model"),
        )
        for value in ("", None, 5, Path("m"))
    ],
    *[
        (StageConfig, STAGE, name, value, "a list of str")
        for name in ("input_modalities", "output_modalities")
        for value in ("text", [1], None, {"text": 1})
    ],
    (StageConfig, STAGE, "vllm_config", {}, "a diffusion stage takes dit_config"),
    (StageConfig, STAGE, "dit_config", {}, "a DiTConfig"),
    (StageConfig, STAGE, "cache_config", {}, "a DiTCacheConfig"),
    *[
        (
            StageConfig,
            AR_STAGE,
            "vllm_config",
            value,
            "a VllmConfig, engine arguments or a dict of them",
        )
        for value in ("max_model_len", 5, True, ["max_model_len"], {1: 2})
    ],
    (StageConfig, AR_STAGE, "dit_config", DiTConfig(), "an AR stage takes vllm_config"),
    (StageConfig, AR_STAGE, "cache_config", DiTCacheConfig(), "an AR stage has no DiT cache"),
    *[
        (OmniConfig, {}, "mode", value, "one of embedded, process")
        for value in ("cloud", "PROCESS", "", None)
    ],
    *[
        (OmniConfig, {}, "seed", value, "a whole number, at least 0")
        for value in (-1, 1.0, "1", True)
    ],
    (OmniConfig, {}, "log_stats", True, "only with mode='process'"),
    (OmniConfig, {}, "otlp_traces_endpoint", "http://h:4317", "only with mode='process'"),
    (OmniConfig, {"mode": "process"}, "log_stats", 1, "a bool"),
    (OmniConfig, {"mode": "process"}, "otlp_traces_endpoint", None, "a str"),
]


@pytest.mark.parametrize(
    ("config_class", "others", "name", "value", "allowed"),
    [pytest.param(*case, id=f"{case[2]}-{str(case[3])[:20]}") for case in REFUSALS],
)
def test_refusal_names_setting_value_and_what_is_allowed(
    config_class: type, others: dict[str, Any], name: str, value: Any, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_class(**(others | {name: value}))
    shown = repr(value) if len(repr(value)) <= 200 else f"{value!r:.200}…"
    assert str(caught.value) == f"{name}={shown} is not allowed: {allowed}"
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("config_class", "name", "value"),
    [
        (DiTConfig, "device", 5),
        (DiTConfig, "device", None),
        (DiTConfig, "device", "cuda:"),
        (DiTConfig, "device", "cuda:first"),
        (DiTConfig, "load_text_encoder", "no"),
        (DiTConfig, "cache_config", {"max_cache_size": 1}),
        (DiTCacheConfig, "dit_cache_tensors", None),
        (DiTCacheConfig, "cache_cleanup_interval", 10**400),
        (OmniConfig, "stage_configs", [5]),
    ],
)
def test_refuses_values_of_another_kind(config_class: type, name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        config_class(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("size", NOT_COUNTS)
def test_reserved_buffer_has_a_size(size: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        DiTCacheTensor(size=size)
    assert str(caught.value) == f"DiTCacheTensor.size={size!r} is not allowed: {AT_LEAST_ONE}"


def test_reserved_buffers_have_to_fit() -> None:
    tensors = [DiTCacheTensor(60), DiTCacheTensor(50)]
    with pytest.raises(ConfigError) as caught:
        DiTCacheConfig(
            dit_cache_tensors=tensors[:1], kv_cache_groups=tensors[1:], max_cache_size=109
        )
    assert str(caught.value) == (
        "max_cache_size=109 is not allowed: the reserved buffers alone take 110 bytes"
    )
    config = DiTCacheConfig(
        dit_cache_tensors=tensors[:1], kv_cache_groups=tensors[1:], max_cache_size=110
    )
    assert config.reserved_size == 110
    assert config.reserved_tensors == tuple(tensors)


def test_each_stage_id_may_appear_once() -> None:
    stages = [
        StageConfig(stage_id=stage_id, engine_type="diffusion", model_path="m")
        for stage_id in (0, 1, 0)
    ]
    with pytest.raises(ConfigError, match=r"stage_configs=\[0, 1, 0\] is not allowed"):
        OmniConfig(stage_configs=stages)
    assert len(OmniConfig(stage_configs=stages[:2]).stage_configs) == 2


def test_config_error_is_an_engine_error_and_a_value_error() -> None:
    for error_class in (EngineError, ValueError):
        with pytest.raises(error_class, match="max_num_seqs=0"):
            DiTConfig(max_num_seqs=0)


@pytest.mark.parametrize(
    ("config_class", "values"),
    [
        (DiTConfig, {}),
        (DiTCacheConfig, {}),
        (DiTCacheTensor, {"size": 1}),
        (StageConfig, STAGE),
        (OmniConfig, {}),
    ],
)
class TestEveryConfig:
    def test_unknown_setting(self, config_class: Any, values: dict[str, Any]) -> None:
        with pytest.raises(TypeError, match="max_num_seq"):
            config_class(**values, max_num_seq=1)

    def test_frozen(self, config_class: Any, values: dict[str, Any]) -> None:
        config = config_class(**values)
        for field in dataclasses.fields(config_class):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(config, field.name, None)

    def test_hashable(self, config_class: Any, values: dict[str, Any]) -> None:
        assert hash(config_class(**values)) == hash(config_class(**values))


@pytest.mark.parametrize("mode", ["embedded", "process"])
def test_modes(mode: Any) -> None:
    assert OmniConfig(mode=mode).mode == mode
    assert OmniConfig().mode == "embedded"


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:3"])
def test_devices(device: str) -> None:
    assert DiTConfig(device=device).device == device


def test_lists_become_tuples() -> None:
    tensors = [DiTCacheTensor(1)]
    config = DiTCacheConfig(dit_cache_tensors=tensors)
    tensors.clear()
    assert config.dit_cache_tensors == (DiTCacheTensor(1),)
    stage = StageConfig(**STAGE, input_modalities=["text"], output_modalities=["image"])
    assert (stage.input_modalities, stage.output_modalities) == (("text",), ("image",))


@pytest.mark.parametrize("vllm_config", [None, {}, {"max_model_len": 8}, SimpleNamespace()])
def test_ar_stage_takes_a_dict_or_an_object(vllm_config: Any) -> None:
    assert StageConfig(**AR_STAGE, vllm_config=vllm_config).vllm_config is vllm_config


@pytest.mark.parametrize("config_class", [DiTConfig, DiTCacheConfig])
def test_every_plain_setting_has_its_line_of_help(config_class: Any) -> None:
    for field in dataclasses.fields(config_class):
        # The one has settings of its own, the other is `OmniConfig.snapshot_every`.
        if field.name not in ("cache_config", "snapshot_steps"):
            assert field.metadata["help"], field.name
