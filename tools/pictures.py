"""The pictures of the README, drawn from what the commands write: `make pictures`.

    docs/pictures/scan.svg         a failing scan in colour
    docs/pictures/report.png       the viewer of the `html` report, as Chromium shows it
    docs/pictures/report-dark.png  the same for readers with a dark screen

No time and no path of a machine is in them. A PNG has a digest of its source in the chunk `Source`, so that a test
notices when the page has changed.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import os
import re
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
SCAN = "scan fixtures/docs/first_scan.jsonl -t fixtures/tokenizers/toy_bpe"
"""The command of the README, whose log has one merge and one tool call rewritten by the template."""
WIDTH = 100
"""Terminal columns of the picture."""
LEFT_OUT = ("Not checked", "Next")
"""How sections begin that the picture leaves out."""
FINDING = "TOK101"
"""The finding that the viewer is opened on."""
WINDOW = {"width": 1060, "height": 580}
SHOTS = {"report.png": False, "report-dark.png": True}
"""Each screenshot, and whether it is dark."""
_PACE = re.compile(r" · [\d.]+ s(, [\d,]+ tokens/s)?")
_CODES = re.compile(r"\x1b\[[\d;]*m")

_SIZE, _ADVANCE, _LINE, _PAD, _BAR = 13, 7.83, 18, 20, 34
_FONTS = "ui-monospace,SFMono-Regular,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"
_PLAIN = Console(file=None, force_terminal=False)
_BACK, _FRAME, _TEXT, _DIM = "#0d1117", "#30363d", "#e6edf3", "#9198a1"
_COLOURS = {1: "#ff7b72", 2: "#56d364", 3: "#e3b341", 5: "#e2a5ff", 6: "#79c0ff"}
"""By the number of a terminal's colour: red, green, yellow, magenta, cyan."""


def environment(**more: str) -> dict[str, str]:
    """The environment in which the command prints the same everywhere."""
    return {
        "COLUMNS": str(WIDTH),
        "PYTHONIOENCODING": "utf-8",
        "PYTHONPATH": str(ROOT),
        "TITO_AUDIT_CACHE": "off",
        **more,
    }


def scan_svg(printed: str) -> str:
    """The picture of a scan, of what it printed in colour."""
    prompt = Text.assemble(("$ ", "dim"), (f"tito-audit {SCAN}", "bold"))
    return svg([prompt, *shortened(printed.rstrip("\n").split("\n"))], "tito-audit scan, failed")


def shortened(lines: Iterable[str]) -> Iterator[Text]:
    """The lines without the time that they took; `…` stands for sections that are left out."""
    sections = [list(section) for blank, section in groupby(lines, key=lambda line: not line) if not blank]
    for out, group in groupby(sections, key=lambda section: _CODES.sub("", section[0]).startswith(LEFT_OUT)):
        for section in [["\x1b[2m…\x1b[0m"]] if out else group:
            yield Text()
            for line in section:
                yield from Text.from_ansi(_PACE.sub("", line)).wrap(_PLAIN, WIDTH)


def svg(lines: list[Text], title: str) -> str:
    """Lines of a terminal as a picture that looks the same in any font: each span states its own width."""
    wide = round(WIDTH * _ADVANCE + 2 * _PAD)
    high = _BAR + len(lines) * _LINE + _PAD
    dots = "".join(
        f'<circle cx="{_PAD + 18 * index}" cy="18" r="5.5" fill="{fill}"/>'
        for index, fill in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    rows = "\n".join(_row(line, _BAR + _LINE * (number + 1) - 4) for number, line in enumerate(lines))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}"'
        f' role="img">\n<title>{escape(title)}</title>\n'
        f"<style>text{{font:{_SIZE}px {_FONTS};fill:{_TEXT};white-space:pre}}</style>\n"
        f'<rect x=".5" y=".5" width="{wide - 1}" height="{high - 1}" rx="9" fill="{_BACK}" stroke="{_FRAME}"/>\n'
        f"{dots}\n{rows}\n</svg>\n"
    )


def _row(line: Text, y: int) -> str:
    """One line: a span for each word or run of words of one style, placed by its column."""
    spans = "".join(_span(line, start, end) for start, end in _stretches(line))
    return f'<text y="{y}">{spans}</text>' if spans else ""


def _stretches(line: Text) -> Iterator[tuple[int, int]]:
    """Where a style begins or ends, a bar of a box stands or several blanks are: what is between them."""
    edges = {edge for span in line.spans for edge in (span.start, span.end)}
    edges |= {edge for match in re.finditer("│|  +", line.plain) for edge in match.span()}
    ends = sorted({0, len(line), *edges})
    return ((start, end) for start, end in pairwise(ends) if line.plain[start:end].strip())


def _span(line: Text, start: int, end: int) -> str:
    """A stretch of one style, without the blanks at its edges."""
    text = line.plain[start:end]
    column = cell_len(line.plain[:start] + text[: len(text) - len(text.lstrip())])
    x, wide = _PAD + column * _ADVANCE, cell_len(text.strip()) * _ADVANCE
    size = f'x="{x:.1f}" textLength="{wide:.1f}" lengthAdjust="spacingAndGlyphs"'
    return f"<tspan {size}{_look(line.get_style_at_offset(_PLAIN, start))}>{escape(text.strip())}</tspan>"


def _look(style: Style) -> str:
    """The attributes of a style."""
    number = style.color.number if style.color and style.color.number is not None else 0
    fill = _COLOURS.get(number % 8) or (_DIM if style.dim else None)
    return (f' fill="{fill}"' if fill else "") + (' font-weight="bold"' if style.bold else "")


def source_of(page: str) -> str:
    """A digest of what the viewer of a report's page is made of: its markup, styles, scripts and data."""
    parts = [one[0] for one in re.finditer(r"<(dialog|style|script)\b.*?</\1>", page, re.DOTALL)]
    return hashlib.sha256("\n".join(parts).encode("utf-8")).hexdigest()


def chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The chunks of a PNG, kind and content."""
    at = 8
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        yield png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        at += 12 + size


def source_in(png: bytes) -> str:
    """The digest that a picture states, or nothing."""
    stated = (content for kind, content in chunks(png) if kind == b"tEXt")
    return next((one[7:].decode() for one in stated if one.startswith(b"Source\0")), "")


def stating(png: bytes, source: str) -> bytes:
    """The PNG with a chunk that names its source."""
    content = b"tEXtSource\0" + source.encode()
    chunk = struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))
    return png[:-12] + chunk + png[-12:]


def write_svg() -> None:
    """Draw the scan."""
    command = [sys.executable, "-m", "tito_audit", *SCAN.split(), "--no-config"]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment(FORCE_COLOR="1", NO_COLOR=""), capture_output=True
    )
    if run.returncode != 1:
        sys.exit(f"The scan of the picture should fail:\n{run.stderr.decode()}")
    (FOLDER / "scan.svg").write_text(scan_svg(run.stdout.decode("utf-8")), encoding="utf-8")


def write_report(page: Path) -> None:
    """Write the page that the screenshots show."""
    command = [sys.executable, "-m", "tito_audit", *SCAN.split(), "--no-config", "-q", f"--report=html={page}"]
    subprocess.run(command, cwd=ROOT, env=os.environ | environment())


def write_shots(folder: Path) -> None:
    """Take the screenshots in a real browser, light and dark."""
    driver = importlib.import_module("tests.browser.driver")
    if missing := driver.missing():
        sys.exit(f"{missing}: the pictures of the report stay as they are")
    page = folder / "report.html"
    write_report(page)
    source = source_of(page.read_text(encoding="utf-8"))
    with driver.started(folder) as browser:
        for name, dark in SHOTS.items():
            (FOLDER / name).write_bytes(stating(_shot(browser, page, dark), source))


_OPEN = """
const [code, done] = arguments;
const rows = [...document.querySelectorAll("table.findings tbody tr")];
const row = rows.find((one) => one.innerText.includes(code)) ?? rows[0];
row.querySelector("td:last-child :is(a, button)").click();
setTimeout(() => {
  document.activeElement?.blur();
  document.getElementById("tip")?.setAttribute("hidden", "");
  done(document.getElementById("viewer").open);
}, 1500);
"""
_PLACE = """
const box = document.getElementById("viewer").getBoundingClientRect();
return {x: box.x, y: box.y, width: box.width, height: box.height};
"""


def _shot(browser: Any, page: Path, dark: bool) -> bytes:
    """The viewer opened on the finding, at twice the size."""
    browser.look(**WINDOW, dark=dark)
    browser.open(page)
    if not browser.driver.execute_async_script(_OPEN, FINDING):
        sys.exit("The viewer did not open on a click on the finding")
    clip = {**browser.js(_PLACE), "scale": 2}
    taken = browser.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip})
    return base64.b64decode(taken["data"])


def main() -> None:
    """Make every picture."""
    FOLDER.mkdir(exist_ok=True)
    write_svg()
    with tempfile.TemporaryDirectory() as folder:
        write_shots(Path(folder))


if __name__ == "__main__":
    main()
