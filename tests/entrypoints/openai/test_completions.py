"""Completions through OpenAI's own client: a text goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.serving import ServerProcess

# The model's own chat, as words: it makes a description of them.
PROMPT = "<|im_start|>user\na red circle<|im_end|>\n<|im_start|>assistant\n"


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **parameters: Any) -> Any:
    return client.completions.create(model="demo", prompt=prompt, temperature=0, **parameters)


@pytest.fixture(scope="module")
def words(client: openai.OpenAI) -> list[str]:
    """The first four; each is one token."""
    words: list[str] = complete(client, max_tokens=4).choices[0].text.split(" ")
    assert len(words) == 4 and words[0] == "a" and "red" in words
    return words


def test_a_text_goes_on(client: openai.OpenAI) -> None:
    answer = complete(client, max_tokens=4)
    assert (answer.object, answer.model) == ("text_completion", "demo")
    [choice] = answer.choices
    assert choice.text.startswith("a ") and choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (11, 4)
    assert len(complete(client).choices[0].text.split()) > 5  # 16 tokens if nothing is said


def test_it_is_the_chat_s_text(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "a red circle"}],
        temperature=0,
        max_tokens=16,
    )
    assert complete(client, max_tokens=16).choices[0].text == chat.choices[0].message.content


def test_a_stream(client: openai.OpenAI, words: list[str]) -> None:
    stream = complete(client, max_tokens=4, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == " ".join(words)
    assert len(chunks[:-1]) <= 4  # tokens that come at once may share a chunk
    assert chunks[-2].choices[0].finish_reason == "length"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 4)


def test_several_prompts(client: openai.OpenAI) -> None:
    prompts = [PROMPT, PROMPT.replace("red circle", "green star")]
    answer = complete(client, prompts, max_tokens=8, n=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    alone = [complete(client, prompt, max_tokens=8).choices[0].text for prompt in prompts]
    assert [choice.text for choice in answer.choices] == alone and alone[0] != alone[1]


def test_the_prompt_comes_first(client: openai.OpenAI) -> None:
    echoed = complete(client, "a red", max_tokens=2, echo=True)
    assert echoed.choices[0].text.startswith("a red ")
    alone = complete(client, "a red", max_tokens=0, echo=True)
    assert alone.choices[0].text == "a red"


def test_logprobs(client: openai.OpenAI, words: list[str]) -> None:
    logprobs = complete(client, max_tokens=2, logprobs=3).choices[0].logprobs
    assert logprobs.tokens == [words[0], f" {words[1]}"]
    assert [len(top) for top in logprobs.top_logprobs] == [3, 3]
    assert all(value <= 0 for value in logprobs.token_logprobs)


def test_tokens_are_a_prompt_too(client: openai.OpenAI) -> None:
    stop = complete(client, [5, 6, 7], max_tokens=3)
    assert stop.usage.prompt_tokens == 3
    both = complete(client, [[5, 6, 7], [5, 6]], max_tokens=3)
    assert both.choices[0].text == stop.choices[0].text
    assert both.usage.prompt_tokens == 5


def test_choices_and_stops(client: openai.OpenAI, words: list[str]) -> None:
    chosen = complete(client, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert chosen.choices[0].text in ("yes", "no")
    assert complete(client, stop=f" {words[3]}").choices[0].text == " ".join(words[:3])


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": ""}, "prompt", "none may be empty"),
        ({"prompt": []}, "prompt", "at least 1"),
        ({"prompt": ["a", [1]]}, "prompt", "cannot be mixed"),
        ({"prompt": [1, "a"]}, "prompt", "none may be empty"),
        ({"prompt": [True, 1]}, "prompt", "none may be empty"),
        ({"prompt": [-1]}, "prompt", "none may be empty"),
        ({"prompt": {"a": 1}}, "prompt", "valid list"),
        ({"prompt": "\ud800"}, "prompt", "none may be empty"),
        ({"prompt": ["x"] * 65}, "prompt", "at most 64"),
        ({"prompt": ["x"] * 33, "n": 2}, "n", "66 texts"),
        ({"prompt": "x" * 20_000}, "prompt", "20000 characters"),
        ({"prompt": ["x" * 9000] * 2}, "prompt", "18000 characters"),
        ({"prompt": [999_999]}, None, "out of vocabulary"),
        ({"prompt": "x " * 5000}, "prompt", "maximum context length"),
        ({"max_tokens": 0}, "max_tokens", "needs echo"),
        ({"max_tokens": 5000}, "max_tokens", "at most 4096"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logprobs": True}, "logprobs", "valid integer"),
        ({"suffix": "x"}, "suffix", "unknown parameter"),
        ({"best_of": 2}, "best_of", "unknown parameter"),
        ({"prompt_embeds": "x"}, "prompt_embeds", "unknown parameter"),
        ({"truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "unknown parameter"),
        ({"vllm_xargs": {}}, "vllm_xargs", "unknown parameter"),
        ({"messages": []}, "messages", "unknown parameter"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "should be"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_what_is_refused(
    server: ServerProcess,
    fields: dict[str, Any],
    param: str | None,
    message: str,
    is_streamed: bool,
) -> None:
    body = json.dumps({"prompt": "x", "stream": is_streamed, **fields})
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="x")
    assert caught.value.param == "model"
