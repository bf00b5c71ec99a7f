"""What a user leaves out of the stages is filled in; what is given is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.drawing import MakeCheckpoint
from vllm_omni.config import DEMO, DiTCacheConfig, DiTConfig, OmniConfig, StageConfig
from vllm_omni.engine.stages import (
    complete_stage_configs,
    derive_stage_configs,
    get_stage_configs,
    make_dit_config,
)
from vllm_omni.errors import ConfigError
from vllm_omni.models.demo import find_model

ENGINE_ARGS = {"max_model_len": 512}


def create_stage(stage_id: int, engine_type: Any, **changes: Any) -> StageConfig:
    return StageConfig(
        stage_id=stage_id, engine_type=engine_type, **({"model_path": "m"} | changes)
    )


def modalities_of(stage: StageConfig) -> tuple[Any, Any]:
    return stage.input_modalities, stage.output_modalities


def test_checkpoint_is_its_text_encoder_and_the_rest(checkpoint: MakeCheckpoint) -> None:
    dit_config = DiTConfig(device="cpu")
    stages = derive_stage_configs(str(checkpoint(0)), dit_config)
    assert stages == (
        StageConfig(
            stage_id=0,
            engine_type="ar",
            model_path=str(checkpoint(0)),
            input_modalities=("text", "image"),
            output_modalities=("text", "hidden_states"),
        ),
        StageConfig(
            stage_id=1,
            engine_type="diffusion",
            model_path=str(checkpoint(0)),
            input_modalities=("hidden_states",),
            output_modalities=("image", "latents"),
            dit_config=dit_config,
        ),
    )


def test_derived_stages_are_complete(checkpoint: MakeCheckpoint) -> None:
    stages = derive_stage_configs(str(checkpoint(0)))
    assert complete_stage_configs(stages) == stages


def test_two_stages_without_modalities_become_the_derived_ones(checkpoint: MakeCheckpoint) -> None:
    model = str(checkpoint(0))
    stages = [
        create_stage(0, "ar", model_path=model),
        create_stage(1, "diffusion", model_path=model),
    ]
    assert complete_stage_configs(stages) == derive_stage_configs(model)


def test_a_config_without_stages_has_those_of_its_checkpoint(checkpoint: MakeCheckpoint) -> None:
    model = str(checkpoint(0))
    ar, drawing = get_stage_configs(OmniConfig(model=model, vllm_config=ENGINE_ARGS))
    assert (replace(ar, vllm_config=None), drawing) == derive_stage_configs(model)
    assert ar.vllm_config == ENGINE_ARGS
    assert get_stage_configs(OmniConfig()) == derive_stage_configs(DEMO)
    [given] = get_stage_configs(OmniConfig(model=model, stage_configs=[create_stage(4, "ar")]))
    assert (given.stage_id, given.model_path) == (4, "m")


def test_stages_come_in_the_order_of_their_ids() -> None:
    stages = [create_stage(7, "diffusion"), create_stage(2, "ar"), create_stage(4, "ar")]
    assert [stage.stage_id for stage in complete_stage_configs(stages)] == [2, 4, 7]


def test_modalities_that_are_given_stay() -> None:
    [rewriter, drawer] = complete_stage_configs(
        [
            create_stage(0, "ar", input_modalities=["text"], output_modalities=["text"]),
            create_stage(1, "diffusion", output_modalities=["latents"]),
        ]
    )
    assert modalities_of(rewriter) == (("text",), ("text",))
    assert modalities_of(drawer) == (("hidden_states",), ("latents",))


def test_diffusion_alone_takes_text() -> None:
    [stage] = complete_stage_configs([create_stage(0, "diffusion")])
    assert modalities_of(stage) == (("text",), ("image", "latents", "hidden_states"))
    assert make_dit_config(stage).load_text_encoder


def test_ar_stages_inherit_engine_arguments() -> None:
    own = {"max_model_len": 64}
    stages = complete_stage_configs(
        [
            create_stage(0, "ar"),
            create_stage(1, "ar", vllm_config=own),
            create_stage(2, "ar", vllm_config={}),
            create_stage(3, "diffusion"),
        ],
        ENGINE_ARGS,
    )
    assert [stage.vllm_config for stage in stages] == [ENGINE_ARGS, own, {}, None]


def test_no_stage_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        complete_stage_configs([])
    assert str(caught.value) == "stage_configs=[] is not allowed: at least one stage"


def test_model_named_demo_is_found() -> None:
    path = str(find_model(DEMO))
    for stage in derive_stage_configs(DEMO):
        assert stage.model_path == path
    [stage] = complete_stage_configs([create_stage(0, "diffusion", model_path=DEMO)])
    assert stage.model_path == path
    assert make_dit_config(create_stage(0, "diffusion", model_path=DEMO)).model == path


def test_engine_core_has_model_and_id_of_its_stage() -> None:
    dit_config = DiTConfig(model="another", stage_id=9, max_num_seqs=3, policy="shortest")
    config = make_dit_config(create_stage(4, "diffusion", dit_config=dit_config))
    assert (config.model, config.stage_id) == ("m", 4)
    assert (config.max_num_seqs, config.policy) == (3, "shortest")
    assert (dit_config.model, dit_config.stage_id) == ("another", 9)


def test_engine_core_has_defaults_without_settings() -> None:
    stage = create_stage(1, "diffusion", input_modalities=["hidden_states"])
    assert make_dit_config(stage) == DiTConfig(model="m", stage_id=1, load_text_encoder=False)


def test_cache_config_of_the_stage_goes_first() -> None:
    own, of_stage = DiTCacheConfig(max_cache_size=111), DiTCacheConfig(max_cache_size=222)
    dit_config = DiTConfig(cache_config=own)

    def cache_of(**changes: Any) -> DiTCacheConfig:
        return make_dit_config(create_stage(1, "diffusion", **changes)).cache_config

    assert cache_of(dit_config=dit_config, cache_config=of_stage) == of_stage
    assert cache_of(dit_config=dit_config) == own
    assert cache_of(cache_config=of_stage) == of_stage
    assert cache_of() == DiTCacheConfig()


@pytest.mark.parametrize(
    ("modalities", "expected"),
    [(["hidden_states"], False), (["text"], True), (["hidden_states", "text"], True)],
)
@pytest.mark.parametrize("given", [False, True])
def test_text_encoder_is_loaded_where_text_arrives(
    modalities: list[str], expected: bool, given: bool
) -> None:
    stage = create_stage(
        1,
        "diffusion",
        input_modalities=modalities,
        dit_config=DiTConfig(load_text_encoder=given),
    )
    assert make_dit_config(stage).load_text_encoder is expected
