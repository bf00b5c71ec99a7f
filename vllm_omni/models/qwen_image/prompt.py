"""Qwen-Image's prompt templates: what the text encoder reads around the user's prompt."""

from __future__ import annotations

from dataclasses import dataclass

# Longest prompt in tokens, template prefix not counted: the stock pipeline truncates there.
MAX_PROMPT_TOKENS = 1024

_USER_TURN = "<|im_start|>user\n"


@dataclass(frozen=True)
class PromptTemplate:
    """A chat in which `{}` is the place of the user's prompt."""

    text: str
    # Tokens of `prefix`. Their hidden states say nothing about the prompt and are dropped.
    num_prefix_tokens: int

    @property
    def prefix(self) -> str:
        """The system turn and the head of the user turn: the same for every prompt."""
        return self.text[: self.text.index(_USER_TURN) + len(_USER_TURN)]

    def apply(self, prompt: str) -> str:
        """The text to tokenize for `prompt`."""
        return self.text.replace("{}", prompt)


TEXT_TO_IMAGE = PromptTemplate(
    text=(
        "<|im_start|>system\n"
        "Describe the image by detailing the color, shape, size, texture, quantity, text, "
        "spatial relationships of the objects and background:<|im_end|>\n"
        "<|im_start|>user\n{}<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    num_prefix_tokens=34,
)

EDIT = PromptTemplate(
    text=(
        "<|im_start|>system\n"
        "Describe the key features of the input image (color, shape, size, texture, objects, "
        "background), then explain how the user's text instruction should alter or modify the "
        "image. Generate a new image that meets the user's requirements while maintaining "
        "consistency with the original input where appropriate.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    num_prefix_tokens=64,
)

REWRITE_INSTRUCTION = (
    "Rewrite the user's prompt for a picture: keep what it says, and add what it leaves open, such "
    "as size, colour, place and background. Answer with the new prompt only."
)
