"""The report in headless Chromium, opened from a file as a reader would. Skipped where there is no Chromium."""

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from eval.measures import Record
from eval.page import render_page
from eval.report import load_content
from shared.files import write_atomic
from tests.eval.agents import HOSTILE, evaluate_mixed
from tests.eval.hostile import DB_ID, write_hostile
from tests.eval.runs import arguments
from tests.eval.training_runs import write_training_run

pytest.importorskip("selenium", reason="selenium is not installed")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver (Debian: chromium-driver)"
    ),
]
# Switches that keep Chromium from the network, and let it run as root and without a screen.
SWITCHES = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDE, PHONE = (1280, 900), (390, 844)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for switch in (*SWITCHES, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of a run's page, of a comparison's, and of a training run's."""
    folder = write_hostile(tmp_path_factory.mktemp("hostile"))
    with pytest.MonkeyPatch.context() as patch:
        for salt in "ab":
            evaluate_mixed(patch, arguments(folder, folder / salt), salt)
    run = load_content([folder / "a"])
    contents = {
        "run": run,
        "comparison": load_content([folder / "a", folder / "b"]),
        "odd": replace(run, episodes=odd_episodes(run.episodes[-1][0])),
        "long": replace(run, episodes=run.episodes * 20),
        "training": load_content([write_training_run(folder, folder / "training")]),
    }
    for name, content in contents.items():
        write_atomic(folder / f"{name}.html", render_page(content))
    return {name: (folder / f"{name}.html").as_uri() for name in contents}


def odd_episodes(record: Record) -> tuple[tuple[Record], ...]:
    """Episodes that lack something: a verdict, turns, rows, a gold query."""
    unscored = {"scores": None, "results": None}
    fault = {
        "status": "harness_error",
        "reason": "ValueError: x",
        "ended": "error",
        "error": "Traceback\nValueError: <b>",
    }
    failed = {**record["gold"], "status": "gold_error", "flags": ["gold_error"]}
    tables = {**record["scores"], "strict": None, "fair": None, "soft_f1": None}
    changes: list[dict[str, Any]] = [
        {**unscored, **fault, "answer_sql": None, "origin": "none"},
        {**unscored, "status": "gold_error", "reason": "no such table: x", "gold": failed},
        {**unscored, "status": "scored", "scores": tables, "gold_sql": "", "results": None},
        {**unscored, "status": "harness_error", "turns": [], "ended": "token_limit", "answer_sql": None},
    ]
    return tuple(({**record, **change},) for change in changes)


@pytest.fixture
def show(browser: Any, pages: dict[str, str]) -> Iterator[Callable[..., Any]]:
    """Open a page; afterwards, nothing hostile has run and the console is empty."""

    def open_page(name: str = "run", hash: str = "", size: tuple[int, int] = WIDE) -> Any:
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get("about:blank")  # else a change of the hash alone would not load the page again
        browser.get(pages[name] + hash)
        return browser

    browser.get_log("browser")
    yield open_page
    assert browser.get_log("browser") == []
    assert "owned" not in browser.title
    assert not browser.find_elements("css selector", "img, iframe, object, main b ~ script")


def count(browser: Any, selector: str) -> int:
    return len(browser.find_elements("css selector", selector))


def text(browser: Any, selector: str) -> str:
    # textContent, not what is rendered: it has every character.
    value: str = browser.execute_script("return document.querySelector(arguments[0]).textContent", selector)
    return value


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(100):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come to that within 5 s")


def choose(browser: Any, name: str, value: str) -> None:
    from selenium.webdriver.support.ui import Select

    Select(browser.find_element("id", f"by-{name}")).select_by_value(value)


def press(browser: Any, *keys: str) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(browser).send_keys(*keys).perform()


def test_opens_on_the_overview(show: Callable[..., Any]) -> None:
    browser = show()
    assert browser.find_element("id", "overview").is_displayed()
    assert not browser.find_element("id", "episodes").is_displayed()
    assert "of 40 scored episodes are right" in text(browser, "#overview .sentence")
    assert count(browser, "#overview svg") >= 4


def test_filters_narrow_the_list(show: Callable[..., Any]) -> None:
    browser = show(hash="#episodes")
    assert count(browser, "#list [data-entry]") == 40
    choose(browser, "tier-0", "no_answer")
    wait_until(lambda: count(browser, "#list [data-entry]") < 40)
    assert count(browser, "#list [data-entry]") == count(browser, "#list .badge.no_answer") > 0
    choose(browser, "db", DB_ID)
    wait_until(lambda: all(db.text == DB_ID for db in browser.find_elements("css selector", "#list .db")))
    browser.find_element("id", "clear").click()
    wait_until(lambda: count(browser, "#list [data-entry]") == 40)


def test_text_is_found_in_questions_and_in_traces(show: Callable[..., Any]) -> None:
    browser = show(hash="#episodes")
    box = browser.find_element("id", "text")
    box.send_keys("</SCRIPT>")
    wait_until(lambda: count(browser, "#list [data-entry]") < 40)
    in_questions = count(browser, "#list [data-entry]")
    assert in_questions >= 6
    box.clear()
    box.send_keys("more rows exist")  # what a tool said
    wait_until(lambda: count(browser, "#list [data-entry]") == 0)
    assert text(browser, "#list") == "Nothing matches."
    browser.find_element("id", "deep").click()
    wait_until(lambda: count(browser, "#list [data-entry]") > 0)
    assert count(browser, "#list [data-entry]") < 40


def test_a_hostile_episode_is_text(show: Callable[..., Any]) -> None:
    browser = show(hash="#episode=1")
    question = text(browser, "#trace .question")
    for character in ("\u2028", "\u2029", "\x1b", "\u202e"):
        assert character not in question
    shown = HOSTILE
    for character in ("\u2028", "\u2029", "\x1b", "\u202e"):
        shown = shown.replace(character, f"U+{ord(character):04X}")
    assert question == shown
    assert DB_ID in text(browser, "#trace .where")
    assert "&amp;" in text(browser, "#trace .evidence")


def test_every_trace_opens_and_shows_its_turns(show: Callable[..., Any]) -> None:
    browser = show(hash="#episodes")
    for i in range(40):
        browser.execute_script("select(arguments[0])", i)
        assert count(browser, "#trace .turn") == browser.execute_script(
            "return entries[arguments[0]].sides[0].turns", i
        )
        assert count(browser, "#trace .answer") == 2
    assert "[object" not in browser.execute_script("return document.body.innerText")


def test_a_trace_reads_from_question_to_answer(show: Callable[..., Any]) -> None:
    browser = show(hash="#episodes")
    choose(browser, "outcome", "exact")
    wait_until(lambda: count(browser, "#list [data-entry]") == count(browser, "#list .badge.strict"))
    browser.find_element("css selector", "#list [data-entry]").click()
    trace = text(browser, "#trace")
    for said in (
        "thinking",
        "list_tables",
        "[5 tool turns left before you must answer]",
        "submit_sql",
        "bird_official",
    ):
        assert said in trace
    assert count(browser, "#trace .answer.gold pre.sql") == 1


def test_keys(show: Callable[..., Any]) -> None:
    from selenium.webdriver.common.keys import Keys

    browser = show()
    press(browser, "2")
    wait_until(lambda: browser.find_element("id", "episodes").is_displayed())
    selected = "#list [aria-selected=true]"
    first = browser.find_element("css selector", selected).get_attribute("id")
    press(browser, "j", "j", "k")
    assert browser.find_element("css selector", selected).get_attribute("id") != first
    press(browser, "/")
    assert browser.switch_to.active_element.get_attribute("id") == "text"
    press(browser, "j")  # in the field, it is a letter
    assert browser.find_element("id", "text").get_attribute("value") == "j"
    wait_until(lambda: browser.find_element("id", "clear").is_displayed())
    browser.find_element("id", "clear").click()
    wait_until(lambda: count(browser, "#list [data-entry]") == 40)
    browser.find_element("css selector", "#list [data-entry]").click()
    press(browser, "n", "n")
    assert browser.switch_to.active_element.get_attribute("class").startswith("turn")
    assert browser.execute_script("return document.querySelectorAll('details.think[open]').length") > 0
    press(browser, "t")
    assert browser.execute_script("return document.querySelectorAll('details.think[open]').length") == 0
    press(browser, "?")
    assert browser.find_element("id", "help").is_displayed()
    press(browser, Keys.ESCAPE)
    wait_until(lambda: not browser.find_element("id", "help").is_displayed())


def test_a_line_of_a_table_leads_to_its_episodes(show: Callable[..., Any]) -> None:
    browser = show()
    link = next(a for a in browser.find_elements("css selector", "a.filter") if a.text == "no answer")
    expected = int(link.find_element("xpath", "../../td[1]").text)
    browser.execute_script("arguments[0].click()", link)
    wait_until(lambda: count(browser, "#list [data-entry]") == expected)
    assert count(browser, "#list .badge.no_answer") == expected


@pytest.mark.parametrize("name", ["run", "comparison", "training"])
@pytest.mark.parametrize("hash", ["", "#episodes", "#episode=1", "#episode=20", "#record"])
def test_a_phone_scrolls_in_one_direction(show: Callable[..., Any], name: str, hash: str) -> None:
    browser = show(name, hash, PHONE)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= PHONE[0]
    if hash.startswith("#episode="):
        assert not browser.find_element("id", "list").is_displayed()
        browser.find_element("css selector", ".back").click()
        assert browser.find_element("id", "list").is_displayed()


def test_a_comparison_shows_both_runs(show: Callable[..., Any]) -> None:
    browser = show("comparison", "#episodes")
    choose(browser, "change", "gained")
    wait_until(lambda: count(browser, "#list [data-entry]") < 40)
    for item in browser.find_elements("css selector", "#list [data-entry] .badges"):
        first, second = (
            badge.get_attribute("class").split()[1] for badge in item.find_elements("css selector", ".badge")
        )
        assert first not in ("strict", "official")
        assert second in ("strict", "official")
    browser.find_element("css selector", "#list [data-entry]").click()
    assert count(browser, "#trace .answer") == 3
    assert count(browser, "#trace .side") == 2
    tabs = browser.find_elements("css selector", "#trace [role=tab]")
    tabs[1].click()
    assert browser.find_element("css selector", "[data-side='1'] .turns").is_displayed()
    assert not browser.find_element("css selector", "[data-side='0'] .turns").is_displayed()


def test_the_candidates_of_a_training_question(show: Callable[..., Any]) -> None:
    browser = show("training")
    link = next(a for a in browser.find_elements("css selector", "a.filter") if a.text.startswith("step 25 · "))
    browser.execute_script("arguments[0].click()", link)
    wait_until(lambda: count(browser, "#list [data-entry]") == 3)
    assert "step 25" in text(browser, "#trace .where")
    assert "candidate 1" in text(browser, "#trace .where")
    assert [node.text for node in browser.find_elements("css selector", "#trace .verdicts code")] == [
        "reward",
        "exact",
        "partial",
        "join",
        "majority",
    ]
    browser.find_element("id", "clear").click()
    wait_until(lambda: count(browser, "#list [data-entry]") == 42)
    choose(browser, "tier-0", "fails")
    wait_until(lambda: 0 < count(browser, "#list [data-entry]") == count(browser, "#list .badge.fails") < 42)
    for i in range(42):
        browser.execute_script("select(arguments[0])", i)
        assert "undefined" not in text(browser, "#trace .figures")
        assert count(browser, "#trace .turn") == browser.execute_script(
            "return entries[arguments[0]].sides[0].turns", i
        )


def test_episodes_that_lack_something(show: Callable[..., Any]) -> None:
    said = []
    for i in range(4):
        browser = show("odd", f"#episode={i + 1}")
        said.append(text(browser, "#trace"))
    assert "no verdict: harness error: ValueError: x" in said[0]
    assert "ValueError: <b>" in said[0]
    assert "no verdict: gold error: no such table: x" in said[1]
    assert "the gold query fails" in said[1]
    assert "result files, no query" in said[2]
    assert "no turn" in said[3]
    choose(browser, "tier-0", "unscored")
    wait_until(lambda: count(browser, "#list [data-entry]") == 3)


def test_a_long_list_grows_as_it_is_scrolled(show: Callable[..., Any]) -> None:
    browser = show("long", "#episodes")
    assert text(browser, "#found") == "800 episodes"
    first = count(browser, "#list [data-entry]")
    assert first < 400
    browser.execute_script("const list = document.getElementById('list'); list.scrollTop = list.scrollHeight")
    wait_until(lambda: count(browser, "#list [data-entry]") > first)
    browser = show("long", "#episode=799")
    assert browser.find_element("css selector", "#list [aria-selected=true]").get_attribute("data-entry") == "798"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_told_from_what_is_behind_them(show: Callable[..., Any], scheme: str) -> None:
    """WCAG AA: a contrast of 4.5 for text, in both schemes, for every colour that text takes."""
    browser = show()
    for _ in range(3):
        if browser.execute_script("return document.documentElement.dataset.theme") == scheme:
            break
        browser.find_element("id", "theme").click()
    colours = browser.execute_script(
        "const s = getComputedStyle(document.documentElement);"
        "return Object.fromEntries(arguments[0].map((n) => [n, s.getPropertyValue('--' + n).trim()]))",
        ["bg", "panel", "sunk", "ink", "muted", "accent", "other", "strict", "official", "wrong", "fails", "none"],
    )
    grounds = [colours.pop(name) for name in ("bg", "panel", "sunk")]
    for name, colour in colours.items():
        for ground in grounds:
            assert contrast(colour, ground) >= 4.5, (scheme, name, ground, contrast(colour, ground))


def contrast(a: str, b: str) -> float:
    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
