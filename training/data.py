"""Endless batches of scenes with their captions as tokens, made by worker processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from training.captions import canonical_caption, make_caption, sample_rewriting, settle
from training.fast import FastLanguageModel
from training.models import MERGE, QUESTIONS
from training.render import SceneBatch, encode_scenes
from training.world import Said, Scene, sample_training_scene
from vllm_omni.models.qwen_image.prompt import REWRITE_INSTRUCTION, TEXT_TO_IMAGE

NUM_TEXT = 40  # tokens a prompt is padded to, the end of its template included
NUM_PREFIX = TEXT_TO_IMAGE.num_prefix_tokens
OPEN_SHARE = 0.1  # of captions, names objects and nothing else: what people try first
EMPTY_SHARE = 0.1  # of prompts, for guidance
NUM_REWRITING = 128  # tokens a chat that rewrites a prompt is padded to
NUM_CAPTION = 48  # tokens a chat about a picture is padded to, from the picture's end on
IGNORED = -100  # label of a token without loss
CHAT_HEAD = "<|im_start|>user\n<|vision_start|>"
NUM_CHAT_HEAD = 4  # its tokens


@dataclass(frozen=True)
class Tokens:
    """Token ids padded on the right, with how many count, and what each is to predict."""

    ids: Tensor  # [n, tokens]
    length: Tensor  # [n]
    labels: Tensor  # [n, tokens]: the token itself where it is part of an answer

    def to(self, device: torch.device | str) -> Tokens:
        return Tokens(*(getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)))


@dataclass(frozen=True)
class Sample:
    """A batch of scenes and what is said about them."""

    scenes: SceneBatch
    prompts: Tensor  # [n, NUM_PREFIX + NUM_TEXT] int64: inside the template
    num_text: Tensor  # [n] tokens after the prefix
    rewriting: Tokens
    captions: list[str]  # canonical ones, for captioning


def pad(rows: Sequence[Sequence[int]], length: int, value: int) -> Tensor:
    padded = torch.full((len(rows), length), value, dtype=torch.int64)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = torch.tensor(ids, dtype=torch.int64)
    return padded


def tokenize_answers(
    tokenizer: Any, questions: Sequence[str], answers: Sequence[str], length: int | None = None
) -> Tokens:
    """Each question followed by its answer and the end of turn; only answers have labels."""
    asked = tokenizer(list(questions)).input_ids
    told = tokenizer([f"{answer}<|im_end|>" for answer in answers]).input_ids
    rows = [a + t for a, t in zip(asked, told, strict=True)]
    marks = [[IGNORED] * len(a) + t for a, t in zip(asked, told, strict=True)]
    most = max(map(len, rows))
    length = length or -(-most // 8) * 8
    if most > length:
        raise ValueError(f"{most} tokens do not fit into {length}")
    return Tokens(
        pad(rows, length, tokenizer.pad_token_id),
        torch.tensor([len(row) for row in rows]),
        pad(marks, length, IGNORED),
    )


def rewrite_chat(tokenizer: Any, prompt: str) -> str:
    """The text before the rewritten prompt, as a server asks for it."""
    messages = [
        {"role": "system", "content": REWRITE_INSTRUCTION},
        {"role": "user", "content": prompt},
    ]
    chat: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return chat


def sample_pair(rng: Random) -> tuple[Scene, str]:
    """A scene that is not held out, and one of its captions."""
    while True:
        scene = sample_training_scene(rng)
        is_open = rng.random() < OPEN_SHARE
        said = Said.nothing(scene) if is_open else Said.sample(rng, scene)
        settled = settle(rng, scene, said)
        if not settled.is_held_out:
            return settled, make_caption(rng, settled, said)


class SceneStream(IterableDataset[Sample]):
    """Batches of training scenes; every worker has its own random numbers."""

    def __init__(self, tokenizer: Any, batch_size: int, num_rewritings: int, seed: int) -> None:
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.num_rewritings = num_rewritings
        self.seed = seed

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        rng = Random(f"{self.seed} {worker.id if worker else 0}")
        while True:
            yield self._sample(rng)

    def _sample(self, rng: Random) -> Sample:
        pairs = [sample_pair(rng) for _ in range(self.batch_size)]
        scenes = [scene for scene, _ in pairs]
        prompts = [prompt for _, prompt in pairs]
        for index in range(len(prompts)):
            if rng.random() < EMPTY_SHARE:
                prompts[index] = rng.choice(("", " "))
        ids = self.tokenizer([TEXT_TO_IMAGE.apply(prompt) for prompt in prompts]).input_ids
        rewritings = [sample_rewriting(rng, scene) for scene in scenes[: self.num_rewritings]]
        questions = []
        for prompt, _ in rewritings:
            # The template of pictures is answered like a request to rewrite: so the hidden states
            # that the transformer reads know what the prompt means.
            is_plain = rng.random() < 0.25
            chat = rewrite_chat(self.tokenizer, prompt)
            questions.append(TEXT_TO_IMAGE.apply(prompt) if is_plain else chat)
        return Sample(
            scenes=encode_scenes(scenes),
            prompts=pad(ids, NUM_PREFIX + NUM_TEXT, self.tokenizer.pad_token_id),
            num_text=torch.tensor([len(row) - NUM_PREFIX for row in ids]),
            rewriting=tokenize_answers(
                self.tokenizer, questions, [a for _, a in rewritings], NUM_REWRITING
            ),
            captions=[canonical_caption(scene) for scene in scenes],
        )


def stream(
    tokenizer: Any, batch_size: int, num_rewritings: int, seed: int, num_workers: int
) -> Iterator[Sample]:
    """Batches without end. The same arguments give the same batches."""
    dataset = SceneStream(tokenizer, batch_size, num_rewritings, seed)
    loader: DataLoader[Sample] = DataLoader(
        dataset,
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=8 if num_workers else None,
        persistent_workers=num_workers > 0,
    )
    return iter(loader)


@dataclass(frozen=True)
class Chats:
    """Chats about pictures of one size: the picture comes first, then the question."""

    ids: Tensor  # [n, tokens]
    labels: Tensor  # [n, tokens]
    positions: Tensor  # [3, 1, tokens]

    def to(self, device: torch.device | str) -> Chats:
        return Chats(*(getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)))


def make_chats(
    tokenizer: Any,
    grid: tuple[int, int],
    questions: Sequence[str],
    captions: Sequence[str],
    length: int | None = None,
) -> Chats:
    """`grid` of patches; `length` of what comes after the picture."""
    rest = tokenize_answers(
        tokenizer,
        [f"<|vision_end|>{q}<|im_end|>\n<|im_start|>assistant\n" for q in questions],
        captions,
        length,
    )
    head = tokenizer(CHAT_HEAD).input_ids
    rows, columns = grid[0] // MERGE, grid[1] // MERGE
    image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    before = torch.tensor(head + [image_id] * rows * columns).expand(len(rest.ids), -1)
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    start = len(head)
    after = torch.arange(rest.ids.shape[1]) + start + max(rows, columns)
    axes = (torch.full_like(y, start), y + start, x + start)
    first = torch.arange(start)
    positions = torch.stack([torch.cat([first, axis.flatten(), after]) for axis in axes])
    return Chats(
        torch.cat([before, rest.ids], dim=1),
        torch.cat([torch.full_like(before, IGNORED), rest.labels], dim=1),
        positions.unsqueeze(1),
    )


def embed_chats(language: FastLanguageModel, chats: Chats, seen: Tensor) -> Tensor:
    """[n, tokens, hidden]; `seen` [n, picture tokens, hidden] stands where the picture is."""
    embeddings = language.embed(chats.ids)
    start, end = NUM_CHAT_HEAD, NUM_CHAT_HEAD + seen.shape[1]
    return torch.cat([embeddings[:, :start], seen.to(embeddings.dtype), embeddings[:, end:]], dim=1)


def pick_questions(rng: Random, count: int) -> list[str]:
    return [rng.choice(QUESTIONS) for _ in range(count)]
