"""The page of the `html` report in a browser: it opens from disk, asks for nothing, and can be read and used."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests import report_results
from tests.browser import driver, made
from tests.browser.made import HOSTILE
from tests.command import run
from tests.tiers import examples, some
from tito_audit.record.finding import Finding, Hit, Result, Severity, Side, Skip, Where
from tito_audit.record.rollout import Place, Rollout
from tito_audit.reports import report_named
from tito_audit.summary import Gate, RateCount, Summary
from tito_audit.viewer.model import Observed, ShownStretch, Swap, View, ViewSequence

ROOT = Path(__file__).resolve().parents[1]
TOY = ROOT / "fixtures" / "tokenizers" / "toy_bpe"
HERE = Path(__file__).resolve().parent
CONTRAST = HERE / "browser" / "contrast.js"
UNNAMED = HERE / "browser" / "unnamed.js"


STARTED = pytest.StashKey[driver.Browser]()


@pytest.fixture(scope="session")
def browser(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[driver.Browser]:
    """The browser of this process, which the first of the test files that import this starts."""
    if (earlier := request.session.stash.get(STARTED, None)) is not None:
        yield earlier
        return
    missing = driver.missing()
    if missing is not None:
        assert not driver.required(), f"a browser is required, and {missing}"
        pytest.skip(f"{missing}: nothing of the page was tried in a browser")
    with driver.started(tmp_path_factory.mktemp("chromium")) as started:
        request.session.stash[STARTED] = started
        yield started


@pytest.fixture(scope="session")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a real scan of the example logs, as the command writes it, for all files that import this."""
    page = tmp_path_factory.getbasetemp() / "examples.html"
    if not page.exists():
        command = ["scan", str(ROOT / "fixtures" / "formats"), "-t", str(TOY), "-q", "--report", f"html={page}"]
        assert run(*command) == (1, "", "")
    return page


def quiet(browser: driver.Browser, page: Path) -> None:
    """Nothing was complained of, and nothing but the page itself was asked for."""
    browser.listen()
    assert browser.complaints == []
    assert browser.requests == [page.resolve().as_uri()]
    assert not [line for line in browser.proxy.asked if "evil" in line]


def texts(browser: driver.Browser, selector: str) -> list[str]:
    return browser.js(
        "return [...document.querySelectorAll(arguments[0])].map(node => node.innerText.trim())", selector
    )


def choose(browser: driver.Browser, name: str, words: str) -> None:
    browser.js(
        """const select = document.getElementById(arguments[0]);
        select.value = [...select.options].find((one) => one.textContent.startsWith(arguments[1])).value;
        select.dispatchEvent(new Event("change", {bubbles: true}));""",
        name,
        words,
    )


def search(browser: driver.Browser, words: str) -> str:
    """What the page says was found, once a search is done."""
    done = """const [words, done] = arguments, shown = document.getElementById("shown");
        const find = document.getElementById("find");
        find.value = words;
        new MutationObserver((_, watch) => { watch.disconnect(); done(shown.textContent); })
            .observe(shown, {childList: true, characterData: true, subtree: true});
        find.dispatchEvent(new Event("input", {bubbles: true}));"""
    return str(browser.driver.execute_async_script(done, words))


def press(browser: driver.Browser, *keys: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser.driver).send_keys(*keys).perform()


def wait(browser: driver.Browser, code: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser.driver, 20, poll_frequency=0.02).until(lambda tab: tab.execute_script(f"return {code}"))


def test_the_page_of_a_real_audit_opens_from_disk_and_asks_for_nothing(
    browser: driver.Browser, scanned: Path
) -> None:
    browser.look()
    browser.open(scanned)
    number = len(texts(browser, "table.findings tbody tr"))
    assert number == 50
    assert texts(browser, "h1") == ["Failed"]
    assert re.search(r"\d+ findings? at or above error", texts(browser, ".verdict")[0])
    assert re.fullmatch(r"Failed · \d+ logs in formats · tito-audit", browser.js("return document.title"))
    assert browser.js("return document.querySelectorAll('figure svg .rect').length") > 3
    quiet(browser, scanned)


def test_findings_are_filtered_by_every_control_and_reset(browser: driver.Browser, tmp_path: Path) -> None:
    page = made.page(tmp_path / "page.html", made.many(400))
    browser.open(page)
    rows = browser.js
    assert texts(browser, "#shown") == ["400 findings"]
    choose(browser, "by-code", "TOK101")
    assert set(texts(browser, "table.findings tbody td:nth-child(3)")) == {"TOK101"}
    choose(browser, "by-cause", "resplit")
    assert texts(browser, "#shown") == ["0 of 400 findings"]
    rows("document.querySelector('.filters button[type=reset]').click()")
    wait(browser, "document.getElementById('shown').textContent === '400 findings'")
    rows("document.querySelector('input[value=error]').click()")
    assert "error" not in texts(browser, "table.findings tbody td:nth-child(2)")
    rows("document.querySelector('input[value=error]').click()")
    choose(browser, "by-file", "part-00003")
    assert {place.split(":")[0] for place in texts(browser, "table.findings tbody td:nth-child(4)")} == {
        "part-00003.jsonl"
    }
    choose(browser, "by-file", "all")
    choose(browser, "by-known", "known")
    assert 0 < len(texts(browser, ".known")) <= 50
    choose(browser, "by-known", "all")
    assert re.fullmatch(r"\d+ of 400 findings", search(browser, "ZÜRICH"))
    assert "Zürich" in texts(browser, "table.findings tbody tr")[0]
    assert set(texts(browser, "table.findings mark")) <= {"Zürich"}
    rows("document.querySelector('a[data-code=LPR505]').click()")
    wait(browser, "document.getElementById('by-code').value !== ''")
    assert set(texts(browser, "table.findings tbody td:nth-child(3)")) == {"LPR505"}
    quiet(browser, page)


def test_findings_are_sorted_and_paged_from_the_keyboard(browser: driver.Browser, tmp_path: Path) -> None:
    browser.open(made.page(tmp_path / "page.html", made.many(400)))
    severities = texts(browser, "table.findings tbody td:nth-child(2)")
    assert set(severities) == {"error"}
    assert browser.js("return document.querySelector('th[data-sort=severity]').ariaSort") == "descending"
    browser.js("document.querySelector('th[data-sort=code] button').focus()")
    press(browser, "\ue007")
    assert browser.js("return document.querySelector('th[data-sort=code]').ariaSort") == "ascending"
    assert set(texts(browser, "table.findings tbody td:nth-child(3)")) == {"LPR505"}
    press(browser, "\ue007")
    assert browser.js("return document.querySelector('th[data-sort=code]').ariaSort") == "descending"
    assert set(texts(browser, "table.findings tbody td:nth-child(3)")) == {"TPL203"}
    browser.js("document.querySelector('[aria-label=\"next page\"]').focus()")
    press(browser, " ")
    assert "page 2 of 8" in texts(browser, ".turn-pages")[0]
    browser.js("document.querySelector('.toggle').focus()")
    press(browser, "\ue007")
    assert browser.js("return document.activeElement.getAttribute('aria-expanded')") == "true"
    assert "tito-audit explain TPL203" in texts(browser, "tr.detail")[0]
    assert "--row" in texts(browser, "tr.detail")[0]
    assert len(texts(browser, "tr.detail .token.today")) >= 1


def test_a_rollout_opens_from_its_finding_and_shows_both_sides(browser: driver.Browser, tmp_path: Path) -> None:
    page = made.page(tmp_path / "page.html", made.viewed())
    browser.look()
    browser.open(page)
    browser.js("document.querySelector('table.findings .small').click()")
    wait(browser, "document.getElementById('viewer').open")
    assert texts(browser, "#viewer-title") == ["run.jsonl:0"]
    assert texts(browser, ".sequence h3") == ["turn 0 · completion", "turn 1 · prompt", "training row"]
    assert texts(browser, ".left .drift") == ["·Skin", "ny"]
    assert texts(browser, ".right .today") == ["·Skinny", "⏎", "⏎"]
    assert texts(browser, ".gap") == ["… 390 tokens left out …"]
    assert "1 more token" in texts(browser, ".right .nothing")[0]
    borders = """return [...document.querySelectorAll(arguments[0])].map(one => {
        const style = getComputedStyle(one);
        return style.borderTopStyle + " " + style.borderTopWidth; })"""
    assert set(browser.js(borders, ".sequence .drift")) == {"solid 2px"}, (
        "differences are not told by colour alone"
    )
    assert set(browser.js(borders, ".sequence .today")) == {"dashed 2px"}
    assert set(browser.js(borders, ".pair.same .left .token")) == {"solid 1px"}
    assert len(texts(browser, ".left .trained")) == 11
    assert browser.js("return document.activeElement.textContent") == "·Skin", "the finding's tokens are jumped to"
    assert texts(browser, ".jump[aria-current=true] b") == ["TOK101"]
    browser.js("document.querySelectorAll('.jump')[1].click()")
    assert texts(browser, ".here") == ["2", "3"]
    press(browser, "\ue00c")  # Escape takes the card first, then the rollout
    assert browser.js("return document.getElementById('tip').hidden")
    press(browser, "\ue00c")
    wait(browser, "!document.getElementById('viewer').open")
    wait(browser, "document.activeElement.classList.contains('small')")  # the focus comes back
    quiet(browser, page)


def test_a_sequence_without_known_differences_claims_nothing_of_another_side(
    browser: driver.Browser, tmp_path: Path
) -> None:
    """Perhaps nothing was compared with it."""
    page = made.page(tmp_path / "page.html", made.viewed())
    browser.look()
    browser.open(page)
    browser.js("document.querySelector('table.findings .small').click()")
    wait(browser, "document.getElementById('viewer').open")
    heads = texts(browser, ".columns div:last-child")
    assert heads == ["next prompt, template", "template", "nothing to compare with"]
    assert texts(browser, ".sequence:nth-of-type(2) .right .token") == ["Hi", "!"]
    assert "the same in: template" in texts(browser, ".sequence:nth-of-type(2) p")[0]
    assert texts(browser, ".sequence:last-of-type .left .token") == ["1", "2", "3"]
    assert texts(browser, ".sequence:last-of-type .right .token") == []


def test_a_token_says_what_it_is_on_focus_and_under_a_pointer(browser: driver.Browser, tmp_path: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    browser.look()
    browser.open(made.page(tmp_path / "page.html", made.viewed()))
    browser.js("document.querySelector('#rollouts-app tbody button').click()")
    wait(browser, "document.getElementById('viewer').open")
    press(browser, "n")
    assert texts(browser, "#tip dd")[:6] == ["102", "·Skin", "20 53 6b 69 6e", "-7.125", "trained", "assistant"]
    assert browser.js("return document.activeElement.getAttribute('aria-describedby')") == "tip"
    press(browser, "\ue014")  # to the right
    assert texts(browser, "#tip dd")[:2] == ["103", "ny"]
    box = browser.driver.find_elements(By.CSS_SELECTOR, ".left .token")[4]
    ActionChains(browser.driver).move_to_element(box).perform()
    wait(browser, "document.querySelector('#tip dd').textContent === '104'")
    assert "unknown" in texts(browser, "#tip dd")[3]
    press(browser, "\ue00c", "\ue00c")
    wait(browser, "!document.getElementById('viewer').open")


def test_rollouts_can_be_gone_through_and_linked_to(browser: driver.Browser, tmp_path: Path) -> None:
    page = made.page(tmp_path / "page.html", made.viewed(3))
    browser.open(page)
    browser.js("location.hash = '#rollout=run.jsonl:1'")
    wait(browser, "document.getElementById('viewer').open")
    assert texts(browser, "#viewer-title") == ["run.jsonl:1"]
    browser.js("document.getElementById('next-rollout').click()")
    wait(browser, "document.getElementById('viewer-title').textContent === 'run.jsonl:2'")
    assert browser.js("return document.getElementById('next-rollout').disabled")
    assert browser.js("return location.hash") == "#rollout=run.jsonl:2"
    browser.js("document.getElementById('close-viewer').click()")
    wait(browser, "location.hash === ''")


def test_a_rollout_opens_where_there_is_something_to_see(browser: driver.Browser, tmp_path: Path) -> None:
    ids, place = tuple(range(4_000)), Place("logs/run.jsonl", 0)
    swaps = (Swap(3000, 3001, (7,), ("7",), ("37",)), Swap(3900, 3901, (8,), ("8",), ("38",)))
    pieces = tuple(f"{number} " for number in ids)
    stretch = ShownStretch(0, ids, pieces, tuple(piece.encode().hex() for piece in pieces))
    view = View((), (ViewSequence(Where.COMPLETION, 0, len(ids), (stretch,), swaps),))
    hit = Hit(Where.COMPLETION, 1000, 1002, "Two tokens.", 0, "merge")
    finding = Finding("TOK101", Severity.ERROR, place, hit)
    observed = Observed(made.measures(), view)
    counts = {"turns": 1, "tokens": 4000, "generated_tokens": 4000}
    result = Result(place, Rollout(place, "slime"), (finding,), (), counts, observed=observed)
    browser.look()
    browser.open(made.page(tmp_path / "page.html", [result]))
    at = """const one = document.querySelector(arguments[0]).getBoundingClientRect();
        const pane = document.getElementById("viewer-tokens").getBoundingClientRect();
        return (one.top - pane.top) / pane.height"""
    browser.js("document.querySelector('#rollouts-app tbody button').click()")
    wait(browser, "document.querySelector('#viewer-tokens .drift')")
    assert 0 < browser.js(at, ".drift") < 0.5, "the first difference is near the top"
    assert browser.js("return document.activeElement.id") == "viewer-title"
    browser.js("document.getElementById('close-viewer').click()")
    browser.js("document.querySelector('table.findings .small').click()")
    wait(browser, "document.querySelector('#viewer-tokens .here')")
    assert 0 < browser.js(at, ".here") < 1, "the finding that it was opened from"
    browser.js("document.getElementById('viewer').dispatchEvent(new Event('close'))")  # said late of the first
    assert 0 < browser.js(at, ".here") < 1, "it stays open"


def test_the_card_of_a_token_leaves_what_stands_in_its_place_in_sight(
    browser: driver.Browser, tmp_path: Path
) -> None:
    for width in (400, 1280):
        browser.look(width=width)
        browser.open(made.page(tmp_path / "page.html", made.viewed()))
        browser.js("document.querySelector('#rollouts-app tbody button').click()")
        wait(browser, "document.getElementById('viewer').open")
        press(browser, "n")
        over = """const tip = document.getElementById("tip").getBoundingClientRect();
            return [...document.querySelectorAll(".pair.differs .today")].slice(0, 1).some((one) => {
                const at = one.getBoundingClientRect();
                return at.left < tip.right && tip.left < at.right && at.top < tip.bottom && tip.top < at.bottom;
            })"""
        assert texts(browser, "#tip dd")
        assert not browser.js(over)


def hostile() -> Iterator[Result]:
    """Results whose every text tries to act."""
    place = Place(f"logs/{HOSTILE}.jsonl", 3, 1)
    stretch = ShownStretch(
        0, (1, 2), (HOSTILE, "<b>"), (HOSTILE, "00"), (-1.0, None), (True, False), (HOSTILE, HOSTILE)
    )
    swap = Swap(0, 1, (3,), (HOSTILE,), (HOSTILE,), 1, HOSTILE, HOSTILE)
    sequences = (ViewSequence(Where.ROW, None, 2, (stretch,), (swap,), HOSTILE),)
    measures = made.measures()
    measures.roles[HOSTILE] = (5, 5)
    observed = Observed(measures, View((HOSTILE,) * 2, sequences))
    side = Side((1, 2), (HOSTILE, HOSTILE), HOSTILE)
    hit = Hit(Where.ROW, 0, 2, HOSTILE, None, HOSTILE, None, side, side, side, side)
    cause = Finding(HOSTILE, Severity.ERROR, place, hit, HOSTILE, headline=HOSTILE)
    after = replace(cause, headline=HOSTILE, because_of=cause.fingerprint)
    skips = (Skip(HOSTILE, HOSTILE),)
    counts = {"turns": 1, "tokens": 9, "generated_tokens": 9}
    yield Result(place, Rollout(place, HOSTILE), (cause, after), skips, counts, (HOSTILE,), observed=observed)


@pytest.mark.parametrize("packed", [False, True])
def test_hostile_words_in_every_field_do_nothing_and_are_seen(
    browser: driver.Browser, tmp_path: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if packed:
        monkeypatch.setattr("tito_audit.reports._html.page.MAX_PLAIN_BLOCK", 0)
    summary = Summary(files=[f"logs/{HOSTILE}.jsonl"], tokenizer=HOSTILE, encoder=HOSTILE, notices=[HOSTILE])
    rates = (RateCount(HOSTILE, 1, 1, 1.0, True),)
    fixed = (report_results.Fixed(HOSTILE, HOSTILE, HOSTILE, 1, HOSTILE),)
    summary.gate = Gate(True, ("1 error", HOSTILE), "error", 1, rates, HOSTILE, 1, fixed)
    texts_of_rules = {"titles": {HOSTILE: HOSTILE}, "docs": {HOSTILE: f"x\n\n## {HOSTILE}\n{HOSTILE}"}}
    page = made.page(tmp_path / "page.html", hostile(), summary, **texts_of_rules)
    browser.look()
    browser.open(page)
    title = browser.js("return document.title")
    assert title.startswith("Failed · ")
    browser.js("for (const one of document.querySelectorAll('details')) one.open = true")
    browser.js(
        "document.querySelector('.toggle').click(); document.querySelector('table.findings .small').click()"
    )
    wait(browser, "document.getElementById('viewer').open && document.querySelector('#viewer-tokens .token')")
    press(browser, "n")
    assert "javascript:window.owned=6.jsonl:3[1]" in texts(browser, "#viewer-title")[0]
    for place in (
        "#viewer-tokens",
        "#tip",
        "tr.detail",
        ".because",
        "table.rules",
        "#viewer-line",
        "table.causes",
        ".headlines",
        ".next",
        ".both .side",
        ".chain",
    ):
        assert "</script><script>window.owned=1" in " ".join(texts(browser, place)), place
    shown = browser.js("return document.body.textContent")
    assert "\\u202eturned\\u202c \\u2028" in shown
    acting = set("\x00\x07\x1b\x9b\u202e\u2028") | {chr(code) for code in range(0xD800, 0xE000)}
    assert not acting & set(re.sub(r"\\ud83d", "", shown))
    assert browser.js("return window.owned === undefined && document.title === arguments[0]", title)
    odd = """return document.querySelectorAll(
        'img, svg[onload], [autofocus], [onfocus], iframe, a[href^="javascript"]').length"""
    assert browser.js(odd) == 0
    assert browser.js("return document.querySelectorAll('script:not([data-kind])').length") == 1
    quiet(browser, page)


def test_the_policy_stops_a_script_that_got_in_all_the_same(browser: driver.Browser, tmp_path: Path) -> None:
    browser.open(made.page(tmp_path / "page.html", made.viewed(1)))
    browser.js(
        """const script = document.createElement("script");
        script.textContent = "window.owned = 1";
        document.body.append(script);
        const image = "<img src='http://evil.invalid/x.png' onerror='window.owned = 2'>";
        document.body.insertAdjacentHTML("beforeend", image);
        try { fetch("http://evil.invalid/").catch(() => 0) } catch { }"""
    )
    wait(browser, "document.querySelector('img').complete")
    assert browser.js("return window.owned") is None
    browser.listen()
    assert any("Content Security Policy" in words for words in browser.complaints)
    assert not [line for line in browser.proxy.asked if "evil" in line]


def test_a_hundred_thousand_findings_stay_usable(browser: driver.Browser, tmp_path: Path) -> None:
    number = examples(4_000, 100_000)
    page = made.page(tmp_path / "page.html", made.many(number))
    assert page.stat().st_size < 160 * number
    browser.look()
    browser.open(page, wait=120)
    assert texts(browser, "#shown") == [f"{number:,} findings"]
    assert len(texts(browser, "table.findings tbody tr")) == 50
    timed = "const begun = performance.now(); %s; return performance.now() - begun"
    search(browser, "wizards quietly")
    assert re.fullmatch(rf"[\d,]+ of {number:,} findings", search(browser, "café"))
    for click in ("th[data-sort=tokens] button", "[aria-label='last page']", "input[value=note]"):
        took = browser.js(timed % f'document.querySelector("{click}").click()')
        assert took < 5_000, f"{click} took {took:.0f} ms"
    quiet(browser, page)


@pytest.mark.parametrize(
    ("width", "dark"),
    some([(400, False), (1280, False), (400, True), (1280, True)], 2),
    ids=lambda value: {False: "light", True: "dark"}[value] if isinstance(value, bool) else str(value),
)
def test_the_page_can_be_read_at_both_widths_and_in_both_schemes(
    browser: driver.Browser, tmp_path: Path, width: int, dark: bool
) -> None:
    folder = Path(os.environ.get("TITO_AUDIT_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{width}-{'dark' if dark else 'light'}.png"
    text = report_results.golden(report_named("html"))
    fixed = tmp_path / "fixed.html"
    fixed.write_text(text, encoding="utf-8", errors="backslashreplace")
    viewed = made.page(tmp_path / "viewed.html", [*made.viewed(), *made.many(200)])
    browser.look(width=width, dark=dark)
    for page in (fixed, viewed):
        browser.open(page)
        browser.js("for (const one of document.querySelectorAll('details')) one.open = true")
        browser.js("document.querySelector('.toggle').click()")
        browser.picture(folder / f"{page.stem}-{name}")
        assert browser.js(CONTRAST.read_text()) == []
        assert browser.js(UNNAMED.read_text()) == []
        assert browser.js("return document.documentElement.scrollWidth") <= width
        ids = browser.js("return [...document.querySelectorAll('[id]')].map((node) => node.id)")
        assert len(ids) == len(set(ids))
        assert (
            browser.js("return [...document.querySelectorAll('h1, h2, h3')].map((node) => node.tagName)")[0]
            == "H1"
        )
    browser.js("document.querySelector('#rollouts-app tbody button').click()")
    wait(browser, "document.getElementById('viewer').open")
    press(browser, "n")
    browser.picture(folder / f"rollout-{name}", whole=False)
    assert browser.js(CONTRAST.read_text()) == []
    assert browser.js("return document.getElementById('viewer').scrollWidth") <= width
    background = browser.js("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is not dark
    assert (folder / f"rollout-{name}").stat().st_size > 5_000
    quiet(browser, viewed)


def test_the_colours_can_be_chosen_and_a_print_leaves_the_controls_out(
    browser: driver.Browser, scanned: Path
) -> None:
    browser.look(dark=False)
    browser.open(scanned)
    backgrounds = []
    for _ in range(3):
        browser.js("document.getElementById('theme').click()")
        backgrounds.append(browser.js("return getComputedStyle(document.body).backgroundColor"))
    assert backgrounds[0] == backgrounds[2] != backgrounds[1]
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    shown = """return ['.filters', '.top', 'h1', '.rules', 'table.findings']
        .map((one) => document.querySelector(one).checkVisibility())"""
    assert browser.js(shown) == [False, False, True, True, True]
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_without_scripts_the_page_says_what_is_missing_and_shows_the_rest(
    browser: driver.Browser, scanned: Path
) -> None:
    browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.driver.get(scanned.resolve().as_uri())
        body = browser.driver.find_element("tag name", "body").text
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert "need JavaScript" in body
    assert "Failed" in body
    assert "Drift by turn" in body
