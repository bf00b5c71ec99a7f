"""Trains the language model and its vision tower: `python -m training.train_ar --out out/training`.

Two tasks: rewriting short prompts into full captions, and saying what is on a rendered picture.
Writes text_encoder-*.safetensors and ar.jsonl. It is the start for `train_dit`, which goes on
training the same weights together with the transformer.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training import models
from training.data import (
    IGNORED,
    Chats,
    Tokens,
    embed_chats,
    make_chats,
    pick_questions,
    stream,
)
from training.fast import FastLanguageModel
from training.loop import Curve, Trainer, load_weights, num_parameters, save_weights
from training.models import PATCH
from training.pictures import patchify, resize_for_vision
from training.render import Renderer

PICTURE_SIZES = ((256, 256), (256, 256), (256, 256), (128, 128), (192, 192), (128, 256), (320, 192))
"""Height and width of the pictures to describe, taken in turn."""


def main() -> None:
    args = parse_args()
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    tokenizer = models.build_tokenizer()
    model = models.build_text_encoder(tokenizer, args.seed).to(device)
    if args.resume:
        model.load_state_dict(load_weights(args.resume, "text_encoder"))
    language = FastLanguageModel(model, args.compile)
    trainer = Trainer({"text_encoder": model}, args.lr, args.iterations)
    print(f"{num_parameters([model]) / 1e6:.2f} M parameters, {len(tokenizer)} tokens")
    curve = Curve(args.out / "ar.jsonl", args.log_every)
    renderer = Renderer(device)
    rng = Random(args.seed)
    samples = stream(tokenizer, args.batch, args.batch, args.seed, args.workers)
    while not trainer.is_done and curve.seconds < min(args.max_seconds, args.budget):
        sample = next(samples)
        height, width = PICTURE_SIZES[trainer.iteration % len(PICTURE_SIZES)]
        pictures, grid = resize_for_vision(renderer.draw(sample.scenes, height, width))
        chats = make_chats(tokenizer, grid, pick_questions(rng, args.batch), sample.captions)
        with torch.autocast(device.type, torch.bfloat16):
            rewriting = rewriting_loss(language, sample.rewriting.to(device))
            captioning = captioning_loss(language, pictures, chats.to(device))
        trainer.step(rewriting + captioning, curve.seconds / args.budget)
        curve.add(trainer.iteration, rewriting=rewriting, captioning=captioning)
        if trainer.iteration % args.save_every == 0:
            save(trainer, model, args.out)
    trainer.use_averages()
    save_weights(model.state_dict(), args.out, "text_encoder")


def save(trainer: Trainer, model: Any, out: Path) -> None:
    trainer.swap()
    save_weights(model.state_dict(), out, "text_encoder")
    trainer.swap()


def answer_loss(language: FastLanguageModel, hidden: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the answers' tokens, each predicted from the one before."""
    logits = language.logits(hidden[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def rewriting_loss(language: FastLanguageModel, tokens: Tokens) -> Tensor:
    return answer_loss(language, language.hidden(language.embed(tokens.ids)), tokens.labels)


def captioning_loss(language: FastLanguageModel, pictures: Tensor, chats: Chats) -> Tensor:
    """pictures [n, 3, H, W] from 0 to 1, of whole tokens."""
    grid = (pictures.shape[2] // PATCH, pictures.shape[3] // PATCH)
    embeddings = embed_chats(language, chats, language.see(patchify(pictures), grid))
    return answer_loss(language, language.hidden(embeddings, chats.positions), chats.labels)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="folder with weights to go on from")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--max-seconds", type=float, default=1e9, help="stop then")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds to be done in")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=1000)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
