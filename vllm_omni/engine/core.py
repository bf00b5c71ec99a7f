"""`OmniEngineCore`: the engines of all stages in one process, stepped one after another.

vLLM keeps the context of a forward in a module global, so two engines of a process must not step
at the same time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from vllm_omni.config import StageConfig
from vllm_omni.diffusion.engine_core import DiffusionEngineCore
from vllm_omni.diffusion.executor import DiffusionExecutor
from vllm_omni.engine.stages import make_dit_config
from vllm_omni.errors import EngineDeadError, EngineError
from vllm_omni.importing import fast_imports
from vllm_omni.outputs import EngineCoreOutputs

logger = logging.getLogger(__name__)


class StageEngine(Protocol):
    """What `AREngine` and `DiffusionEngineCore` have in common."""

    @property
    def scheduler(self) -> Any: ...

    @property
    def executor(self) -> Any: ...

    def add_request(self, request: Any) -> None: ...

    def abort_requests(self, request_ids: Iterable[str]) -> None: ...

    def has_requests(self) -> bool: ...

    def step(self) -> tuple[dict[int, EngineCoreOutputs], bool]: ...

    def shutdown(self) -> None: ...


class OmniScheduler:
    """Which stages step next; within a stage its own scheduler decides."""

    def __init__(self, stage_engines: Mapping[int, StageEngine]) -> None:
        self._engines = stage_engines
        self.stage_schedulers = {id: engine.scheduler for id, engine in stage_engines.items()}

    def schedule(self) -> list[int]:
        """The stages that have work, in their order: what one gives, the next can take soon."""
        return [id for id, engine in sorted(self._engines.items()) if engine.has_requests()]

    def get_request_counts(self) -> dict[int, tuple[int, int]]:
        """(started, waiting) of each stage."""
        return {id: s.get_request_counts() for id, s in sorted(self.stage_schedulers.items())}


class OmniExecutor:
    """The workers of all stages."""

    def __init__(self, stage_engines: Mapping[int, StageEngine]) -> None:
        self.stage_executors = {id: engine.executor for id, engine in stage_engines.items()}

    def collective_rpc(self, stage_id: int, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker of a stage."""
        executor = self.stage_executors[stage_id]
        try:
            if isinstance(executor, DiffusionExecutor):
                return executor.collective_rpc(method, *args)
            results: list[Any] = executor.collective_rpc(method, args=args)
        except EngineError:
            raise
        except Exception as error:  # a worker's, of any kind
            raise EngineError(f"{method} failed in stage {stage_id}: {error}") from error
        return results


class OmniEngineCore:
    """Not thread safe: one caller adds, aborts and steps."""

    def __init__(self, stage_configs: Sequence[StageConfig]) -> None:
        self.stage_configs = {stage.stage_id: stage for stage in stage_configs}
        self.stage_engines: dict[int, StageEngine] = {}
        self.dead_stages: dict[int, EngineDeadError] = {}
        try:
            self._make_engines()
        except BaseException:
            self.shutdown()
            raise
        self.scheduler = OmniScheduler(self.stage_engines)
        self.executor = OmniExecutor(self.stage_engines)

    def add_request(self, stage_id: int, request: Any) -> None:
        """Queue a request in a stage; raises an `OmniRequestError` if it can never run."""
        self.check_health(stage_id)
        self.stage_engines[stage_id].add_request(request)

    def abort_requests(self, stage_id: int, request_ids: Iterable[str]) -> None:
        """End requests before the next step; each still gets its final output."""
        if stage_id not in self.dead_stages:
            self.stage_engines[stage_id].abort_requests(request_ids)

    def has_requests(self) -> bool:
        return any(stage_id not in self.dead_stages for stage_id in self.scheduler.schedule())

    def step(self) -> tuple[dict[int, EngineCoreOutputs], bool]:
        """One step of every stage that has work: the news by stage, and whether there was any.

        A stage whose engine fails is dead from then on; the others go on.
        """
        news: dict[int, EngineCoreOutputs] = {}
        for stage_id in self.scheduler.schedule():
            if stage_id in self.dead_stages:
                continue
            try:
                outputs, _ = self.stage_engines[stage_id].step()
            except EngineDeadError as error:
                logger.exception("stage %d is dead", stage_id)
                self.dead_stages[stage_id] = error
                continue
            stats = [o.step_stats for o in outputs.values() if o.step_stats is not None]
            news[stage_id] = EngineCoreOutputs(
                outputs=[output for of_client in outputs.values() for output in of_client.outputs],
                step_stats=stats[0] if stats else None,
            )
        return news, bool(news)

    def check_health(self, stage_id: int) -> None:
        """Raise what a stage died of, if it did."""
        if stage_id in self.dead_stages:
            raise self.dead_stages[stage_id]

    def shutdown(self) -> None:
        for engine in self.stage_engines.values():
            engine.shutdown()

    def _make_engines(self) -> None:
        """Load all stages; worker processes load while this process does."""
        dit_configs = {
            stage_id: make_dit_config(stage)
            for stage_id, stage in self.stage_configs.items()
            if stage.engine_type == "diffusion"
        }
        for stage_id, dit_config in dit_configs.items():
            executor = DiffusionExecutor.from_config(dit_config)
            try:
                self.stage_engines[stage_id] = DiffusionEngineCore(dit_config, executor)
            except BaseException:
                executor.shutdown()
                raise
        for stage_id, stage in self.stage_configs.items():
            if stage.engine_type == "ar":
                # vLLM takes seconds to import: not before the workers have started.
                with fast_imports():
                    from vllm_omni.ar.engine import AREngine

                self.stage_engines[stage_id] = AREngine(stage.model_path, stage.vllm_config)
        for stage_id in dit_configs:
            self.stage_engines[stage_id].executor.wait_until_ready()


def __getattr__(name: str) -> Any:
    """`OmniEngineCoreProc`, on first use: it imports vLLM."""
    if name == "OmniEngineCoreProc":
        from vllm_omni.engine.core_proc import OmniEngineCoreProc

        return OmniEngineCoreProc
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
