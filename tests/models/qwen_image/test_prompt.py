"""The templates are those of the stock pipelines, and prompts go in unchanged."""

import inspect
import subprocess
import sys
from typing import Any

import pytest
from diffusers import QwenImageEditPipeline, QwenImagePipeline

from vllm_omni.models.qwen_image.prompt import (
    EDIT,
    MAX_PROMPT_TOKENS,
    TEXT_TO_IMAGE,
    PromptTemplate,
)

TEMPLATES = {"text_to_image": TEXT_TO_IMAGE, "edit": EDIT}


def create_stock_pipeline(pipeline_class: Any) -> Any:
    """A stock pipeline without models: its constructor sets the template."""
    return pipeline_class(**dict.fromkeys(inspect.signature(pipeline_class).parameters))


@pytest.mark.parametrize(
    ("template", "pipeline_class"),
    [(TEXT_TO_IMAGE, QwenImagePipeline), (EDIT, QwenImageEditPipeline)],
    ids=TEMPLATES,
)
def test_template_equals_diffusers(template: PromptTemplate, pipeline_class: Any) -> None:
    stock = create_stock_pipeline(pipeline_class)
    assert template.text == stock.prompt_template_encode
    assert template.num_prefix_tokens == stock.prompt_template_encode_start_idx
    assert stock.tokenizer_max_length == MAX_PROMPT_TOKENS


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("prompt", ["a cat", "", "{}", "{0} {name} {{", "}", "\\1 %s {!r:>{w}}"])
def test_apply_inserts_the_prompt_unchanged(template: PromptTemplate, prompt: str) -> None:
    head, tail = template.text.split("{}")
    assert template.apply(prompt) == head + prompt + tail


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_prefix_ends_where_the_user_turn_begins(template: PromptTemplate) -> None:
    assert template.prefix.endswith("<|im_end|>\n<|im_start|>user\n")
    assert template.apply("a cat").startswith(template.prefix)


def test_prompt_module_does_not_import_torch() -> None:
    code = "import sys, vllm_omni.models.qwen_image.prompt; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
