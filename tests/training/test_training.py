"""A short run learns, goes on from where it stopped, and the judge knows a right picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from training.captions import canonical_caption, parse_caption
from training.export import export
from training.judge import judge
from training.loop import Trainer
from training.render import Renderer, encode_scenes
from training.unpack import unpack
from training.world import Said, sample_held_out_scene
from vllm_omni.models.demo import find_model


def train_ar(out: Path, *arguments: str) -> list[float]:
    """Errors of rewriting that a short run on the CPU logged, every four iterations."""
    small = ["--device", "cpu", "--no-compile", "--batch", "4", "--workers", "1"]
    small += ["--log-every", "4"]
    small += ["--lr", "0.02"]  # of which a short run uses little: the first 200 iterations warm up
    subprocess.run(
        [sys.executable, "-m", "training.train_ar", "--out", str(out), *small, *arguments],
        check=True,
        capture_output=True,
    )
    lines = (out / "ar.jsonl").read_text().splitlines()
    return [line["rewriting"] for line in map(json.loads, lines)]


def test_a_short_run_learns_and_goes_on(tmp_path: Path) -> None:
    first = train_ar(tmp_path / "a", "--iterations", "16")
    assert len(first) == 4 and first[3] < 0.8 * first[0]
    arguments = ("--iterations", "4", "--seed", "1", "--resume", str(tmp_path / "a"))
    [resumed] = train_ar(tmp_path / "b", *arguments)
    assert resumed < 0.8 * first[0]  # not as at the start


def test_the_state_of_a_run_resumes_exactly(tmp_path: Path) -> None:
    def create(seed: int) -> tuple[nn.Linear, Trainer]:
        torch.manual_seed(seed)
        module = nn.Linear(4, 4)
        return module, Trainer({"net": module}, lr=1e-2, iterations=20)

    def run(module: nn.Linear, trainer: Trainer, count: int) -> None:
        for _ in range(count):
            x = torch.full((2, 4), float(trainer.iteration % 3))
            trainer.step((module(x) - 1).square().mean())

    whole, trainer = create(0)
    run(whole, trainer, 5)
    trainer.save_state(tmp_path / "state.pt")
    run(whole, trainer, 5)
    resumed, other = create(1)
    other.load_state(tmp_path / "state.pt")
    run(resumed, other, 5)
    assert resumed.weight.equal(whole.weight)
    assert all(a.equal(b) for a, b in zip(other.averages, trainer.averages, strict=True))


def test_the_judge_finds_rendered_pictures_right_and_others_wrong() -> None:
    rng = Random(0)
    scenes = [sample_held_out_scene(rng, 1 + index % 2) for index in range(6)]
    drawn = Renderer(torch.device("cpu")).draw(encode_scenes(scenes), 256, 256)
    pictures = ((drawn / 2 + 0.5) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    for scene, picture in zip(scenes, pictures, strict=True):
        right = judge(picture, scene, Said.everything(scene))
        assert all(right.values()), (scene, right)
        blank = np.full_like(picture, 255)
        assert not all(judge(blank, scene, Said.everything(scene)).values())


def test_captions_can_be_read_back() -> None:
    rng = Random(1)
    for index in range(20):
        scene = sample_held_out_scene(rng, 1 + index % 2)
        caption = canonical_caption(scene)
        assert parse_caption(caption) is not None, caption


def test_the_shipped_checkpoint_can_be_taken_apart_and_put_together(tmp_path: Path) -> None:
    """So training can go on from it."""
    shipped = find_model("demo")
    unpack(shipped, tmp_path / "parts")
    export(tmp_path / "parts", tmp_path / "again")
    files = sorted(file.relative_to(shipped) for file in shipped.rglob("*.safetensors"))
    assert len(files) == 3
    for file in files:
        weights, again = load_file(shipped / file), load_file(tmp_path / "again" / file)
        assert weights.keys() == again.keys()
        assert all(weights[name].equal(again[name]) for name in weights)
    config = Path("vae", "config.json")
    assert json.loads((shipped / config).read_text()) == json.loads(
        (tmp_path / "again" / config).read_text()
    )
