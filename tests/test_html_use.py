"""The page of the `html` report in use: findings open in sight, the address keeps the view, keys, copies."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.apart import SHARED
from tests.browser import driver, made
from tests.command import run
from tests.test_html_browser import browser, choose, press, quiet, scanned, search, texts, wait
from tests.tiers import crossed, examples, some
from tito_audit.record.finding import NEXT_PROMPT, SAMPLED, Finding, Hit, Result, Severity, Side, Where
from tito_audit.record.rollout import Place, Rollout

__all__ = ["browser", "scanned"]

CHARTS = Path(__file__).resolve().parent / "browser" / "charts.js"
OPENED = Path(__file__).resolve().parent / "browser" / "opened.js"
WIDTHS = (400, 1280, 1920)
TOKENIZERS = Path(os.environ.get("TITO_AUDIT_TOKENIZERS") or SHARED / "tokenizers")
CLOSED = "!document.body.matches('.viewing')"
"""Whether the viewer is closed, and the page knows it: the browser says so later."""


# --- a finding opens in sight ---------------------------------------------------------------------------------


def links(tab: driver.Browser) -> list[str]:
    """The links to the tokens of every finding in the page, through all pages of the table."""
    addresses: list[str] = tab.js(
        """const links = [], next = document.querySelector("#findings [aria-label='next page']");
        const fold = document.getElementById("fold");
        if (fold.checked) fold.click();
        for (;;) {
            links.push(...[...document.querySelectorAll("table.findings a.small")].map((link) => link.hash));
            if (next.disabled) return links;
            next.click();
        }"""
    )
    return addresses


def all_open_in_sight(tab: driver.Browser, page: Path, number: int) -> None:
    """Random findings of a page are in sight once opened, at every width; in `make test` each at one width."""
    tab.look()
    tab.open(page)
    with_tokens = [link for link in links(tab) if ".log." not in link and "finding=REC" not in link]
    chosen = random.Random(25).sample(with_tokens, min(number, len(with_tokens)))
    assert chosen
    pairs = crossed(WIDTHS, chosen)
    for width in WIDTHS:
        tab.js("document.getElementById('close-viewer').click()")
        tab.look(width=width)
        shown = [link for at, link in pairs if at == width]
        assert tab.driver.execute_async_script(OPENED.read_text(), shown) == []


@pytest.mark.shared
@pytest.mark.parametrize(("model", "number"), some([("smollm2", 8), ("gemma-3", 8), ("qwen2.5-coder", 9)], 1))
def test_findings_of_real_logs_are_in_sight_when_opened(
    browser: driver.Browser, tmp_path: Path, model: str, number: int
) -> None:
    log, tokenizer = SHARED / "rollouts" / model / "retok.jsonl.gz", TOKENIZERS / model
    for needed in (log, tokenizer):
        if not needed.exists():
            pytest.skip(f"{needed} is not here: no finding of {model} was opened")
    page = tmp_path / "page.html"
    run("scan", str(log), "-t", str(tokenizer), "-q", "--fail-on", "never", "--report", f"html={page}")
    all_open_in_sight(browser, page, number)


def test_findings_of_the_example_logs_are_in_sight_when_opened(browser: driver.Browser, scanned: Path) -> None:
    all_open_in_sight(browser, scanned, examples(6, 25))


# --- the address ----------------------------------------------------------------------------------------------


def state(tab: driver.Browser) -> str:
    return str(tab.js("return decodeURIComponent(location.hash)"))


def test_filters_order_and_page_are_in_the_address_and_come_back(browser: driver.Browser, tmp_path: Path) -> None:
    page = made.page(tmp_path / "page.html", made.many(400))
    browser.look()
    browser.open(page)
    choose(browser, "by-code", "TOK101")
    choose(browser, "by-known", "new")
    browser.js("document.querySelector('th[data-sort=place] button').click()")
    browser.js("document.querySelector('th[data-sort=place] button').click()")
    message = search(browser, "the")
    browser.js("document.querySelector(\"[aria-label='next page']\").click()")
    assert state(browser) == "#q=the&code=TOK101&known=0&sort=-place" + (
        "&page=2" if "page=2" in state(browser) else ""
    )
    shown = texts(browser, "table.findings tbody td:nth-child(4)")
    address = browser.js("return location.href")

    browser.driver.get("about:blank")
    browser.driver.get(address)
    wait(browser, "document.documentElement.dataset.ready === 'yes'")
    assert texts(browser, "#shown") == [message]
    assert texts(browser, "table.findings tbody td:nth-child(4)") == shown
    assert browser.js("return document.querySelector('th[data-sort=place]').ariaSort") == "descending"
    assert browser.js("return document.getElementById('find').value") == "the"

    browser.js("document.querySelector('.filters button[type=reset]').click()")
    assert state(browser) == ""
    assert texts(browser, "#shown") == ["400 findings"]
    browser.driver.back()
    wait(browser, "document.getElementById('find').value === 'the'")
    assert texts(browser, "table.findings tbody td:nth-child(4)") == shown
    browser.driver.forward()
    wait(browser, "document.getElementById('shown').textContent === '400 findings'")


def test_a_link_to_sections_keeps_the_filters(browser: driver.Browser, tmp_path: Path) -> None:
    browser.open(made.page(tmp_path / "page.html", made.many(40)))
    choose(browser, "by-code", "TOK101")
    number = texts(browser, "#shown")
    browser.js("document.querySelector('nav a[href=\"#rules\"]').click()")
    assert state(browser) == "#code=TOK101"
    assert texts(browser, "#shown") == number


def test_a_value_that_the_page_does_not_hold_finds_nothing_and_says_so(
    browser: driver.Browser, tmp_path: Path
) -> None:
    page = made.page(tmp_path / "page.html", made.many(40))
    browser.open(page)
    browser.js("location.hash = '#code=TOK999&severity=error'")
    wait(browser, "document.getElementById('shown').textContent === '0 of 40 findings'")
    assert "TOK999" in browser.js("return document.getElementById('by-code').selectedOptions[0].textContent")
    browser.js("document.querySelector('#none-shown button').click()")
    assert texts(browser, "#shown") == ["40 findings"]


def test_an_opened_finding_is_in_the_address_and_back_closes_it(browser: driver.Browser, tmp_path: Path) -> None:
    page = made.page(tmp_path / "page.html", made.viewed(3))
    browser.look()
    browser.open(page)
    browser.js("document.querySelectorAll('table.findings a.small')[1].click()")
    wait(browser, "document.getElementById('viewer').open")
    assert state(browser) == "#rollout=run.jsonl:1&finding=TOK101.0.completion.2-4"
    address = browser.js("return location.href")
    browser.driver.back()
    wait(browser, CLOSED)
    browser.driver.forward()
    wait(browser, "document.getElementById('viewer').open")
    browser.driver.get("about:blank")
    browser.driver.get(address)
    wait(browser, "document.getElementById('viewer').open")
    assert texts(browser, "#viewer-title") == ["run.jsonl:1"]
    assert texts(browser, ".jump[aria-current=true] b") == ["TOK101"]
    assert browser.js("return document.activeElement.textContent") == "·Skin"
    browser.js("document.getElementById('close-viewer').click()")
    wait(browser, "location.hash === ''")


# --- causes ---------------------------------------------------------------------------------------------------


def caused() -> list[Result]:
    """A rollout with a cause, two findings that follow from it, and one apart; the row is not among the views."""
    place = Place("logs/run.jsonl", 0)
    around = Side((1, 2), ("so", " it"))
    sampled, prompt = Side((10, 11), (" Skin", "ny"), SAMPLED), Side((12,), (" Skinny",), NEXT_PROMPT)
    hit = Hit(
        Where.COMPLETION, 4, 6, "Two tokens come back as one.", 0, "merge", None, sampled, prompt, around, around
    )
    root = Finding("TOK101", Severity.ERROR, place, hit, headline="{n} re-tokenized")
    after = [
        Finding(
            code, Severity.ERROR, place, Hit(Where.PROMPT, 9, 10, "It departs.", turn), because_of=root.fingerprint
        )
        for code, turn in (("SEQ301", 1), ("SEQ301", 2))
    ]
    apart = Finding(
        "LPR505", Severity.WARNING, place, Hit(Where.ROW, 1, 3, "A placeholder is trained.", None, "0.0")
    )
    counts = {"turns": 3, "tokens": 90, "generated_tokens": 40}
    return [Result(place, Rollout(place, "slime"), (*after, root, apart), (), counts)]


def test_what_follows_from_a_finding_is_counted_with_it_and_linked(
    browser: driver.Browser, tmp_path: Path
) -> None:
    page = made.page(tmp_path / "page.html", caused())
    browser.look()
    browser.open(page)
    assert texts(browser, "#shown") == ["2 root findings; the other 2 of 4 follow from them"]
    assert texts(browser, "table.findings td:nth-child(3)") == ["TOK101", "LPR505"]
    assert texts(browser, "table.findings .chain") == ["explains SEQ301 in turn 1, SEQ301 in turn 2"]
    browser.js("document.getElementById('fold').click()")
    assert texts(browser, "#shown") == ["4 findings"]
    assert state(browser) == "#fold=no"
    choose(browser, "by-code", "SEQ301")
    browser.js("document.getElementById('fold').click()")
    assert texts(browser, "table.findings td:nth-child(3)") == ["SEQ301", "SEQ301"], "their root does not match"
    browser.js("document.querySelector('table.findings .chain a').click()")
    wait(browser, "document.querySelector('tr.detail')")
    assert "TOK101" in texts(browser, "table.findings tr:has(+ tr.detail)")[0], "the root is gone to"
    quiet(browser, page)


def test_a_cause_leads_to_its_findings(browser: driver.Browser, tmp_path: Path) -> None:
    browser.open(made.page(tmp_path / "page.html", caused()))
    assert texts(browser, ".headlines a")[0] == "1 completion re-tokenized"
    browser.js("document.querySelector('.headlines a').click()")
    assert state(browser) == "#headline=completions re-tokenized"
    assert texts(browser, "#shown") == ["1 root finding; the other 2 of 3 follow from them"]


def test_rows_show_both_sides_named_and_what_was_sampled_first(browser: driver.Browser, tmp_path: Path) -> None:
    browser.look()
    browser.open(made.page(tmp_path / "page.html", caused()))
    assert texts(browser, ".both .side") == ["sampled", "next prompt"]
    assert texts(browser, ".both .token") == [
        *("so", "·it", "·Skin", "ny", "so", "·it"),
        *("so", "·it", "·Skinny", "so", "·it"),
    ]
    colour = "return getComputedStyle(document.querySelector(`.both .${arguments[0]}`)).borderColor"
    assert browser.js(colour, "drift") == browser.js(colour, "today"), "a side is neither right nor wrong"
    assert "recorded" not in browser.js("return document.body.innerText")
    assert "canonical" not in browser.js("return document.body.innerText")


# --- keys and copies ------------------------------------------------------------------------------------------


def test_keys_are_listed_and_go_through_the_findings(browser: driver.Browser, tmp_path: Path) -> None:
    browser.look()
    browser.open(made.page(tmp_path / "page.html", made.viewed(2)))
    press(browser, "?")
    assert {"?", "/", "j", "k", "Esc"} <= set(texts(browser, "#keys kbd"))
    press(browser, "\ue00c")
    assert not browser.js("return document.getElementById('keys').open")
    at = "return document.activeElement.closest('tr')?.finding.at"
    press(browser, "j")
    first = browser.js(at)
    press(browser, "j")
    assert browser.js(at) != first
    press(browser, "k")
    assert browser.js(at) == first
    press(browser, "o")
    wait(browser, "document.getElementById('viewer').open")
    press(browser, "j")
    wait(browser, "document.getElementById('finding-number').textContent === 'finding 2 of 2'")
    press(browser, "j")
    wait(browser, "document.getElementById('viewer-title').textContent === 'run.jsonl:1'")
    assert texts(browser, "#finding-number") == ["finding 1 of 2"], "the next rollout's first"
    press(browser, "k")
    wait(browser, "document.getElementById('viewer-title').textContent === 'run.jsonl:0'")
    assert texts(browser, "#finding-number") == ["finding 2 of 2"]
    browser.js("document.getElementById('close-viewer').click()")
    wait(browser, CLOSED)
    press(browser, "/")
    press(browser, "j?")
    assert browser.js("return document.getElementById('find').value") == "j?", "in a text field a key is a letter"
    press(browser, "\ue00c")
    assert browser.js("return document.activeElement.id") != "find"


def click(tab: driver.Browser, selector: str) -> None:
    """A click as a person makes it: a page may copy only after one."""
    tab.js(
        "document.querySelector(arguments[0]).scrollIntoView({ block: 'center', behavior: 'instant' })", selector
    )
    tab.driver.find_element("css selector", selector).click()


@pytest.mark.parametrize("allowed", [True, False])
def test_commands_and_places_can_be_copied(browser: driver.Browser, tmp_path: Path, allowed: bool) -> None:
    browser.look()
    browser.open(made.page(tmp_path / "page.html", made.viewed(1)))
    refused = "writeText: () => Promise.reject(new Error('refused'))"
    allows = "writeText: (text) => { window.kept = text; return Promise.resolve(); }"
    browser.js(
        f"""Object.defineProperty(navigator, "clipboard", {{ value: {{ {allows if allowed else refused} }} }});
        document.addEventListener("copy", () => {{
            window.kept = getSelection().toString() || document.activeElement.value;
        }});"""
    )
    click(browser, ".next .copy")
    wait(browser, "document.querySelector('.next .copy').dataset.done === 'yes'")
    assert browser.js("return window.kept") == "tito-audit explain TOK101"
    assert texts(browser, "#said") == ["Copied the command"]
    click(browser, ".toggle")
    click(browser, ".detail .copy.worded")
    wait(browser, "window.kept.includes('#rollout=')")
    assert browser.js("return window.kept").endswith("#rollout=run.jsonl:0&finding=TOK101.0.completion.2-4")
    click(browser, "#copy-places .copy")
    wait(browser, "window.kept === 'logs/run.jsonl:0'")
    browser.js("window.kept = ''")
    click(browser, "table.findings a.small")
    wait(browser, "document.getElementById('viewer').open")
    click(browser, "#viewer-copy .copy")
    wait(browser, "window.kept === 'logs/run.jsonl:0'")


# --- charts ---------------------------------------------------------------------------------------------------


def test_charts_fill_their_places_and_no_bar_touches_the_frame(browser: driver.Browser, tmp_path: Path) -> None:
    page = made.page(tmp_path / "page.html", made.viewed())
    for width in WIDTHS:
        browser.look(width=width)
        browser.open(page)
        assert browser.js(CHARTS.read_text()) == []
        assert browser.js("return document.documentElement.scrollWidth") <= width
