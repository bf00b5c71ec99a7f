"""What every training script shares: the optimizer, averaged weights, checkpoints and curves."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

MAX_FILE = 15 << 20  # bytes a weights file has at most


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix updates are made orthogonal, all matrices of one shape at once.

    The update's root mean square is 0.2, as with AdamW, so both can share a learning rate.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: Tensor, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for parameters in by_shape.values():
                self._step_shape(parameters, group["lr"], group["momentum"])

    def _step_shape(self, parameters: list[Tensor], lr: Tensor, momentum: float) -> None:
        grads = [p.grad for p in parameters if p.grad is not None]
        buffers = []
        for parameter in parameters:
            state = self.state[parameter]
            if "buffer" not in state:
                state["buffer"] = torch.zeros_like(parameter)
            buffers.append(state["buffer"])
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        ahead = torch._foreach_lerp(grads, buffers, momentum)
        updates = orthogonalize(torch.stack(list(ahead))).to(parameters[0].dtype)
        scale = 0.2 * math.sqrt(max(parameters[0].shape))
        torch._foreach_sub_(parameters, list(updates * (lr * scale)))


def orthogonalize(matrices: Tensor) -> Tensor:
    """[n, rows, columns] with all singular values near 1, by a Newton-Schulz iteration."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    turned: Tensor = x.mT if is_tall else x
    return turned


class Trainer:
    """Parameters of some modules with their optimizers, schedule and running average."""

    def __init__(self, modules: dict[str, nn.Module], lr: float, iterations: int) -> None:
        self.modules = modules
        self.iterations = iterations
        self.iteration = 0
        named = [
            (f"{m}.{n}", p) for m, module in modules.items() for n, p in module.named_parameters()
        ]
        matrices = [p for n, p in named if _is_hidden_matrix(n, p)]
        others = [p for n, p in named if not _is_hidden_matrix(n, p)]
        device = named[0][1].device
        # Tensors, so that a recorded step reads what they hold when it is replayed.
        self._rate, self._average_weight = torch.zeros(2, device=device).unbind()
        is_cuda = device.type == "cuda"
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                others,
                lr=self._rate,
                betas=(0.9, 0.98),
                weight_decay=0.0,
                fused=is_cuda,
                capturable=is_cuda,
            )
        ]
        if matrices:
            self.optimizers.append(Muon(matrices, self._rate))
        self.lr = lr
        self.parameters: list[Tensor] = [p for _, p in named]
        self.averages = [p.detach().clone() for p in self.parameters]

    def step(self, loss: Tensor, time_share: float = 0.0) -> None:
        """Backward and update."""
        self.begin(time_share)
        self.update(loss)

    def begin(self, time_share: float = 0.0) -> None:
        """Set the rates of the next step: a linear warm-up, a flat stretch, a linear fall over
        the last 40 %.

        `time_share` is how much of a budget of seconds is used up, where there is one.
        """
        progress = max(self.iteration / self.iterations, time_share)
        factor = min(1.0, (self.iteration + 1) / 200, max(0.02, (1 - progress) / 0.4))
        self._rate.fill_(self.lr * factor)
        self.iteration += 1
        self._average_weight.fill_(max(0.001, 9 / (self.iteration + 10)))

    def update(self, loss: Tensor) -> None:
        """Backward and update, all on the device."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            difference = torch._foreach_sub(self.parameters, self.averages)
            torch._foreach_mul_(difference, self._average_weight)
            torch._foreach_add_(self.averages, difference)

    def save_state(self, path: Path) -> None:
        """Everything needed to go on as if nothing had happened."""
        state = {
            "iteration": self.iteration,
            "parameters": self.parameters,
            "averages": self.averages,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)

    def load_state(self, path: Path) -> None:
        state = torch.load(path, map_location=self.parameters[0].device, weights_only=True)
        self.iteration = state["iteration"]
        for name in ("parameters", "averages"):
            for own, saved in zip(getattr(self, name), state[name], strict=True):
                own.data.copy_(saved)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
            for group in optimizer.param_groups:
                group["lr"] = self._rate

    @property
    def is_done(self) -> bool:
        return self.iteration >= self.iterations

    def use_averages(self) -> None:
        """Put the averaged weights into the modules, for good."""
        for parameter, average in zip(self.parameters, self.averages, strict=True):
            parameter.data.copy_(average)

    def swap(self) -> None:
        """Exchange weights and averages; twice is as before."""
        for parameter, average in zip(self.parameters, self.averages, strict=True):
            kept = parameter.data.clone()
            parameter.data.copy_(average)
            average.copy_(kept)


def _is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Matrices inside a block; modulation, embeddings and what is at the ends are not."""
    is_inside = any(part in name for part in (".transformer_blocks.", ".layers.", ".blocks."))
    return parameter.ndim == 2 and is_inside and "_mod." not in name


def save_weights(state: dict[str, Tensor], folder: Path, name: str) -> None:
    """bfloat16, in files small enough to travel."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    room = MAX_FILE
    for key, value in state.items():
        tensor = value.detach().to("cpu", torch.bfloat16).contiguous()
        if tensor.nbytes > room:
            shards.append({})
            room = MAX_FILE
        shards[-1][key] = tensor
        room -= tensor.nbytes
    for index, shard in enumerate(shards):
        save_file(shard, folder / f"{name}-{index}.safetensors")


def load_weights(folder: Path, name: str) -> dict[str, Tensor]:
    """What `save_weights` wrote, in float32."""
    files = sorted(folder.glob(f"{name}-*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no {name} in {folder}: train it first")
    return {k: v.float() for file in files for k, v in load_file(file).items()}


class Curve:
    """Means of what is logged, written as JSON lines; values stay on the device until then."""

    def __init__(self, path: Path, every: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.every = every
        self.start = time.perf_counter()
        self._sums: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, iteration: int, **values: Tensor) -> None:
        for name, value in values.items():
            self._sums[name].append(value.detach())
        if iteration % self.every == 0:
            means = {k: float(torch.stack(v).float().mean()) for k, v in self._sums.items()}
            self._sums.clear()
            self.write(iteration=iteration, **means)

    def write(self, **values: float) -> None:
        seconds = round(time.perf_counter() - self.start, 1)
        line = {"seconds": seconds, **{k: round(v, 6) for k, v in values.items()}}
        print(f"{self.path.stem}: {line}", flush=True)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start


def num_parameters(modules: Sequence[nn.Module]) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())
