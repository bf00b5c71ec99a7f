"""Trains the autoencoder: `python -m training.train_vae --out out/training`.

It learns as a net of 2-D convolutions: for a picture, only the last time slice of each causal 3-D
kernel counts. Writes vae-0.safetensors (2-D kernels, with the statistics of its latents) and
vae.jsonl. An existing vae-0.safetensors in `--resume` is trained on.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from training import fast, models
from training.loop import Curve, Trainer, load_weights, num_parameters, save_weights
from training.render import Renderer, SceneBatch, encode_scenes
from training.world import sample_held_out_scene, sample_training_scene

LATENT_NOISE = 0.1  # of their standard deviation: the decoder has to bear the transformer's errors
KL_WEIGHT = 1e-5


def main() -> None:
    args = parse_args()
    torch.backends.cudnn.benchmark = True
    device = torch.device(args.device)
    vae = models.build_vae(args.seed)
    fast.flatten_vae(vae)
    vae.requires_grad_(True)
    vae = vae.to(device, memory_format=torch.channels_last)
    if args.resume:
        vae.load_state_dict(load_weights(args.resume, "vae"), strict=False)
    trainer = Trainer({"vae": vae}, args.lr, args.iterations)
    print(f"{num_parameters([vae]) / 1e6:.2f} M parameters")
    curve = Curve(args.out / "vae.jsonl", args.log_every)
    renderer = Renderer(device)
    scenes = Scenes(args.pool, args.seed)
    step = torch.compile(losses, dynamic=False) if args.compile else losses
    generator = torch.Generator(device).manual_seed(args.seed)
    while not trainer.is_done and curve.seconds < min(args.max_seconds, args.budget):
        is_large = trainer.iteration % 4 == 3
        side, count = (args.side * 2, args.batch // 4) if is_large else (args.side, args.batch)
        pictures = renderer.draw(scenes.next(count), side, side)
        pictures = pictures.contiguous(memory_format=torch.channels_last)
        noise = torch.randn(
            (2, count, 16, side // 8, side // 8), generator=generator, device=device
        )
        with torch.autocast(device.type, torch.bfloat16):
            error, kl = step(vae, pictures, noise)
        trainer.step(error + KL_WEIGHT * kl, curve.seconds / args.budget)
        curve.add(trainer.iteration, error=error, kl=kl)
        if trainer.iteration % args.evaluate_every == 0:
            trainer.swap()
            curve.write(iteration=trainer.iteration, psnr=evaluate(vae, renderer, args.side * 2))
            trainer.swap()
    trainer.use_averages()
    mean, std = latent_statistics(vae, renderer, scenes, args.side * 2)
    curve.write(
        iteration=trainer.iteration,
        psnr=evaluate(vae, renderer, args.side * 2),
        latent_std=float(std.mean()),
    )
    state = {k: v for k, v in vae.state_dict().items() if "time_conv" not in k}
    save_weights({**state, "latents_mean": mean, "latents_std": std}, args.out, "vae")


class Scenes:
    """A pool of training scenes, drawn from at random."""

    def __init__(self, size: int, seed: int) -> None:
        rng = Random(seed)
        self.pool = encode_scenes([sample_training_scene(rng) for _ in range(size)])
        self.generator = torch.Generator().manual_seed(seed)

    def next(self, count: int) -> SceneBatch:
        rows = torch.randint(len(self.pool.radius), (count,), generator=self.generator)
        return SceneBatch(*(getattr(self.pool, name)[rows] for name in vars(self.pool)))


def losses(vae: object, pictures: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Reconstruction error, and the latents' distance from a standard normal distribution."""
    mean, log_variance = fast.encode(vae, pictures)
    mean, log_variance = mean.float(), log_variance.float()
    std = mean.std(dim=(0, 2, 3), keepdim=True).detach()
    latents = mean + (0.5 * log_variance).exp() * noise[0] + LATENT_NOISE * std * noise[1]
    decoded = fast.decode(vae, latents).float()
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    return F.l1_loss(decoded, pictures) + 2 * F.mse_loss(decoded, pictures), kl


@torch.no_grad()
def evaluate(vae: object, renderer: Renderer, side: int) -> float:
    """PSNR in dB of held-out pictures: the mean over pictures."""
    rng = Random(1)
    scenes = [sample_held_out_scene(rng, 1 + index % 2) for index in range(64)]
    pictures = renderer.draw(encode_scenes(scenes), side, side)
    decoded = fast.decode(vae, fast.encode(vae, pictures)[0]).clamp(-1, 1)
    error = (decoded - pictures).square().mean(dim=(1, 2, 3)) / 4
    return float((-10 * error.log10()).mean())


@torch.no_grad()
def latent_statistics(
    vae: object, renderer: Renderer, scenes: Scenes, side: int
) -> tuple[Tensor, Tensor]:
    latents = torch.cat(
        [fast.encode(vae, renderer.draw(scenes.next(32), side, side))[0] for _ in range(8)]
    )
    return latents.mean(dim=(0, 2, 3)), latents.std(dim=(0, 2, 3))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="folder with weights to go on from")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--max-seconds", type=float, default=1e9, help="stop then")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds to be done in")
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--side", type=int, default=128, help="pixels; a quarter have twice that")
    parser.add_argument("--pool", type=int, default=20000, help="scenes")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--evaluate-every", type=int, default=500)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
