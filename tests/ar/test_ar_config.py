"""What an AR stage may be configured with, and that vLLM gets it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import EngineArgs

from tests.ar.test_ar_engine import ATOL, create_request, rows_of, run
from tests.drawing import MakeCheckpoint, MakeStock
from tests.reference import Reference
from vllm_omni import envs
from vllm_omni.ar.config import ARModel
from vllm_omni.ar.engine import AREngine
from vllm_omni.ar.messages import ARRequest
from vllm_omni.errors import ConfigError, ModalityNotSupportedError, ModelLoadError


def test_a_mapping_engine_args_and_a_config_say_the_same(checkpoint: MakeCheckpoint) -> None:
    mapping = {"max_model_len": 512, "max_num_seqs": 3}
    models = [
        ARModel(checkpoint(0), {"model": str(checkpoint(0)), **mapping}),
        ARModel(checkpoint(0), EngineArgs(model=str(checkpoint(0) / "text_encoder"), **mapping)),
    ]
    models.append(ARModel("not read", models[0].vllm_config))
    for model in models:
        config = model.vllm_config
        assert config.model_config.max_model_len == 512
        assert config.scheduler_config.max_num_seqs == 3
        assert config.parallel_config.worker_cls == "vllm_omni.ar.cpu_worker.HiddenStatesCPUWorker"
        assert Path(config.model_config.model).resolve() == model.folder.resolve()
        assert model.reads_images
    assert models[2].vllm_config is not models[0].vllm_config  # the caller's stays as it was


def test_a_folder_in_hugging_face_layout_is_read_where_it_is(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    for folder in ("tokenizer", "text_encoder"):
        shutil.copytree(checkpoint(0) / folder, tmp_path, dirs_exist_ok=True)
    model = ARModel(tmp_path)
    assert model.folder == tmp_path and not model.reads_images


def test_links_follow_the_checkpoint(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint(0), tmp_path / "model")
    (copy / "processor" / "extra.json").write_text("{}")
    folder = ARModel(copy).folder
    assert folder.parent == envs.cache_dir() / "ar"
    assert (folder / "extra.json").readlink() == copy / "processor" / "extra.json"
    assert (folder / "config.json").readlink() == copy / "text_encoder" / "config.json"
    (copy / "processor" / "extra.json").unlink()
    assert ARModel(copy).folder == folder and not (folder / "extra.json").is_symlink()
    assert {path.name for path in folder.parent.iterdir()} == {
        path.name for path in folder.parent.iterdir() if path.is_dir()
    }


def test_a_cache_that_cannot_be_written(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_OMNI_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="set VLLM_OMNI_CACHE"):
        ARModel(checkpoint(0))


@pytest.mark.parametrize(
    ("vllm_config", "message"),
    [
        (3, "a VllmConfig, EngineArgs or a mapping"),
        ({"worker_cls": "mine"}, "the stage sets these itself"),
        ({"model": "another"}, "the stage sets these itself"),
        ({"model": None}, "the stage sets these itself"),
        ({"max_num_seq": 3}, "max_num_seq"),
    ],
)
def test_a_wrong_config_is_refused(
    checkpoint: MakeCheckpoint, vllm_config: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ARModel(checkpoint(0), vllm_config)


@pytest.fixture(scope="module")
def pooling_engine(checkpoint: MakeCheckpoint) -> Iterator[AREngine]:
    engine = AREngine(checkpoint(0), {"runner": "pooling", "max_num_batched_tokens": 64})
    yield engine
    engine.shutdown()


def test_a_pooling_runner_gives_the_same_hidden_states(
    pooling_engine: AREngine, checkpoint: MakeCheckpoint, stock: MakeStock
) -> None:
    reference = Reference(checkpoint(0), stock(0))
    prompts = ["a red circle", "a large blue square, " * 30, "x"]
    requests = [create_request(str(i), prompt, "prompt") for i, prompt in enumerate(prompts)]
    for _ in range(2):  # the second time with a filled prefix cache
        outputs = run(pooling_engine, *requests)
        for index, prompt in enumerate(prompts):
            expected = reference.hidden_states(reference.inputs(prompt))
            assert (rows_of(outputs[str(index)]) - expected).abs().max() <= ATOL


def test_a_pooling_runner_writes_no_text(pooling_engine: AREngine) -> None:
    with pytest.raises(ModalityNotSupportedError, match="runner='pooling'"):
        pooling_engine.add_request(ARRequest(request_id="r", prompt="a cat"))
    assert not pooling_engine.has_requests()
