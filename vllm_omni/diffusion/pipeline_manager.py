"""`PipelineManager`: a checkpoint in diffusers layout, loaded, on its device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_omni.config import DiTConfig
from vllm_omni.errors import EngineError, ModelLoadError
from vllm_omni.models.progress import progress_bars_off
from vllm_omni.models.registry import get_model_spec, load_class, read_json
from vllm_omni.models.weights import check_tensors

logger = logging.getLogger(__name__)

_OFFLOADED: dict[str, tuple[str, ...]] = {  # by `cpu_offload`
    "none": (),
    "text_encoder": ("text_encoder",),
    "transformer": ("transformer", "text_encoder"),
}
_MAX_CAUSE = 500  # characters of what a library says
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PipelineManager:
    """Owns the model's components; loads, unloads, and lets them sleep and wake."""

    def __init__(self, config: DiTConfig, rank: int = 0) -> None:
        self.model = Path(config.model)
        self.spec = get_model_spec(self.model)
        self.device = select_device(config.device, rank)
        self.dtype = select_dtype(config.dtype, self.device)
        self.scheduler_config = read_json(self.model, "scheduler/scheduler_config.json")
        self._names = [
            name
            for name in self.spec.components
            if name != "text_encoder" or config.load_text_encoder
        ]
        self._offloaded = _OFFLOADED[config.cpu_offload]
        self._components: dict[str, Any] = {}
        self._is_asleep = False

    @property
    def transformer(self) -> Any:
        return self._component("transformer")

    @property
    def vae(self) -> Any:
        return self._component("vae")

    @property
    def text_encoder(self) -> Any:
        return self._component("text_encoder")

    def _component(self, name: str) -> Any:
        if self._is_asleep or name not in self._components:
            raise EngineError(f"the {name} is not loaded: call load() or wake() first")
        return self._components[name]

    def load(self) -> None:
        for name in self._names:
            if name not in self._components:
                self._components[name] = self._load_component(name)

    def unload(self) -> None:
        """Give all weights back."""
        self._components.clear()
        self.empty_cache()

    def empty_cache(self) -> None:
        """Give memory that nobody uses any more back to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def sleep(self, level: int = 1) -> None:
        """Leave the device: level 1 keeps the weights in host memory, level 2 drops them."""
        if level not in (1, 2):
            raise ValueError(f"level={level} is not allowed: 1 or 2")
        self._is_asleep = True
        if level == 2:
            self.unload()
        for component in self._on_device():
            component.to("cpu")
        self.empty_cache()

    def wake(self) -> None:
        """Be ready again after `sleep`."""
        self.load()
        for component in self._on_device():
            component.to(self.device)
        self._is_asleep = False

    def _on_device(self) -> list[Any]:
        """The components whose weights stay on the device between uses."""
        return [c for name, c in self._components.items() if name not in self._offloaded]

    def encode_text(self, token_ids: Sequence[int], num_prefix_tokens: int) -> Tensor:
        """The hidden states [tokens - prefix, hidden] that condition the transformer."""
        input_ids = torch.tensor([token_ids], device=self.device)
        # `.model` leaves out the language model head, whose logits nobody needs here; its last
        # hidden state is the stock pipeline's `hidden_states[-1]`.
        output = self.text_encoder.model(
            input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False
        )
        embeds: Tensor = output.last_hidden_state[0, num_prefix_tokens:].clone()
        return embeds

    def _load_component(self, name: str) -> Any:
        component_class = load_class(self.spec.components[name])
        is_offloaded = name in self._offloaded
        # The module is made without weights, and each weight goes from the file to its device: at
        # no time is there a second copy of them in host memory.
        device = torch.device("cpu") if is_offloaded else self.device
        component = load_whole(component_class, self.model / name, self.dtype, device)
        logger.debug("loaded %s", name)
        component = component.requires_grad_(False).eval()
        if is_offloaded:
            keep_on_host(component, self.device)
        return component


def load_whole(component_class: Any, folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """A component with all of its weights; both libraries would draw those that are missing."""
    try:
        if hasattr(component_class, "load_config"):  # one of diffusers
            check_tensors(folder, _get_shapes(component_class, folder))
            options = {}
        else:  # transformers renames tensors as it reads them: only the outcome can be looked at
            options = {"ignore_mismatched_sizes": True}
        with progress_bars_off():
            component, outcome = component_class.from_pretrained(
                folder,
                dtype=dtype,
                use_safetensors=True,
                device_map={"": device},
                output_loading_info=True,
                **options,
            )
    except ModelLoadError:
        raise
    except Exception as error:  # of whatever kind: diffusers, transformers and safetensors differ
        cause = " ".join(str(error).split())[:_MAX_CAUSE]
        raise ModelLoadError(f"cannot load {folder.name} from {folder.parent}: {cause}") from error
    for problem in ("missing", "mismatched"):
        if names := sorted(map(str, outcome[f"{problem}_keys"])):
            raise ModelLoadError(f"{folder} is broken: the tensor {names[0]} is {problem}")
    return component


def _get_shapes(component_class: Any, folder: Path) -> dict[str, torch.Size]:
    """Of the tensors that a component of diffusers is made of."""
    from accelerate import init_empty_weights  # takes long, and few need it

    with init_empty_weights():
        skeleton = component_class.from_config(component_class.load_config(folder))
    return {name: tensor.shape for name, tensor in skeleton.state_dict().items()}


def keep_on_host(module: torch.nn.Module, device: torch.device) -> None:
    """Leave a module's weights in host memory; each layer fetches its own when it is called.

    By layers, not by blocks: a packed forward calls the layers and never the blocks around them.
    On a GPU the host's copies are pinned, and dropping a fetched one copies nothing.
    """
    from diffusers.hooks import apply_group_offloading  # takes long, and few need it

    apply_group_offloading(
        module,
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="leaf_level",
        use_stream=device.type == "cuda",
    )
    if device.type == "cuda":
        stop_tracking(module)


def stop_tracking(module: torch.nn.Module) -> None:
    """Take away the hooks that write down which layer was called when, to fetch the next early.

    They do so until the whole module was called once. We call its parts only: the list would grow
    with every step, for ever. Checked against diffusers 0.42.1.
    """
    from diffusers.hooks import HookRegistry

    registry = HookRegistry.check_if_exists_or_initialize(module)
    for name in ("lazy_prefetch_group_offloading", "layer_execution_tracker"):
        registry.remove_hook(name)


def select_device(device: str, rank: int = 0) -> torch.device:
    """Where a worker runs; "auto" and "cuda" take the GPU of the worker's rank."""
    has_cuda = torch.cuda.is_available()
    if device == "auto":
        device = "cuda" if has_cuda else "cpu"
    if device.startswith("cuda") and not has_cuda:
        raise EngineError(f"device={device!r} is not there: torch sees no GPU; take cpu or auto")
    if device != "cuda":
        return torch.device(device)
    if rank >= torch.cuda.device_count():
        raise EngineError(
            f"worker {rank} has no GPU: there are {torch.cuda.device_count()}, so "
            f"worker_processes may be at most that"
        )
    return torch.device("cuda", rank)


def select_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """bfloat16 pays on GPUs; without matrix units for it a CPU is several times slower."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[dtype]
