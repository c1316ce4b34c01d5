"""Pages as their users meet them: a step a line, and beneath it what is seen then.

`tests/browser/scenes/*.txt` hold scenes. A scene has a title, `# …`, remarks, `// …`, and steps:

    open PAGE               a page by its name and what else is said of it
    look WIDTH [dark]       the size of the window, and its colours
    again, back, forward    the address opened anew; the page before; the page after
    hash ADDRESS            go to a part of the page
    click, tap, focus, hover SELECTOR
                            `tap` as a person clicks: a page may copy only after that
    press KEY …             keys by their name or letter
    choose ID WORDS         the option that begins so
    find WORDS              search the findings: what the page says of it
    search WORDS [| as]     search a site, the words read as text or ids: what the page says of it
    until EXPRESSION        wait until this is true, or until the viewer is `opened` or `closed`
    texts, distinct, count SELECTOR
                            the text of each element; the different texts, sorted; how many there are
    styles SELECTOR | PROPERTY …
                            the different values of properties
    within SELECTOR | FROM TO
                            whether it stands there in the height of the viewer
    covers SELECTOR | OTHER whether an element lies over the first of others
    js EXPRESSION           its value, as JSON
    address                 the part of the page that the address names
    clipboard allowed       take what is copied, by the browser or where that is `refused`
    media print             as it would be printed; alone, as it is shown
    check NAME              what `tests/browser/NAME.js` complains of
    quiet                   nothing was complained of, and nothing but the own files was asked for

A text of several lines stands on one with `⏎` between, an empty one as `∅`, a time as `0.0 s`.
`SELECTOR @2` is the third element, `@-1` the last. `UPDATE_GOLDENS=1` writes what is seen today.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest

from tests.browser.driver import Browser

__all__ = ["Stage", "play", "scenes"]

HERE = Path(__file__).resolve().parent
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Right": "\ue014", "Space": " "}
VIEWER = {"opened": "document.getElementById('viewer')?.open", "closed": "!document.body.matches('.viewing')"}
"""Whether it is closed, and the page knows it: the browser says so later."""
CLOCK = re.compile(r"in [\d.]+ s$")
ALL = "const all = [...document.querySelectorAll(arguments[0])];"
SCRIPTS = {
    "click": "all.at(arguments[1]).click()",
    "focus": "all.at(arguments[1]).focus()",
    "texts": "return all.map((node) => node.innerText.trim())",
    "distinct": "return [...new Set(all.map((node) => node.innerText.trim()))].sort()",
    "count": "return [`${all.length}`]",
    "styles": """return [...new Set(all.map((node) => arguments[1].split(" ")
        .map((name) => getComputedStyle(node)[name]).join(" ")))].sort()""",
    "within": """const [from, to] = arguments[1].split(" "), box = all[0].getBoundingClientRect();
        const pane = document.getElementById("viewer-tokens").getBoundingClientRect();
        const at = (box.top - pane.top) / pane.height;
        return [at > from && at < to ? "yes" : "no"]""",
    "covers": """const over = all[0].getBoundingClientRect();
        const at = document.querySelector(arguments[1]).getBoundingClientRect();
        const beside = at.left >= over.right || over.left >= at.right;
        return [beside || at.top >= over.bottom || over.top >= at.bottom ? "no" : "yes"]""",
}
CHOOSE = """const select = document.getElementById(arguments[0]);
    select.value = [...select.options].find((one) => one.textContent.startsWith(arguments[1])).value;
    select.dispatchEvent(new Event("change", {bubbles: true}));"""
FIND = """const [words, done] = arguments, shown = document.getElementById("shown");
    const find = document.getElementById("find");
    find.value = words;
    new MutationObserver((_, watch) => { watch.disconnect(); done(shown.textContent); })
        .observe(shown, {childList: true, characterData: true, subtree: true});
    find.dispatchEvent(new Event("input", {bubbles: true}));"""
SEARCH = """delete document.documentElement.dataset.searched;
    document.getElementById("search-words").value = arguments[0];
    document.getElementById("search-as").value = arguments[1];
    document.getElementById("search-form").requestSubmit();"""
CLIPBOARD = {
    "allowed": "(text) => { window.kept = text; return Promise.resolve(); }",
    "refused": "() => Promise.reject(new Error('refused'))",
}
COPIES = """Object.defineProperty(navigator, "clipboard", { value: { writeText: WRITE } });
    document.addEventListener("copy", () => {
        window.kept = getSelection().toString() || document.activeElement.value;
    });"""


class Stage:
    """A browser, the pages that a scene may open, and how it is told that nothing else was asked for."""

    def __init__(self, browser: Browser, opens: Callable[..., Path | str], quiet: Callable[[], None]) -> None:
        self.browser = browser
        self.opens = opens
        self.quiet = quiet

    def act(self, step: str) -> Iterable[str]:
        """Do a step; what is seen then, a line each."""
        name, _, rest = step.partition(" ")
        if name in SCRIPTS:
            selector, _, more = rest.partition(" | ")
            selector, _, at = selector.partition(" @")
            answer: Sequence[str] = self.browser.js(f"{ALL} {SCRIPTS[name]}", selector, more or int(at or 0)) or ()
            return answer[int(at) :][:1] if at else answer
        return getattr(self, f"_{name}")(rest) or ()

    def _open(self, page: str) -> None:
        self.browser.open(self.opens(*page.split()))

    def _look(self, words: str) -> None:
        width, _, dark = words.partition(" ")
        self.browser.look(width=int(width), dark=bool(dark))

    def _again(self, _: str) -> None:
        self.browser.open(self.browser.js("return location.href"))

    def _back(self, _: str) -> None:
        self.browser.driver.back()

    def _forward(self, _: str) -> None:
        self.browser.driver.forward()

    def _hash(self, address: str) -> None:
        self.browser.js("location.hash = arguments[0]", address)

    def _tap(self, selector: str) -> None:
        into_view = "document.querySelector(arguments[0]).scrollIntoView({ block: 'center', behavior: 'instant' })"
        self.browser.js(into_view, selector)
        self.browser.driver.find_element("css selector", selector).click()

    def _hover(self, selector: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        selector, _, at = selector.partition(" @")
        box = self.browser.driver.find_elements("css selector", selector)[int(at or 0)]
        ActionChains(self.browser.driver).move_to_element(box).perform()

    def _press(self, keys: str) -> None:
        self.browser.press(*(KEYS.get(key, key) for key in keys.split()))

    def _choose(self, words: str) -> None:
        self.browser.js(CHOOSE, *words.split(" ", 1))

    def _find(self, words: str) -> list[str]:
        return [self.browser.driver.execute_async_script(FIND, words)]

    def _search(self, words: str) -> list[str]:
        words, _, read_as = words.partition(" | ")
        self.browser.js(SEARCH, words, read_as)
        self.browser.wait("document.documentElement.dataset.searched")
        return [self.browser.js("return document.getElementById('search-state').textContent")]

    def _until(self, expression: str) -> None:
        self.browser.wait(VIEWER.get(expression, expression))

    def _js(self, expression: str) -> list[str]:
        return [json.dumps(self.browser.js(f"return {expression}"), ensure_ascii=False)]

    def _address(self, _: str) -> list[str]:
        return [self.browser.js("return decodeURIComponent(location.hash)")]

    def _clipboard(self, how: str) -> None:
        self.browser.js(COPIES.replace("WRITE", CLIPBOARD[how]))

    def _media(self, kind: str) -> None:
        self.browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": kind})

    def _check(self, name: str) -> Any:
        return self.browser.js((HERE / f"{name}.js").read_text())

    def _quiet(self, _: str) -> None:
        self.quiet()


def scenes(name: str) -> list[Any]:
    """Each scene of a file, with the file, as a case of a test that is named by its title."""
    file = HERE / "scenes" / f"{name}.txt"
    parts = re.split(r"\n(?=# )", file.read_text(encoding="utf-8").rstrip("\n"))
    return [pytest.param(file, part.rstrip("\n"), id=part.partition("\n")[0][2:]) for part in parts]


def play(file: Path, scene: str, stage: Stage) -> None:
    """The scene goes as it is written."""
    today: list[str] = []
    for line in scene.split("\n"):
        if not line or line.startswith("  "):
            continue
        today.append(line)
        if not line.startswith(("# ", "// ")):
            try:
                seen = stage.act(line)
            except Exception as error:
                error.add_note(f"in the step: {line}")
                raise
            today += ["  " + (CLOCK.sub("in 0.0 s", text).replace("\n", "⏎") or "∅") for text in seen]
    if os.environ.get("UPDATE_GOLDENS"):
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(scene, "\n".join(today), 1), encoding="utf-8")
        return
    wanted = [line for line in scene.split("\n") if line]
    assert today == wanted, "UPDATE_GOLDENS=1 renews the scene:\n" + "\n".join(unified_diff(wanted, today))
