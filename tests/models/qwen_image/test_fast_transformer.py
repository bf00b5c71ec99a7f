"""The fast step equals the simple loop: each of its parts, and all of them together."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor, nn

from vllm_omni.layers import linear
from vllm_omni.layers.linear import round_up_rows
from vllm_omni.models.qwen_image import fast_transformer, modulation
from vllm_omni.models.qwen_image.fast_plan import fill_bucket, find_bucket, make_fast_plan
from vllm_omni.models.qwen_image.fast_transformer import FastTransformer
from vllm_omni.models.qwen_image.modulation import ModulationTable, compute_modulation
from vllm_omni.models.qwen_image.transformer import (
    PackPlan,
    RowShape,
    make_plan,
    make_single_row_module,
    packed_forward,
    single_row_forward,
)
from vllm_omni.models.qwen_image.weights import pack_weights, quantize_weights

pytestmark = pytest.mark.usefixtures("no_garbage")

MIX = (
    RowShape(((1, 4, 6),), 7),
    RowShape(((1, 8, 8),), 3),
    RowShape(((1, 2, 2),), 12),
    RowShape(((1, 8, 8),), 5),
)


def create_transformer(num_layers: int = 3) -> QwenImageTransformer2DModel:
    torch.manual_seed(0)
    model = QwenImageTransformer2DModel(
        num_layers=num_layers,
        num_attention_heads=2,
        attention_head_dim=32,
        joint_attention_dim=24,
        axes_dims_rope=(4, 14, 14),
    )
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(6**0.5)
        if hasattr(module, "weight") and module.weight is not None and module.weight.ndim == 1:
            module.weight.data.uniform_(0.5, 1.5)
    return model.requires_grad_(False).eval()


@pytest.fixture(scope="module")
def transformer() -> QwenImageTransformer2DModel:
    return create_transformer()


Inputs = tuple[PackPlan, Tensor, Tensor, Tensor]


def create_inputs(
    transformer: QwenImageTransformer2DModel, rows: Sequence[RowShape], seed: int = 0
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    plan = make_plan(transformer, rows)
    latents = torch.randn(sum(plan.image_lens), 64, generator=generator)
    text = torch.randn(sum(plan.text_lens), transformer.inner_dim, generator=generator)
    return plan, latents, text, torch.rand(len(rows), generator=generator)


def relative_error(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).norm() / expected.norm())


@torch.no_grad()
def test_packed_weights_change_nothing_for_the_simple_loop_and_the_stock_forward() -> None:
    stock, packed = create_transformer(), create_transformer()
    pack_weights(packed)
    pack_weights(packed)  # the second time it finds nothing to do
    inputs = create_inputs(stock, MIX)
    expected = packed_forward(stock, *inputs)
    assert relative_error(packed_forward(packed, *inputs), expected) < 1e-6
    _, latents, text, timesteps = create_inputs(stock, MIX[:1])
    alone = [
        single_row_forward(make_single_row_module(model), MIX[0], latents, text, timesteps[0])
        for model in (stock, packed)
    ]
    assert relative_error(alone[1], alone[0]) < 1e-6
    sizes = [sum(p.numel() for p in model.parameters()) for model in (stock, packed)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("rows", [MIX, MIX[:1], MIX[1:3]], ids=["mix", "alone", "two"])
@torch.no_grad()
def test_fast_step_equals_the_simple_loop(
    transformer: QwenImageTransformer2DModel, rows: Sequence[RowShape]
) -> None:
    inputs = create_inputs(transformer, rows)
    expected = packed_forward(transformer, *inputs)
    fast = FastTransformer(copy.deepcopy(transformer), max_rows=8, backend="")
    assert relative_error(fast.forward(*inputs), expected) < 2e-6


@torch.no_grad()
def test_nobody_sees_the_tokens_that_fill_a_bucket(
    transformer: QwenImageTransformer2DModel,
) -> None:
    inputs = plan, latents, text, timesteps = create_inputs(transformer, MIX)
    expected = packed_forward(transformer, *inputs)
    bucket = find_bucket(plan, 4096)
    assert bucket is not None
    assert (bucket.num_image_tokens, bucket.num_text_tokens) == (256, 128)
    assert (bucket.num_segments, bucket.max_len) == (8, 512)
    filled = fill_bucket(plan, bucket)
    assert filled.segments.lens == [69, 67, 31, 16, 201, 0, 0, 0]

    fast = FastTransformer(copy.deepcopy(transformer), max_rows=8, backend="")
    fast._set_slots(fast._row_slots, fast.table.find(timesteps.tolist()))
    for junk in (0.0, 100.0):
        more_latents = torch.full((256, 64), junk)
        more_text = torch.full((128, transformer.inner_dim), junk)
        more_latents[: latents.shape[0]], more_text[: text.shape[0]] = latents, text
        (velocity,), _ = fast._all(filled, more_latents, more_text)
        assert relative_error(velocity[: latents.shape[0]], expected) < 2e-6


def test_buckets_end_where_graphs_do(transformer: QwenImageTransformer2DModel) -> None:
    plan = make_plan(transformer, MIX)
    assert find_bucket(plan, 383) is None
    assert find_bucket(plan, 384) is not None
    assert find_bucket(plan, 0) is None
    assert find_bucket(make_plan(transformer, [RowShape(((1, 32, 64),), 5)]), 10_000) is None


def test_plan_has_the_long_segments_first(transformer: QwenImageTransformer2DModel) -> None:
    plan = make_fast_plan(make_plan(transformer, MIX))
    assert plan.segment_rows == [3, 1, 0, 2]
    assert plan.segments.lens == [69, 67, 31, 16]
    assert plan.segments.starts.tolist() == [0, 69, 136, 167, 183]
    assert torch.equal(plan.to_segments[plan.from_segments], torch.arange(183))


def test_text_is_filled_up_to_what_fp8_needs(transformer: QwenImageTransformer2DModel) -> None:
    plan = make_fast_plan(make_plan(transformer, MIX), round_up_rows(27), round_up_rows(1))
    assert [plan.num_text_tokens, plan.num_image_tokens] == [128, 156]
    assert plan.segments.lens == [69, 67, 31, 16, 101]
    assert plan.segment_rows == [3, 1, 0, 2]
    assert sorted(plan.to_segments.tolist()) == list(range(284))
    assert plan.to_segments[-101:].tolist() == list(range(27, 128))


@pytest.mark.parametrize(("num_rows", "expected"), [(1, 128), (128, 128), (129, 192), (8268, 8320)])
def test_rows_of_products_in_fp8(num_rows: int, expected: int) -> None:
    assert round_up_rows(num_rows) == expected


class TestModulationTable:
    @torch.no_grad()
    def test_values_are_those_of_the_blocks(self, transformer: QwenImageTransformer2DModel) -> None:
        table = ModulationTable(transformer, 4)
        slots = table.find([0.5, 0.25, 0.5])
        assert slots == [0, 1, 0]
        temb = transformer.time_text_embed(torch.tensor([0.5, 0.25]), torch.zeros(1))
        for layer, block in enumerate(transformer.transformer_blocks):
            for stream, mod in enumerate((block.img_mod, block.txt_mod)):
                expected = mod(temb).view(2, 6, -1)
                torch.testing.assert_close(table.of_blocks[:2, layer, stream], expected)
        norm_out = transformer.norm_out
        expected = norm_out.linear(norm_out.silu(temb)).view(2, 2, -1)
        torch.testing.assert_close(table.of_output[:2], expected)

    @torch.no_grad()
    def test_the_oldest_gives_way_and_none_that_is_wanted_now(
        self, transformer: QwenImageTransformer2DModel
    ) -> None:
        table = ModulationTable(transformer, 3)
        random = Random(0)
        for _ in range(50):
            wanted = [random.randrange(6) / 8 for _ in range(random.randint(1, 3))]
            slots = table.find(wanted)
            expected, _ = compute_modulation(transformer, wanted)
            torch.testing.assert_close(table.of_blocks[slots], expected)

    @torch.no_grad()
    def test_what_could_not_be_made_is_made_when_it_is_asked_for_again(
        self, transformer: QwenImageTransformer2DModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def run_out(*_: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        table = ModulationTable(transformer, 4)
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
            patch.setattr(modulation, "compute_modulation", run_out)
            table.find([0.5])
        slots = table.find([0.5])
        expected, _ = compute_modulation(transformer, [0.5])
        torch.testing.assert_close(table.of_blocks[slots], expected)


@torch.no_grad()
def test_a_new_mix_compiles_nothing(transformer: QwenImageTransformer2DModel) -> None:
    # Without code generation, which takes a minute on a CPU: what counts is what is traced.
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    num_before = counters["stats"]["unique_graphs"]  # of other tests
    fast = FastTransformer(copy.deepcopy(transformer), max_rows=8, backend="aot_eager")
    fast.compile()
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs == num_before + 5
    random = Random(1)
    for seed in range(10):
        rows = [
            RowShape(((1, random.randint(1, 9), random.randint(2, 9)),), random.randint(2, 9))
            for _ in range(random.randint(1, 8))
        ]
        inputs = create_inputs(transformer, rows, seed)
        assert relative_error(fast.forward(*inputs), packed_forward(transformer, *inputs)) < 2e-6
    # A single token of text, as what is left of a batch may have when other rows hit a cache.
    plan, _, text, _ = create_inputs(transformer, [RowShape(((1, 2, 2),), 1)])
    (image,), _ = fast._run_plain(fast._tail, plan, torch.randn(4, transformer.inner_dim), text)
    assert image.shape == (4, transformer.inner_dim)
    assert counters["stats"]["unique_graphs"] == num_graphs


@torch.no_grad()
def test_steps_take_the_simple_loop_until_it_is_compiled(
    transformer: QwenImageTransformer2DModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_simple = 0

    def count(*args: object) -> Tensor:
        nonlocal num_simple
        num_simple += 1
        return packed_forward(*args)  # type: ignore[arg-type]

    torch._dynamo.reset()
    monkeypatch.setattr(fast_transformer, "packed_forward", count)
    fast = FastTransformer(copy.deepcopy(transformer), max_rows=8, backend="aot_eager")
    inputs = create_inputs(transformer, MIX)
    expected = packed_forward(transformer, *inputs)
    assert relative_error(fast.forward(*inputs), expected) < 2e-6
    assert num_simple == 1
    assert fast._thread is not None
    fast._thread.join()
    assert fast.is_ready
    # What was compiled in the thread serves this one.
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert relative_error(fast.forward(*inputs), expected) < 2e-6
    assert num_simple == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_graphs


@pytest.mark.parametrize("rows", [MIX, MIX[:1]], ids=["mix", "few image tokens"])
@torch.no_grad()
def test_fp8_is_the_same_in_the_fast_step_and_the_simple_loop(
    rows: Sequence[RowShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both round to fp8; what differs is the last bit of what they round.
    stock, quantized = create_transformer(), create_transformer()
    inputs = create_inputs(stock, rows)
    expected = packed_forward(stock, *inputs)
    quantize_weights(quantized)
    simple = packed_forward(quantized, *inputs)
    assert 0.005 < relative_error(simple, expected) < 0.1
    fast = FastTransformer(quantized, max_rows=8, backend="")
    multiplied: list[int] = []  # rows of each product

    def note(x: Tensor, *more: Any) -> Tensor:
        multiplied.append(x.shape[0])
        return fp8_product(x, *more)

    fp8_product = linear._fp8_product
    monkeypatch.setattr(linear, "_fp8_product", note)
    assert relative_error(fast.forward(*inputs), simple) < 0.02
    assert min(multiplied) >= round_up_rows(1)  # of fewer, a GPU has no product
    bytes_of = [
        sum(p.nbytes for block in model.transformer_blocks for p in block.parameters())
        for model in (stock, quantized)
    ]
    mods = sum(p.nbytes for b in stock.transformer_blocks for p in b.img_mod.parameters())
    assert bytes_of[1] < (bytes_of[0] - 2 * mods) * 0.3 + 2 * mods


def test_what_does_not_compile_runs_in_the_simple_loop(
    transformer: QwenImageTransformer2DModel,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("there is no compiler")

    fast = FastTransformer(copy.deepcopy(transformer), max_rows=8, backend="aot_eager")
    monkeypatch.setattr(fast, "_project", fail)
    fast.try_to_compile()
    assert not fast.is_ready
    assert "there is no compiler" in caplog.text
    inputs = create_inputs(transformer, MIX)
    with torch.no_grad():
        expected = packed_forward(transformer, *inputs)
        assert relative_error(fast.forward(*inputs), expected) < 2e-6
    assert fast._thread is not None  # it tries again beside the step
    fast._thread.join()
    assert not fast.is_ready
