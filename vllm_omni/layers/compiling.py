"""How inductor is asked to compile: kernels that keep a whole row of a tensor in registers.

By default it does so up to 1024 values; longer rows are read once for their statistics and again
for the rest. Ours have 3072 (a token) or 12288 (inside an MLP), and memory is all they wait for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MAX_ROW = 16384  # values


@contextmanager
def whole_rows() -> Iterator[None]:
    """What compiles in here keeps rows in registers. Checked with torch 2.11 and 2.13."""
    # Here, because importing inductor takes seconds and is of no use where nothing compiles.
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    class Choices(InductorChoices):
        """The default ones but for the length of rows."""

        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            is_along_rows = features.get_reduction_hint() == ReductionHint.INNER
            is_short = V.graph.sizevars.statically_known_leq(features.reduction_numel, MAX_ROW)
            if is_along_rows and is_short and not cooperative_reduction:
                return True
            return InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)

    with V.set_choices_handler(Choices()):
        yield
