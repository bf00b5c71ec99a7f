"""Cache-DiT inside the engine: its own numbers, in any company, and nothing of it is left."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import cache_dit
import pytest
import torch
from cache_dit import (
    DBCacheConfig,
    DBPruneConfig,
    DMDCalibratorConfig,
    FoCaCalibratorConfig,
    TaylorSeerCalibratorConfig,
)
from cache_dit.caching.cache_contexts import CachedContext
from diffusers import QwenImagePipeline
from torch import Tensor

from tests.drawing import (
    Case,
    MakeEngineCore,
    MakeStock,
    draw_stock,
    inputs_of,
    latents_of,
    load_tokenizer,
    run_engine,
)
from vllm_omni.cache_dit_params import (
    CACHE_OPTIONS,
    CALIBRATOR_OPTIONS,
    CALIBRATORS,
    PRUNE_OPTIONS,
    REFUSED_OPTIONS,
    CacheDiTParams,
)
from vllm_omni.config import DiTCacheConfig, DiTConfig
from vllm_omni.diffusion.engine_core import DiffusionEngineCore
from vllm_omni.diffusion.executor import UniProcDiffusionExecutor
from vllm_omni.diffusion.messages import DiffusionRequest
from vllm_omni.diffusion.model_runner import DiffusionModelRunner
from vllm_omni.errors import InvalidParameterError
from vllm_omni.models.demo import find_model
from vllm_omni.models.qwen_image.adapter import QwenImageRunnerAdapter
from vllm_omni.models.qwen_image.input_processor import QwenImageInputProcessor
from vllm_omni.models.qwen_image.state import QwenImageState
from vllm_omni.outputs import EngineCoreOutput
from vllm_omni.params import DiffusionParams
from vllm_omni.step_cache import CacheParams, StepCacheParams

UNGUIDED = Case("a large red circle in the center on a white background", 64, 64, 10, None, 1)
GUIDED = Case("a red star above a small blue ring", 64, 96, 9, 3.0, 2)
WIDE = Case("a small yellow heart on a black background", 64, 128, 8, 4.0, 3)

# With the trained model, about half of the rows are near enough.
BASE: dict[str, Any] = {
    "Fn_compute_blocks": 1,
    "max_warmup_steps": 2,
    "residual_diff_threshold": 0.3,
}


def params_of(**options: Any) -> CacheDiTParams:
    return CacheDiTParams(options=BASE | options)


# What a request asks for, and the same in Cache-DiT's own words.
METHODS: dict[str, tuple[CacheDiTParams, Any, Any]] = {
    "plain": (params_of(), DBCacheConfig(**BASE), None),
    "limits": (
        params_of(
            Bn_compute_blocks=1,
            max_continuous_cached_steps=1,
            max_cached_steps=2,
            cfg_diff_compute_separate=False,
        ),
        DBCacheConfig(
            **BASE,
            Bn_compute_blocks=1,
            max_continuous_cached_steps=1,
            max_cached_steps=2,
            cfg_diff_compute_separate=False,
        ),
        None,
    ),
    "mask": (
        params_of(steps_computation_mask="fast", steps_computation_policy="static"),
        DBCacheConfig(**BASE, steps_computation_policy="static"),
        None,
    ),
    "refresh": (
        params_of(force_refresh_step_hint=6),
        DBCacheConfig(**BASE, force_refresh_step_hint=6),
        None,
    ),
    "taylorseer": (
        params_of(calibrator="taylorseer", taylorseer_order=2),
        DBCacheConfig(**BASE),
        TaylorSeerCalibratorConfig(taylorseer_order=2),
    ),
    "foca": (params_of(calibrator="foca"), DBCacheConfig(**BASE), FoCaCalibratorConfig()),
    "dmd": (
        params_of(calibrator="dmd", max_warmup_steps=4, calibrator_cache_type="hidden_states"),
        DBCacheConfig(**BASE | {"max_warmup_steps": 4}),
        DMDCalibratorConfig(calibrator_cache_type="hidden_states"),
    ),
    "prune": (
        params_of(cache_type="DBPrune", non_prune_block_ids=[2]),
        DBPruneConfig(**BASE, non_prune_block_ids=[2]),
        None,
    ),
    "other prune": (
        params_of(cache_type="DBPrune", calibrator="taylorseer"),
        DBPruneConfig(**BASE),
        TaylorSeerCalibratorConfig(),
    ),
}


def draw(
    core: DiffusionEngineCore, cases: Sequence[Case], caches: Sequence[CacheParams | None]
) -> list[EngineCoreOutput]:
    tokenizer = load_tokenizer(core)
    inputs = [
        inputs_of(case, tokenizer, cache=cache) for case, cache in zip(cases, caches, strict=True)
    ]
    return run_engine(core, inputs, [case.arrival for case in cases])


def draw_stock_cached(pipeline: Any, case: Case, method: str) -> tuple[Tensor, int]:
    """Latents and skipped rows of Cache-DiT alone in diffusers."""
    _, config, calibrator = METHODS[method]
    config = replace(config, enable_separate_cfg=case.true_cfg_scale is not None)
    if method == "mask":
        config.steps_computation_mask = cache_dit.steps_mask(
            total_steps=case.num_steps, mask_policy="fast"
        )
    cache_dit.enable_cache(
        pipeline, cache_config=config, calibrator_config=copy.deepcopy(calibrator)
    )
    try:
        latents, _ = draw_stock(pipeline, case)
        network = pipeline.transformer
        skipped = network._accumulated_cached_steps + network._cfg_accumulated_cached_steps
    finally:
        cache_dit.disable_cache(pipeline)
    assert not hasattr(QwenImagePipeline, "_is_cached")
    return latents, skipped


def get_skipped(output: EngineCoreOutput) -> int:
    skipped: int = output.output_metadata["num_skipped_rows"]
    return skipped


def runner_of(core: DiffusionEngineCore) -> DiffusionModelRunner:
    assert isinstance(core.executor, UniProcDiffusionExecutor)
    return core.executor.worker.model_runner


def is_nothing_left(core: DiffusionEngineCore) -> bool:
    gc.collect()
    is_empty = not any(isinstance(one, CachedContext) for one in gc.get_objects())
    [stats] = core.executor.collective_rpc("get_stats")
    return is_empty and stats["num_requests"] == 0 and stats["cache_request_bytes"] == 0


# --- the numbers ---


def test_in_a_mixed_batch_it_equals_cache_dit_alone(
    demo_core: DiffusionEngineCore, demo_stock: Any
) -> None:
    """All methods in one batch, with requests that have no cache or one of ours."""
    kinds = [GUIDED, UNGUIDED, WIDE]
    methods = list(METHODS)
    cases = [
        replace(kinds[index % 3], arrival=index // 2, seed=index) for index in range(len(methods))
    ]
    others = [replace(UNGUIDED, arrival=1, seed=20), replace(GUIDED, arrival=3, seed=21)]
    ours = [None, StepCacheParams(threshold=0.3)]
    caches = [METHODS[method][0] for method in methods]
    outputs = draw(demo_core, [*others, *cases], [*ours, *caches])

    for case, method, output in zip(cases, methods, outputs[2:], strict=True):
        latents, skipped = draw_stock_cached(demo_stock, case, method)
        assert (latents_of(output) - latents).abs().max() <= 1e-4, method
        assert get_skipped(output) == skipped > 0, method
    for other, cache, output in zip(others, ours, outputs[:2], strict=True):
        [alone] = draw(demo_core, [other], [cache])
        assert (latents_of(output) - latents_of(alone)).abs().max() <= 1e-5
        assert get_skipped(output) == get_skipped(alone)
    assert get_skipped(outputs[1]) > 0
    assert is_nothing_left(demo_core)


def test_a_mask_of_its_own(demo_core: DiffusionEngineCore) -> None:
    mask = [1, 1, 0, 1, 0, 0, 1, 0, 1]
    cache = params_of(steps_computation_mask=mask, steps_computation_policy="static")
    [output] = draw(demo_core, [GUIDED], [cache])
    assert get_skipped(output) == 2 * mask.count(0)


@pytest.mark.parametrize("method", ["plain", "prune", "refresh"])
def test_blocks_that_are_left_out_are_counted(demo_core: DiffusionEngineCore, method: str) -> None:
    adapter = runner_of(demo_core).adapter
    assert isinstance(adapter, QwenImageRunnerAdapter)
    blocks = adapter.pipeline.transformer.transformer_blocks
    computed: list[None] = []
    hooks = [block.attn.register_forward_hook(lambda *_: computed.append(None)) for block in blocks]
    inputs = inputs_of(GUIDED, load_tokenizer(demo_core), cache=METHODS[method][0])
    demo_core.add_request(DiffusionRequest(request_id="a", custom_inputs=inputs))
    seen = []
    while demo_core.has_requests():
        news, _ = demo_core.step()
        seen += [outputs.step_stats for outputs in news.values()]
    for hook in hooks:
        hook.remove()
    steps = [stats for stats in seen if stats is not None]
    assert [stats.num_cached_rows for stats in steps] == [2] * GUIDED.num_steps
    skipped = sum(stats.num_skipped_blocks for stats in steps)
    assert 0 < skipped == 2 * GUIDED.num_steps * len(blocks) - len(computed)


def test_threshold_0_is_no_cache(demo_core: DiffusionEngineCore, demo_stock: Any) -> None:
    [output] = draw(demo_core, [GUIDED], [params_of(residual_diff_threshold=0)])
    assert (latents_of(output) - draw_stock(demo_stock, GUIDED)[0]).abs().max() <= 1e-4
    assert get_skipped(output) == 0


class LateFaultAdapter(QwenImageRunnerAdapter):
    """Fails with a poisoned request in the batch, when all the others have been computed."""

    def step(self, states: Sequence[QwenImageState]) -> list[Tensor]:
        stepped = super().step(states)
        if any(state.inputs.seed == 666 for state in states):
            raise RuntimeError("kernel exploded")
        return stepped


def test_a_step_that_is_tried_again_counts_once(demo_core: DiffusionEngineCore) -> None:
    methods = ["plain", "taylorseer", "prune"]
    caches = [METHODS[method][0] for method in methods]
    expected = draw(demo_core, [GUIDED] * 3, caches)
    runner = runner_of(demo_core)
    adapter = runner.adapter
    assert isinstance(adapter, QwenImageRunnerAdapter)
    runner.adapter = LateFaultAdapter(
        adapter.pipeline, adapter.cache_manager, DiTConfig(model=str(find_model("demo")))
    )
    try:
        guilty = [replace(UNGUIDED, seed=666, arrival=arrival) for arrival in range(1, 8)]
        *outputs, first_guilty = draw(
            demo_core, [*[GUIDED] * 3, *guilty], [*caches, *[METHODS["foca"][0]] * len(guilty)]
        )[:4]
    finally:
        runner.adapter = adapter
    assert first_guilty.error is not None
    for output, wanted in zip(outputs, expected, strict=True):
        assert (latents_of(output) - latents_of(wanted)).abs().max() <= 1e-5
        assert get_skipped(output) == get_skipped(wanted) > 0


def test_it_works_with_every_executor(engine_core: MakeEngineCore, stock: MakeStock) -> None:
    """Random weights, where no step is near to another: by a mask that does not ask."""
    core = engine_core(0)
    cases = [GUIDED, UNGUIDED, UNGUIDED]
    *outputs, refused = draw(
        core, cases, [METHODS["mask"][0]] * 2 + [params_of(Fn_compute_blocks=5)]
    )
    for case, output in zip(cases, outputs, strict=False):
        latents, skipped = draw_stock_cached(stock(0), case, "mask")
        assert (latents_of(output) - latents).abs().max() <= 1e-4
        assert get_skipped(output) == skipped > 0
    assert refused.error is not None
    assert refused.error.type == "InvalidParameterError"
    assert refused.error.param == "cache.options.Fn_compute_blocks"


# --- what it holds ---


@pytest.mark.parametrize("end", ["finish", "abort", "error"])
def test_nothing_is_left_of_a_request(demo_core: DiffusionEngineCore, end: str) -> None:
    tokenizer = load_tokenizer(demo_core)
    methods = ["taylorseer", "dmd", "prune", "other prune"]
    for method in methods:
        inputs = inputs_of(UNGUIDED, tokenizer, cache=METHODS[method][0])
        demo_core.add_request(DiffusionRequest(request_id=method, custom_inputs=inputs))
    for _ in range(5):
        demo_core.step()
    states = runner_of(demo_core).states
    held: list[weakref.ref[Any]] = []
    for method in methods:
        state = states[method]
        assert isinstance(state, QwenImageState) and state.external_cache is not None
        context = state.external_cache._context  # type: ignore[attr-defined]
        held += [weakref.ref(context), *map(weakref.ref, context.buffers.values())]
        if end == "error":
            state.latents.fill_(torch.nan)
    [stats] = demo_core.executor.collective_rpc("get_stats")
    assert stats["cache_request_bytes"] > 1_000_000
    del states, state, context, stats
    if end == "abort":
        demo_core.abort_requests(methods)
    while demo_core.has_requests():
        demo_core.step()
    demo_core.step()  # the workers hear of it
    assert is_nothing_left(demo_core)
    assert [ref for ref in held if ref() is not None] == []


def test_30_requests_do_not_grow(demo_core: DiffusionEngineCore) -> None:
    caches = [METHODS[method][0] for method in ("plain", "prune", "dmd")] * 10
    cases = [replace(UNGUIDED, num_steps=3, seed=seed, arrival=seed) for seed in range(30)]

    def count_tensors() -> int:
        assert is_nothing_left(demo_core)
        return sum(isinstance(one, Tensor) for one in gc.get_objects())

    draw(demo_core, cases[:3], caches[:3])
    before = count_tensors()
    assert all(output.error is None for output in draw(demo_core, cases, caches))
    assert count_tensors() <= before


def test_it_takes_no_more_than_is_left(demo_stock: Any) -> None:
    """A budget that is too small: every step in full, by whatever method, and nothing fails."""
    config = DiTConfig(
        model=str(find_model("demo")),
        device="cpu",
        cache_config=DiTCacheConfig(max_cache_size=60_000),
    )
    core = DiffusionEngineCore(config)
    try:
        for method in ("mask", "dmd", "prune"):
            [output] = draw(core, [UNGUIDED], [METHODS[method][0]])
            expected, _ = draw_stock(demo_stock, UNGUIDED)
            assert (latents_of(output) - expected).abs().max() <= 1e-4
            assert get_skipped(output) == 0
        assert is_nothing_left(core)
    finally:
        core.shutdown()


# --- what is not allowed ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"Fn_compute_blocks": 0}, r"Fn_compute_blocks=0 .*: a whole number from 1 to 1000"),
        ({"Bn_compute_blocks": True}, r"Bn_compute_blocks=True"),
        ({"residual_diff_threshold": float("nan")}, r"residual_diff_threshold=nan"),
        ({"residual_diff_threshold": 10**400}, r"residual_diff_threshold=10000"),
        ({"warmup_interval": 0}, r"warmup_interval=0"),
        ({"fn_blocks": 1}, r"cache\.options\.fn_blocks=1 .*: only Bn_compute_blocks, Fn_compute"),
        ({"num_inference_steps": 9}, r"num_inference_steps=9 .*: the engine knows"),
        ({"quantize_config": {}}, r"quantize_config={} .*: it changes the model for all"),
        ({"cache_type": "NONE"}, r"cache_type='NONE' .*: one of DBCache, DBPrune"),
        ({"calibrator": "magic"}, r"calibrator='magic' .*: one of taylorseer, foca, dmd"),
        ({"taylorseer_order": 2}, r"taylorseer_order=2 .*: only with calibrator 'taylorseer'"),
        ({"calibrator": "foca", "dmd_rank": 2}, r"dmd_rank=2 .*: only with calibrator 'dmd'"),
        ({"enable_encoder_calibrator": True}, r"only with calibrator 'taylorseer' or 'foca' or"),
        ({"non_prune_block_ids": [1]}, r"non_prune_block_ids=.*: only with cache_type 'DBPrune'"),
        ({"steps_computation_mask": [0, 1]}, r"steps_computation_mask=\[0, 1\].* the first of"),
        ({"steps_computation_mask": "quick"}, r"steps_computation_mask='quick' .*: slow, medium"),
        (
            {"cache_type": "DBPrune", "cfg_diff_compute_separate": False},
            r"cfg_diff_compute_separate=False .*: Cache-DiT cannot do that with DBPrune",
        ),
    ],
)
def test_what_is_not_allowed_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message) as raised:
        DiffusionParams(cache={"method": "cache_dit", "options": options})  # type: ignore[arg-type]
    assert raised.value.param.startswith("cache.options.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"Fn_compute_blocks": 7}, r"Fn_compute_blocks=7 .*: the model has 6 blocks"),
        ({"Fn_compute_blocks": 4, "Bn_compute_blocks": 3}, r"Bn_compute_blocks=3 .*: the model"),
        ({"steps_computation_mask": [1, 0]}, r"steps_computation_mask=.*: 5 values, one for every"),
        ({"steps_computation_mask": "slow"}, r"steps_computation_mask='slow' .*: .* not for 5"),
        (
            {"cache_type": "DBPrune", "non_prune_block_ids": [1, 6]},
            r"non_prune_block_ids=\[6\] .*: from 0 to 5",
        ),
    ],
)
def test_what_the_model_cannot_do_is_refused_before_it_is_queued(
    options: dict[str, Any], message: str
) -> None:
    params = DiffusionParams(cache=CacheDiTParams(options=options), num_inference_steps=5)
    processor = QwenImageInputProcessor(Path(find_model("demo")))
    with pytest.raises(InvalidParameterError, match=message):
        processor.complete_params(params)


def test_first_blocks_are_as_cache_dit_has_them_where_the_model_has_so_many() -> None:
    assert [CacheDiTParams().get_num_first_blocks(num) for num in (6, 8, 9, 60)] == [1, 1, 8, 8]
    assert params_of(Fn_compute_blocks=3).get_num_first_blocks(60) == 3


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({"method": "cache_dit", "threshold": 1}, r"cache\.threshold=1 .*: with cache_dit only"),
        ({"method": "cache_dit", "options": [1]}, r"cache\.options=\[1\] .*: a mapping"),
        ({"method": "cache_dit", "options": False}, r"cache\.options=False .*: a mapping"),
    ],
)
def test_fields_of_our_own_caches_are_refused(cache: Any, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        DiffusionParams(cache=cache)


def test_a_missing_package_is_said(
    demo_core: DiffusionEngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("cache_dit")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "vllm_omni.plugins.cache_dit", raising=False)
    monkeypatch.setitem(sys.modules, "cache_dit", None)
    install = r"pip install 'vllm-omni\[cache-dit\]'"
    with pytest.raises(InvalidParameterError, match=f"cache-dit is not installed: {install}"):
        DiffusionParams(cache="cache_dit")  # type: ignore[arg-type]
    [output] = draw(demo_core, [UNGUIDED], [params_of()])  # where only the worker does not have it
    assert output.error is not None and output.error.param == "cache.method"
    assert "it cannot be loaded" in output.error.message
    assert "pip install" in output.error.message


def test_every_option_of_cache_dit_is_known_or_refused() -> None:
    def names_of(config: type) -> set[str]:
        return {field.name for field in fields(config)}

    known = set(CACHE_OPTIONS)
    assert names_of(DBCacheConfig) == known | (names_of(DBCacheConfig) & set(REFUSED_OPTIONS))
    assert names_of(DBPruneConfig) - names_of(DBCacheConfig) == set(PRUNE_OPTIONS)
    configs = {
        "taylorseer": TaylorSeerCalibratorConfig,
        "foca": FoCaCalibratorConfig,
        "dmd": DMDCalibratorConfig,
    }
    assert set(configs) == set(CALIBRATORS)
    for name, config in configs.items():
        own = set(CALIBRATOR_OPTIONS) | set(CALIBRATORS[name])
        assert names_of(config) - set(REFUSED_OPTIONS) == own
