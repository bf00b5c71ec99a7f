"""Step caches: equal to diffusers' own, in any company, and never more than an option."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
import torch
from diffusers import FirstBlockCacheConfig
from torch import Tensor

from tests.drawing import (
    Case,
    MakeCheckpoint,
    draw_stock,
    inputs_of,
    latents_of,
    load_tokenizer,
    run_engine,
)
from vllm_omni.config import DiTCacheConfig, DiTConfig
from vllm_omni.diffusion.cache_manager import DiTCacheManager
from vllm_omni.diffusion.engine_core import DiffusionEngineCore
from vllm_omni.diffusion.messages import DiffusionRequest
from vllm_omni.diffusion.step_cache import (
    PackedStepCache,
    RowCache,
    Signal,
    TaylorStrategy,
    TeaStrategy,
    make_row_caches,
)
from vllm_omni.errors import InvalidParameterError
from vllm_omni.models.demo import find_model
from vllm_omni.models.qwen_image.input_processor import QwenImageInputProcessor
from vllm_omni.outputs import EngineCoreOutput
from vllm_omni.params import DiffusionParams
from vllm_omni.step_cache import Method, StepCacheParams, parse_cache_defaults

# Guided and not, sizes, steps and arrivals mixed. The trained model: with random weights nothing
# is near to anything.
CASES = [
    Case("a large red circle in the center on a white background", 128, 128, 14, None, 1),
    Case("a red star above a small blue ring", 128, 192, 10, 3.0, 2, arrival=2),
    Case("a small yellow heart on a black background", 128, 128, 12, 4.0, 3, arrival=3),
    Case("the letter A", 192, 128, 8, None, 4, arrival=5),
]


def draw(
    core: DiffusionEngineCore, caches: list[StepCacheParams | None], cases: list[Case] = CASES
) -> list[EngineCoreOutput]:
    tokenizer = load_tokenizer(core)
    inputs = [
        inputs_of(case, tokenizer, cache=cache) for case, cache in zip(cases, caches, strict=True)
    ]
    return run_engine(core, inputs, [case.arrival for case in cases])


def draw_stock_cached(pipeline: Any, case: Case, threshold: float) -> Tensor:
    pipeline.transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    try:
        return draw_stock(pipeline, case)[0]
    finally:
        pipeline.transformer.disable_cache()


def get_skipped(output: EngineCoreOutput) -> int:
    skipped: int = output.output_metadata["num_skipped_rows"]
    return skipped


@pytest.mark.parametrize("threshold", [0.05, 0.1, 0.2, 0.4])
def test_in_a_mixed_batch_it_equals_diffusers_alone(
    demo_core: DiffusionEngineCore, demo_stock: Any, threshold: float
) -> None:
    cache = StepCacheParams(threshold=threshold, warmup_steps=0)
    outputs = draw(demo_core, [cache] * len(CASES))
    for case, output in zip(CASES, outputs, strict=True):
        expected = draw_stock_cached(demo_stock, case, threshold)
        assert (latents_of(output) - expected).abs().max() <= 1e-4
    assert (sum(map(get_skipped, outputs)) > 10) == (threshold >= 0.2)


@pytest.mark.parametrize("method", ["first_block", "tea", "taylor"])
def test_threshold_0_is_no_cache(demo_core: DiffusionEngineCore, method: Any) -> None:
    plain = draw(demo_core, [None] * len(CASES))
    cached = draw(demo_core, [StepCacheParams(method=method, threshold=0.0)] * len(CASES))
    for expected, output in zip(plain, cached, strict=True):
        assert (latents_of(output) - latents_of(expected)).abs().max() <= 1e-5
        assert get_skipped(output) == 0
    assert plain[1].output_metadata["num_rows"] == 20


MIXED = [
    StepCacheParams(method="tea", threshold=0.4),
    StepCacheParams(threshold=0.3, max_skips=2),
    StepCacheParams(method="taylor", threshold=0.3, order=2),
    None,
]


def test_a_result_does_not_depend_on_the_caches_of_others(demo_core: DiffusionEngineCore) -> None:
    together = draw(demo_core, MIXED)
    for case, cache, output in zip(CASES, MIXED, together, strict=True):
        [alone] = draw(demo_core, [cache], [case])
        assert (latents_of(output) - latents_of(alone)).abs().max() <= 1e-4
        assert get_skipped(output) == get_skipped(alone)
    assert [get_skipped(output) > 0 for output in together] == [True, True, True, False]


def test_both_branches_of_tea_decide_alike(demo_core: DiffusionEngineCore) -> None:
    [output] = draw(demo_core, [StepCacheParams(method="tea", threshold=0.5)], [CASES[2]])
    assert get_skipped(output) > 0 and get_skipped(output) % 2 == 0


def test_a_better_prediction_is_nearer(demo_core: DiffusionEngineCore) -> None:
    """At equal decisions what is extrapolated is nearer to the truth than what is repeated."""
    [plain] = draw(demo_core, [None], [CASES[0]])

    def error(method: Any) -> float:
        cache = StepCacheParams(method=method, threshold=0.25, warmup_steps=4, max_skips=1)
        [output] = draw(demo_core, [cache], [CASES[0]])
        assert get_skipped(output) >= 3
        return float((latents_of(output) - latents_of(plain)).abs().mean())

    assert error("taylor") < error("first_block")


def test_the_cache_takes_no_more_than_is_left(demo_stock: Any) -> None:
    """A budget that is too small for step caches: every step in full, and nothing fails."""
    config = DiTConfig(
        model=str(find_model("demo")),
        device="cpu",
        cache_config=DiTCacheConfig(max_cache_size=130_000),
    )
    core = DiffusionEngineCore(config)
    try:
        cases = [CASES[0], CASES[3]]
        outputs = draw(core, [StepCacheParams(threshold=0.4)] * 2, cases)
        for case, output in zip(cases, outputs, strict=True):
            assert (latents_of(output) - draw_stock(demo_stock, case)[0]).abs().max() <= 1e-4
            assert get_skipped(output) == 0
    finally:
        core.shutdown()


def test_a_request_that_is_passed_over_may_lose_its_cache(checkpoint: MakeCheckpoint) -> None:
    """One that needs the room takes it; the other goes on with a step in full, and ends well."""
    core = DiffusionEngineCore(
        DiTConfig(
            model=str(checkpoint(0)),
            device="cpu",
            max_num_seqs=1,
            policy="priority",
            cache_config=DiTCacheConfig(max_cache_size=84_000),  # bytes: of both but for the cache
        )
    )
    try:
        tokenizer = load_tokenizer(core)
        cache = StepCacheParams(threshold=10.0)  # random weights: whatever comes is near enough
        inputs = inputs_of(Case("a cat", 64, 64, 6, None, 1), tokenizer, cache=cache)
        [alone] = run_engine(core, [inputs])
        assert get_skipped(alone) == 5
        large = inputs_of(Case("a dog", 256, 256, 2, None, 2), tokenizer)
        core.add_request(DiffusionRequest(request_id="a", custom_inputs=inputs))
        finals: dict[str, tuple[int, EngineCoreOutput]] = {}
        evictions = 0
        for step in range(9):
            if step == 3:
                urgent = DiffusionRequest(request_id="b", custom_inputs=large, priority=-1)
                core.add_request(urgent)
            news, _ = core.step()
            for outputs in news.values():
                finals |= {o.request_id: (step, o) for o in outputs.outputs if o.finished}
                assert outputs.step_stats is not None
                evictions += outputs.step_stats.num_evictions.get("step_cache", 0)
        assert {id: step for id, (step, _) in finals.items()} == {"b": 4, "a": 7}
        assert evictions == 1
        assert get_skipped(finals["a"][1]) == 4  # one more was taken in full
        assert finals["a"][1].error is None and finals["b"][1].error is None
        [stats] = core.executor.collective_rpc("get_stats")
        assert (stats["num_requests"], stats["cache_request_bytes"]) == (0, 0)
    finally:
        core.shutdown()


def test_nothing_is_left_of_200_mixed_requests(demo_core: DiffusionEngineCore) -> None:
    """Different settings, staggered, a quarter aborted; the others equal the same alone."""
    rng = Random(0)
    tokenizer = load_tokenizer(demo_core)
    settings = [*MIXED, StepCacheParams(threshold=0.5)]
    kinds = [
        inputs_of(
            Case(prompt, 64, 64, steps, scale, seed=steps), tokenizer, cache=rng.choice(settings)
        )
        for prompt in ("a star", "a ring")
        for steps in (3, 5)
        for scale in (None, 2.0)
    ]
    expected = [latents_of(run_engine(demo_core, [kind])[0]) for kind in kinds]
    running: dict[str, int] = {}
    finals: dict[str, EngineCoreOutput] = {}
    aborted: set[str] = set()
    for number in range(200):
        kind = rng.randrange(len(kinds))
        running[str(number)] = kind
        demo_core.add_request(DiffusionRequest(request_id=str(number), custom_inputs=kinds[kind]))
        if rng.random() < 0.25:
            victim = rng.choice(sorted(set(running) - set(finals)))
            demo_core.abort_requests([victim])
            aborted.add(victim)
        while demo_core.has_requests() and (rng.random() < 0.6 or number == 199):
            news, _ = demo_core.step()
            for outputs in news.values():
                finals |= {o.request_id: o for o in outputs.outputs if o.finished}
    assert set(finals) == set(running) and len(aborted) > 20
    for request_id, output in finals.items():
        if request_id not in aborted:
            wanted = expected[running[request_id]]
            assert (latents_of(output) - wanted).abs().max() <= 1e-4
    [stats] = demo_core.executor.collective_rpc("get_stats")
    assert stats["num_requests"] == 0 and stats["cache_request_bytes"] == 0


# --- the parts ---


def make_row(params: StepCacheParams, manager: DiTCacheManager | None = None) -> RowCache:
    manager = manager or DiTCacheManager(DiTCacheConfig())
    [row] = make_row_caches("a", params, 1, manager)
    return row


def take_step(row: RowCache, signal: float, tail: float, sigma: float = 0.5) -> float:
    """One step whose first block gives 0 and adds `signal`; the answer is what comes out."""
    cache = PackedStepCache([row], [2], [sigma])
    [kind] = cache.signals
    output = cache.apply(
        {kind: torch.full((2, 3), signal)}, torch.zeros(2, 3), lambda rows: torch.full((2, 3), tail)
    )
    row.commit()
    return float(output[0, 0])


def test_a_step_that_is_tried_again_counts_once() -> None:
    row = make_row(StepCacheParams(threshold=0.5, warmup_steps=0))
    take_step(row, 1.0, 7.0)
    cache = PackedStepCache([row], [2], [0.5])
    for _ in range(3):
        cache.apply(
            {Signal.HEAD_RESIDUAL: torch.full((2, 3), 1.1)},
            torch.zeros(2, 3),
            lambda rows: pytest.fail("it is near"),
        )
    row.commit()
    row.commit()
    assert (row.num_steps, row.num_skipped) == (2, 1)


def test_warm_up_and_the_most_skips_in_a_row() -> None:
    row = make_row(StepCacheParams(threshold=0.5, warmup_steps=2, max_skips=2))
    tails = [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]
    assert [take_step(row, 1.0, tail) for tail in tails] == [10, 11, 11, 11, 14, 14]


def test_first_block_compares_with_the_last_full_step() -> None:
    row = make_row(StepCacheParams(threshold=0.25, warmup_steps=0))
    signals = [1.0, 1.2, 1.3, 1.5]  # 0.2 and 0.3 from the first, then 0.15 from the third
    outputs = [take_step(row, signal, 100 * signal) for signal in signals]
    assert outputs == pytest.approx([100, 100, 130, 130])


def test_tea_sums_up_rescaled_differences_of_neighbours() -> None:
    row = make_row(
        StepCacheParams(method="tea", threshold=0.5, warmup_steps=0, coefficients=(2.0, 0.0))
    )
    assert isinstance(row.strategy, TeaStrategy)
    signals = [1.0, 1.1, 1.21, 1.331, 1.4641]  # each 0.1 from the one before: 0.2 rescaled
    outputs = [take_step(row, signal, 100 * signal) for signal in signals]
    assert outputs == pytest.approx([100, 100, 100, 133.1, 133.1])


@pytest.mark.parametrize("order", [1, 2])
def test_taylor_is_exact_for_polynomials_of_its_order(order: int) -> None:
    strategy = TaylorStrategy(StepCacheParams(method="taylor", order=order).with_defaults())

    def at(sigma: float) -> Tensor:
        return torch.tensor([3 * sigma**order - sigma + 2], dtype=torch.float64)

    sigmas = [0.5, 0.7, 0.95][: order + 1]
    predicted = strategy.predict([at(sigma) for sigma in sigmas], sigmas, 0.31)
    assert predicted.item() == pytest.approx(at(0.31).item())
    assert strategy.num_tails == order + 1


@pytest.mark.parametrize(("extrapolation", "expected"), [(0.0, 5.0), (0.5, 6.0), (1.0, 7.0)])
def test_part_of_the_extrapolated_change_is_added(extrapolation: float, expected: float) -> None:
    params = StepCacheParams(method="taylor", extrapolation=extrapolation)
    strategy = TaylorStrategy(params.with_defaults())
    tails = [torch.tensor([5.0]), torch.tensor([3.0])]  # 2 more, 0.1 further; the same again
    assert strategy.predict(tails, [0.6, 0.7], 0.5).item() == pytest.approx(expected)


@pytest.mark.parametrize("order", [1, 2])
def test_steps_of_one_noise_level_give_no_direction(order: int) -> None:
    """Two of `DiffusionParams.sigmas` can be one in float32."""
    row = make_row(StepCacheParams(method="taylor", threshold=0.5, warmup_steps=3, order=order))
    steps = [(3.0, 0.75), (5.0, 0.625), (5.0, 0.625), (0.0, 0.5)]
    outputs = [take_step(row, 1.0, tail, sigma) for tail, sigma in steps]
    assert outputs == [3, 5, 5, 7]  # the last one extrapolated from the first and the third


def test_rows_that_cannot_skip_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In warm-up, at the most skips in a row and with threshold 0 nothing is read back."""
    warming = make_row(StepCacheParams(threshold=0.5, warmup_steps=3))
    capped = make_row(StepCacheParams(threshold=0.5, warmup_steps=0, max_skips=1))
    off = make_row(StepCacheParams(threshold=0.0, warmup_steps=0))
    for row in (warming, off):
        take_step(row, 1.0, 7.0)
    assert [take_step(capped, 1.0, 7.0), take_step(capped, 1.0, 8.0)] == [7, 7]
    cache = PackedStepCache([warming, capped, off, None], [2, 2, 2, 2], [0.5] * 4)
    output = torch.full((8, 3), 9.0)
    monkeypatch.setattr(Tensor, "tolist", lambda _: pytest.fail("there is nothing to wait for"))
    signals = {Signal.HEAD_RESIDUAL: torch.ones(8, 3)}
    assert cache.apply(signals, torch.zeros(8, 3), lambda rows: output) is output


def test_all_rows_of_a_step_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        make_row(StepCacheParams(method=method, threshold=0.5, warmup_steps=0))
        for method in ("first_block", "tea", "taylor")
    ]
    for row in rows:
        take_step(row, 1.0, 7.0)
    waits: list[Tensor] = []
    tolist = Tensor.tolist

    def count(tensor: Tensor) -> Any:
        waits.append(tensor)
        return tolist(tensor)

    monkeypatch.setattr(Tensor, "tolist", count)
    cache = PackedStepCache([*rows, None], [2, 2, 2, 2], [0.5] * 4)
    signals = dict.fromkeys(Signal, torch.full((8, 3), 1.1))
    output = cache.apply(signals, torch.zeros(8, 3), lambda rows: torch.full((2, 3), float(*rows)))
    assert output[:, 0].tolist() == [7, 7, 7, 7, 7, 7, 3, 3]
    assert len(waits) == 2 and waits[0].shape == (3,)  # the second is this test's own


def test_evicted_entries_mean_a_step_in_full() -> None:
    manager = DiTCacheManager(DiTCacheConfig(max_cache_size=100))
    row = make_row(StepCacheParams(threshold=0.5, warmup_steps=0), manager)
    assert [take_step(row, 1.0, 10.0), take_step(row, 1.0, 11.0)] == [10, 10]
    manager.allocate_cache("b", 80)  # the latents of another request, which cannot do without
    assert manager.num_evictions == 1 and manager.get_cache("a", "step_cache.0.signal") is None
    assert [take_step(row, 1.0, 12.0), take_step(row, 1.0, 13.0)] == [12, 13]
    manager.release_cache("b")
    assert [take_step(row, 1.0, 14.0), take_step(row, 1.0, 15.0)] == [14, 14]


def test_optional_entries_do_not_push_each_other_out() -> None:
    manager = DiTCacheManager(DiTCacheConfig(max_cache_size=100))
    assert manager.try_cache_tensor("a", "x", torch.zeros(20))
    assert not manager.try_cache_tensor("b", "x", torch.zeros(20))
    assert manager.try_cache_tensor("a", "x", torch.ones(20))
    assert manager.get_cache("a", "x") is not None and manager.num_evictions == 0


def test_a_device_without_memory_has_no_room_for_optional_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = DiTCacheManager(DiTCacheConfig())
    row = make_row(StepCacheParams(threshold=0.5, warmup_steps=0), manager)

    def run_out(size: int) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(manager, "_new_buffer", run_out)
        assert [take_step(row, 1.0, 10.0), take_step(row, 1.0, 11.0)] == [10, 11]
    assert manager.used_bytes == 0
    assert [take_step(row, 1.0, 12.0), take_step(row, 1.0, 13.0)] == [12, 12]


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ("magic", r"cache\.method='magic' is not allowed: one of first_block, tea, taylor"),
        (3, r"cache=3 is not allowed"),
        ({}, r"cache\.method=None is not allowed: one of first_block"),
        (
            {"method": "tea", "treshold": 1},
            r"cache\.treshold=1 is not allowed: only coefficients, extrapolation, max_skips",
        ),
        ({"method": "tea", "threshold": 10**400}, r"cache\.threshold="),
        (
            {"method": "tea", "threshold": -1},
            r"cache\.threshold=-1 is not allowed: a number from 0 to 10",
        ),
        ({"method": "tea", "threshold": float("nan")}, r"cache\.threshold=nan"),
        ({"method": "tea", "warmup_steps": True}, r"cache\.warmup_steps=True"),
        ({"method": "tea", "max_skips": 0}, r"cache\.max_skips=0"),
        ({"method": "tea", "order": 3}, r"cache\.order=3 is not allowed: 1 or 2"),
        ({"method": "tea", "coefficients": []}, r"cache\.coefficients=\[\]"),
        (
            {"method": "taylor", "extrapolation": 1.5},
            r"cache\.extrapolation=1\.5 is not allowed: a number from 0 to 1",
        ),
    ],
)
def test_what_is_not_allowed_is_named(cache: Any, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        DiffusionParams(cache=cache)


def test_a_cache_can_be_given_in_three_ways() -> None:
    wanted = StepCacheParams(method="tea")
    for given in ("tea", {"method": "tea"}, wanted):
        assert DiffusionParams(cache=given).cache == wanted  # type: ignore[arg-type]
    assert wanted.with_defaults().threshold == 0.2


def test_a_model_has_its_own_defaults() -> None:
    defaults = parse_cache_defaults(
        {"tea": {"threshold": 0.3, "warmup_steps": 3}, "taylor": {"extrapolation": 0.5}}
    )
    tea = StepCacheParams(method="tea", max_skips=2).with_defaults(defaults)
    assert (tea.threshold, tea.warmup_steps, tea.max_skips) == (0.3, 3, 2)
    assert StepCacheParams(method="tea").with_defaults(defaults).max_skips == 1000  # no limit
    given = StepCacheParams(method="tea", threshold=0.1, warmup_steps=0).with_defaults(defaults)
    assert (given.threshold, given.warmup_steps) == (0.1, 0)
    taylor = StepCacheParams(method="taylor").with_defaults(defaults)
    assert (taylor.threshold, taylor.warmup_steps, taylor.extrapolation) == (0.12, 1, 0.5)
    assert StepCacheParams().with_defaults(defaults) == StepCacheParams().with_defaults()


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ([], r"cache=\[\] is not allowed: a mapping of fields by method"),
        ({"tea": 0.2}, r"cache\.tea=0\.2 is not allowed: a mapping of fields"),
        ({"magic": {}}, r"cache\.method='magic' is not allowed"),
        ({"tea": {"order": 2}}, r"cache\.tea\.order=2 is not allowed: one of threshold, warmup"),
        ({"tea": {"threshold": -1}}, r"cache\.threshold=-1 is not allowed"),
    ],
)
def test_a_models_defaults_are_checked(defaults: Any, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        parse_cache_defaults(defaults)


def test_the_demo_model_has_them_in_its_files() -> None:
    processor = QwenImageInputProcessor(Path(find_model("demo")))
    for method in get_args(Method):
        cache = processor.complete_params(DiffusionParams(cache=method)).cache
        assert isinstance(cache, StepCacheParams)
        own = processor.cache_defaults[method]
        assert {name: getattr(cache, name) for name in own} == own != {}
