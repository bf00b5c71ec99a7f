"""What happens before the first request: named sizes are drawn, and nothing of it is left."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.drawing import Case, MakeCheckpoint, inputs_of, load_tokenizer, run_engine
from vllm_omni import envs
from vllm_omni.config import DiTConfig, WarmupSize
from vllm_omni.diffusion.engine_core import DiffusionEngineCore
from vllm_omni.diffusion.executor import UniProcDiffusionExecutor
from vllm_omni.errors import ConfigError
from vllm_omni.models.qwen_image.adapter import QwenImageRunnerAdapter
from vllm_omni.models.qwen_image.state import QwenImageState


def test_named_sizes_are_drawn_before_the_worker_is_ready(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, tuple[int, int], bool]] = []
    warm_up, decode = QwenImageRunnerAdapter.warm_up_step, QwenImageRunnerAdapter.start_decode

    def note(name: str, states: Sequence[QwenImageState]) -> None:
        size = (states[0].inputs.width, states[0].inputs.height)
        seen.append((name, len(states), size, states[0].is_guided))

    def warm_up_step(self: Any, states: Sequence[QwenImageState]) -> list[Tensor]:
        note("step", states)
        return warm_up(self, states)

    def start_decode(self: Any, states: Sequence[QwenImageState]) -> Any:
        note("decode", states)
        return decode(self, states)

    monkeypatch.setattr(QwenImageRunnerAdapter, "warm_up_step", warm_up_step)
    monkeypatch.setattr(QwenImageRunnerAdapter, "start_decode", start_decode)
    config = DiTConfig(model=str(checkpoint(0)), device="cpu", warmup_sizes=["64x96", "32x32x3"])
    executor = UniProcDiffusionExecutor(config)
    assert seen == [
        ("step", 1, (64, 96), True),
        ("decode", 1, (64, 96), True),
        ("step", 3, (32, 32), True),
        ("decode", 3, (32, 32), True),
    ]
    worker = executor.worker
    assert worker.get_stats()["num_requests"] == 0
    assert worker.cache_manager.used_bytes == 0

    core = DiffusionEngineCore(config, executor)
    case = Case("a red cat", 64, 64, 2, None, seed=1)
    [output] = run_engine(core, [inputs_of(case, load_tokenizer(core))])
    assert output.error is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1024x768", WarmupSize(1024, 768)), ("512x512x4", WarmupSize(512, 512, 4))],
)
def test_sizes_are_read(text: str, expected: WarmupSize) -> None:
    assert WarmupSize.parse(text) == expected


@pytest.mark.parametrize("text", ["", "1024", "1024x", "0x64", "64x64x0", "64x64x2x2", "64*64"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="width x height, or width x height x count"):
        DiTConfig(warmup_sizes=[text])


@pytest.mark.parametrize("text", ["8x64", "64x100", "512x513x2"])
def test_sides_that_no_picture_has_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"'{text}' is not allowed: sides that are multiples of"):
        DiTConfig(warmup_sizes=[text])


def test_no_more_are_warmed_up_than_a_step_holds() -> None:
    assert DiTConfig(warmup_sizes=["64x64x4"], max_num_seqs=4).warmup_sizes == ("64x64x4",)
    with pytest.raises(ConfigError, match=r"64x64x5.* no more at once than max_num_seqs=4"):
        DiTConfig(warmup_sizes=["64x64x5"], max_num_seqs=4)


def test_compiled_code_is_kept_for_us_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_OMNI_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    envs.keep_compiled_code()
    folder = tmp_path / "cache" / "compiled"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    envs.keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"  # whoever set it knows why
