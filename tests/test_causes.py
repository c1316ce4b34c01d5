"""Every cause in every family of models, one fault a row, through the command line."""

from __future__ import annotations

import pytest

from tests.causes.families import MARKS, SHARED
from tests.causes.run import FORMS, run
from tests.tiers import some

ENOUGH = 0.99
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not (SHARED / "rollouts").is_dir(), reason="no shared/rollouts beside the checkout"),
]


@pytest.mark.parametrize("name", some(list(MARKS), 1))
def test_each_fault_is_named_with_its_code_and_cause_and_a_clean_row_with_nothing(name: str) -> None:
    tally = run([name], 1)
    assert {form for _, fault in tally.total for form in FORMS if fault.endswith(f"[{form}]")} == set(FORMS)
    clean = {key: tally.total[key] - tally.right[key] for key in tally.total if key[1].startswith("clean")}
    assert not any(clean.values()), clean
    right, total = sum(tally.right.values()), sum(tally.total.values())
    assert right >= ENOUGH * total, tally.wrong[:20]
