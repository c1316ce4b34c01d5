"""The page of rescore in a browser: it opens from disk, asks for nothing, shows hostile words, and can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.made import HOSTILE
from tests.rescoring import OPEN, call, log_of, rescored, token_ids
from tests.test_html_browser import CONTRAST, UNNAMED, browser, quiet
from tests.test_rescore import SAMPLED
from tito_audit.cli.rescore import verdict
from tito_audit.rescore.summary import page

__all__ = ["browser"]


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_can_be_read_and_does_nothing_that_a_log_says(browser, tmp_path: Path, width: int, dark: bool):
    prompt = token_ids(OPEN)
    drifts, gone = call(prompt, token_ids(SAMPLED)), {"prompt_ids": prompt, "completion_ids": [10**6]}
    _, run = rescored(log_of(tmp_path, [{"calls": [drifts]}, {"calls": [gone]}]))
    run.summary.model = HOSTILE
    run.summary.explanations[HOSTILE] += 1
    file = tmp_path / "rescored.html"
    text = page(run.summary, verdict(run.summary), 5, lambda ids: f"{run.pieces(ids)}{HOSTILE}")
    file.write_text(text, encoding="utf-8", errors="backslashreplace")
    browser.look(width=width, dark=dark)
    browser.open(file)
    assert browser.js(CONTRAST.read_text()) == []
    assert browser.js(UNNAMED.read_text()) == []
    assert browser.js("return document.documentElement.scrollWidth") <= width
    assert browser.js("return document.querySelectorAll('svg rect').length") > 5
    assert browser.js("return document.querySelectorAll('script, img, iframe, a').length") == 0
    background = browser.js("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is not dark
    quiet(browser, file)
