"""The example in the manual of each rule is what the tool prints of a case of its fixture.

`UPDATE_GOLDENS=1 pytest tests/test_rule_examples.py` writes the examples into the docstrings of the rules.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests import toy
from tito_audit.rule import Rule
from tito_audit.rules import all_rules

sys.path.insert(0, str(toy.ROOT / "docs"))
from pages.cases import Example, example_of

RULES = all_rules()
EXAMPLE = re.compile(r"(?<=    ## Example\n).*?(?=\n\n    ## Repair\n)", re.DOTALL)


def manual(example: Example) -> str:
    """The example as the manual has it: the sentence of the case, and what the tool prints of it."""
    return f"{example.name[0].upper()}{example.name[1:]}:\n\n```text\n{example.before}\n```"


def file_of(rule: Rule) -> Path:
    return toy.ROOT / "tito_audit" / "rules" / f"{rule.code.lower()}_{rule.name.replace('-', '_')}.py"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_the_example_of_a_manual_is_what_the_tool_prints(rule: Rule) -> None:
    page = manual(example_of(rule))
    if os.environ.get("UPDATE_GOLDENS"):
        lines = [f"    {line}".rstrip() for line in page.replace("\\", "\\\\").splitlines()]
        file = file_of(rule)
        text, count = EXAMPLE.subn(lambda _: "\n".join(lines), file.read_text(encoding="utf-8"))
        assert count == 1
        file.write_text(text, encoding="utf-8")
        return
    assert rule.doc.partition("## Example\n")[2].partition("\n\n## Repair\n")[0] == page


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_an_example_names_its_rule_and_a_repair_cures_it_where_the_manual_says_so(rule: Rule) -> None:
    example = example_of(rule)
    assert rule.code in example.before
    assert bool(example.command) == bool(example.after)
    if example.after:
        by = re.match(r"repaired by (\w+)", example.after)
        assert by is not None
        assert f"`{by[1]}`" in rule.doc.partition("## Repair\n")[2]


def test_the_examples_show_most_repairs_at_work() -> None:
    cured = {name for rule in RULES for name in re.findall(r"(\w+) \([A-Z]{3}\d", example_of(rule).after[:200])}
    assert cured >= {"fork", "splice", "mask", "realign", "once"}
