"""Step caches inside a packed step: each row decides for itself, hits and misses share the step.

The first block runs for all rows. A row looks at a *signal* there, and where that is near enough
to an earlier one, the row leaves out the blocks behind it, the tail, and adds what its strategy
makes of the tail's earlier *residuals*. The rows that are left run the tail as a sub-batch.
All distances are fetched from the device at once: one wait a step.

A step changes nothing here before `RowCache.commit`, so that it can be tried again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import pairwise

import torch
from torch import Tensor

from vllm_omni.diffusion.cache_manager import DiTCacheManager
from vllm_omni.step_cache import CacheParams, StepCacheParams


class Signal(Enum):
    """What a row looks at, [tokens, D] of its image."""

    HEAD_RESIDUAL = auto()  # what the first block adds
    MODULATED_INPUT = auto()  # what the first block's attention reads


@dataclass(frozen=True)
class StoredTail:
    """What the tail added in a step that was taken in full."""

    name: str  # of the entry in the cache manager
    sigma: float  # noise level of that step


class StepCacheStrategy(ABC):
    """When to leave out the tail, and what to add instead. Knows no row and holds no tensor."""

    signal = Signal.HEAD_RESIDUAL
    is_signal_of_last_step = False  # else of the last step that was taken in full
    num_tails = 1  # earlier residuals to keep

    def __init__(self, params: StepCacheParams) -> None:
        assert params.threshold is not None
        assert params.warmup_steps is not None and params.max_skips is not None
        self.params = params
        self.threshold = params.threshold
        self.warmup_steps = params.warmup_steps
        self.max_skips = params.max_skips

    @abstractmethod
    def accumulate(self, sum_before: float, distance: float) -> float:
        """What is compared with the threshold, from the last sum and this step's distance."""

    def is_near(self, accumulated: float) -> bool:
        return accumulated <= self.threshold

    @abstractmethod
    def predict(self, tails: Sequence[Tensor], sigmas: Sequence[float], sigma: float) -> Tensor:
        """The residual of a tail that is left out.

        Args:
            tails: residuals of the last full steps, the latest first.
            sigmas: noise levels of those steps.
            sigma: noise level of this step.
        """


class FirstBlockStrategy(StepCacheStrategy):
    """Near in what the first block adds; the same residual again."""

    def accumulate(self, sum_before: float, distance: float) -> float:
        return distance

    def predict(self, tails: Sequence[Tensor], sigmas: Sequence[float], sigma: float) -> Tensor:
        return tails[0]


class TeaStrategy(FirstBlockStrategy):
    """Differences of the modulated input from step to step, rescaled and summed up.

    Both guidance branches see the same input, so they decide alike.
    """

    signal = Signal.MODULATED_INPUT
    is_signal_of_last_step = True

    def accumulate(self, sum_before: float, distance: float) -> float:
        rescaled = 0.0
        for coefficient in self.params.coefficients:
            rescaled = rescaled * distance + coefficient
        return sum_before + abs(rescaled)


class TaylorStrategy(FirstBlockStrategy):
    """As the first-block cache, with the residual extrapolated along the noise level."""

    def __init__(self, params: StepCacheParams) -> None:
        super().__init__(params)
        assert params.extrapolation is not None
        self.extrapolation = params.extrapolation
        self.num_tails = params.order + 1

    def predict(self, tails: Sequence[Tensor], sigmas: Sequence[float], sigma: float) -> Tensor:
        # Newton's form: f(s) = f0 + [f0 f1](s - s0) + [f0 f1 f2](s - s0)(s - s1).
        divided = list(tails)
        result, product = tails[0], self.extrapolation
        for order in range(1, len(tails)):
            divided = [
                (near - far) / (sigmas[index] - sigmas[index + order])
                for index, (near, far) in enumerate(pairwise(divided))
            ]
            product *= sigma - sigmas[order - 1]
            result = result + divided[0] * product
        return result


STRATEGIES: dict[str, type[StepCacheStrategy]] = {
    "first_block": FirstBlockStrategy,
    "tea": TeaStrategy,
    "taylor": TaylorStrategy,
}


@dataclass(frozen=True)
class _Pending:
    """What a step will have changed once it counts."""

    is_skipped: bool
    accumulated: float
    sigma: float
    signal: Tensor | None  # to be kept
    tail: Tensor | None


@dataclass(eq=False)
class RowCache:
    """The cache of one row: one guidance branch of one request. Its tensors are the manager's."""

    request_id: str
    branch: int
    strategy: StepCacheStrategy
    manager: DiTCacheManager
    num_steps: int = 0
    num_skipped: int = 0
    num_skipped_in_a_row: int = 0
    accumulated: float = 0.0
    tails: list[StoredTail] = field(default_factory=list)  # the latest first
    pending: _Pending | None = None

    @property
    def previous_signal(self) -> Tensor | None:
        """What this step's signal is compared with; None: nothing is there, or it was evicted."""
        if not self.tails or self.manager.get_cache(self.request_id, self.tails[0].name) is None:
            return None
        return self.manager.get_cache(self.request_id, self._signal_name)

    def get_tails(self) -> list[tuple[Tensor, float]]:
        """The residuals that are there, with their noise levels, the latest first."""
        found = []
        for stored in self.tails:
            tensor = self.manager.get_cache(self.request_id, stored.name)
            if tensor is None:
                break
            found.append((tensor, stored.sigma))
        return found

    @property
    def may_skip(self) -> bool:
        """Whether this step can leave out the tail, if it is near enough."""
        strategy = self.strategy
        is_warm = self.num_steps >= strategy.warmup_steps
        is_capped = self.num_skipped_in_a_row >= strategy.max_skips
        return is_warm and not is_capped and strategy.threshold > 0

    def commit(self) -> None:
        """The step counts: keep what it said."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        self.num_steps += 1
        self.num_skipped += pending.is_skipped
        self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if pending.is_skipped else 0
        self.accumulated = pending.accumulated
        if pending.signal is not None:
            self._keep(self._signal_name, pending.signal)
        if pending.tail is not None:
            self._keep_tail(pending.tail, pending.sigma)

    def _keep_tail(self, tail: Tensor, sigma: float) -> None:
        if self.tails and self.tails[0].sigma == sigma:
            # Noise levels can be one in float32: no direction is seen along them.
            name = self.tails.pop(0).name
        elif len(self.tails) == self.strategy.num_tails:
            # The oldest one's buffer takes the newest residual.
            name = self.tails.pop().name
        else:
            name = f"step_cache.{self.branch}.tail.{len(self.tails)}"
        if self._keep(name, tail):
            self.tails.insert(0, StoredTail(name, sigma))
        else:
            self.tails.clear()

    def _keep(self, name: str, tensor: Tensor) -> bool:
        return self.manager.try_cache_tensor(self.request_id, name, tensor)

    @property
    def _signal_name(self) -> str:
        return f"step_cache.{self.branch}.signal"


class PackedStepCache:
    """The caches of all rows of one packed step.

    Args:
        rows: the cache of each row; None for a row that has none.
        lens: image tokens of each row.
        sigmas: noise level of each row's step.
    """

    def __init__(
        self, rows: Sequence[RowCache | None], lens: Sequence[int], sigmas: Sequence[float]
    ) -> None:
        self.rows = rows
        self.lens = list(lens)
        self.sigmas = sigmas

    @property
    def signals(self) -> set[Signal]:
        """Those that some row looks at."""
        return {row.strategy.signal for row in self.rows if row is not None}

    def apply(
        self,
        signals: Mapping[Signal, Tensor],
        head: Tensor,
        run_tail: Callable[[list[int]], Tensor],
    ) -> Tensor:
        """What comes out of the last block, [N_img, D].

        Args:
            signals: of all rows, [N_img, D] each.
            head: what comes out of the first block, [N_img, D].
            run_tail: the rest of the blocks for these rows: [their image tokens, D].
        """
        by_row = {signal: tensor.split(self.lens) for signal, tensor in signals.items()}
        sums = self._accumulate(by_row)
        computed = [i for i in range(len(self.rows)) if i not in sums or not self._is_near(i, sums)]
        outputs = {index: of_row for index, of_row in enumerate(head.split(self.lens))}
        tails: dict[int, Tensor] = {}
        packed = head
        if computed:
            packed = run_tail(computed)
            tails = self._subtract_heads(computed, packed, outputs)
        for index, row in enumerate(self.rows):
            if row is not None:
                signal = by_row[row.strategy.signal][index]
                row.pending = self._make_pending(index, row, signal, tails, sums)
        if len(computed) == len(self.rows):
            return packed
        for index in set(outputs).difference(computed):
            outputs[index] = outputs[index] + self._predict(index)
        return torch.cat([outputs[index] for index in range(len(self.rows))])

    def _accumulate(self, by_row: Mapping[Signal, Sequence[Tensor]]) -> dict[int, float]:
        """What each row that may skip this step compares with its threshold, by row."""
        compared: list[tuple[int, RowCache, Tensor]] = []
        for index, row in enumerate(self.rows):
            if row is not None and row.may_skip and (before := row.previous_signal) is not None:
                compared.append((index, row, before))
        if not compared:
            return {}
        # Over all rows at once: a few kernels, however many rows there are.
        previous = [before for _, _, before in compared]
        current = [by_row[row.strategy.signal][index] for index, row, _ in compared]
        changes = torch._foreach_norm(torch._foreach_sub(current, previous), 1, dtype=torch.float32)
        scales = torch._foreach_norm(previous, 1, dtype=torch.float32)
        distances = torch.stack(changes) / torch.stack(scales)
        values: list[float] = distances.tolist()  # the one wait of the step
        return {
            index: row.strategy.accumulate(row.accumulated, distance)
            for (index, row, _), distance in zip(compared, values, strict=True)
        }

    def _is_near(self, index: int, sums: Mapping[int, float]) -> bool:
        row = self.rows[index]
        assert row is not None
        return row.strategy.is_near(sums[index])

    def _subtract_heads(
        self, computed: Sequence[int], packed: Tensor, outputs: dict[int, Tensor]
    ) -> dict[int, Tensor]:
        """What the tail added to computed rows that have a cache; `outputs` gets all computed."""
        heads = dict(outputs)
        of_computed = packed.split([self.lens[index] for index in computed])
        outputs.update(zip(computed, of_computed, strict=True))
        kept = [index for index in computed if self.rows[index] is not None]
        if not kept:
            return {}
        added = torch._foreach_sub([outputs[i] for i in kept], [heads[i] for i in kept])
        return dict(zip(kept, added, strict=True))

    def _make_pending(
        self,
        index: int,
        row: RowCache,
        signal: Tensor,
        tails: Mapping[int, Tensor],
        sums: Mapping[int, float],
    ) -> _Pending:
        is_computed = index in tails
        return _Pending(
            is_skipped=not is_computed,
            accumulated=0.0 if is_computed else sums[index],
            sigma=self.sigmas[index],
            signal=signal if is_computed or row.strategy.is_signal_of_last_step else None,
            tail=tails.get(index),
        )

    def _predict(self, index: int) -> Tensor:
        row = self.rows[index]
        assert row is not None
        residuals, levels = zip(*row.get_tails(), strict=True)
        return row.strategy.predict(residuals, levels, self.sigmas[index])


def make_row_caches(
    request_id: str, params: CacheParams | None, num_branches: int, manager: DiTCacheManager
) -> list[RowCache]:
    """A cache for each guidance branch of a request that asks for one of ours."""
    if not isinstance(params, StepCacheParams):
        return []
    strategy = STRATEGIES[params.method](params.with_defaults())
    return [RowCache(request_id, branch, strategy, manager) for branch in range(num_branches)]
