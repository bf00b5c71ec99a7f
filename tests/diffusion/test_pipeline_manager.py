"""Weights go from the file to their device once; offloaded ones come back for each use."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.hooks import HookRegistry
from diffusers.hooks.group_offloading import LazyPrefetchGroupOffloadingHook

from tests.drawing import Case, MakeCheckpoint, inputs_of, latents_of, load_tokenizer, run_engine
from vllm_omni.config import DiTConfig
from vllm_omni.diffusion.engine_core import DiffusionEngineCore
from vllm_omni.diffusion.pipeline_manager import PipelineManager, keep_on_host, stop_tracking
from vllm_omni.models.qwen_image.checkpoint import write_checkpoint

CASES = [
    Case("a red cat", 64, 96, 3, 4.0, seed=1),
    Case("a blue sofa", 96, 64, 2, None, seed=2),
]

# Memory of its own that a process takes while it loads, in MiB; pages of files do not count.
MEASURE = """
import sys, threading, torch
from vllm_omni.config import DiTConfig
from vllm_omni.diffusion.pipeline_manager import PipelineManager
import diffusers, transformers
diffusers.QwenImageTransformer2DModel, diffusers.AutoencoderKLQwenImage
transformers.Qwen2_5_VLForConditionalGeneration

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024

peak, done = 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous())

manager = PipelineManager(DiTConfig(model=sys.argv[1], device="cpu", dtype=sys.argv[2]))
before = anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
manager.load()
done.set()
watcher.join()
modules = (manager.transformer, manager.vae, manager.text_encoder)
weights = sum(p.nbytes for m in modules for p in m.parameters()) / 2**20
print(f"weights {weights:.0f} peak {max(peak, anonymous()) - before:.0f}")
"""


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """350 MB, so that a copy of the weights stands out."""
    return write_checkpoint(tmp_path_factory.mktemp("small") / "model", size="small", seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "copies"), [("float32", 0.0), ("bfloat16", 1.0)])
def test_no_second_copy_of_the_weights(small_checkpoint: Path, dtype: str, copies: float) -> None:
    """As they are in the file they stay in its pages; in another dtype they are made once."""
    command = [sys.executable, "-c", MEASURE, str(small_checkpoint), dtype]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"weights (\d+) peak (-?\d+)", printed)
    assert found is not None
    weights, peak = map(int, found.groups())
    assert weights > 100
    assert peak < copies * weights + 0.4 * weights


def test_modules_are_made_without_weights(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is drawn or moved: each parameter is made once, with what the file says."""
    model = str(checkpoint(0))  # which makes a transformer too, if it is the first to ask
    made: list[str] = []
    build = QwenImageTransformer2DModel.__init__

    @functools.wraps(build)  # diffusers reads the signature
    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        made.extend({parameter.device.type for parameter in self.parameters()})

    monkeypatch.setattr(QwenImageTransformer2DModel, "__init__", note)
    manager = PipelineManager(DiTConfig(model=model, device="cpu"))
    manager.load()
    assert set(made) == {"meta"}
    for module in (manager.transformer, manager.vae, manager.text_encoder):
        assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}
        assert not any(parameter.requires_grad for parameter in module.parameters())
        assert not module.training


@pytest.mark.parametrize("cpu_offload", ["text_encoder", "transformer"])
def test_offloaded_weights_give_the_same_pictures(
    checkpoint: MakeCheckpoint, cpu_offload: Any
) -> None:
    outputs = {}
    for offload in ("none", cpu_offload):
        config = DiTConfig(model=str(checkpoint(0)), device="cpu", cpu_offload=offload)
        core = DiffusionEngineCore(config)
        tokenizer = load_tokenizer(core)
        inputs = [inputs_of(case, tokenizer) for case in CASES]
        outputs[offload] = run_engine(core, inputs)
        core.executor.collective_rpc("sleep", 1)
        core.executor.collective_rpc("wake")
        outputs[f"{offload}, woken"] = run_engine(core, inputs)
        core.shutdown()
    for ours in outputs.values():
        for output, expected in zip(ours, outputs["none"], strict=True):
            assert torch.equal(latents_of(output), latents_of(expected))
            assert output.pooling_output is not None and expected.pooling_output is not None
            assert torch.equal(output.pooling_output, expected.pooling_output)


@pytest.mark.parametrize(
    ("cpu_offload", "offloaded"),
    [
        ("none", set()),
        ("text_encoder", {"text_encoder"}),
        ("transformer", {"text_encoder", "transformer"}),
    ],
)
def test_which_components_stay_in_host_memory(
    checkpoint: MakeCheckpoint, cpu_offload: Any, offloaded: set[str]
) -> None:
    manager = PipelineManager(
        DiTConfig(model=str(checkpoint(0)), device="cpu", cpu_offload=cpu_offload)
    )
    manager.load()
    has_hooks = {
        name
        for name in ("transformer", "vae", "text_encoder")
        if any(hasattr(module, "_diffusers_hook") for module in getattr(manager, name).modules())
    }
    assert has_hooks == offloaded


def test_calls_of_offloaded_layers_are_not_written_down() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    keep_on_host(module, torch.device("cpu"))
    # With streams, which a CPU has none of, diffusers adds this.
    tracking = LazyPrefetchGroupOffloadingHook()
    HookRegistry.check_if_exists_or_initialize(module).register_hook(
        tracking, "lazy_prefetch_group_offloading"
    )
    x = torch.ones(1, 2)
    expected = module[0](x)
    assert [name for name, _ in tracking.execution_order] == ["0"]
    stop_tracking(module)
    assert torch.equal(module[0](x), expected)
    module(x)
    assert len(tracking.execution_order) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offloaded_weights_are_not_on_the_gpu(checkpoint: MakeCheckpoint) -> None:
    manager = PipelineManager(
        DiTConfig(model=str(checkpoint(0)), device="cuda", cpu_offload="transformer")
    )
    manager.load()
    assert {p.device.type for p in manager.transformer.parameters()} == {"cpu"}
    assert {p.device.type for p in manager.vae.parameters()} == {"cuda"}
