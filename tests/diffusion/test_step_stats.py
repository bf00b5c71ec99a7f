"""What an engine core says about each of its steps, with both executors."""

from __future__ import annotations

import itertools
import time

import pytest

from tests.conftest import MAX_NUM_BATCHED_TOKENS
from tests.drawing import Case, MakeEngineCore, inputs_of, load_tokenizer
from vllm_omni.diffusion.engine_core import DiffusionEngineCore
from vllm_omni.diffusion.messages import DiffusionRequest
from vllm_omni.models.qwen_image.inputs import TASK_TEXT_ENCODING, QwenImageCustomInputs
from vllm_omni.outputs import StepStats
from vllm_omni.serial import MessageDecoder, encode
from vllm_omni.step_cache import StepCacheParams

PLAIN = Case("a red cat", 64, 96, 3, None, seed=1)
GUIDED = Case("a dog", 48, 64, 2, 4.0, seed=2)


def watch_steps(core: DiffusionEngineCore, *inputs: QwenImageCustomInputs) -> list[StepStats]:
    """The stats of every step from the arrival of requests to the end of all."""
    for index, one in enumerate(inputs):
        core.add_request(DiffusionRequest(request_id=str(index), custom_inputs=one))
    seen = []
    while core.has_requests():
        news, _ = core.step()
        seen += [outputs.step_stats for outputs in news.values()]
    return [stats for stats in seen if stats is not None]


def test_counts_of_every_step(engine_core: MakeEngineCore) -> None:
    core = engine_core(0)
    tokenizer = load_tokenizer(core)
    plain, guided = inputs_of(PLAIN, tokenizer), inputs_of(GUIDED, tokenizer)
    both = plain.num_tokens + guided.num_tokens
    steps = watch_steps(core, plain, guided)
    assert [
        (s.num_requests, s.num_rows, s.num_tokens, s.num_running, s.num_waiting) for s in steps
    ] == [(2, 3, both, 2, 0), (2, 3, both, 1, 0), (1, 1, plain.num_tokens, 0, 0)]
    assert [s.num_computed_steps for s in steps] == [2, 2, 1]
    assert [s.num_skipped_rows for s in steps] == [0, 0, 0]
    assert [s.occupancy for s in steps] == pytest.approx(
        [both / MAX_NUM_BATCHED_TOKENS] * 2 + [plain.num_tokens / MAX_NUM_BATCHED_TOKENS]
    )


def test_times_add_up(engine_core: MakeEngineCore) -> None:
    core = engine_core(0)
    before = time.monotonic()
    steps = watch_steps(core, inputs_of(PLAIN, load_tokenizer(core), num_inference_steps=8))
    after = time.monotonic()
    assert before <= steps[0].start_time and steps[-1].end_time <= after
    for earlier, later in itertools.pairwise(steps):
        assert earlier.end_time <= later.start_time
    for stats in steps:
        assert 0 < stats.model_time <= stats.step_time
        assert stats.prepare_time + stats.denoise_time + stats.decode_time <= stats.step_time
        assert stats.denoise_time > 0
    # Preparing is in the first step, decoding in the last. (The quickest of the others: a machine
    # with other work may stop any of them for a while.)
    assert steps[0].prepare_time > 10 * min(stats.prepare_time for stats in steps[1:])
    assert steps[-1].decode_time > 10 * min(stats.decode_time for stats in steps[:-1])


def test_who_waits_is_counted(engine_core: MakeEngineCore) -> None:
    core = engine_core(0)
    large = inputs_of(Case("a cat", 512, 512, 2, None, seed=1), load_tokenizer(core))
    assert 2 * large.num_tokens < MAX_NUM_BATCHED_TOKENS < 3 * large.num_tokens
    steps = watch_steps(core, large, large, large)
    assert [(s.num_requests, s.num_running, s.num_waiting) for s in steps] == [
        (2, 2, 1),
        (2, 0, 1),
        (1, 1, 0),
        (1, 0, 0),
    ]


def test_an_abort_is_news_without_a_step(engine_core: MakeEngineCore) -> None:
    core = engine_core(0)
    inputs = inputs_of(PLAIN, load_tokenizer(core))
    core.add_request(DiffusionRequest(request_id="a", custom_inputs=inputs))
    core.step()
    core.abort_requests(["a"])
    news, _ = core.step()
    stats = news[0].step_stats
    assert stats is not None
    assert (stats.num_requests, stats.num_tokens, stats.num_running) == (0, 0, 0)
    while core.has_requests():
        assert core.step()[0] == {}


def test_a_text_encoding_takes_no_denoising_step(engine_core: MakeEngineCore) -> None:
    core = engine_core(0)
    [stats] = watch_steps(core, inputs_of(PLAIN, load_tokenizer(core), task=TASK_TEXT_ENCODING))
    assert (stats.num_requests, stats.num_rows, stats.num_computed_steps) == (1, 1, 0)


def test_memory_is_told_once_a_second(engine_core: MakeEngineCore) -> None:
    core = engine_core(0)
    inputs = inputs_of(PLAIN, load_tokenizer(core))
    time.sleep(1.0)
    start = time.monotonic()
    told = [stats.memory_bytes for stats in watch_steps(core, inputs, inputs)]
    workers = len(core.executor.collective_rpc("get_stats"))
    assert set(told[0]) == set(range(workers))
    assert all(50 << 20 < num_bytes < 16 << 30 for num_bytes in told[0].values())
    if time.monotonic() - start < 1.0:
        assert told[1:] == [{}] * (len(told) - 1)


def test_what_the_caches_hold(engine_core: MakeEngineCore) -> None:
    core = engine_core(0)
    tokenizer = load_tokenizer(core)
    cache = StepCacheParams(threshold=10.0)  # random weights: whatever comes is near enough
    cached = inputs_of(GUIDED, tokenizer, cache=cache, num_inference_steps=4)
    steps = watch_steps(core, inputs_of(PLAIN, tokenizer), cached)
    # The first step is warm-up; the third of three ends the one without a cache.
    assert [s.num_rows for s in steps] == [3, 3, 3, 2]
    assert [s.num_cached_rows for s in steps] == [2] * 4
    assert [s.num_skipped_rows for s in steps] == [0, 2, 2, 2]
    blocks = [s.num_skipped_blocks for s in steps]
    assert blocks[0] == 0 and blocks[1] > 0 and blocks[1] % 2 == 0 and blocks[1:] == [blocks[1]] * 3

    def held(stats: StepStats, kind: str) -> int:
        return sum(by_kind[kind] for by_kind in stats.cache_bytes.values())

    # Two branches with two tensors of [12 tokens, hidden size] each; released with the result.
    hidden_size = held(steps[0], "step_cache") // (2 * 2 * 12 * 4)
    assert [held(s, "step_cache") for s in steps] == [2 * 2 * 12 * 4 * hidden_size] * 3 + [0]
    assert hidden_size >= 16
    assert held(steps[0], "request") > held(steps[2], "request") > held(steps[3], "request") == 0
    assert all(held(s, "prompt") > 0 for s in steps)
    assert [s.num_evictions for s in steps] == [{}] * 4


def test_one_client_of_several_counts_a_step(engine_core: MakeEngineCore) -> None:
    core = engine_core(0)
    inputs = inputs_of(PLAIN, load_tokenizer(core))
    for client_index in (1, 2):
        core.add_request(
            DiffusionRequest(
                request_id=str(client_index), custom_inputs=inputs, client_index=client_index
            )
        )
    while core.has_requests():
        news, _ = core.step()
        stats = [outputs.step_stats for outputs in news.values()]
        assert sum(one is not None for one in stats) == min(1, len(news))


def test_stats_cross_a_process() -> None:
    stats = StepStats(
        start_time=5.0,
        step_time=0.25,
        num_rows=3,
        cache_bytes={1: {"step_cache": 7}},
        num_evictions={"prompt": 2},
        memory_bytes={0: 1 << 40},
    )
    assert MessageDecoder(StepStats).decode(encode(stats)) == stats
    assert stats.end_time == 5.25
    assert stats.occupancy == 0.0
