"""The page of the `html` report in a browser: it opens from disk, asks for nothing, and can be read and used."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests import report_results
from tests.apart import SHARED
from tests.browser import driver, made
from tests.browser.made import HOSTILE
from tests.browser.scene import FIND, Stage, play, scenes
from tests.command import run
from tests.tiers import crossed, examples, some
from tests.world import ROOT, TOY
from tito_audit.record.finding import NEXT_PROMPT, SAMPLED, Finding, Hit, Result, Severity, Side, Skip, Where
from tito_audit.record.rollout import Place, Rollout
from tito_audit.reports import report_named
from tito_audit.summary import Gate, RateCount, Summary
from tito_audit.viewer.model import Observed, ShownStretch, Swap, View, ViewSequence

BROWSER = ROOT / "tests" / "browser"
CONTRAST = BROWSER / "contrast.js"
UNNAMED = BROWSER / "unnamed.js"
WIDTHS = (400, 1280, 1920)
REAL = Path(os.environ.get("TITO_AUDIT_TOKENIZERS") or SHARED / "tokenizers")
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


def test_the_page_of_a_real_audit_opens_from_disk_and_asks_for_nothing(
    browser: driver.Browser, scanned: Path
) -> None:
    browser.look()
    browser.open(scanned)
    assert len(browser.texts("table.findings tbody tr")) == 50
    assert browser.texts("h1") == ["Failed"]
    assert re.search(r"\d+ findings? at or above error", browser.texts(".verdict")[0])
    assert re.fullmatch(r"Failed · \d+ logs in formats · tito-audit", browser.js("return document.title"))
    assert browser.js("return document.querySelectorAll('figure svg .rect').length") > 3
    quiet(browser, scanned)


def links(browser: driver.Browser) -> list[str]:
    """The links to the tokens of every finding in the page, through all pages of the table."""
    addresses: list[str] = browser.js(
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


def all_open_in_sight(browser: driver.Browser, page: Path, number: int) -> None:
    """Random findings of a page are in sight once opened, at every width; in `make test` each at one width."""
    browser.look()
    browser.open(page)
    with_tokens = [link for link in links(browser) if ".log." not in link and "finding=REC" not in link]
    chosen = random.Random(25).sample(with_tokens, min(number, len(with_tokens)))
    assert chosen
    pairs = crossed(WIDTHS, chosen)
    for width in WIDTHS:
        browser.js("document.getElementById('close-viewer').click()")
        browser.look(width=width)
        shown = [link for at, link in pairs if at == width]
        assert browser.driver.execute_async_script((BROWSER / "opened.js").read_text(), shown) == []


@pytest.mark.shared
@pytest.mark.parametrize(("model", "number"), some([("smollm2", 8), ("gemma-3", 8), ("qwen2.5-coder", 9)], 1))
def test_findings_of_real_logs_are_in_sight_when_opened(
    browser: driver.Browser, tmp_path: Path, model: str, number: int
) -> None:
    log, tokenizer = SHARED / "rollouts" / model / "retok.jsonl.gz", REAL / model
    for needed in (log, tokenizer):
        if not needed.exists():
            pytest.skip(f"{needed} is not here: no finding of {model} was opened")
    page = tmp_path / "page.html"
    run("scan", str(log), "-t", str(tokenizer), "-q", "--fail-on", "never", "--report", f"html={page}")
    all_open_in_sight(browser, page, number)


def test_findings_of_the_example_logs_are_in_sight_when_opened(browser: driver.Browser, scanned: Path) -> None:
    all_open_in_sight(browser, scanned, examples(6, 25))


def long() -> list[Result]:
    """A rollout of many tokens with two differences near its end, and a finding before them."""
    ids, place = tuple(range(4_000)), Place("logs/run.jsonl", 0)
    swaps = (Swap(3000, 3001, (7,), ("7",), ("37",)), Swap(3900, 3901, (8,), ("8",), ("38",)))
    pieces = tuple(f"{number} " for number in ids)
    stretch = ShownStretch(0, ids, pieces, tuple(piece.encode().hex() for piece in pieces))
    view = View((), (ViewSequence(Where.COMPLETION, 0, len(ids), (stretch,), swaps),))
    hit = Hit(Where.COMPLETION, 1000, 1002, "Two tokens.", 0, "merge")
    finding = Finding("TOK101", Severity.ERROR, place, hit)
    observed = Observed(made.measures(), view)
    counts = {"turns": 1, "tokens": 4000, "generated_tokens": 4000}
    return [Result(place, Rollout(place, "slime"), (finding,), (), counts, observed=observed)]


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


PAGES: dict[str, Callable[..., Iterable[Result]]] = {
    "caused": caused,
    "long": long,
    "many": made.many,
    "viewed": made.viewed,
}
"""The results of a page that a scene opens, by its name; some take their number."""


@pytest.mark.parametrize(("file", "scene"), scenes("page"))
def test_a_page_is_used_as_a_scene_says(browser: driver.Browser, tmp_path: Path, file: Path, scene: str) -> None:
    page = tmp_path / "page.html"

    def opens(name: str, *number: str) -> Path:
        return made.page(page, PAGES[name](*map(int, number)))

    play(file, scene, Stage(browser, opens, lambda: quiet(browser, page)))


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
    browser.wait("document.getElementById('viewer').open && document.querySelector('#viewer-tokens .token')")
    browser.press("n")
    assert "javascript:window.owned=6.jsonl:3[1]" in browser.texts("#viewer-title")[0]
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
        assert "</script><script>window.owned=1" in " ".join(browser.texts(place)), place
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
    browser.wait("document.querySelector('img').complete")
    assert browser.js("return window.owned") is None
    browser.listen()
    assert any("Content Security Policy" in words for words in browser.complaints)
    assert not [line for line in browser.proxy.asked if "evil" in line]


def test_a_hundred_thousand_findings_stay_usable(browser: driver.Browser, tmp_path: Path) -> None:
    number = examples(4_000, 100_000)
    page = made.page(tmp_path / "page.html", made.many(number))
    assert page.stat().st_size < 160 * number
    browser.look()
    browser.open(page)
    assert browser.texts("#shown") == [f"{number:,} findings"]
    assert len(browser.texts("table.findings tbody tr")) == 50
    timed = "const begun = performance.now(); %s; return performance.now() - begun"
    shown = [browser.driver.execute_async_script(FIND, words) for words in ("wizards quietly", "café")]
    assert re.fullmatch(rf"[\d,]+ of {number:,} findings", shown[1])
    for click in ("th[data-sort=tokens] button", "[aria-label='last page']", "input[value=note]"):
        took = browser.js(timed % f'document.querySelector("{click}").click()')
        assert took < 5_000, f"{click} took {took:.0f} ms"
    quiet(browser, page)


def assert_readable(browser: driver.Browser, width: int) -> None:
    """Every text stands out, every control has a name, no id is there twice, nothing is wider than the window."""
    assert browser.js(CONTRAST.read_text()) == []
    assert browser.js(UNNAMED.read_text()) == []
    assert browser.js("return document.documentElement.scrollWidth") <= width
    ids = browser.js("return [...document.querySelectorAll('[id]')].map((node) => node.id)")
    assert len(ids) == len(set(ids))


def looks(narrow: int, wide: int) -> pytest.MarkDecorator:
    """A window of both widths in both schemes of colours; in `make test` two of these."""
    cases = [(width, dark) for dark in (False, True) for width in (narrow, wide)]
    named = [pytest.param(*case, id=f"{case[0]}-{'dark' if case[1] else 'light'}") for case in some(cases, 2)]
    return pytest.mark.parametrize(("width", "dark"), named)


@looks(400, 1280)
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
        assert_readable(browser, width)
        assert (
            browser.js("return [...document.querySelectorAll('h1, h2, h3')].map((node) => node.tagName)")[0]
            == "H1"
        )
    browser.js("document.querySelector('#rollouts-app tbody button').click()")
    browser.wait("document.getElementById('viewer').open")
    browser.press("n")
    browser.picture(folder / f"rollout-{name}", whole=False)
    assert browser.js(CONTRAST.read_text()) == []
    assert browser.js("return document.getElementById('viewer').scrollWidth") <= width
    background = browser.js("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is not dark
    assert (folder / f"rollout-{name}").stat().st_size > 5_000
    quiet(browser, viewed)


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
