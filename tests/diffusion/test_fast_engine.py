"""The engine with the fast step, here without a compiler: the same pictures as with the simple one.

What a GPU adds, compiled kernels and CUDA graphs, is checked by `benchmarks/step_latency.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.drawing import Case, inputs_of, latents_of, load_tokenizer, run_engine
from vllm_omni.config import DiTConfig
from vllm_omni.diffusion.engine_core import DiffusionEngineCore
from vllm_omni.diffusion.executor import UniProcDiffusionExecutor
from vllm_omni.layers.linear import PackedLinear
from vllm_omni.models.demo import find_model
from vllm_omni.models.qwen_image.adapter import QwenImageRunnerAdapter
from vllm_omni.models.qwen_image.fast_transformer import FastTransformer
from vllm_omni.step_cache import StepCacheParams

CASES = [
    Case("a large red circle in the center on a white background", 128, 128, 8, None, 1),
    Case("a red star above a small blue ring", 128, 192, 6, 3.0, 2, arrival=2),
    Case("a small yellow heart on a black background", 128, 128, 7, 4.0, 3, arrival=3),
]
CACHES = [
    None,
    StepCacheParams(threshold=0.3, warmup_steps=1),
    StepCacheParams(method="tea", threshold=0.4),
]


def get_adapter(core: DiffusionEngineCore) -> QwenImageRunnerAdapter:
    assert isinstance(core.executor, UniProcDiffusionExecutor)
    adapter = core.executor.worker.adapter
    assert isinstance(adapter, QwenImageRunnerAdapter)
    return adapter


def create_core(**settings: Any) -> DiffusionEngineCore:
    return DiffusionEngineCore(DiTConfig(model=str(find_model("demo")), device="cpu", **settings))


def draw(core: DiffusionEngineCore, caches: list[StepCacheParams | None]) -> list[torch.Tensor]:
    tokenizer = load_tokenizer(core)
    inputs = [inputs_of(c, tokenizer, cache=cache) for c, cache in zip(CASES, caches, strict=True)]
    return [latents_of(o) for o in run_engine(core, inputs, [case.arrival for case in CASES])]


@pytest.fixture(scope="module")
def simple() -> Iterator[DiffusionEngineCore]:
    core = create_core()
    yield core
    core.shutdown()


@pytest.fixture(scope="module")
def fast() -> Iterator[DiffusionEngineCore]:
    core = create_core()
    adapter = get_adapter(core)
    adapter._fast = FastTransformer(adapter.transformer, max_rows=64, backend="")
    yield core
    core.shutdown()


@pytest.mark.parametrize("caches", [[None] * 3, CACHES], ids=["no cache", "caches"])
def test_pictures_are_the_same(
    simple: DiffusionEngineCore, fast: DiffusionEngineCore, caches: list[StepCacheParams | None]
) -> None:
    expected, drawn = draw(simple, caches), draw(fast, caches)
    for ours, theirs in zip(drawn, expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-4


def test_requests_bring_their_modulation_with_them(fast: DiffusionEngineCore) -> None:
    table = get_adapter(fast)._fast.table  # type: ignore[union-attr]
    table.clear()
    tokenizer = load_tokenizer(fast)
    [state] = [get_adapter(fast).prepare("a", inputs_of(CASES[0], tokenizer))]
    assert len(table._slots) == state.num_steps
    timesteps = get_adapter(fast)._timesteps(torch.tensor(state.sigmas[:-1]))
    assert list(table._slots) == timesteps.tolist()
    get_adapter(fast).cache_manager.release_cache("a")


def test_a_step_that_warms_up_is_a_step(fast: DiffusionEngineCore) -> None:
    adapter = get_adapter(fast)
    with torch.no_grad():
        state = adapter.prepare("b", inputs_of(CASES[1], load_tokenizer(fast)))
        [warm] = adapter.warm_up_step([state])
        [stepped] = adapter.step([state])
    assert torch.equal(warm, stepped)
    adapter.release(state)
    adapter.cache_manager.release_cache("b")


def test_where_blocks_do_not_compile_it_warms_up_the_simple_loop(
    fast: DiffusionEngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = get_adapter(fast)
    broken = FastTransformer(adapter.transformer, max_rows=64, backend="aot_eager")
    monkeypatch.setattr(broken, "_project", None)
    broken.try_to_compile()
    assert not broken.is_ready
    monkeypatch.setattr(broken, "start_compiling", lambda: None)
    monkeypatch.setattr(adapter, "_fast", broken)
    with torch.no_grad():
        state = adapter.prepare("c", inputs_of(CASES[0], load_tokenizer(fast)))
        [warm] = adapter.warm_up_step([state])
    assert warm.isfinite().all()
    adapter.release(state)
    adapter.cache_manager.release_cache("c")


def test_asleep_it_holds_nothing_of_the_device(fast: DiffusionEngineCore) -> None:
    adapter = get_adapter(fast)
    kept = adapter._fast
    adapter.sleep()
    assert adapter._fast is None
    adapter.transformer  # noqa: B018  comes back with its first use, here with the simple loop
    assert adapter._fast is None
    adapter._fast = kept


def test_fp8_draws_nearly_the_same(simple: DiffusionEngineCore) -> None:
    core = create_core(quantization="fp8")
    try:
        expected, drawn = draw(simple, [None] * 3), draw(core, [None] * 3)
        attn = get_adapter(core).transformer.transformer_blocks[0].attn
        assert isinstance(attn.to_qkv, PackedLinear)
        assert attn.to_qkv.weight.dtype == torch.float8_e4m3fn
    finally:
        core.shutdown()
    for ours, theirs in zip(drawn, expected, strict=True):
        error = float((ours - theirs).norm() / theirs.norm())
        assert 0.001 < error < 0.15
