"""The pictures of the README show what the commands write today; `make pictures` draws them again."""

from __future__ import annotations

import importlib
import re
import struct
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from textwrap import wrap

import pytest

from tests.command import run
from tools import pictures

RENEW = "`make pictures` draws it again"
SVG = "{http://www.w3.org/2000/svg}"
MOST = 300_000
"""Bytes of a picture that a page loads."""


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pictures.ROOT)
    for name, value in pictures.environment(NO_COLOR="").items():
        monkeypatch.setenv(name, value)


def scanned(*more: str) -> str:
    code, out, _ = run(*pictures.SCAN.split(), "--no-config", *more)
    assert code == 1, "the scan of the pictures fails"
    return out


def drawn() -> ElementTree.Element:
    return ElementTree.fromstring((pictures.FOLDER / "scan.svg").read_text(encoding="utf-8"))


def test_the_picture_of_the_scan_is_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = (pictures.FOLDER / "scan.svg").read_text(encoding="utf-8")
    assert shown == pictures.scan_svg(scanned()), f"docs/pictures/scan.svg is stale: {RENEW}"


def bare(line: str) -> str:
    """A line without its blanks, the bars of boxes and the time that a scan took."""
    return re.sub("[│ ]", "", re.sub(r" · [\d.]+ s, .*", "", line))


def test_every_line_of_the_picture_is_one_that_is_printed_and_the_verdict_is_the_last() -> None:
    # Apart from the script that draws: the words of the picture, and those of a terminal without colour.
    *page, verdict = scanned().splitlines()
    printed = [bare(line) for line in (*page, *wrap(verdict, pictures.WIDTH))]
    command, *shown = ("".join(part.text or "" for part in line) for line in drawn().iter(f"{SVG}text"))
    assert bare(command) == bare(f"$ tito-audit {pictures.SCAN}")
    lines = [bare(line) for line in shown if line != "…"]
    assert 20 < len(shown) <= 36
    assert len(shown) - len(lines) == 1
    assert lines == [line for line in printed if line in lines]
    assert shown[-2].startswith("failed")


def test_nothing_of_the_picture_is_cut_and_columns_are_where_a_terminal_has_them() -> None:
    root = drawn()
    _, _, wide, high = map(float, root.attrib["viewBox"].split())
    for line in root.iter(f"{SVG}text"):
        assert float(line.attrib["y"]) < high
        ends = 0.0
        for part in line:
            at, size = float(part.attrib["x"]), float(part.attrib["textLength"])
            assert at >= ends - 0.11, "two stretches overlap"
            ends = at + size
        assert ends < wide


def test_the_screenshots_are_of_the_page_as_it_is(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    scanned("-q", f"--report=html={page}")
    source = pictures.source_of(page.read_text(encoding="utf-8"))
    for name in pictures.SHOTS:
        png = (pictures.FOLDER / name).read_bytes()
        assert pictures.source_in(png) == source, f"docs/pictures/{name} is of another page: {RENEW}"
        width, height = struct.unpack(">II", png[16:24])
        assert (width, height) > (2 * 800, 2 * 400), "twice the size, for screens that have it"
        assert len(png) < MOST


def test_a_picture_is_of_the_viewer_its_style_and_its_data() -> None:
    page = "<style>p {}</style><p>0.1 s</p><script>{}</script><dialog>tokens</dialog>"
    source = pictures.source_of(page)
    assert source == pictures.source_of(page.replace("0.1 s", "12.5 s"))
    for part in ("p {}", "<script>{}", "tokens"):
        assert source != pictures.source_of(page.replace(part, f"{part} "))
    png = next(iter((pictures.FOLDER / name).read_bytes() for name in pictures.SHOTS))
    again = pictures.stating(png, "another")
    assert [kind for kind, _ in pictures.chunks(again)][-2:] == [b"tEXt", b"IEND"]


def test_no_picture_names_a_path_or_a_time_of_a_machine() -> None:
    text = (pictures.FOLDER / "scan.svg").read_text(encoding="utf-8")
    assert not re.search(r"\d s\b|tokens/s|/home|/tmp|/root", text)


def test_the_log_of_the_pictures_is_what_its_script_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pictures.ROOT / "fixtures" / "docs"
    monkeypatch.syspath_prepend(str(folder))
    make = importlib.import_module("make_first_scan")
    assert (folder / "first_scan.jsonl").read_text(encoding="utf-8") == make.jsonl(make.rows())
