"""vLLM's own server with a tiny model, for the same faults."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.faults.load import Ask
from tests.faults.record import PLAIN
from tests.faults.victim import Victim

CORE, WORKER = "VLLM::EngineCore", "VLLM::Worker"
NUM_TOKENS = 200  # of an answer

_CONFIG: Mapping[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 552,
    "max_position_embeddings": 1024,
    "torch_dtype": "float32",
}


class PlainVllm(Victim):
    """`vllm serve`, as it is installed."""

    server = PLAIN
    # What `vllm serve` runs; the command itself looks for a package `vllm`, which on CPUs has
    # another name.
    command = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    ready_path = "/health"

    def __init__(self, log: Path, model: str, *arguments: str, **settings: Any) -> None:
        env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        small = ("--load-format", "dummy", "--dtype", "float32", "--enforce-eager")
        few = ("--model", model, *small, "--max-num-seqs", "8")
        super().__init__(log, *few, *arguments, env=env, **settings)


def write_model(folder: Path, tokenizer: Path) -> str:
    """A language model with random weights, as small as ours."""
    shutil.copytree(tokenizer, folder)
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    return str(folder)


def create_texts(model: str, num: int, num_tokens: int = NUM_TOKENS) -> list[Ask]:
    """Requests for texts of a certain length."""
    body = {"model": model, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    return [Ask("text", "text", body | {"prompt": f"a circle, number {i}"}) for i in range(num)]
