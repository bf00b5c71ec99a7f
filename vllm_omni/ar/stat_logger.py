"""vLLM's own metrics (`vllm:*`) of all AR stages of a process.

vLLM's logger keeps its metrics in the default registry, and begins by taking out whatever is there
from a logger before it: the second AR stage would end the metrics of the first. This one has a
registry of its own, in which stages share each metric and differ in its label `model_name`.

Seams, checked against vLLM 0.32.0: `PrometheusStatLogger`, its `_gauge_cls`, `_counter_cls` and
`_histogram_cls`, and `model_config.served_model_name`, which it takes for the label.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger

VLLM_REGISTRY = CollectorRegistry()
"""Where the metrics of AR stages are; as the default registry, there is one in a process."""

_made: dict[str, Any] = {}  # metrics by name


def _get_metric(kind: type, *, name: str, **arguments: Any) -> Any:
    """The metric of that name, made by the first who asks."""
    if name not in _made:
        _made[name] = kind(name=name, registry=VLLM_REGISTRY, **arguments)
    return _made[name]


class StageStatLogger(PrometheusStatLogger):
    """vLLM's, for one stage among others."""

    _gauge_cls = staticmethod(partial(_get_metric, Gauge))
    _counter_cls = staticmethod(partial(_get_metric, Counter))
    _histogram_cls = staticmethod(partial(_get_metric, Histogram))
    stage_name = "ar"

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        # The label would be the model's path, which is the same for two stages of one model.
        labelled = copy.copy(vllm_config)
        labelled.model_config = copy.copy(vllm_config.model_config)
        labelled.model_config.served_model_name = self.stage_name
        super().__init__(labelled, engine_indexes)


def make_stat_logger(stage_id: int) -> type[StageStatLogger]:
    """The logger class of a stage: vLLM makes the object itself."""
    return type("StageStatLogger", (StageStatLogger,), {"stage_name": f"ar:{stage_id}"})
