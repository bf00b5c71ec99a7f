"""`Omni` as a script uses it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.drawing import COMPANY_TOLERANCE, Case, MakeCheckpoint, MakeStock, draw_stock
from tests.reference import Reference
from vllm_omni import DiffusionParams, Omni, OmniRequest, OutputMode
from vllm_omni.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineDeadError,
    InvalidParameterError,
    ModelLoadError,
    OmniRequestError,
)

PARAMS = DiffusionParams(height=64, width=96, num_inference_steps=3, seed=1)
LATENTS = replace(PARAMS, output_mode=OutputMode.LATENTS)


@pytest.fixture(scope="module")
def omni(checkpoint: MakeCheckpoint) -> Iterator[Omni]:
    with Omni(model=str(checkpoint(0)), device="cpu") as omni:
        yield omni


def test_draws_what_diffusers_draws(omni: Omni, stock: MakeStock) -> None:
    params = replace(
        PARAMS,
        negative_prompt="blurry, ugly",
        true_cfg_scale=3.0,
        output_mode=OutputMode.PIXELS_AND_LATENTS,
    )
    [out] = omni.generate(["a red circle"], params)
    latents, pixels = draw_stock(stock(0), Case("a red circle", 64, 96, 3, 3.0, seed=1))
    assert out.finished and out.error is None and out.prompt == "a red circle"
    assert out.images[0].size == (96, 64) and out.images[0].mode == "RGB"
    assert np.abs(np.asarray(out.images[0]).astype(int) - pixels).max() <= 1
    assert out.latents is not None and out.latents.shape == (1, 24, 64)
    assert (out.latents[0] - latents).abs().max() <= 1e-4
    assert out.seeds == [1]
    assert out.metrics.num_steps == 3
    assert 0 <= out.metrics.queue_time <= out.metrics.total_time


def test_one_params_for_each_prompt(omni: Omni) -> None:
    outs = omni.generate(["a", "b"], [LATENTS, replace(LATENTS, width=64)])
    assert [out.latents.shape for out in outs if out.latents is not None] == [
        (1, 24, 64),
        (1, 16, 64),
    ]
    with pytest.raises(InvalidParameterError, match="one, or one for each of 3 prompts"):
        omni.generate(["a", "b", "c"], [PARAMS, PARAMS])


def test_output_i_is_drawn_with_seed_plus_i(omni: Omni) -> None:
    [three] = omni.generate("a cat", replace(LATENTS, num_outputs_per_prompt=3))
    assert three.seeds == [1, 2, 3]
    for index, seed in enumerate(three.seeds):
        [one] = omni.generate("a cat", replace(LATENTS, seed=seed))
        assert one.latents is not None and three.latents is not None
        assert (three.latents[index] - one.latents[0]).abs().max() <= COMPANY_TOLERANCE


def test_a_seed_is_drawn_and_reported(omni: Omni) -> None:
    outs = omni.generate(["a cat"] * 2, replace(LATENTS, seed=None))
    assert outs[0].seeds != outs[1].seeds
    [again] = omni.generate("a cat", replace(LATENTS, seed=outs[1].seeds[0]))
    assert again.latents is not None and outs[1].latents is not None
    assert (again.latents - outs[1].latents).abs().max() <= COMPANY_TOLERANCE


def test_a_run_with_a_seed_of_its_own_can_be_repeated(checkpoint: MakeCheckpoint) -> None:
    params = replace(LATENTS, seed=None, num_inference_steps=1)
    runs = []
    for _ in range(2):
        with Omni(model=str(checkpoint(0)), device="cpu", mode="embedded", seed=5) as omni:
            runs.append([out.seeds for out in omni.generate(["a", "b"], params)])
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]


def test_defaults_come_from_the_checkpoint(omni: Omni) -> None:
    [out] = omni.generate("a cat", DiffusionParams(output_mode=OutputMode.LATENTS))
    assert out.latents is not None and out.latents.shape == (1, 256, 64)  # 256 x 256 pixels
    assert out.metrics.num_steps == 20


def test_a_failing_prompt_does_not_touch_the_others(omni: Omni) -> None:
    endless = "very " * 2000
    too_large = replace(PARAMS, height=8192, width=8192)
    outs = omni.generate(
        ["a cat", endless, "a cat", "a cat", "a cat"],
        [
            LATENTS,
            PARAMS,
            too_large,
            replace(PARAMS, deadline=1e-9),
            replace(PARAMS, guidance_scale=3.5),
        ],
    )
    assert outs[0].error is None and outs[0].latents is not None
    errors = [out.error for out in outs[1:]]
    assert all(out.finished and not out.images for out in outs[1:])
    assert isinstance(errors[0], InvalidParameterError)
    assert "the most is 1024" in str(errors[0])
    assert type(errors[1]) is OmniRequestError
    assert "needs 262151 tokens a step" in str(errors[1])
    assert isinstance(errors[2], DeadlineExceededError)
    assert isinstance(errors[3], InvalidParameterError)
    assert "use true_cfg_scale" in str(errors[3])
    [after] = omni.generate("a cat", LATENTS)
    assert after.latents is not None
    assert (after.latents - outs[0].latents).abs().max() <= COMPANY_TOLERANCE


def test_what_is_no_prompt_does_not_touch_the_others(omni: Omni) -> None:
    prompts: Any = ["a cat", None, 5, "a cat"]
    params: Any = [LATENTS, LATENTS, LATENTS, {"seed": 1}]
    outs = omni.generate(prompts, params)
    assert outs[0].error is None and outs[0].latents is not None
    assert [str(out.error) for out in outs[1:]] == [
        "prompt=None is not allowed: a string",
        "prompt=5 is not allowed: a string",
        "params={'seed': 1} is not allowed: a DiffusionParams",
    ]
    assert all(out.finished for out in outs)
    none, some = omni.encode([None, "a cat"])  # type: ignore[list-item]
    assert isinstance(none.error, InvalidParameterError) and some.hidden_states is not None


def test_progress_counts_every_step_of_every_request(omni: Omni) -> None:
    seen: list[tuple[int, int]] = []
    omni.generate(
        ["a", "b"],
        [LATENTS, replace(LATENTS, num_inference_steps=5)],
        progress=lambda done, total: seen.append((done, total)),
    )
    assert {total for _, total in seen} == {8}
    assert [done for done, _ in seen] == list(range(1, 9))


def test_an_interrupted_call_leaves_nothing_behind(omni: Omni) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        omni.generate(["a", "b"], PARAMS, progress=interrupt)
    [out] = omni.generate("a cat", LATENTS)
    assert out.error is None
    deadline = time.monotonic() + 10  # the worker lets go in its next step
    while omni.collective_rpc(1, "get_stats")[0]["num_requests"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_threads_may_share_it(omni: Omni) -> None:
    [expected] = omni.generate("a cat", LATENTS)
    results: list[torch.Tensor | None] = []

    def draw() -> None:
        [out] = omni.generate("a cat", LATENTS)
        results.append(out.latents)

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert expected.latents is not None
    for latents in results:
        assert latents is not None
        assert (latents - expected.latents).abs().max() <= COMPANY_TOLERANCE
    assert len(results) == 4


def test_encode_gives_the_hidden_states_of_the_stock_encoder(omni: Omni, stock: MakeStock) -> None:
    outs = omni.encode(["a red circle", "{} 猫"])
    for out in outs:
        with torch.no_grad():
            expected, _ = stock(0).encode_prompt(out.prompt)
        assert out.hidden_states is not None
        assert (out.hidden_states - expected[0]).abs().max() <= 1e-5


def test_wrong_use_says_what_is_wrong(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is not a folder: give 'demo' or a local path"):
        Omni(model="no/such/model")
    with pytest.raises(ModelLoadError, match=r"has no model_index\.json"):
        Omni(model=str(tmp_path))
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(ModelLoadError, match="holds a 'FluxPipeline'"):
        Omni(model=str(tmp_path))
    (tmp_path / "model_index.json").write_text("{")
    with pytest.raises(ModelLoadError, match="is not valid JSON"):
        Omni(model=str(tmp_path))
    with pytest.raises(ConfigError, match="policy='random' is not allowed: one of fcfs"):
        Omni(model=str(checkpoint(0)), policy="random")
    with pytest.raises(ConfigError, match="mode='cloud' is not allowed: one of embedded"):
        Omni(model=str(checkpoint(0)), mode="cloud")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="colour"):
        Omni(model=str(checkpoint(0)), colour="red")


def test_closed_is_closed(checkpoint: MakeCheckpoint) -> None:
    omni = Omni(model=str(checkpoint(0)), device="cpu")
    omni.close()
    omni.close()
    with pytest.raises(EngineDeadError, match="is closed"):
        omni.generate("a cat")


def test_chat_answers_as_hugging_face_does(
    omni: Omni, checkpoint: MakeCheckpoint, stock: MakeStock
) -> None:
    reference = Reference(checkpoint(0), stock(0))
    greedy = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
    image = Image.new("RGB", (64, 48), "red")
    chats: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "a star"}],
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a ring"}],
        [
            {
                "role": "user",
                "content": [
                    {"type": "image_pil", "image_pil": image},
                    {"type": "text", "text": "what is it"},
                ],
            }
        ],
    ]
    prompts = [
        "<|im_start|>user\na star<|im_end|>\n",
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na ring<|im_end|>\n",
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>what is it<|im_end|>\n",
    ]
    outs = omni.chat(chats, greedy)
    for out, prompt, picture in zip(outs, prompts, (None, None, image), strict=True):
        inputs = reference.inputs(f"{prompt}<|im_start|>assistant\n", picture)
        assert list(out.outputs[0].token_ids) == reference.generate(inputs, 5)
        assert out.text == out.outputs[0].text and out.finished
    [alone] = omni.chat(chats[0], greedy)
    assert alone.text == outs[0].text
    [refused] = omni.chat([{"role": "user", "content": [{"type": "smell"}]}])
    assert isinstance(refused.error, InvalidParameterError)


def test_any_requests_in_one_call(omni: Omni) -> None:
    text, picture, states = omni.run(
        [
            OmniRequest(prompt="a cat", output_format="text", sampling_params={"max_tokens": 3}),
            OmniRequest(prompt="a cat", params=PARAMS),
            OmniRequest(prompt="a cat", output_format="hidden_states"),
        ]
    )
    assert text.text is not None and picture.images and states.hidden_states is not None
    [both] = omni.generate("a cat", PARAMS, output_format="text+image")
    assert both.text is not None and both.images
