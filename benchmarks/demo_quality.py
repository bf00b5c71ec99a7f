"""Does the demo model draw what it is told, and say what it sees? Scores from the pixels.

Held-out prompts with fixed seeds: one shape, two objects, one letter or digit. Every stated fact
(shape, colour, size, place or relation, background) is judged by `training.judge`, which segments
the picture; a picture is right when all of them are. Then prompts that name objects and nothing
else: are just those there, and do colours differ from seed to seed? Then the language model's own
tasks: full captions for short prompts, and captions of held-out pictures, rendered and drawn by
the model.

    python -m benchmarks.demo_quality --model vllm_omni/demo --out out/quality
    python -m benchmarks.demo_quality --model out/demo --backend omni --prompts 60 --out out/quality

Writes demo_quality.json, demo_quality.md and contact_sheet.png. On the GPU machine only the
`diffusers` backend is there; benchmarks/README.md says how diffusers gets there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from training.captions import canonical_caption, make_caption, parse_caption, sample_rewriting
from training.data import rewrite_chat
from training.glyphs import SHAPES
from training.judge import judge, look
from training.models import QUESTIONS
from training.render import Renderer, encode_scenes
from training.world import Said, Scene, sample_held_out_scene

Pixels = NDArray[np.uint8]  # [height, width, 3]

KINDS = {"one object": (1, "shape"), "two objects": (2, None), "letters and digits": (1, "symbol")}
SIDE = 256  # pixels
OTHER_SIZES = ((128, 128), (256, 128), (192, 320), (384, 192), (384, 384))  # width and height
NUM_OPEN_SEEDS = 6  # pictures drawn of each open prompt
BATCH = 50  # pictures a call of the stock pipeline

SHEET_PROMPTS = (
    "a large yellow star in the center on a dark blue background",
    "a small red circle in the top left on a white background",
    "a large purple heart on a light pink background",
    "a red star above a small blue ring on a light yellow background",
    "the letter Q on a green background",
    "a large white crescent in the top right on a gradient background from dark blue to purple",
    "a medium black cross on a striped background in white and orange",
    "a green triangle to the left of an orange hexagon on a light blue background",
    "a large cyan diamond on a checked background in black and gray",
    "a white digit 7 to the right of a pink heart on a dark purple background",
    "on a gray background, a large red letter A is above a yellow letter B",
    "a heart",
    "a star",
    "big blue square, bottom right, light green background",
    "a pink ring on a dark green background",
    "a brown digit 3 below a large black circle on a cyan background",
)


@dataclass(frozen=True)
class Task:
    """One picture to draw and to judge."""

    kind: str
    prompt: str
    scene: Scene
    said: Said
    seed: int


def make_tasks(count: int) -> list[Task]:
    """Kinds in turn; four captions in five say everything."""
    rng = Random(2026)
    tasks = []
    for index in range(count):
        kind = list(KINDS)[index % len(KINDS)]
        scene = sample_held_out_scene(rng, *KINDS[kind])
        is_full = rng.random() < 0.8
        said = Said.everything(scene) if is_full else Said.sample(rng, scene)
        tasks.append(Task(kind, make_caption(rng, scene, said), scene, said, seed=index))
    return tasks


def make_open_tasks(count: int) -> list[Task]:
    """Prompts that name one or two objects and leave all else open, each with several seeds."""
    rng = Random(2027)
    tasks: list[Task] = []
    for index in range(-(-count // NUM_OPEN_SEEDS)):
        num_things = 1 + index % 2
        scene = sample_held_out_scene(rng, num_things)
        if num_things == 1:  # the ten shapes in turn
            scene = replace(
                scene, things=(replace(scene.things[0], glyph=SHAPES[index // 2 % 10]),)
            )
        said = Said.nothing(scene)
        prompt = make_caption(rng, scene, said)
        kind = f"open, {'one object' if num_things == 1 else 'two objects'}"
        tasks += [Task(kind, prompt, scene, said, seed) for seed in range(NUM_OPEN_SEEDS)]
    return tasks


# --- drawing ---


class Artist:
    """Draws prompts with the checkpoint, through one of the two engines."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.engine: Any = None

    def draw(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        num_steps: int,
        size: tuple[int, int] = (SIDE, SIDE),
    ) -> list[Pixels]:
        draw = self._draw_stock if self.args.backend == "diffusers" else self._draw_omni
        return draw(prompts, seeds, num_steps, size)

    def draw_tasks(
        self, tasks: Sequence[Task], num_steps: int, size: tuple[int, int] = (SIDE, SIDE)
    ) -> list[Pixels]:
        return self.draw([t.prompt for t in tasks], [t.seed for t in tasks], num_steps, size)

    def _draw_stock(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        num_steps: int,
        size: tuple[int, int],
    ) -> list[Pixels]:
        if self.engine is None:
            self.engine = load_pipeline(self.args)
        drawn: list[Pixels] = []
        for start in range(0, len(prompts), BATCH):
            part = list(prompts[start : start + BATCH])
            images = self.engine(
                prompt=part,
                negative_prompt=[" "] * len(part),
                true_cfg_scale=self.args.guidance,
                width=size[0],
                height=size[1],
                num_inference_steps=num_steps,
                generator=[
                    torch.Generator("cpu").manual_seed(seed) for seed in seeds[start:][: len(part)]
                ],
                output_type="np",
            ).images
            drawn += [np.asarray((image * 255).round(), dtype=np.uint8) for image in images]
        return drawn

    def _draw_omni(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        num_steps: int,
        size: tuple[int, int],
    ) -> list[Pixels]:
        from vllm_omni.entrypoints.omni import Omni
        from vllm_omni.params import DiffusionParams

        if self.engine is None:
            self.engine = Omni(str(self.args.model))
        params = [
            DiffusionParams(
                negative_prompt=" ",
                true_cfg_scale=self.args.guidance,
                width=size[0],
                height=size[1],
                num_inference_steps=num_steps,
                seed=seed,
            )
            for seed in seeds
        ]
        drawn = []
        for output in self.engine.generate(list(prompts), params):
            if output.error is not None:
                raise output.error
            drawn.append(np.asarray(output.images[0].convert("RGB")))
        return drawn

    def close(self) -> None:
        if self.args.backend == "omni" and self.engine is not None:
            self.engine.close()


def load_pipeline(args: argparse.Namespace) -> Any:
    from diffusers import QwenImagePipeline

    dtype = getattr(torch, args.dtype)
    pipeline = QwenImagePipeline.from_pretrained(args.model, dtype=dtype).to(args.device)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


# --- scores ---


def score_drawing(tasks: Sequence[Task], pictures: Sequence[Pixels]) -> dict[str, dict[str, float]]:
    """Percent right of each kind: of every fact, and of whole pictures (`all`)."""
    with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        judged = list(
            pool.map(
                judge,
                pictures,
                [task.scene for task in tasks],
                [task.said for task in tasks],
                chunksize=8,
            )
        )
    marks: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for task, facts in zip(tasks, judged, strict=True):
        marks[task.kind]["all"].append(all(facts.values()))
        for fact, is_right in facts.items():
            marks[task.kind][fact].append(is_right)
    return {
        kind: {fact: round(100 * float(np.mean(values)), 1) for fact, values in facts.items()}
        for kind, facts in marks.items()
    }


def count_colours(tasks: Sequence[Task], pictures: Sequence[Pixels]) -> float:
    """How many colours the first object has over the seeds of a prompt, on average."""
    colours: dict[str, set[str]] = defaultdict(set)
    for task, picture in zip(tasks, pictures, strict=True):
        _, pieces = look(picture)
        colours[task.prompt].update(piece.colour for piece in pieces[:1])
    return round(float(np.mean([len(names) for names in colours.values()])), 1)


def score_open(artist: Artist, count: int, num_steps: int) -> dict[str, Any]:
    """Prompts that leave nearly all open."""
    tasks = make_open_tasks(count)
    drawn = artist.draw_tasks(tasks, num_steps)
    colours = count_colours(tasks, drawn)
    scores = {"scores": score_drawing(tasks, drawn), f"colours in {NUM_OPEN_SEEDS} seeds": colours}
    print(json.dumps(scores), flush=True)
    return scores


def score_sizes(
    artist: Artist, tasks: Sequence[Task], count: int, num_steps: int
) -> dict[str, dict[str, float]]:
    """The first tasks once more, in other sizes."""
    scores: dict[str, dict[str, float]] = {}
    for width, height in OTHER_SIZES:
        kind = f"{width}x{height}"
        of_size = [replace(task, kind=kind) for task in tasks[:count]]
        scores |= score_drawing(of_size, artist.draw_tasks(of_size, num_steps, (width, height)))
    print(json.dumps(scores), flush=True)
    return scores


class Speaker:
    """The checkpoint's language model through transformers, greedy."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import (
            AutoTokenizer,
            Qwen2_5_VLForConditionalGeneration,
            Qwen2VLImageProcessor,
        )

        self.device = args.device
        self.tokenizer = AutoTokenizer.from_pretrained(
            args.model / "processor", padding_side="left"
        )
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            args.model / "text_encoder", dtype=torch.float32
        ).to(args.device)
        self.processor = Qwen2VLImageProcessor.from_pretrained(args.model / "processor")

    def rewrite(self, prompts: Sequence[str]) -> list[str]:
        answers = []
        for part in batches(prompts):
            chats = [rewrite_chat(self.tokenizer, prompt) for prompt in part]
            inputs = self.tokenizer(chats, padding=True, return_tensors="pt").to(self.device)
            answers += self._answer(dict(inputs))
        return answers

    def describe(self, pictures: Sequence[Pixels]) -> list[str]:
        """Pictures of one size."""
        answers = []
        for part in batches(pictures):
            seen = self.processor([Image.fromarray(p) for p in part], return_tensors="pt")
            num_seen = int(seen["image_grid_thw"][0].prod()) // 4
            chat = (
                "<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * num_seen + "<|vision_end|>"
                f"{QUESTIONS[0]}<|im_end|>\n<|im_start|>assistant\n"
            )
            inputs = dict(self.tokenizer([chat] * len(part), return_tensors="pt"), **seen)
            is_picture = inputs["input_ids"] == self.model.config.image_token_id
            inputs["mm_token_type_ids"] = is_picture.int()
            answers += self._answer({k: v.to(self.device) for k, v in inputs.items()})
        return answers

    @torch.no_grad()
    def _answer(self, inputs: dict[str, Any]) -> list[str]:
        ids = self.model.generate(**inputs, max_new_tokens=48, do_sample=False)
        texts: list[str] = self.tokenizer.batch_decode(
            ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return [text.strip() for text in texts]


def batches(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]


def score_language(
    args: argparse.Namespace, tasks: Sequence[Task], pictures: Sequence[Pixels]
) -> dict[str, float]:
    """Percent of rewritings that are full captions and keep what was said, and of captions that
    name every shape and colour, and that are right in everything."""
    speaker = Speaker(args)
    rng = Random(7)
    pairs = [sample_rewriting(rng, task.scene) for task in tasks]
    rewritten = speaker.rewrite([prompt for prompt, _ in pairs])
    scores = {
        "rewriting valid": percent(parse_caption(text) is not None for text in rewritten),
        "rewriting as taught": percent(
            text == wanted for text, (_, wanted) in zip(rewritten, pairs, strict=True)
        ),
    }
    rendered = Renderer("cpu").draw(encode_scenes([task.scene for task in tasks]), SIDE, SIDE)
    levels = ((rendered + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    for name, shown in (("rendered", list(levels)), ("drawn", list(pictures))):
        said = [parse_caption(text) for text in speaker.describe(shown)]
        # A drawn picture is asked for facts its prompt stated.
        kept = [
            (scene, task)
            for scene, task in zip(said, tasks, strict=True)
            if name == "rendered" or task.said == Said.everything(task.scene)
        ]
        scores[f"captions of {name} pictures, shape and colour"] = percent(
            scene is not None and _names(scene) == _names(task.scene) for scene, task in kept
        )
        scores[f"captions of {name} pictures, everything"] = percent(
            scene is not None and canonical_caption(scene) == canonical_caption(task.scene)
            for scene, task in kept
        )
    return scores


def _names(scene: Scene) -> list[tuple[str, str]]:
    return sorted((thing.glyph, thing.colour) for thing in scene.things)


def percent(values: Any) -> float:
    return round(100 * float(np.mean(list(values))), 1)


# --- the run ---


def main() -> None:
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tasks = make_tasks(args.prompts)
    artist = Artist(args)
    figures: dict[str, Any] = {"prompts": len(tasks), "guidance": args.guidance, "steps": {}}
    pictures: list[Pixels] = []
    for num_steps in args.steps:
        start = time.perf_counter()
        drawn = artist.draw_tasks(tasks, num_steps)
        seconds = time.perf_counter() - start
        pictures = pictures or drawn
        scores = score_drawing(tasks, drawn)
        figures["steps"][num_steps] = {"seconds": round(seconds, 1), "scores": scores}
        print(f"{num_steps} steps, {seconds:.0f} s: {json.dumps(scores)}", flush=True)
        write_report(args.out, figures)
    figures["open"] = score_open(artist, args.open_prompts, args.steps[0])
    figures["sizes"] = score_sizes(artist, tasks, args.size_prompts, args.steps[0])
    write_report(args.out, figures)
    sheet = artist.draw(SHEET_PROMPTS, range(len(SHEET_PROMPTS)), args.steps[0])
    save_sheet(args.out / "contact_sheet.png", sheet)
    artist.close()
    figures["language"] = score_language(args, tasks, pictures)
    print(json.dumps(figures["language"]), flush=True)
    write_report(args.out, figures)


def save_sheet(path: Path, pictures: Sequence[Pixels]) -> None:
    """Four a row, with a white gap."""
    gap, columns = 8, 4
    rows = -(-len(pictures) // columns)
    size = ((SIDE + gap) * columns + gap, (SIDE + gap) * rows + gap)
    sheet = Image.new("RGB", size, "white")
    for index, picture in enumerate(pictures):
        at = (gap + index % columns * (SIDE + gap), gap + index // columns * (SIDE + gap))
        sheet.paste(Image.fromarray(picture), at)
    sheet.save(path, optimize=True)


def write_report(out: Path, figures: dict[str, Any]) -> None:
    (out / "demo_quality.json").write_text(json.dumps(figures, indent=2) + "\n")
    facts = ("all", "count", "shape", "colour", "size", "place", "relation", "background")
    lines = [f"| steps | kind | {' | '.join(facts)} |", "|" + " --- |" * (len(facts) + 2)]
    parts = [(steps, part["scores"]) for steps, part in figures["steps"].items()]
    others = (figures.get("open", {}).get("scores", {}), figures.get("sizes", {}))
    parts += [(next(iter(figures["steps"])), scores) for scores in others]
    for num_steps, by_kind in parts:
        for kind, scores in by_kind.items():
            cells = [f"{scores[fact]:.1f}" if fact in scores else "" for fact in facts]
            lines.append(f"| {num_steps} | {kind} | {' | '.join(cells)} |")
    lines += ["", "| language | percent |", "| --- | --- |"]
    lines += [f"| {name} | {value:.1f} |" for name, value in figures.get("language", {}).items()]
    (out / "demo_quality.md").write_text("\n".join(lines) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", choices=["diffusers", "omni"], default="diffusers")
    parser.add_argument("--device", default="cpu", help="of the diffusers backend")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--open-prompts", type=int, default=120, help="that name objects only")
    parser.add_argument("--size-prompts", type=int, default=60, help="of every other size")
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 10])
    parser.add_argument("--guidance", type=float, default=3.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
