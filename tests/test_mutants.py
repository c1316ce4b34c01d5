"""The tool that counts how many faults the tests notice: its mutants are one change each, and a test sees them."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

import pytest

from tests.tiers import one_in
from tools.mutant_changes import mutants_of, mutated

ROOT = Path(__file__).resolve().parents[1]
TEXT = '''
LIMIT = 3

def many(values: list[int], least: int = 2) -> bool:
    """More than three, or none."""
    if not values or len(values) > 3:
        return True
    return sum(values) + 1 == least
'''


def test_every_operator_and_constant_within_functions_is_changed_once() -> None:
    changes = [mutant.change for mutant in mutants_of("many.py", TEXT)]
    assert sorted(changes) == sorted(
        [
            "if x -> if not x",
            "Or -> And",
            "not x -> x",
            "Gt -> GtE",
            "3 -> 4",
            "return x -> return None",
            "True -> False",
            "return x -> return None",
            "Eq -> NotEq",
            "Add -> Sub",
            "1 -> 2",
        ]
    )


@pytest.mark.parametrize("module", ["run/workers.py", "record/prefix.py", "rules/rec003_id_outside_vocabulary.py"])
def test_a_mutant_differs_in_one_statement(module: str) -> None:
    text = (ROOT / "tito_audit" / module).read_text(encoding="utf-8")
    plain = ast.unparse(ast.parse(text)).splitlines()
    mutants = mutants_of(module, text)
    assert len(mutants) > 5
    for mutant in one_in(3, mutants):
        changed = mutated(text, mutant)
        compile(changed, module, "exec")
        _, _, *lines = difflib.unified_diff(plain, changed.splitlines(), n=0, lineterm="")
        assert 1 <= sum(line[0] in "+-" for line in lines) <= 6, mutant
