"""Trains transformer and language model together.

    python -m training.train_dit --start out/training --out out/training

Needs vae-0.safetensors and text_encoder-0.safetensors in `--start`. Flow matching through the
language model's hidden states, with its own tasks (rewriting, captioning) going on beside it, so
that one set of weights does all three. Writes transformer-*.safetensors, text_encoder-*.safetensors
(averages, bfloat16), dit.jsonl and, with `--state`, everything to resume exactly.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training import fast, models
from training.data import (
    NUM_CAPTION,
    NUM_PREFIX,
    Chats,
    Sample,
    Tokens,
    make_chats,
    pick_questions,
    stream,
)
from training.fast import FastLanguageModel, FastTransformer
from training.loop import Curve, Trainer, load_weights, num_parameters, save_weights
from training.pictures import resize_for_vision
from training.render import Renderer
from training.replay import Recorder
from training.train_ar import captioning_loss, rewriting_loss

Grid = tuple[int, int]  # height and width in tokens of 16 pixels

SMALL_GRIDS: dict[Grid, float] = {(8, 8): 30, (12, 12): 40, (16, 16): 20, (8, 12): 5, (12, 8): 5}
MIXED_GRIDS: dict[Grid, float] = {
    (16, 16): 46,
    (8, 8): 8,
    (12, 12): 10,
    (20, 20): 5,
    (24, 24): 5,
    (8, 16): 5,
    (16, 8): 5,
    (20, 13): 4,
    (13, 20): 4,
    (24, 12): 4,
    (12, 24): 4,
}
LOSSES = ("flow", "rewriting", "captioning")
SIGMA_SHIFT = 0.6  # of the normal distribution whose sigmoid is sigma
LANGUAGE_WEIGHT = 0.1  # of the language model's own tasks, against the flow's error
NUM_REWRITTEN = 24  # prompts rewritten in an iteration
NUM_CAPTIONED = 8  # pictures described in an iteration


@dataclass
class Pool:
    """Latents of one size with their prompts; the oldest are replaced by new ones."""

    latents: Tensor  # [size, tokens, 64]
    prompts: Tensor  # [size, prompt tokens]
    num_text: Tensor  # [size]
    count: int = 0  # ever added

    @classmethod
    def empty(cls, size: int, grid: Grid, sample: Sample, device: torch.device) -> Pool:
        return cls(
            torch.zeros(size, grid[0] * grid[1], 64, dtype=torch.bfloat16, device=device),
            torch.zeros(size, sample.prompts.shape[1], dtype=torch.int64, device=device),
            torch.zeros(size, dtype=torch.int64, device=device),
        )

    def add(self, latents: Tensor, sample: Sample) -> None:
        rows = torch.arange(self.count, self.count + len(latents)) % len(self.latents)
        rows = rows.to(self.latents.device)
        self.latents[rows] = latents.to(self.latents.dtype)
        self.prompts[rows] = sample.prompts.to(rows.device)
        self.num_text[rows] = sample.num_text.to(rows.device)
        self.count += len(latents)

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        size = min(self.count, len(self.latents))
        rows = torch.randint(size, (count,), generator=generator, device=self.latents.device)
        return self.latents[rows].float(), self.prompts[rows], self.num_text[rows]


class LatentMaker:
    """Draws scenes and encodes them to normalised latents."""

    def __init__(self, start: Path, device: torch.device, is_compiled: bool) -> None:
        weights = load_weights(start, "vae")
        mean, std = (weights.pop(f"latents_{name}").to(device) for name in ("mean", "std"))
        self.mean, self.std = mean.view(1, -1, 1, 1), std.view(1, -1, 1, 1)
        self.vae = models.build_vae()
        fast.flatten_vae(self.vae)
        self.vae.load_state_dict(weights, strict=False)
        self.vae = self.vae.to(device, memory_format=torch.channels_last).requires_grad_(False)
        self.renderer = Renderer(device)
        self._encode: Any = torch.compile(fast.encode, dynamic=True) if is_compiled else fast.encode

    @torch.no_grad()
    def make(self, sample: Sample, grid: Grid) -> tuple[Tensor, Tensor]:
        """Pictures [n, 3, H, W] and tokens [n, h * w, 64]."""
        pictures = self.renderer.draw(sample.scenes, grid[0] * 16, grid[1] * 16)
        pictures = pictures.contiguous(memory_format=torch.channels_last)
        with torch.autocast(pictures.device.type, torch.bfloat16):
            mean = self._encode(self.vae, pictures)[0].float()
        normal = (mean - self.mean) / self.std
        patches = normal.reshape(len(normal), 16, grid[0], 2, grid[1], 2)
        return pictures, patches.permute(0, 2, 4, 1, 3, 5).reshape(len(normal), -1, 64)

    @torch.no_grad()
    def decode(self, tokens: Tensor, grid: Grid) -> Tensor:
        """Tokens [n, h * w, 64] to pictures [n, 3, H, W]."""
        patches = tokens.reshape(len(tokens), *grid, 16, 2, 2).permute(0, 3, 1, 4, 2, 5)
        latents = patches.reshape(len(tokens), 16, grid[0] * 2, grid[1] * 2)
        with torch.autocast(tokens.device.type, torch.bfloat16):
            decoded: Tensor = fast.decode(self.vae, latents * self.std + self.mean)
        return decoded.float().clamp(-1, 1)


def main() -> None:
    args = parse_args()
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    tokenizer = models.build_tokenizer()
    encoder = models.build_text_encoder(tokenizer).to(device)
    encoder.load_state_dict(load_weights(args.start, "text_encoder"))
    transformer = models.build_transformer(args.seed).to(device)
    if args.resume:
        transformer.load_state_dict(load_weights(args.start, "transformer"))
    trainer = Trainer({"transformer": transformer, "encoder": encoder}, args.lr, args.iterations)
    trainer.iteration = args.first_iteration
    if args.state and args.state.is_file():
        trainer.load_state(args.state)
    print(f"{num_parameters([transformer, encoder]) / 1e6:.2f} M, from {trainer.iteration}")

    run = Run(args, tokenizer, encoder, transformer, trainer)
    curve = Curve(args.out / "dit.jsonl", args.log_every)
    while not trainer.is_done and curve.seconds < min(args.max_seconds, args.budget):
        is_small = trainer.iteration < args.small_share * args.iterations
        run.iterate(SMALL_GRIDS if is_small else MIXED_GRIDS, curve.seconds / args.budget)
        curve.add(trainer.iteration, **dict(zip(LOSSES, run.losses.clone(), strict=True)))
        if trainer.iteration % args.save_every == 0:
            trainer.swap()
            save(encoder, transformer, args.out)
            trainer.swap()
    if args.state:
        trainer.save_state(args.state)
    trainer.use_averages()
    save(encoder, transformer, args.out)


def save(encoder: Any, transformer: Any, out: Path) -> None:
    save_weights(encoder.state_dict(), out, "text_encoder")
    save_weights(transformer.state_dict(), out, "transformer")


class Run:
    """What an iteration needs besides the weights."""

    def __init__(
        self,
        args: argparse.Namespace,
        tokenizer: Any,
        encoder: Any,
        transformer: Any,
        trainer: Trainer,
    ) -> None:
        self.args = args
        self.tokenizer = tokenizer
        self.trainer = trainer
        self.device = torch.device(args.device)
        seed = args.seed * 1_000_000 + args.first_iteration
        self.rng = Random(seed)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.recorder = Recorder(self.generator)
        self.language = FastLanguageModel(encoder, args.compile)
        self.transformer = FastTransformer(transformer, args.compile)
        self.maker = LatentMaker(args.start, self.device, args.compile)
        self.samples = stream(tokenizer, args.fresh, NUM_REWRITTEN, seed, args.workers)
        self.pools: dict[Grid, Pool] = {}
        self.losses = torch.zeros(len(LOSSES), device=self.device)
        self._train: dict[Grid, Callable[..., None]] = {}

    def iterate(self, grids: dict[Grid, float], time_share: float) -> None:
        """Draw a batch of one size of pictures and learn from it."""
        grid = self.rng.choices(list(grids), weights=list(grids.values()))[0]
        if not self.pools:
            grid = (12, 12)  # compiled first, with different numbers for all that varies
        if grid not in self._train:
            train = partial(self._learn, grid)
            self._train[grid] = self.recorder.wrap(train) if self.args.graphs else train
        batch = self._make_batch(grid)
        self.trainer.begin(time_share)
        self._train[grid](*batch)

    def _make_batch(self, grid: Grid) -> list[Tensor]:
        """The arguments of `_learn`, on the device."""
        sample, pictures, tokens = self._refresh(grid)
        count = max(1, self.args.tokens // (grid[0] * grid[1]))
        drawn = self.pools[grid].draw(count, self.generator)
        # Half of the pictures to describe went through the autoencoder, as drawn ones do.
        half = NUM_CAPTIONED // 2
        decoded = self.maker.decode(tokens[half:NUM_CAPTIONED], grid)
        shown, patches = resize_for_vision(torch.cat([pictures[:half], decoded]))
        questions = pick_questions(self.rng, len(shown))
        captions = sample.captions[: len(shown)]
        chats = make_chats(self.tokenizer, patches, questions, captions, NUM_CAPTION)
        texts = (sample.rewriting.to(self.device), chats.to(self.device))
        return [*drawn, shown, *(getattr(text, f.name) for text in texts for f in fields(text))]

    def _learn(
        self,
        grid: Grid,
        latents: Tensor,
        prompts: Tensor,
        num_text: Tensor,
        pictures: Tensor,
        *texts: Tensor,
    ) -> None:
        """One step with the flow's error and the language model's own two.

        Args:
            texts: the fields of the `Tokens` to rewrite and of the `Chats` about the pictures.
        """
        with torch.autocast(self.device.type, torch.bfloat16):
            flow = self._flow_loss(latents, prompts, num_text, grid)
            rewriting = rewriting_loss(self.language, Tokens(*texts[:3]))
            captioning = captioning_loss(self.language, pictures, Chats(*texts[3:]))
        self.losses.copy_(torch.stack([flow, rewriting, captioning]).detach())
        self.trainer.update(flow + LANGUAGE_WEIGHT * (rewriting + captioning))

    def _refresh(self, grid: Grid) -> tuple[Sample, Tensor, Tensor]:
        """Put new pictures into the pool of a size; many the first time."""
        rounds = 1 if grid in self.pools else self.args.first_rounds
        for _ in range(rounds):
            sample = next(self.samples)
            pictures, tokens = self.maker.make(sample, grid)
            if grid not in self.pools:
                self.pools[grid] = Pool.empty(self.args.pool, grid, sample, self.device)
            self.pools[grid].add(tokens, sample)
        return sample, pictures, tokens

    def _flow_loss(self, latents: Tensor, prompts: Tensor, num_text: Tensor, grid: Grid) -> Tensor:
        hidden = self.language.hidden(self.language.embed(prompts))[:, NUM_PREFIX:]
        normal = torch.randn(len(latents), generator=self.generator, device=self.device)
        sigma = torch.sigmoid(normal + SIGMA_SHIFT)
        noise = torch.randn(latents.shape, generator=self.generator, device=self.device)
        blend = sigma[:, None, None]
        noisy = (1 - blend) * latents + blend * noise
        velocity = self.transformer(noisy, hidden, num_text, sigma, grid)
        return F.mse_loss(velocity, noise - latents)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, required=True, help="folder with the other parts")
    parser.add_argument("--resume", action="store_true", help="the transformer is there as well")
    parser.add_argument("--state", type=Path, help="file to resume from exactly, and to write")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--iterations", type=int, default=8000, help="of all runs together")
    parser.add_argument("--first-iteration", type=int, default=0)
    parser.add_argument(
        "--small-share", type=float, default=0.12, help="of iterations, small sizes"
    )
    parser.add_argument("--max-seconds", type=float, default=1e9, help="stop then")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds to be done in")
    parser.add_argument("--tokens", type=int, default=65536, help="image tokens a batch")
    parser.add_argument("--fresh", type=int, default=48, help="new pictures an iteration")
    parser.add_argument("--pool", type=int, default=8192, help="pictures kept of each size")
    parser.add_argument("--first-rounds", type=int, default=24)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=2000)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
