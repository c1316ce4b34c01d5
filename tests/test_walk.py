"""The page that says where a row goes names what a row passes through, in that order."""

from __future__ import annotations

import re
from pathlib import Path

from tools.walk import walk

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / "fixtures" / "formats" / "nemo_gym.jsonl"
STEP = re.compile(r"^\| [^|]* \| `([\w/]+\.py)` `([\w.]+)`", re.MULTILINE)


def test_a_row_passes_through_the_steps_that_the_guide_names_in_its_order() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    page = text[text.index("### Where a row goes") : text.index("### The rooms")]
    steps = STEP.findall(page)
    assert len(steps) > 10
    assert len(page.splitlines()) <= 25, "one screen"
    passed = iter(walk(LOG, 1))
    missing = [step for step in steps if step not in passed]
    assert missing == [], f"python -m tools.walk {LOG.relative_to(ROOT)} 1 shows the way of today"
