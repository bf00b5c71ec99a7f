"""Chats through OpenAI's own client: words, what they have to be, tools."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from tests.chatting import DRAW, REWRITE, SAID, SHAPES, STAR, chat, say, stream
from tests.inner_server import InnerServer, Served
from tests.serving import ServerProcess
from vllm_omni.errors import ConfigError
from vllm_omni.models.demo import find_model

# --- words ---


def test_an_answer(client: openai.OpenAI) -> None:
    answer = chat(client, [REWRITE, *say("star")])
    assert answer.object == "chat.completion" and answer.model == "demo"
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", STAR)
    assert (choice.finish_reason, choice.index) == ("stop", 0)
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (52, 13, 65)


def test_the_id_is_the_server_s_own(server: ServerProcess) -> None:
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"messages": SAID, "max_tokens": 1},
        headers={"X-Request-Id": "mine", "X-Session-ID": "mine", "X-data-parallel-rank": "7"},
        timeout=60,
    )
    assert answer.status_code == 200
    assert answer.json()["id"] == f"chatcmpl-{answer.headers['x-request-id']}"


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    chunks = stream(client, [REWRITE, *say("star")])
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    # A chunk for each token; vLLM puts those together that come faster than they are sent.
    assert len([text for text in texts if text]) <= 12
    assert "".join(texts) == STAR
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (52, 13)
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_comes_while_it_is_written(client: openai.OpenAI) -> None:
    chunks = stream(client, say("go on"), max_tokens=100, ignore_eos=True)
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 100
    assert len(chunks) > 6  # however busy the server is


def test_several_answers_and_stops(client: openai.OpenAI) -> None:
    several = chat(client, [REWRITE, *say("a red circle")], n=2, temperature=1, seed=1)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert all("red circle" in (choice.message.content or "") for choice in several.choices)
    again = chat(client, [REWRITE, *say("a red circle")], n=2, temperature=1, seed=1)
    assert [c.message.content for c in again.choices] == [
        c.message.content for c in several.choices
    ]
    stopped = chat(client, [REWRITE, *say("star")], stop=[" star", " square"])
    assert stopped.choices[0].message.content == "a large yellow"
    short = chat(client, [REWRITE, *say("star")], max_tokens=3)
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == (
        "a large yellow",
        "length",
    )


def test_an_answer_without_a_length_ends(inner_client: openai.OpenAI, served: Served) -> None:
    # A model that never stops by itself: the server's bound, or the rest of the context.
    answer = inner_client.chat.completions.create(
        model="tiny", messages=say("go on"), extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None and answer.usage.total_tokens == 1024
    assert answer.choices[0].finish_reason == "length"


def test_logprobs(client: openai.OpenAI) -> None:
    answer = chat(client, [REWRITE, *say("star")], max_tokens=2, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["a", " large"]
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0


def test_a_chat_goes_on(client: openai.OpenAI) -> None:
    first = chat(client, [REWRITE, *say("star")])
    # As the client gives it, so may it be sent back: with everything that is null.
    back = first.choices[0].message.model_dump()
    second = chat(client, [REWRITE, *say("star"), back, *say("a red circle")])
    assert second.choices[0].message.content
    assert first.usage is not None and second.usage is not None
    # Both earlier turns were read, and two that have five tokens around their words.
    assert second.usage.prompt_tokens > first.usage.total_tokens + 5


# --- what the text has to be ---


def test_json_as_a_schema_says(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SHAPES}}
    answer = chat(client, say("a star"), response_format=form)
    content = json.loads(answer.choices[0].message.content or "")
    assert content["shape"] in ("star", "circle") and content["size"] in (1, 2, 3)
    anything = chat(client, say("a star"), response_format={"type": "json_object"})
    assert isinstance(json.loads(anything.choices[0].message.content or ""), dict)


def test_choices_and_patterns(client: openai.OpenAI) -> None:
    chosen = chat(client, say("a star"), structured_outputs={"choice": ["yes", "no"]})
    assert chosen.choices[0].message.content in ("yes", "no")
    pattern = "(red|green) (star|circle)"
    found = chat(client, [REWRITE, *say("a green star")], structured_outputs={"regex": pattern})
    assert found.choices[0].message.content == "green star"


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},  # a 500 from vLLM's own server
        {"type": "string", "pattern": "(a{1,999}){1,999}"},
        {"type": "array", "uniqueItems": True},
        {"allOf": [{"type": "string"}, {"enum": ["a"]}]},  # vLLM's own refusal
        {"type": "object", "properties": {"a\ud800": {"type": "null"}}, "required": ["a\ud800"]},
        {"type": "integer", "minimum": -(10**30)},
    ],
    ids=["itself", "pattern", "keyword", "all of", "half a character", "small number"],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_schemas_that_cannot_be_used(
    server: ServerProcess, schema: dict[str, Any], is_streamed: bool
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": SAID, "max_tokens": 5, "response_format": form, "stream": is_streamed}
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        content=json.dumps(body),
        headers={"Content-Type": "application/json"},
        timeout=60,
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "invalid_schema" and error["param"].startswith("response_format")


# --- tools ---


def get_bias() -> dict[str, int]:
    """No spaces: the demo model writes nothing else where JSON allows them."""
    tokenizer = AutoTokenizer.from_pretrained(find_model("demo") / "tokenizer")
    ids = range(len(tokenizer))
    return {str(id): -100 for id in ids if not tokenizer.decode([id]).strip()}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "draw"}}])
def test_a_tool_is_called(client: openai.OpenAI, choice: Any) -> None:
    answer = chat(
        client,
        say("draw a star"),
        tools=[DRAW],
        tool_choice=choice,
        max_tokens=100,
        logit_bias=get_bias(),
        parallel_tool_calls=False,
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "draw"
    arguments = json.loads(call.function.arguments)
    assert arguments["shape"] in ("star", "circle") and arguments["size"] in (1, 2, 3)
    named = isinstance(choice, dict)
    assert answer.choices[0].finish_reason == ("stop" if named else "tool_calls")
    # What the tool says goes back with the call, as the client has it.
    message = answer.choices[0].message.model_dump()
    said = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    after = chat(client, [*say("draw a star"), message, said], tools=[DRAW], tool_choice="none")
    assert after.choices[0].message.content


def test_a_call_is_streamed(client: openai.OpenAI) -> None:
    chunks = stream(
        client,
        say("draw a star"),
        tools=[DRAW],
        tool_choice="required",
        max_tokens=100,
        logit_bias=get_bias(),
        parallel_tool_calls=False,
    )
    calls = [
        call.function
        for chunk in chunks
        for choice in chunk.choices
        for call in choice.delta.tool_calls or ()
    ]
    assert [call.name for call in calls if call is not None and call.name] == ["draw"]
    arguments = json.loads("".join(call.arguments or "" for call in calls if call is not None))
    assert arguments["shape"] in ("star", "circle")


def test_a_model_may_leave_its_tools_alone(client: openai.OpenAI) -> None:
    answer = chat(client, [REWRITE, *say("star")], tools=[DRAW])
    assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == (STAR, None)


def test_a_parser_that_vllm_does_not_have(inner: InnerServer) -> None:
    with (
        pytest.raises(ConfigError, match=r"tool_call_parser='mine'.*hermes"),
        inner.serve(tool_call_parser="mine"),
    ):
        pass


def test_without_a_parser_there_are_no_tools(inner: InnerServer) -> None:
    with inner.serve(tool_call_parser="") as served:
        url = f"{served.url}/v1/chat/completions"
        body = {"messages": SAID, "max_tokens": 2, "tools": [DRAW]}
        assert httpx.post(url, json=body, timeout=60).json()["error"]["param"] == "tools"
        unused = {**body, "tool_choice": "none"}
        assert httpx.post(url, json=unused, timeout=60).status_code == 200
