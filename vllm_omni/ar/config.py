"""From a stage's model and settings to a `VllmConfig`.

Seams, checked against vLLM 0.32.0: `EngineArgs`, `VllmConfig.parallel_config.worker_cls`.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from vllm import EngineArgs
from vllm.config import PoolerConfig, VllmConfig
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from vllm_omni.ar.rendering import describe
from vllm_omni.ar.worker import HiddenStatesCPUWorker
from vllm_omni.errors import ConfigError, ModelLoadError

DEFAULT_ENGINE_ARGS: Mapping[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,  # compiling takes more than a minute
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
}
"""For a small machine without a GPU; each can be overridden."""

OWN_ENGINE_ARGS = ("model", "tokenizer", "worker_cls", "distributed_executor_backend")
"""What a stage sets itself."""

# Folders of a checkpoint in diffusers layout that vLLM needs as one. Of two files with the same
# name the first wins.
CHECKPOINT_FOLDERS = ("text_encoder", "processor", "tokenizer")


class ARModel:
    """A model as vLLM reads it, and the settings to run it with.

    Args:
        model: a checkpoint in diffusers layout, of which the text encoder is taken, or a folder in
            Hugging Face's layout.
        vllm_config: engine arguments, as a mapping or an `EngineArgs`, or a whole `VllmConfig`,
            which then also says which model.
    """

    def __init__(self, model: str | Path, vllm_config: Any = None) -> None:
        self.model = Path(model)
        # vLLM reads weights, tokenizer and image settings from one folder; checkpoints have three.
        self._links = tempfile.TemporaryDirectory(prefix="vllm-omni-ar-")
        try:
            if isinstance(vllm_config, VllmConfig):
                self.vllm_config = _with_own_worker(vllm_config)
                self.folder = Path(vllm_config.model_config.model)
            else:
                self.folder = _find_folder(self.model, Path(self._links.name))
                self.vllm_config = self._create_config(_to_mapping(vllm_config))
        except BaseException:
            self.close()
            raise

    @property
    def reads_images(self) -> bool:
        return (self.folder / "preprocessor_config.json").is_file()

    def close(self) -> None:
        """Remove the temporary folder; after that the model cannot be loaded again."""
        self._links.cleanup()

    def _create_config(self, engine_args: Mapping[str, Any]) -> VllmConfig:
        own = sorted(set(engine_args) & set(OWN_ENGINE_ARGS))
        if own:
            raise ConfigError("vllm_config", own, "the stage sets these itself")
        limits = {"video": 0} if self.reads_images else {"video": 0, "image": 0}
        args = {"limit_mm_per_prompt": limits, **DEFAULT_ENGINE_ARGS, **engine_args}
        if args.get("runner") == "pooling":
            args |= {"convert": "embed", "pooler_config": _EVERY_TOKEN}
        try:
            return EngineArgs(
                model=str(self.folder),
                worker_cls=_name(HiddenStatesCPUWorker),
                # The class's name: "uni" would become worker processes on a CPU.
                distributed_executor_backend=_name(UniProcExecutor),
                **args,
            ).create_engine_config()
        except TypeError as error:  # an unknown name
            raise ConfigError("vllm_config", sorted(engine_args), str(error)) from error
        except Exception as error:  # of whatever kind: vLLM, transformers and pydantic differ
            raise ModelLoadError(f"vLLM cannot load {self.model}: {describe(error)}") from error


# The hidden state of each token, not normalised.
_EVERY_TOKEN = PoolerConfig(task="token_embed", tok_pooling_type="ALL", use_activation=False)


def _find_folder(model: Path, links: Path) -> Path:
    """The folder that vLLM is to read, which `links` becomes if the model has several."""
    if (model / "config.json").is_file():
        return model.resolve()
    if not (model / CHECKPOINT_FOLDERS[0] / "config.json").is_file():
        raise ModelLoadError(
            f"{model} is not a checkpoint: neither config.json nor "
            f"{CHECKPOINT_FOLDERS[0]}/config.json is there"
        )
    for folder in CHECKPOINT_FOLDERS:
        for file in sorted((model / folder).glob("*")):
            link = links / file.name
            if not link.is_symlink():
                link.symlink_to(file.resolve())
    return links


def _to_mapping(vllm_config: Any) -> Mapping[str, Any]:
    if vllm_config is None:
        return {}
    if isinstance(vllm_config, EngineArgs):
        default = EngineArgs(model=vllm_config.model)  # without one, vLLM looks for its own
        given = {field.name: getattr(vllm_config, field.name) for field in fields(default)}
        return {
            name: value
            for name, value in given.items()
            if name != "model" and value != getattr(default, name)
        }
    if not isinstance(vllm_config, Mapping):
        raise ConfigError("vllm_config", vllm_config, "a VllmConfig, EngineArgs or a mapping")
    return vllm_config


def _with_own_worker(vllm_config: VllmConfig) -> VllmConfig:
    vllm_config = copy.deepcopy(vllm_config)
    vllm_config.parallel_config.worker_cls = _name(HiddenStatesCPUWorker)
    vllm_config.parallel_config.distributed_executor_backend = _name(UniProcExecutor)
    return vllm_config


def _name(of: type) -> str:
    return f"{of.__module__}.{of.__name__}"
