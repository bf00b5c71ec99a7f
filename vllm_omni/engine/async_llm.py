"""`OmniAsyncLLM`: requests in, streams of outputs out, over stages in one process or in many."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from typing import Any, Self

from vllm_omni.config import SYSTEM, DiTConfig, Mode, OmniConfig, StageConfig
from vllm_omni.engine.coordinator import CrossEngineCoordinator
from vllm_omni.engine.forkserver import start_forkserver
from vllm_omni.engine.output_processor import MultimodalOutputProcessor
from vllm_omni.engine.processor import OmniProcessor
from vllm_omni.engine.stage_client import EmbeddedCore, StageClient, StageHealth
from vllm_omni.engine.stages import derive_stage_configs, get_stage_configs
from vllm_omni.errors import ConfigError, EngineDeadError, InvalidParameterError
from vllm_omni.importing import fast_imports
from vllm_omni.outputs import OmniOutput
from vllm_omni.request import OmniRequest, OutputKind

_SYSTEM = {f.name for f in fields(OmniConfig) if f.metadata.get("group") in SYSTEM}
_FAILURE_PERIOD = 0.1  # seconds between looks at stages by who waits for their end


class OmniAsyncLLM:
    """All stages of a model.

    Example:
        llm = OmniAsyncLLM.from_pretrained("demo")
        request = OmniRequest(prompt="a red circle", params=DiffusionParams(seed=1))
        async for output in llm.generate(request):
            print(output.step, output.num_steps)
        output.images[0].save("out.png")
        llm.shutdown()
    """

    def __init__(self, config: OmniConfig) -> None:
        """Start the stages that a config names, or those of its checkpoint."""
        self.stage_configs = get_stage_configs(config)
        self.config = replace(config, stage_configs=self.stage_configs)
        self._is_shut_down = False
        self.clients = _make_clients(self.config)
        try:
            # The last stage is the one whose model draws, where there is one.
            self.processor = OmniProcessor(self.stage_configs[-1].model_path)
        except BaseException:
            self.shutdown()
            raise
        self.output_processor = MultimodalOutputProcessor()
        self.coordinator = CrossEngineCoordinator(
            self.clients, self.processor, self.output_processor, config.prompt_cache_bytes
        )
        self._seeds = random.SystemRandom() if config.seed is None else random.Random(config.seed)

    @classmethod
    def from_pretrained(
        cls,
        model: str = "demo",
        *,
        mode: Mode = "embedded",
        seed: int | None = None,
        stage_configs: Sequence[StageConfig] = (),
        vllm_config: Any = None,
        **settings: Any,
    ) -> Self:
        """The stages of a checkpoint.

        Args:
            model: "demo" or the path of a checkpoint in diffusers layout.
            mode: "embedded": all stages in this process; "process": each in one of its own.
            seed: requests without a seed draw theirs from this one, so that a run can be repeated.
            stage_configs: instead of those that the checkpoint has by itself.
            vllm_config: of AR stages: a `VllmConfig`, engine arguments, or a dict of them.
            settings: fields of `DiTConfig`, such as `device`, `dtype` or `worker_processes`, and
                those of `OmniConfig` on supervision and the cache of prompts, such as
                `max_restarts`.
        """
        of_system = {name: settings.pop(name) for name in _SYSTEM if name in settings}
        if unknown := sorted(set(settings) - {field.name for field in fields(DiTConfig)}):
            raise TypeError(f"unexpected keyword arguments: {', '.join(unknown)}")
        if stage_configs and settings:
            raise InvalidParameterError(
                "stage_configs", sorted(settings), "these settings belong in a stage's dit_config"
            )
        stages = stage_configs or derive_stage_configs(str(model), dit_config=DiTConfig(**settings))
        return cls(
            OmniConfig(
                model=str(model),
                mode=mode,
                seed=seed,
                vllm_config=vllm_config,
                stage_configs=stages,
                **of_system,
            )
        )

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: Any = None,
        stage_configs: Sequence[StageConfig] = (),
        *,
        mode: Mode = "embedded",
        seed: int | None = None,
        **settings: Any,
    ) -> Self:
        """Stages one by one; an AR stage without a `vllm_config` of its own takes this one.

        Args:
            settings: fields of `OmniConfig` on supervision and the cache of prompts.
        """
        if unknown := sorted(set(settings) - _SYSTEM):
            raise TypeError(f"unexpected keyword arguments: {', '.join(unknown)}")
        if not stage_configs:  # nothing else here says which checkpoint
            raise ConfigError("stage_configs", list(stage_configs), "at least one stage")
        return cls(
            OmniConfig(
                mode=mode,
                seed=seed,
                vllm_config=vllm_config,
                stage_configs=stage_configs,
                **settings,
            )
        )

    async def generate(self, request: OmniRequest) -> AsyncGenerator[OmniOutput, None]:
        """Everything there is to say of a request; the last output, and no other, is finished.

        Raises an `OmniRequestError` if nothing of what was asked for can be given, and an
        `EngineError` if a stage it needs is gone. Whoever stops listening ends the request.
        """
        if self._is_shut_down:
            raise EngineDeadError("the engine was shut down: make a new one")
        if not isinstance(request, OmniRequest):
            raise InvalidParameterError("request", request, "an OmniRequest")
        if request.params.seed is None:
            seed = self._seeds.randrange(2**32)
            request = replace(request, params=replace(request.params, seed=seed))
        async with aclosing(self.coordinator.generate(request)) as outputs:
            async for output in outputs:
                if output.finished or request.output_kind is not OutputKind.FINAL_ONLY:
                    yield output

    async def abort(self, request_id: str) -> None:
        """End a request, wherever it is; its stream ends with an output that says so."""
        await self.coordinator.abort(request_id)

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if a stage does not work now."""
        for client in self.clients:
            await client.check_health()

    def stage_health(self) -> dict[int, StageHealth]:
        """How each stage is; asks nobody."""
        return {client.stage.stage_id: client.health for client in self.clients}

    @property
    def failure(self) -> EngineDeadError | None:
        """Why a stage will never work again, if one will not."""
        return next((c.failure for c in self.clients if c.failure is not None), None)

    async def wait_until_failed(self) -> EngineDeadError:
        """Return once a stage is given up, with the cause."""
        while (failure := self.failure) is None:
            await asyncio.sleep(_FAILURE_PERIOD)
        return failure

    async def collective_rpc(self, stage_id: int, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker of a stage."""
        if stage_id not in self.coordinator.clients:
            allowed = f"one of {sorted(self.coordinator.clients)}"
            raise ConfigError("stage_id", stage_id, allowed)
        return await self.coordinator.clients[stage_id].collective_rpc(method, *args)

    def shutdown(self) -> None:
        """Let go of all stages. May be called twice."""
        self._is_shut_down = True
        for client in self.clients:
            client.shutdown()


def _make_clients(config: OmniConfig) -> list[StageClient]:
    if config.mode == "embedded":
        from vllm_omni.engine.core import OmniEngineCore

        return list(EmbeddedCore(OmniEngineCore(config.stage_configs)).clients.values())
    # The server of processes imports vLLM while this process does.
    start_forkserver()
    with fast_imports():
        from vllm_omni.engine.process_client import start_stages

    return start_stages(config)
