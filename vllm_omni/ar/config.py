"""From a stage's model and settings to a `VllmConfig`.

Seams, checked against vLLM 0.32.0: `EngineArgs`, `VllmConfig.parallel_config.worker_cls`.
"""

from __future__ import annotations

import copy
import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from vllm import EngineArgs
from vllm.config import PoolerConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from vllm_omni import envs
from vllm_omni.ar.rendering import describe
from vllm_omni.ar.worker import worker_class_name
from vllm_omni.errors import ConfigError, ModelLoadError
from vllm_omni.models.demo import find_model

CPU_ENGINE_ARGS: Mapping[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,  # compiling takes more than a minute
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "use_tqdm_on_load": False,
    # The class's name: "uni" would become worker processes.
    "distributed_executor_backend": f"{UniProcExecutor.__module__}.{UniProcExecutor.__name__}",
}
"""For a small machine without a GPU; each can be overridden."""

CUDA_ENGINE_ARGS: Mapping[str, Any] = {
    "dtype": "auto",  # the checkpoint's, usually bfloat16
    "gpu_memory_utilization": 0.35,  # of the whole GPU: other stages share it
    "max_num_seqs": 64,
    "use_tqdm_on_load": False,
}
"""For an NVIDIA GPU, where CUDA graphs pay; each can be overridden. Read, not run."""

STRUCTURED_OUTPUTS: Mapping[str, Any] = {
    # One, not whichever of four can read a schema: the server bounds what it lets through to it.
    "backend": "xgrammar",
    "disable_any_whitespace": True,  # small models write nothing else once they may
}
"""How text is held to a schema; overridden as a whole."""

OWN_ENGINE_ARGS = ("model", "tokenizer", "worker_cls")
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
        if isinstance(vllm_config, VllmConfig):
            self.vllm_config = _with_own_worker(vllm_config)
            self.folder = Path(vllm_config.model_config.model)
        else:
            self.folder = _find_folder(self.model)
            self.vllm_config = self._create_config(_to_mapping(vllm_config))

    @property
    def reads_images(self) -> bool:
        return (self.folder / "preprocessor_config.json").is_file()

    def _create_config(self, engine_args: Mapping[str, Any]) -> VllmConfig:
        if self._is_own(engine_args.get("model")):
            engine_args = {name: value for name, value in engine_args.items() if name != "model"}
        own = sorted(set(engine_args) & set(OWN_ENGINE_ARGS))
        if own:
            raise ConfigError("vllm_config", own, "the stage sets these itself")
        limits = {"video": 0} if self.reads_images else {"video": 0, "image": 0}
        defaults = CUDA_ENGINE_ARGS if current_platform.is_cuda() else CPU_ENGINE_ARGS
        args = {
            "load_format": "safetensors",  # "auto" would also unpickle a .bin
            "limit_mm_per_prompt": limits,
            "structured_outputs_config": dict(STRUCTURED_OUTPUTS),
            **defaults,
            **engine_args,
        }
        if args.get("runner") == "pooling":
            args |= {"convert": "embed", "pooler_config": _EVERY_TOKEN}
        try:
            return EngineArgs(
                model=str(self.folder), worker_cls=worker_class_name(), **args
            ).create_engine_config()
        except TypeError as error:  # an unknown name
            raise ConfigError("vllm_config", sorted(engine_args), str(error)) from error
        except Exception as error:  # of whatever kind: vLLM, transformers and pydantic differ
            raise ModelLoadError(f"vLLM cannot load {self.model}: {describe(error)}") from error

    def _is_own(self, model: Any) -> bool:
        """Whether an engine argument names the model that the stage has anyway."""
        folders = (self.model, self.model / CHECKPOINT_FOLDERS[0], self.folder)
        return isinstance(model, (str, Path)) and any(
            find_model(str(model)).resolve() == folder.resolve() for folder in folders
        )


# The hidden state of each token, not normalised.
_EVERY_TOKEN = PoolerConfig(task="token_embed", tok_pooling_type="ALL", use_activation=False)


def _find_folder(model: Path) -> Path:
    """The folder that vLLM is to read: weights, tokenizer and image settings in one.

    A checkpoint in diffusers layout has three; links to their files are kept in the cache.
    """
    if (model / "config.json").is_file():
        return model.resolve()
    if not (model / CHECKPOINT_FOLDERS[0] / "config.json").is_file():
        raise ModelLoadError(
            f"{model} is not a checkpoint: neither config.json nor "
            f"{CHECKPOINT_FOLDERS[0]}/config.json is there"
        )
    files: dict[str, Path] = {}
    for folder in CHECKPOINT_FOLDERS:
        for file in (model / folder).glob("*"):
            files.setdefault(file.name, file.resolve())
    digest = hashlib.sha256(str(model.resolve()).encode()).hexdigest()
    links = envs.cache_dir() / "ar" / digest[:16]
    try:
        _link_files(files, links)
    except OSError as error:
        raise ModelLoadError(
            f"the cache for {model} cannot be written, set VLLM_OMNI_CACHE: {error}"
        ) from error
    return links


def _link_files(files: Mapping[str, Path], links: Path) -> None:
    """Make `links` a folder of links to these files, whatever it was before."""
    links.mkdir(parents=True, exist_ok=True)
    for old in links.iterdir():
        if old.name not in files:
            old.unlink(missing_ok=True)
    for name, file in files.items():
        link = links / name
        if not link.is_symlink() or link.readlink() != file:
            new = links.parent / f"{uuid.uuid4().hex}"
            new.symlink_to(file)
            new.replace(link)  # at once: another process may be reading


def _to_mapping(vllm_config: Any) -> Mapping[str, Any]:
    if vllm_config is None:
        return {}
    if isinstance(vllm_config, EngineArgs):
        given = {field.name: getattr(vllm_config, field.name) for field in fields(EngineArgs)}
        defaults = {field.name: _get_default(field) for field in fields(EngineArgs)}
        return {
            name: value
            for name, value in given.items()
            if name != "model" and value != defaults[name]
        }
    if not isinstance(vllm_config, Mapping):
        raise ConfigError("vllm_config", vllm_config, "a VllmConfig, EngineArgs or a mapping")
    return vllm_config


def _get_default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _with_own_worker(vllm_config: VllmConfig) -> VllmConfig:
    vllm_config = copy.deepcopy(vllm_config)
    vllm_config.parallel_config.worker_cls = worker_class_name()
    if current_platform.is_cpu():
        backend = CPU_ENGINE_ARGS["distributed_executor_backend"]
        vllm_config.parallel_config.distributed_executor_backend = backend
    return vllm_config
