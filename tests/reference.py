"""Hugging Face's Qwen2.5-VL, to compare tokens and hidden states with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor


class Reference:
    """Hugging Face's model over the same checkpoint."""

    def __init__(self, checkpoint: Path, pipeline: Any) -> None:
        self.tokenizer = pipeline.tokenizer
        self.model = pipeline.text_encoder
        self.image_processor = AutoImageProcessor.from_pretrained(
            checkpoint / "processor", backend="pil"
        )

    def inputs(self, prompt: str | list[int], image: Image.Image | None = None) -> dict[str, Any]:
        ids = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        if image is None:
            return {"input_ids": torch.tensor([ids])}
        pixels = self.image_processor(images=[image], return_tensors="pt")
        pad = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        num_tokens = int(pixels["image_grid_thw"].prod()) // self.image_processor.merge_size**2
        at = ids.index(pad)
        input_ids = torch.tensor([ids[:at] + [pad] * num_tokens + ids[at + 1 :]])
        # Without the types the model takes image tokens for text and gives them other positions.
        return {"input_ids": input_ids, "mm_token_type_ids": (input_ids == pad).int(), **pixels}

    @torch.no_grad()
    def hidden_states(self, inputs: dict[str, Any], generated: list[int] | None = None) -> Tensor:
        if generated:
            more = torch.tensor([generated])
            inputs = {**inputs, "input_ids": torch.cat([inputs["input_ids"], more], dim=1)}
            if "mm_token_type_ids" in inputs:
                types = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(more)], dim=1)
                inputs["mm_token_type_ids"] = types.int()
        rows: Tensor = self.model(**inputs, output_hidden_states=True).hidden_states[-1][0]
        return rows

    @torch.no_grad()
    def generate(self, inputs: dict[str, Any], num_new_tokens: int) -> list[int]:
        output = self.model.generate(
            **inputs,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            do_sample=False,
            max_new_tokens=num_new_tokens,
            eos_token_id=[],
        )
        tokens: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens
