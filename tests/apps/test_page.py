"""The page, as people use it: in a browser, over a server with the embedded model."""

from __future__ import annotations

import io
import re
import time
from typing import Any

import httpx
import pytest
from PIL import Image, ImageDraw
from playwright.sync_api import Browser, Page, expect

from tests.apps.conftest import LAPTOP, PHONE, SCREENSHOTS, open_page, wait_until_loaded
from tests.pictures import get_difference, read_pixels
from tests.serving import ServerProcess

PROMPT = "a large red circle on a white background"
ENDLESS = {"steps": 100, "count": 8}  # half a minute, where nobody else works


def fill_form(page: Page, **values: Any) -> None:
    """Type into fields, by their ids."""
    for name, value in values.items():
        kind = {"prompt": "textarea", "negative": "textarea", "seed": "textarea"}.get(name)
        page.locator(f"#{name} {kind or 'input[type=number]'}").fill(str(value))


def draw(page: Page, **values: Any) -> None:
    """Ask for pictures with Enter, and wait for them."""
    fill_form(page, **values)
    newest = get_newest(page)
    page.locator("#prompt textarea").press("Enter")
    wait_until_drawn(page, newest)


def get_newest(page: Page) -> str | None:
    """Which picture is the first of the gallery."""
    newest: str | None = page.evaluate("document.querySelector('#gallery button')?.dataset.id")
    return newest


def wait_until_drawn(page: Page, newest: str | None) -> None:
    """Until a picture after the one that was the newest is there to be looked at."""
    page.wait_for_function(
        """(newest) => {
          const id = document.querySelector('#gallery button')?.dataset.id;
          return id && id !== newest && document.querySelector(`#stage [data-id="${id}"]`);
        }""",
        arg=newest,
    )
    expect(page.locator("#generate")).to_be_enabled()


def get_queue(server: ServerProcess) -> dict[str, Any]:
    queue: dict[str, Any] = httpx.get(f"{server.url}/v1/queue", timeout=60).json()
    return queue


def wait_until_idle(server: ServerProcess) -> float:
    """Seconds until the server has nothing to do."""
    start = time.monotonic()
    while (queue := get_queue(server))["running"] or queue["waiting"]:
        time.sleep(0.02)
    return time.monotonic() - start


def get_parameters(page: Page) -> dict[str, str]:
    names = page.locator("#stage dt").all_inner_texts()
    return dict(zip(names, page.locator("#stage dd").all_inner_texts(), strict=True))


def get_picture(page: Page) -> bytes:
    source = page.locator("#stage .frame img").get_attribute("src")
    return page.request.get(source or "").body()


# --- drawing ---


def test_previews_then_the_picture_that_the_api_gives(page: Page, server: ServerProcess) -> None:
    # Noted by the browser itself, as they go by.
    page.evaluate(
        """() => {
          window.seen = {previews: new Set(), steps: new Set(), texts: new Set()};
          const look = () => {
            const preview = document.querySelector('#stage img[alt=Preview]');
            if (preview) seen.previews.add(preview.src);
            const bar = document.querySelector('[role=progressbar]');
            if (bar) {
              seen.steps.add(`${bar.ariaValueNow} of ${bar.ariaValueMax}`);
              seen.texts.add(document.querySelector('#bar').innerText);
            }
          };
          const everything = {childList: true, subtree: true, attributes: true};
          new MutationObserver(look).observe(document.querySelector('#see'), everything);
        }"""
    )
    fill_form(page, prompt=PROMPT, steps=60, seed=7)
    page.locator("#prompt textarea").press("Enter")
    page.locator("#stage .frame img").wait_for()
    assert page.locator("#stage img[alt=Preview]").count() == 0
    previews = page.evaluate("[...seen.previews]")
    assert len(previews) == 3
    assert all(preview.startswith("data:image/png;base64,") for preview in previews)
    steps = page.evaluate("[...seen.steps]")
    assert len(steps) > 3 and set(steps) <= {f"{step} of 60" for step in range(61)}
    texts = page.evaluate("[...seen.texts]")
    assert any(re.match(r"Step \d+ of 60 · \d+ s", text) for text in texts)

    told = get_parameters(page)
    assert re.fullmatch(r"\d+\.\d s", told.pop("Time"))
    assert told == {
        "Prompt": PROMPT,
        "Seed": "7",
        "Size": "256 \N{MULTIPLICATION SIGN} 256",
        "Steps": "60",
        "Guidance": "3",
    }
    body = {"prompt": PROMPT, "num_inference_steps": 60, "seed": 7, "true_cfg_scale": 3.0}
    answer = httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=60).json()
    drawn = read_pixels(get_picture(page))
    assert get_difference(drawn, read_pixels(answer["data"][0]["b64_json"])) == 0


def test_cancel_frees_the_server_at_once(page: Page, server: ServerProcess) -> None:
    fill_form(page, prompt=PROMPT, steps=100, count=2)
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#bar")).to_contain_text(re.compile(r"Step \d+ of 200"))
    page.locator("#stage img[alt=Preview]").first.wait_for()
    page.screenshot(path=SCREENSHOTS / "forming.png")
    assert get_queue(server)["running"] == 1
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#stage")).to_contain_text("Cancelled.")
    assert wait_until_idle(server) < 8
    expect(page.locator("#generate")).to_be_enabled()
    expect(page.locator("#bar")).to_be_empty()
    draw(page, steps=2, count=1)  # and it can be used again
    expect(page.locator("#stage .frame img")).to_be_visible()


def test_several_pictures_each_with_its_parameters(page: Page) -> None:
    draw(page, prompt="a blue star", negative="red", steps=3, count=3, seed=20)
    tiles = page.locator("#stage button.tile")
    expect(tiles).to_have_count(3)
    expect(page.locator("#gallery button")).to_have_count(3)
    tiles.nth(2).click()
    page.locator("#stage .frame img").wait_for()
    told = get_parameters(page)
    assert (told["Prompt"], told["Not"], told["Seed"]) == ("a blue star", "red", "22")
    third = get_picture(page)

    # From the gallery, and back into the form: the same picture can be made again.
    page.locator("#gallery button").first.click()
    expect(page.locator("#stage dl")).to_contain_text("20")
    page.locator("#gallery button").nth(2).click()
    expect(page.locator("#stage dl")).to_contain_text("22")
    fill_form(page, prompt="something else", steps=50, negative="")
    page.get_by_role("button", name="Use these settings").click()
    expect(page.locator("#prompt textarea")).to_have_value("a blue star")
    expect(page.locator("#negative textarea")).to_have_value("red")
    expect(page.locator("#steps input[type=number]")).to_have_value("3")
    expect(page.locator("#seed textarea")).to_have_value("22")
    expect(page.locator("#count input")).to_have_value("1")
    draw(page)
    again = get_picture(page)
    assert get_difference(read_pixels(again), read_pixels(third)) <= 1  # alone, not as one of three


def test_last_seed_can_be_used_again(page: Page) -> None:
    draw(page, prompt=PROMPT, steps=2)
    seed = get_parameters(page)["Seed"]
    page.get_by_role("button", name="Reuse last").click()
    expect(page.locator("#seed textarea")).to_have_value(seed)


def test_prompt_is_rewritten(page: Page) -> None:
    page.get_by_label("Rewrite my prompt").check()
    draw(page, prompt="a star", steps=2)
    told = get_parameters(page)
    assert told["Prompt"] == "a star"
    assert len(told["Rewritten"]) > len("a star")


def test_other_size(page: Page) -> None:
    page.locator("#size input").click()
    page.get_by_role("option", name="Custom").wait_for()
    options = page.get_by_role("option").all_inner_texts()
    assert "288 \N{MULTIPLICATION SIGN} 224 landscape" in [option.strip() for option in options]
    page.get_by_role("option", name="Custom").click()
    draw(page, prompt=PROMPT, steps=2, width=128, height=160)
    assert get_parameters(page)["Size"] == "128 \N{MULTIPLICATION SIGN} 160"
    assert read_pixels(get_picture(page)).shape == (160, 128, 3)


def test_mistakes_are_told_in_words(page: Page) -> None:
    alert = page.get_by_role("alert")
    page.get_by_role("button", name="Generate").click()
    expect(alert).to_have_text("Write what to draw first.")
    fill_form(page, prompt=PROMPT, seed="one")
    page.locator("#prompt textarea").press("Enter")
    expect(alert).to_have_text("The seed is a whole number, or nothing for a random one.")
    fill_form(page, seed="")
    page.locator("#size input").click()
    page.get_by_role("option", name="Custom").click()
    fill_form(page, width=100, height=128)
    page.locator("#prompt textarea").press("Enter")
    expect(alert).to_contain_text("100")  # the API's own words
    expect(alert).to_contain_text("16")
    expect(page.locator("#generate")).to_be_enabled()


def test_prompt_is_text_and_not_code(page: Page) -> None:
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    prompt = "<img src=x onerror=alert(1)> ${alert(2)} {{value}} \"'"
    draw(page, prompt=prompt, steps=1)
    assert get_parameters(page)["Prompt"] == prompt
    assert page.locator("#stage .frame img").get_attribute("alt") == prompt


# --- coming and going ---


def test_page_comes_back_after_a_reload(page: Page) -> None:
    draw(page, prompt=PROMPT, steps=2)
    page.reload()
    wait_until_loaded(page)
    expect(page.locator("#gallery button")).to_have_count(1)
    page.locator("#gallery button").click()
    expect(page.locator("#stage dl")).to_contain_text(PROMPT)
    draw(page, prompt="a blue star", steps=2)
    expect(page.locator("#gallery button")).to_have_count(2)


def test_who_leaves_waits_for_nothing(browser: Browser, server: ServerProcess) -> None:
    # Gradio's script says this to itself when a page is left while it reads a stream.
    may_say = "AbortError: signal is aborted|Unexpected error Connection errored out"
    with open_page(browser, server.url, "leaves", may_say) as page:
        fill_form(page, prompt=PROMPT, **ENDLESS)
        page.locator("#prompt textarea").press("Enter")
        expect(page.locator("#bar")).to_contain_text(re.compile(r"Step \d+ of 800"))
        page.reload()
        assert wait_until_idle(server) < 10
        wait_until_loaded(page)
        draw(page, prompt=PROMPT, steps=2)
        fill_form(page, **ENDLESS)
        page.locator("#prompt textarea").press("Enter")
        expect(page.locator("#bar")).to_contain_text(re.compile(r"Step \d+ of 800"))
        page.goto("about:blank")
        assert wait_until_idle(server) < 10


def test_status_line_says_how_busy_it_is(page: Page) -> None:
    status = page.locator("#header .status")
    expect(status).to_contain_text("Idle")
    fill_form(page, prompt=PROMPT, **ENDLESS)
    page.locator("#prompt textarea").press("Enter")
    expect(status).to_contain_text("1 running, 0 waiting")
    page.get_by_role("button", name="Cancel").click()
    expect(status).to_contain_text(re.compile(r"Idle · about \d+\.\d s a picture"))


@pytest.mark.parametrize(
    ("status", "text"),
    [(401, "Not signed in: load the page again."), (503, "The server does not answer.")],
)
def test_status_line_says_why_it_knows_nothing(
    browser: Browser, server: ServerProcess, status: int, text: str
) -> None:
    with open_page(browser, server.url, f"status_{status}", may_say=str(status)) as page:
        page.route("**/ui/status", lambda route: route.fulfill(status=status))
        expect(page.locator("#header .status")).to_have_text(text)


def test_keyboard_is_enough(page: Page) -> None:
    expect(page.locator("#prompt textarea")).to_be_focused()
    page.keyboard.type(PROMPT)
    order = []
    for _ in range(9):
        page.keyboard.press("Tab")
        order.append(
            page.evaluate(
                "['generate', 'size', 'count', 'steps', 'guidance', 'negative', 'seed', 'reuse']"
                ".find((id) => document.getElementById(id).contains(document.activeElement))"
            )
        )
    first_seen = list(dict.fromkeys(order))
    assert first_seen[:5] == ["generate", "size", "count", "steps", "guidance"]
    fill_form(page, steps=2)
    page.locator("#generate").focus()
    page.keyboard.press("Enter")
    wait_until_drawn(page, None)
    page.locator("#gallery button").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#stage dl")).to_contain_text(PROMPT)


def test_prompt_does_not_take_the_focus_back(page: Page) -> None:
    prompt = page.locator("#prompt textarea")
    prompt.fill("a line\n" * 40)
    steps = page.locator("#steps input[type=number]")
    for top in (0, 10_000, 0):
        steps.focus()
        prompt.evaluate("(element, top) => element.scrollTo(0, top)", top)
        page.wait_for_timeout(200)
        expect(steps).to_be_focused()


# --- looks ---


@pytest.mark.parametrize("page", [{"viewport": PHONE, "has_touch": True}], indirect=True)
def test_phone_shows_the_picture_below_the_button(page: Page) -> None:
    draw(page, prompt=PROMPT, steps=4, seed=1)
    expect(page.locator("#stage .frame img")).to_have_js_property("complete", True)
    tops = []
    for name in ("prompt", "generate", "stage", "gallery", "size"):
        place = page.locator(f"#{name}").bounding_box()
        assert place is not None and place["x"] + place["width"] <= PHONE["width"]
        tops.append(place["y"])
    assert tops == sorted(tops)
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert page.locator("#stage .frame img").evaluate("(image) => image.width") > 300


@pytest.mark.parametrize("page", [{"color_scheme": "dark"}], indirect=True)
def test_dark_where_the_browser_is(page: Page) -> None:
    draw(page, prompt=PROMPT, steps=4, seed=1)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(int(value) for value in re.findall(r"\d+", background)[:3]) < 50
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width == LAPTOP["width"]
    assert page.evaluate("document.documentElement.scrollHeight") <= LAPTOP["height"] + 40


# --- chat ---


def make_circle() -> bytes:
    image = Image.new("RGB", (256, 256), "white")
    ImageDraw.Draw(image).ellipse((60, 60, 190, 190), fill="red")
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def open_chat(page: Page) -> None:
    page.get_by_role("tab", name="Chat").click()
    page.locator("#message textarea").wait_for()


def say(page: Page, text: str) -> None:
    page.locator("#message textarea").fill(text)
    page.locator("#message textarea").press("Enter")


def test_chat_answers_word_by_word(page: Page) -> None:
    open_chat(page)
    # Every length that the last answer has had, noted by the browser itself.
    page.evaluate(
        """() => {
          window.lengths = new Set();
          new MutationObserver(() => {
            const answers = document.querySelectorAll('#chatbot .bot.message');
            if (answers.length) window.lengths.add([...answers].at(-1).innerText.trim().length);
          }).observe(document.querySelector('#chatbot'), {
            childList: true, subtree: true, characterData: true});
        }"""
    )
    answer = page.locator("#chatbot .bot.message")
    for number in range(1, 6):  # a busy browser may show one at once, but not all
        page.evaluate("lengths.clear()")
        say(page, "a star")
        expect(answer.nth(number - 1)).not_to_be_empty()
        expect(page.locator("#message textarea")).to_be_enabled()
        if len(page.evaluate("[...lengths]")) > 3:
            break
    assert len(page.evaluate("[...lengths]")) > 3
    page.reload()
    wait_until_loaded(page)
    open_chat(page)
    expect(page.locator("#chatbot")).to_contain_text("a star")
    page.get_by_role("button", name="New chat").click()
    expect(answer).to_have_count(0)


def test_chat_sees_a_picture_and_draws_one(page: Page, server: ServerProcess) -> None:
    open_chat(page)
    with page.expect_response(re.compile("/upload")) as upload:
        file = {"name": "circle.png", "mimeType": "image/png", "buffer": make_circle()}
        page.locator("#message input[type=file]").set_input_files(file)  # type: ignore[arg-type]
    uploaded = upload.value.json()[0]
    file_url = f"{server.url}/ui/gradio_api/file={uploaded}"
    expect(page.locator("#message img")).to_be_visible()
    assert page.request.get(file_url).status == 200
    say(page, "What is on this picture?")
    answer = page.locator("#chatbot .bot.message").last
    expect(answer).to_contain_text(re.compile("red.*circle", re.DOTALL))
    expect(page.locator("#chatbot .user.message img")).to_be_visible()
    assert page.request.get(file_url).status != 200  # it was read, and is not kept as a file

    expect(page.locator("#message textarea")).to_be_enabled()
    page.get_by_role("button", name="New chat").click()
    page.get_by_label("Answer with a picture").check()
    say(page, "a large blue square on a white background")
    expect(page.locator("#chatbot .bot.message").first).to_contain_text("blue")
    drawn = page.locator("#chatbot .bot.message img")
    drawn.wait_for()
    pixels = read_pixels(page.request.get(drawn.get_attribute("src") or "").body())
    assert pixels.shape == (256, 256, 3)
    is_blue = pixels[..., 2] - pixels[..., 0] > 80
    assert 0.02 < is_blue.mean() < 0.9


def test_chat_shows_what_the_server_refuses(page: Page) -> None:
    open_chat(page)
    file = {"name": "not.png", "mimeType": "image/png", "buffer": b"not a picture"}
    page.locator("#message input[type=file]").set_input_files(file)  # type: ignore[arg-type]
    page.locator("#message .thumbnail-item, #message img").first.wait_for()
    say(page, "What is on this picture?")
    expect(page.locator("#chatbot .bot.message")).to_contain_text("⚠️")
    # The next question is not refused for it.
    expect(page.locator("#message textarea")).to_be_enabled()
    say(page, "a star")
    expect(page.locator("#chatbot .bot.message").last).not_to_contain_text("⚠️")
