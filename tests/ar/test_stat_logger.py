"""vLLM's own metrics: of several stages side by side, each under its name."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats

from tests.drawing import MakeCheckpoint
from vllm_omni.ar.config import ARModel
from vllm_omni.ar.stat_logger import VLLM_REGISTRY, make_stat_logger


@pytest.fixture(scope="module")
def model(checkpoint: MakeCheckpoint) -> ARModel:
    return ARModel(checkpoint(0))


@pytest.fixture
def loggers(model: ARModel) -> Iterator[list[PrometheusStatLogger]]:
    """Of stages 3 and 4, of one model."""
    yield [make_stat_logger(stage_id)(model.vllm_config) for stage_id in (3, 4)]


def read(name: str, stage: str) -> float | None:
    return VLLM_REGISTRY.get_sample_value(name, {"model_name": stage, "engine": "0"})


def test_stages_do_not_take_each_other_s_metrics(loggers: list[PrometheusStatLogger]) -> None:
    for logger, num_running in zip(loggers, (5, 7), strict=True):
        logger.record(SchedulerStats(num_running_reqs=num_running), None)
    assert read("vllm:num_requests_running", "ar:3") == 5
    assert read("vllm:num_requests_running", "ar:4") == 7


def test_a_stage_that_starts_again_goes_on_counting(model: ARModel) -> None:
    for num_running in (1, 2):
        logger = make_stat_logger(5)(model.vllm_config)
        logger.record(SchedulerStats(num_running_reqs=num_running), None)
        logger.log_engine_initialized()
    assert read("vllm:num_requests_running", "ar:5") == 2


def test_the_path_of_a_model_is_not_told(
    loggers: list[PrometheusStatLogger], model: ARModel
) -> None:
    for logger in loggers:
        logger.log_engine_initialized()
    text = generate_latest(VLLM_REGISTRY).decode()
    assert "vllm:cache_config_info" in text
    assert str(model.folder) not in text and str(model.model) not in text


def test_the_stage_s_own_config_is_left_alone(model: ARModel) -> None:
    before = copy.deepcopy(model.vllm_config.model_config.served_model_name)
    make_stat_logger(6)(model.vllm_config)
    assert model.vllm_config.model_config.served_model_name == before


def test_the_default_registry_is_left_alone(loggers: list[PrometheusStatLogger]) -> None:
    assert "vllm:num_requests_running" not in generate_latest(REGISTRY).decode()
