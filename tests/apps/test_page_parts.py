"""Parts of the page that need no browser: forms, sizes, sessions, and the reading of streams."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import pytest

from vllm_omni.apps.gradio import require_gradio
from vllm_omni.apps.gradio.api import Api, ApiError, Message, ModelInfo, Step
from vllm_omni.apps.gradio.chat import make_body
from vllm_omni.apps.gradio.draw import make_form, make_sizes
from vllm_omni.apps.gradio.sessions import Picture, Session, Sessions, Turn
from vllm_omni.apps.gradio.view import CUSTOM, describe_queue, show_note
from vllm_omni.errors import ConfigError


def fill(**values: Any) -> dict[str, Any]:
    """The form as the page opens it, but for some values."""
    blank = {
        "prompt": "a star",
        "negative": "",
        "size": "256x256",
        "width": None,
        "height": None,
        "steps": 20,
        "guidance": 3.0,
        "seed": "",
        "count": 1,
        "rewrite": False,
    }
    return make_form(**blank | values)


# --- what is asked for ---


def test_form_becomes_the_parameters_of_the_api() -> None:
    assert fill() == {
        "prompt": "a star",
        "size": "256x256",
        "num_inference_steps": 20,
        "true_cfg_scale": 3.0,
        "n": 1,
        "rewrite_prompt": False,
    }
    full = fill(negative=" red ", size=CUSTOM, width=128, height=64, seed=" 5 ", count=2)
    assert full["negative_prompt"] == "red"
    assert (full["size"], full["seed"], full["n"]) == ("128x64", 5, 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": " \n"}, "Write what to draw first."),
        ({"seed": "-1"}, "The seed is a whole number"),
        ({"seed": "1e3"}, "The seed is a whole number"),
        ({"size": None}, "The page is not loaded yet"),
        ({"size": CUSTOM, "width": 0, "height": 64}, "Give a width and a height."),
        ({"size": CUSTOM}, "Give a width and a height."),
    ],
)
def test_form_says_what_is_missing(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fill(**values)


@pytest.mark.parametrize(
    ("default", "values"),
    [
        ((256, 256), ["256x256", "224x288", "288x224", "192x336", "336x192", CUSTOM]),
        ((1024, 1024), ["1024x1024", "880x1184", "1184x880", "768x1360", "1360x768", CUSTOM]),
        ((512, 768), ["512x768", "624x624", "544x720", "720x544", "464x832", "832x464", CUSTOM]),
    ],
)
def test_sizes_suit_the_model(default: tuple[int, int], values: list[str]) -> None:
    assert [value for _, value in make_sizes(ModelInfo("m", default_size=default))] == values


def test_model_of_another_server_is_known_by_its_name() -> None:
    assert ModelInfo.from_json({"id": "other"}) == ModelInfo("other")
    capabilities = {"default_size": "256x128", "default_steps": None, "news": 1, "max_n": 3}
    model = ModelInfo.from_json({"id": "m", "capabilities": capabilities})
    assert model == ModelInfo("m", default_size=(256, 128), max_n=3)


def test_status_line() -> None:
    model = ModelInfo("m", default_size=(256, 256), default_steps=20)
    queue: dict[str, Any] = {"running": 0, "waiting": 0, "pixel_steps_per_second": None}
    assert describe_queue(queue, model) == "Idle"
    queue = {
        "running": 2,
        "waiting": 3,
        "pixel_steps_per_second": 1e6,
        "estimated_wait_seconds": 12.3,
    }
    assert describe_queue(queue, model) == (
        "2 running, 3 waiting · 12 s to wait · about 2.6 s a picture"
    )


def test_messages_are_escaped() -> None:
    assert "<b>" not in show_note("<b>bold</b>", is_error=True)


def test_missing_gradio_is_told_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ConfigError, match=r"pip install 'vllm-omni\[ui\]'"):
        require_gradio()


# --- chats ---


def test_chat_sends_answers_but_not_what_failed() -> None:
    session = Session()
    pictures = [Picture(bytes([index]), "image/png") for index in range(6)]
    session.pictures = {picture.id: picture for picture in pictures}
    session.chat = [
        Turn("one", [pictures[0].id, pictures[1].id], answer="1"),
        Turn("two", [], error="refused"),
        Turn("", [picture.id for picture in pictures[2:5]], answer="3"),
        Turn("four", ["gone"]),
    ]
    body = make_body(session, with_picture=True)
    assert body["modalities"] == ["text", "image"] and body["stream"] is True
    assert [message["role"] for message in body["messages"]] == [
        *("user", "assistant", "user", "assistant", "user"),
    ]
    first, _, third, _, last = (message["content"] for message in body["messages"])
    # Four pictures at most, the newest; nothing is said of one that is gone.
    assert first == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AQ=="}},
        {"type": "text", "text": "one"},
    ]
    assert [part["type"] for part in third] == ["image_url"] * 3
    assert last == "four"


# --- sessions ---


def test_oldest_pictures_give_way() -> None:
    sessions = Sessions(max_bytes=10)
    first, second = sessions.create(), sessions.create()
    pictures = [Picture(b"1234", "image/png", form={}) for _ in range(3)]
    sessions.keep(first, pictures[0])
    sessions.keep(second, pictures[1])
    sessions.keep(second, pictures[2])
    assert first.gallery == []
    assert second.gallery == [pictures[2], pictures[1]]


def test_longest_unseen_visitor_is_forgotten() -> None:
    sessions = Sessions(max_sessions=2)
    first, second = sessions.create(), sessions.create()
    picture = Picture(b"1234", "image/png", form={})
    sessions.keep(second, picture)
    assert sessions.find(first.id) is first
    third = sessions.create()
    assert sessions.find(second.id) is None and second.pictures == {}
    assert sessions.find(first.id) is first and sessions.find(third.id) is third
    assert sessions.find(None) is None and sessions.find("") is None


# --- requests on their way ---


async def collect(session: Session, messages: AsyncGenerator[Message | Step, None]) -> list[Any]:
    async with session.run(("tab", "draw"), messages) as running:
        return [message async for message in running.messages(60)]


def test_cancelling_ends_a_request_wherever_it_is() -> None:
    closed = []

    async def messages() -> AsyncGenerator[Message | Step, None]:
        try:
            yield {"a": 1}
            await asyncio.sleep(3600)
        finally:
            closed.append(True)

    async def run() -> None:
        session = Session()
        collecting = asyncio.create_task(collect(session, messages()))
        await asyncio.sleep(0.01)
        session.cancel("another tab")
        session.cancel("tab", "chat")
        await asyncio.sleep(0.01)
        assert closed == []
        session.cancel("tab")
        assert await collecting == [{"a": 1}]
        assert closed == [True] and session.running == {}

    asyncio.run(run())


def test_nothing_for_a_while_is_a_tick_and_an_error_is_raised() -> None:
    async def messages() -> AsyncGenerator[Message | Step, None]:
        await asyncio.sleep(0.05)
        yield Step(1, 2)
        raise ApiError("no more")

    async def run() -> None:
        seen = []
        async with Session().run(("tab", "draw"), messages()) as running:
            with pytest.raises(ApiError, match="no more"):
                async for message in running.messages(0.01):
                    seen.append(message)
        assert seen[0] is None and seen[-1] == Step(1, 2)

    asyncio.run(run())


def serve(status: int, chunks: list[bytes]) -> Api:
    async def body() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    transport = httpx.MockTransport(lambda request: httpx.Response(status, content=body()))
    return Api(httpx.AsyncClient(transport=transport), "http://server")


def read(api: Api) -> list[Message | Step]:
    async def run() -> list[Message | Step]:
        return [message async for message in api.stream("/", {})]

    return asyncio.run(run())


def test_stream_is_read_however_it_is_cut() -> None:
    # U+2028 ends a line for Python, but not in a stream of events.
    text = json.dumps({"text": "one\u2028two"}, ensure_ascii=False)
    whole = f": step 3 of 20\n\nevent: x\r\ndata: {text}\r\n\r\ndata: [DONE]\n\n".encode()
    expected = [Step(3, 20), {"text": "one\u2028two"}]
    for size in (1, 7, len(whole)):
        chunks = [whole[start : start + size] for start in range(0, len(whole), size)]
        assert read(serve(200, chunks)) == expected


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"error": {"message": "too large"}}', "too large"),
        (502, b"<html>", "the server answered with status 502"),
        (500, b"[]", "the server answered with status 500"),
        (200, b'event: error\ndata: {"error": {"message": "it broke"}}\n\n', "it broke"),
    ],
)
def test_errors_are_in_the_words_of_the_server(status: int, body: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message):
        read(serve(status, [body]))


def test_server_that_is_not_there() -> None:
    api = Api(httpx.AsyncClient(trust_env=False), "http://127.0.0.1:9")
    with pytest.raises(ApiError, match="the server does not answer"):
        read(api)
