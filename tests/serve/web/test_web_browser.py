"""The page in a real browser: headless Chromium, driven by Playwright."""

import functools
import json
import os
import shlex
import shutil
import threading

import pytest
import support_tokenizer

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT = 30_000  # ms; a loaded machine is slow
ANSWER = "Tiles meet edge to edge, 你好 🐝.\n\nNo gaps."
CLIPBOARD = ("clipboard-read", "clipboard-write")


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        assert not os.environ.get("GIRIH_NEEDS_BROWSER"), "Chromium is not installed"
        pytest.skip("Chromium is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        instance = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        yield instance
        instance.close()


@pytest.fixture
def open_page(browser):
    """Opens the page of a server; anything the browser complains about fails the test."""
    complaints, contexts = [], []

    def open_(server, width=1280, height=800, ready=True, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(WAIT)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: note(message.type, message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(server.url)
        if ready:
            page.wait_for_selector("#state[data-state=good]")
        return page

    def note(kind, text):
        # A refused request is logged by the browser itself; the page shows it.
        if kind in ("error", "warning") and "Failed to load resource" not in text:
            complaints.append(text)

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def talker(new_server):
    """A server whose model says ANSWER and ends."""

    def make(**options):
        tokenizer = support_tokenizer.byte_level()
        answer = tokenizer.encode(ANSWER, False)
        (end,) = tokenizer.encode("<|im_end|>", False)
        opening = tokenizer.encode("<|im_start|>assistant\n", False)

        def next_token(token_ids):
            starts = range(len(token_ids) - len(opening), -1, -1)
            after = next(i for i in starts if token_ids[i : i + len(opening)] == opening)
            spoken = len(token_ids) - after - len(opening)
            return answer[spoken] if spoken < len(answer) else end

        return new_server(next_token=next_token, eos=(end,), **options)

    return make


@pytest.fixture
def writer(new_server):
    """A server whose model, without a chat template, ends every text with ANSWER."""

    def make(**options):
        tokenizer = support_tokenizer.byte_level()
        tokenizer.chat_templates = {}
        answer = tokenizer.encode(ANSWER, False)
        (end,) = tokenizer.encode("<|im_end|>", False)

        def next_token(token_ids):
            longest = min(len(answer), len(token_ids))
            said = (n for n in range(longest, -1, -1) if token_ids[-n:] == answer[:n] or n == 0)
            return [*answer, end][next(said)]

        return new_server(next_token=next_token, eos=(end,), tokenizer=tokenizer, **options)

    return make


def ask(page, text):
    page.fill("#input", text)
    page.keyboard.press("Enter")


def answer_of(page):
    page.wait_for_selector("#stop", state="hidden")
    page.wait_for_selector("article:last-child:not(.busy) .figures:not(:empty)")
    return page.text_content("article[data-role=assistant]:last-child .text")


def test_an_answer_streams_in_token_by_token(open_page, talker):
    page = open_page(talker(step_seconds=0.03))
    assert page.is_visible("text=Ask the model something")
    ask(page, "Hello")
    page.wait_for_selector("article.busy .tok")
    early = page.text_content("article:last-child .text")
    assert ANSWER.startswith(early)
    assert early != ANSWER
    assert page.is_visible("#stop")
    assert answer_of(page) == ANSWER
    figures = page.text_content("article:last-child .figures")
    assert "tokens/s" in figures
    assert page.is_hidden("#stop")
    assert page.text_content("article[data-role=user] .text") == "Hello"


def test_stop_ends_the_request(open_page, new_server):
    server = new_server(step_seconds=0.03)
    page = open_page(server)
    for how in ("button", "key"):
        ask(page, "Hello")
        page.wait_for_selector("article.busy .tok")
        if how == "button":
            page.click("#stop")
        else:
            page.keyboard.press("Escape")
        page.wait_for_selector("#send", state="visible")
        assert "stopped" in page.text_content("article:last-child .figures")
        server.wait_idle()
        assert page.text_content("article:last-child .text") != ""


def test_an_error_is_shown_and_can_be_overcome(open_page, talker):
    page = open_page(talker())
    ask(page, "word " * 400)
    alert = page.wait_for_selector("article [role=alert]")
    assert "leaves no room" in alert.text_content()
    ask(page, "short")  # what failed is not sent again
    assert answer_of(page) == ANSWER
    assert page.locator("article").count() == 2
    assert page.query_selector("article [role=alert]") is None


def test_a_server_that_went_away_is_told(open_page, talker):
    server = talker()
    page = open_page(server)
    server.server.stop()
    server.join()
    page.wait_for_selector("#state[data-state=bad]")
    ask(page, "Hello")
    assert "does not answer" in page.wait_for_selector("article [role=alert]").text_content()


def test_settings_reach_the_request(open_page, talker):
    page = open_page(talker())
    page.wait_for_selector("[name=temperature][placeholder='1']")
    page.fill("[name=max_tokens]", "2")
    page.fill("[name=system]", "Be kind.")
    with page.expect_request("**/v1/chat/completions") as seen:
        ask(page, "Hello")
    body = seen.value.post_data_json
    assert body["max_tokens"] == 2
    assert body["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
    ]
    assert "temperature" not in body
    answer_of(page)
    assert "cut off" in page.text_content("article:last-child .figures")
    page.reload()
    page.wait_for_selector("#state[data-state=good]")
    assert page.input_value("[name=max_tokens]") == "2"
    assert page.text_content("article[data-role=user] .text") == "Hello"
    page.click("button[type=reset]")
    assert page.input_value("[name=max_tokens]") == ""


def test_tokens_show_their_probability_to_pointer_and_keys(open_page, talker):
    page = open_page(talker())
    ask(page, "Hello")
    answer_of(page)
    page.hover(".tok >> nth=1")
    page.wait_for_selector("#token-card .rival.chosen")
    assert "61 %" in page.text_content("#token-card")  # exp(-0.5)
    page.hover("h1")
    page.wait_for_selector("#token-card", state="hidden")
    page.focus("article:last-child .text")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#token-card:not([hidden])")
    active = page.evaluate(
        "[...document.querySelectorAll('.tok')].findIndex(t => t.matches('.active'))"
    )
    assert active == 1
    page.uncheck("[name=logprobs]")
    ask(page, "Again")
    assert answer_of(page) == ANSWER
    assert page.query_selector("article:last-child .tok") is None


def test_a_tapped_token_keeps_its_card(open_page, talker):
    page = open_page(talker(), width=360, height=740, has_touch=True)
    ask(page, "Hello")
    answer_of(page)
    for place in (1, 4):
        page.tap(f".tok >> nth={place}")
        page.wait_for_selector("#token-card .rival.chosen")
        tapped = page.evaluate(
            "[...document.querySelectorAll('.tok')].findIndex(t => t.matches('.active'))"
        )
        assert tapped == place
    page.wait_for_timeout(300)  # what follows the release of a finger came by now
    assert page.is_visible("#token-card")
    page.tap("h1")
    page.wait_for_selector("#token-card", state="hidden")
    page.tap(".tok >> nth=2")
    page.wait_for_selector("#token-card .rival.chosen")
    page.tap("article[data-role=user] h3")
    page.wait_for_selector("#token-card", state="hidden")


def copied_curl(page):
    """What `Copy as curl` gives: the address, and the body that is sent."""
    page.click("#copy-curl")
    page.wait_for_selector("#toast:text-is('Copied')")
    words = shlex.split(page.evaluate("navigator.clipboard.readText()"))
    assert words[:2] == ["curl", "-N"]
    return words[2], json.loads(words[-1])


def test_copied_curl_is_the_request_of_the_last_answer(open_page, talker):
    server = talker()
    page = open_page(server, permissions=CLIPBOARD)
    url = f"{server.url}/v1/chat/completions"
    assert copied_curl(page)[1]["messages"] == [{"role": "user", "content": "Hello!"}]
    page.fill("[name=system]", 'It\'s "me" $HOME `x` \\ \n')
    for text in ("What's 1 + 1?", "Again, 'quoted' 🐝"):
        page.fill("#input", text)
        draft = copied_curl(page)
        with page.expect_request("**/v1/chat/completions") as seen:
            page.press("#input", "Enter")
        answer_of(page)
        assert copied_curl(page) == draft == (url, seen.value.post_data_json)
    page.reload()
    page.wait_for_selector("#state[data-state=good]")
    assert copied_curl(page) == draft
    with page.expect_request("**/v1/chat/completions") as seen:
        page.click("article[data-role=assistant]:last-child [data-do=retry]")
    assert seen.value.post_data_json == draft[1]


def test_text_is_copied_without_the_browser_s_clipboard(open_page, talker):
    page = open_page(talker(), permissions=CLIPBOARD)
    ask(page, "Hello")
    answer_of(page)
    page.evaluate("window.kept = navigator.clipboard")  # pages of other machines have none
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.click("article[data-role=assistant] [data-do=copy]")
    page.wait_for_selector("#toast:text-is('Copied')")
    assert page.evaluate("kept.readText()") == ANSWER


def test_a_model_without_a_chat_template_continues_texts(open_page, writer):
    server = writer()
    page = open_page(server, permissions=CLIPBOARD)
    assert page.is_visible("text=This model has no chat template")
    assert page.is_hidden("[name=system]")
    assert page.get_attribute("[name=max_tokens]", "placeholder") == "128"
    prompt = ""
    for text in ("One wall, ", "", "  and more:\n"):
        page.fill("#input", text)
        with page.expect_request("**/v1/completions") as seen:
            page.press("#input", "Enter")
        prompt += text
        body = seen.value.post_data_json
        assert (body["prompt"], body["max_tokens"], body["logprobs"]) == (prompt, 128, 5)
        end = ANSWER if text else ""  # what ends with it has nothing to add
        page.wait_for_selector("#stop", state="hidden")
        assert copied_curl(page) == (f"{server.url}/v1/completions", body)
        prompt += end
    page.click("article:last-child [data-do=copy]")
    page.wait_for_function("navigator.clipboard.readText().then(t => !t.startsWith('curl'))")
    assert page.evaluate("navigator.clipboard.readText()") == prompt
    articles = page.locator("article").all()
    assert "".join(article.locator(".text").text_content() for article in articles) == prompt
    for article in articles:  # pieces of one text, without white space between them
        assert article.evaluate("a => getComputedStyle(a).display") == "inline"
        assert article.evaluate("a => a.childNodes.length == a.children.length")
    page.hover(".tok >> nth=1")
    page.wait_for_selector("#token-card .rival.chosen")
    assert "61 %" in page.text_content("#token-card")
    page.reload()
    page.wait_for_selector("#state[data-state=good]")
    assert page.evaluate("document.querySelectorAll('article').length") == 5
    page.click("article:last-child [data-do=drop]")
    with page.expect_request("**/v1/completions") as seen:
        page.press("#input", "Enter")
    assert seen.value.post_data_json["prompt"] == prompt.removesuffix(ANSWER)
    page.click("#new")
    assert page.is_visible("text=Begin a text")


def test_an_error_of_a_completion_leaves_the_text(open_page, writer):
    page = open_page(writer())
    ask(page, "word " * 400)
    assert "no room" in page.wait_for_selector("article [role=alert]").text_content()
    with page.expect_request("**/v1/completions") as seen:
        ask(page, "more")
    assert seen.value.post_data_json["prompt"] == "word " * 400 + "more"
    page.wait_for_selector("article:last-child [role=alert]")
    assert page.locator("article").count() == 3
    for _ in range(3):
        page.click("article:last-child [data-do=drop]")
    assert page.is_visible("text=Begin a text")


def test_an_embedder_compares_texts(open_page, new_server):
    page = open_page(new_server(embeds=True), permissions=CLIPBOARD)
    assert page.is_hidden("#chat")
    assert page.is_hidden("[name=temperature]")
    assert "2 numbers" in page.text_content("#texts-about")
    page.fill("#texts-input", "alpha\n\n  beta \ngamma delta")
    with page.expect_request("**/v1/embeddings") as seen:
        page.click("#texts-send")
    assert seen.value.post_data_json == {"model": "fake", "input": ["alpha", "beta", "gamma delta"]}
    page.wait_for_selector("#texts-result li >> nth=2")
    assert "3 texts" in page.text_content("#texts-figures")
    assert copied_curl(page)[1] == seen.value.post_data_json
    vectors = [entry["embedding"] for entry in seen.value.response().json()["data"]]
    page.click(".pick:has-text('beta')")
    page.wait_for_selector(".pick[aria-pressed=true]:has-text('beta')")
    shown = page.locator("#texts-result .value").all_text_contents()
    near = [cosine(vectors[1], vectors[other]) for other in (0, 2)]
    assert shown == [f"{value:.2f}" for value in sorted(near, reverse=True)]
    page.click("li:has-text('gamma') [data-do=copy]")
    page.wait_for_function("navigator.clipboard.readText().then(t => t.startsWith('['))")
    assert json.loads(page.evaluate("navigator.clipboard.readText()")) == vectors[2]
    page.fill("#texts-input", "word " * 400)
    page.click("#texts-send")
    page.wait_for_selector("#texts-error:not([hidden])")
    page.reload()
    page.wait_for_selector("#state[data-state=good]")
    assert page.input_value("#texts-input").startswith("word word")


def cosine(a, b):
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / (sum(x * x for x in a) * sum(x * x for x in b)) ** 0.5


def fulfil(body, route):
    route.fulfill(body=body, content_type="application/json")


def play_classifier(page, labels, answers):
    """Have the page of an embedder meet a classifier; `answers`: route -> data."""

    def card(route):
        found = route.fetch().json()
        pooling = {**found["pooling"], "labels": labels}
        route.fulfill(json={**found, "task": "classify", "pooling": pooling})

    page.route("**/v1/models/*", card)
    for path, data in answers.items():
        body = json.dumps({"data": data, "usage": {"prompt_tokens": 7}})
        page.route(f"**{path}", functools.partial(fulfil, body))
    page.reload()
    page.wait_for_selector("#state[data-state=good]")


def test_a_classifier_names_labels(open_page, new_server):
    page = open_page(new_server(embeds=True))
    probs = [[0.1, 0.7, 0.2], [0.8, 0.15, 0.05]]
    play_classifier(page, ["bad", "good", "so-so"], {"/v1/classify": [{"probs": p} for p in probs]})
    assert "3 labels" in page.text_content("#texts-about")
    page.fill("#texts-input", "nice\nbroken")
    page.click("#texts-send")
    page.wait_for_selector("#texts-result li >> nth=1")
    first, second = page.locator("#texts-result li").all()
    assert first.locator(".rival code").all_text_contents() == ["good", "so-so", "bad"]
    assert second.locator(".rival.chosen").text_content() == "bad0.80"


def test_a_cross_encoder_scores_against_the_chosen_text(open_page, new_server):
    page = open_page(new_server(embeds=True))
    play_classifier(page, ["score"], {"/v1/score": [{"score": 0.2}, {"score": 0.9}]})
    page.fill("#texts-input", "a\nb\nc")
    with page.expect_request("**/v1/score") as seen:
        page.click("#texts-send")
    assert seen.value.post_data_json == {"model": "fake", "text_1": "a", "text_2": ["b", "c"]}
    page.wait_for_selector("#texts-result li >> nth=2")
    assert page.locator(".hit-text").all_text_contents() == ["a", "c", "b"]
    with page.expect_request("**/v1/score") as seen:
        page.click(".pick >> nth=1")
    assert seen.value.post_data_json == {"model": "fake", "text_1": "c", "text_2": ["a", "b"]}
    page.wait_for_selector(".pick[aria-pressed=true]:has-text('c')")
    assert page.locator(".hit-text").all_text_contents() == ["c", "b", "a"]


@pytest.mark.parametrize("kind", ["text", "texts"])
def test_a_phone_shows_the_other_uses_whole(open_page, writer, new_server, kind):
    server = writer() if kind == "text" else new_server(embeds=True)
    page = open_page(server, width=360, height=740, has_touch=True)
    if kind == "text":
        ask(page, "x" * 200)
        page.wait_for_selector("article:last-child .tok")
        main = "chat"
    else:
        vectors = json.dumps(
            {"data": [{"embedding": [-0.123] * 384}] * 2, "usage": {"prompt_tokens": 7}}
        )
        page.route("**/v1/embeddings", functools.partial(fulfil, vectors))
        page.fill("#texts-input", "x" * 200 + "\n" + "two words")
        page.click("#texts-send")
        page.wait_for_selector("#texts-result li >> nth=1")
        main = "texts"
    sections = ("settings", "chat", "texts", "status")
    assert [v for v in sections if page.is_visible(f"main > #{v}")] == [main]
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate(f"document.getElementById('{main}').scrollWidth") <= 360
    page.click("nav [data-view=status]")
    assert [v for v in sections if page.is_visible(f"main > #{v}")] == ["status"]


def test_messages_can_be_edited_answered_anew_and_deleted(open_page, talker):
    page = open_page(talker())
    ask(page, "Hello")
    answer_of(page)
    page.click("article[data-role=user] [data-do=edit]")
    page.fill("article textarea", "Good day")
    page.keyboard.press("Control+Enter")
    with page.expect_request("**/v1/chat/completions") as seen:
        page.click("article[data-role=assistant] [data-do=retry]")
    assert [m["content"] for m in seen.value.post_data_json["messages"]] == ["Good day"]
    assert answer_of(page) == ANSWER
    assert page.locator("article").count() == 2
    page.click("article[data-role=assistant] [data-do=drop]")
    page.click("article[data-role=user] [data-do=drop]")
    assert page.is_visible("text=Ask the model something")


def test_the_status_follows_the_engine(open_page, talker):
    page = open_page(talker(step_seconds=0.04))
    assert page.wait_for_selector("#finished:text-is('0')")
    ask(page, "Hello")
    page.wait_for_selector("#running:text-is('1')")
    page.wait_for_function("parseFloat(document.getElementById('rate-out').textContent) > 0")
    page.wait_for_function("document.getElementById('kv-meter').ariaValueNow > 0")
    answer_of(page)
    page.wait_for_selector("#finished:text-is('1')")
    page.wait_for_selector("#running:text-is('0')")
    assert "ms" in page.text_content("#step-ms")
    assert page.get_attribute("#spark .line", "d").count("L") >= 1


def test_progress_of_the_start_is_shown(open_page, new_server):
    hold = threading.Event()
    page = open_page(new_server(hold=hold), ready=False)
    page.wait_for_selector("#start-card:not([hidden])")
    page.wait_for_selector("#state-text:text-is('compile 1/3')")
    assert page.text_content("#start-stage") == "compile"
    assert page.get_attribute("#start-bar", "max") == "3"
    assert "tile 1 of 3" in page.text_content("#start-detail")
    hold.set()
    page.wait_for_selector("#state[data-state=good]")
    page.wait_for_selector("#start-card", state="hidden")


def test_a_key_is_asked_for_and_used(open_page, talker):
    page = open_page(talker(serve={"api_keys": ("k",)}), ready=False)
    page.wait_for_selector("#state-text:text-is('needs an API key')")
    page.fill("#key", "k")
    page.press("#key", "Tab")
    page.wait_for_selector("#state[data-state=good]")
    ask(page, "Hello")
    assert answer_of(page) == ANSWER


def test_the_keyboard_is_enough(open_page, talker):
    page = open_page(talker())
    assert page.evaluate("document.activeElement.id") == "input"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    answer_of(page)
    assert page.text_content("article[data-role=user] .text") == "one\ntwo"
    reached = set()
    page.evaluate("document.body.focus()")
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.id || document.activeElement.name || "
                "document.activeElement.dataset.do || document.activeElement.className"
            )
        )
    assert {"new", "theme", "model", "temperature", "logprobs", "retry", "text", "input"} <= reached


def test_a_phone_shows_one_view_at_a_time(open_page, talker):
    page = open_page(talker(), width=360, height=740, has_touch=True)
    ask(page, "Hello " + "x" * 80)
    assert answer_of(page) == ANSWER
    for view in ("settings", "status", "chat"):
        page.click(f"nav [data-view={view}]")
        shown = [v for v in ("settings", "status", "chat") if page.is_visible(f"main > #{v}")]
        assert shown == [view]
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 360
    box = page.locator("#send").bounding_box()
    assert box["x"] + box["width"] <= 360
    assert box["y"] + box["height"] <= 740


def contrast(page, selector):
    """WCAG contrast of an element's text against the page's card colour."""
    return page.evaluate(
        """selector => {
          const canvas = document.createElement('canvas')
            .getContext('2d', {willReadFrequently: true});
          const light = color => {
            canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
            const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data]
              .map(v => v / 255)
              .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const card = getComputedStyle(document.getElementById('chat')).backgroundColor;
          const text = getComputedStyle(document.querySelector(selector)).color;
          const [a, b] = [light(card), light(text)].sort((x, y) => y - x);
          return (a + 0.05) / (b + 0.05);
        }""",
        selector,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_can_be_read(open_page, talker, scheme):
    page = open_page(talker(), color_scheme=scheme)
    ask(page, "Hello")
    answer_of(page)
    brightness = page.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    )
    assert (sum(brightness) > 380) == (scheme == "light")
    for selector in (".text", ".figures", "#status dt", "h2", "#settings label"):
        assert contrast(page, selector) >= 4.5, selector
    page.click("#theme")  # light
    page.click("#theme")  # dark
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"
