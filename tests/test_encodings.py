"""Pages on streams of every encoding: each is shown, boxes align, and marks have a form in ASCII."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

from tests.command import written
from tests.ready import program
from tests.tables import stored, table
from tests.tiers import DEEP, some
from tests.world import ROOT, TOY
from tito_audit.terminal.encoding import ERROR_HANDLER, as_encoded

ENCODINGS = ("ascii", "latin-1", "cp1252", "cp437", "cp850", "cp866", "cp932", "cp936", "koi8-r", "utf-16-le")
ODD = "Grüße, 東京 👩‍🚀 \u202e\x1b[2J\t{e\u0301}\n– “quoted”"

PAGES = stored(__file__, "PAGES")
JSON_PAGES = {
    "scan": "scan {log} -t {toy} -f json",
    "show": "show {log} --row 0 -t {toy} -f json",
    "repair": "repair {log} --dry-run -t {toy} --with canonical --unsafe -f json",
    "inspect": "inspect {log} -f json",
    "template": "template {toy} -f json",
    "list": "list rules -f json",
    "explain": "explain TOK101 -f json",
    "schema": "config --schema",
}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of every kind of character, sampled one byte or one character each."""
    from tito_audit.tokens.load import load_tokenizer

    tokenizer = load_tokenizer(str(TOY))
    rows = []
    for text in ("It rains in Oslo. ", ODD, " The tower is 330 metres tall…"):
        single = [number for char in text for number in tokenizer.encode(char).tolist()]
        rows.append({"token_ids": single, "loss_mask": [1] * len(single), "logprobs": [-0.5] * len(single)})
    return written(tmp_path_factory.mktemp("encodings") / "a.jsonl", rows)


def printed(page: str, log: Path, encoding: str) -> tuple[int, str, str]:
    """Exit code, and what came out on both streams, decoded: an error if it is not in the encoding."""
    words = [word.format(log=log, toy=TOY) for word in page.split()]
    env = {**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "100", "PYTHONUTF8": "0"}
    ran = subprocess.run([*program(), *words], cwd=ROOT, env=env, capture_output=True, check=False)
    return ran.returncode, ran.stdout.decode(encoding), ran.stderr.decode(encoding)


MARK = re.compile(r"\\u2[0-59][0-9a-f]{2}|\\xb7|\\xd7")
"""An escape instead of a mark."""


@pytest.mark.parametrize("page", PAGES)
def test_every_page_is_shown_in_every_encoding(page: str, log: Path) -> None:
    code, whole, complaint = printed(PAGES[page], log, "utf-8")
    assert whole or complaint
    # In `make test` ASCII and one of the others for each page, all of them over all pages.
    others = ENCODINGS[1:]
    for encoding in ENCODINGS if DEEP else ("ascii", others[list(PAGES).index(page) % len(others)]):
        ended, out, err = printed(PAGES[page], log, encoding)
        assert ended == code, err
        assert "Traceback" not in err
        assert "UnicodeEncodeError" not in err
        for line in out.splitlines():
            assert not MARK.search(line.replace("\\u202e", "").replace("\\u200d", "")), (encoding, line)
        same = (abs(len(out.splitlines()) - len(whole.splitlines())), abs(len(err) - len(complaint)))
        assert same <= (4, 40), "longer tokens may need another line"


@pytest.mark.parametrize("page", JSON_PAGES)
def test_json_is_the_same_value_in_every_encoding(page: str, log: Path) -> None:
    code, whole, _ = printed(JSON_PAGES[page], log, "utf-8")
    encodings = ("ascii", "cp1252", "cp932")
    for encoding in encodings if DEEP else encodings[list(JSON_PAGES).index(page) % 3 :][:1]:
        ended, out, err = printed(JSON_PAGES[page], log, encoding)
        assert (ended, err) == (code, "")
        assert out.isascii()
        assert without_times(json.loads(out)) == without_times(json.loads(whole))


@pytest.mark.parametrize("report", ["junit", "html", "markdown"])
def test_reports_with_entities_keep_their_text(report: str, log: Path) -> None:
    pages = [printed(f"scan {{log}} -t {{toy}} -f {report}", log, encoding)[1] for encoding in ("utf-8", "ascii")]
    assert pages[1].isascii()
    apart = [re.sub(r"\d+\.\d+|[\d,]+ tokens/s|T[\d:]+", "", unescape(page)) for page in pages]
    assert apart[0] == apart[1]
    assert not pages[0].isascii()


def without_times(value: object) -> object:
    if isinstance(value, dict):
        return {key: without_times(part) for key, part in value.items() if not key.startswith("seconds")}
    return [without_times(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp437"])
@pytest.mark.parametrize("page", ["scan {log} -t {toy}", "show {log} --row 1 -t {toy} --ids --full"])
def test_boxes_align_whatever_the_encoding(encoding: str, page: str, log: Path) -> None:
    """Every id stands below the first column of its token, after a border."""
    border = "│" if encoding == "cp437" else "|"
    _, out, _ = printed(page, log, encoding)
    above, aligned = "", 0
    for line in out.splitlines():
        if line.count(border) > 1:
            above = line
        elif re.fullmatch(r" +(id )?[ \d]+", line) and above:
            numbers = list(re.finditer(r"\d+", line))
            assert all(above[number.start() - 1] == border for number in numbers), (above, line)
            aligned += len(numbers)
    assert aligned > 10


@pytest.mark.parametrize(*table(__file__, "a_mark_has_a_form_in_ascii_and_the_rest_is_escaped"))
def test_a_mark_has_a_form_in_ascii_and_the_rest_is_escaped(text: str, shown: str) -> None:
    assert text.encode("ascii", ERROR_HANDLER) == shown.encode()
    assert as_encoded(text, "ascii") == shown
    assert as_encoded(text, "utf-8") == text


@pytest.mark.parametrize("locale", some(["C", "POSIX", "C.ISO-8859-1"], 2))
def test_a_plain_locale_shows_a_page(locale: str, log: Path) -> None:
    """A process of its own, whose Python is not told to write UTF-8 all the same."""
    env = {"PATH": os.environ["PATH"], "LC_ALL": locale, "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    words = [sys.executable, "-m", "tito_audit", "scan", log, "-t", TOY]
    ran = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, check=False)
    assert ran.stderr == b""
    assert ran.stdout.isascii()
    assert b"training row |" in ran.stdout
