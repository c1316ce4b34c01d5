"""What conversions make of rows, and what they name as lost, case by case: `tests/data/conversions.json`.

A case holds `logs` (the rows of each), the form `to` and maybe `settings`; expected are what is
`carried` (counts that are not 0, and what is lost, repeated, missing or refused by name), the `notices` and the
`rows` that are made; or the `error`. Under `but` are changes of the case, by JSON pointer (`set` and `drop`), and
what they change in what comes out (`gives`). `python -m tests.test_conversions` writes what is expected anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.command import written
from tests.format_cases import changed_at, differences, shown, text_of
from tests.world import ROOT, lines_of
from tito_audit import Settings, convert_rollouts
from tito_audit.convert.run import ConversionOutcome
from tito_audit.errors import TitoAuditError

FILE = ROOT / "tests" / "data" / "conversions.json"
LISTED: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
COUNTS = ("rows_read", "rollouts", "joined", "rows_made", "forked", "not_converted")


def converted(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What comes out of the logs of a case, under the keys that expect it."""
    logs = [written(folder / f"{number}.jsonl", rows) for number, rows in enumerate(case["logs"])]
    settings, out = Settings(**case.get("settings", {})), folder / "out.jsonl"
    outcome: dict[str, Any] = {}
    try:
        survey = convert_rollouts(logs, case["to"], settings=settings)
        outcome["carried"] = named(survey.carried)
        if survey.notices:
            outcome["notices"] = survey.notices
        if survey.carried.rows_made:
            conversion = convert_rollouts(logs, case["to"], out, settings, lossy=True)
            assert conversion.carried == survey.carried
            outcome["rows"] = lines_of(out)
    except TitoAuditError as error:
        outcome["error"] = str(error)
    return json.loads(json.dumps(outcome).replace(json.dumps(f"{folder}/")[1:-1], ""))  # type: ignore[no-any-return]


def named(carried: ConversionOutcome) -> dict[str, Any]:
    counts = {name: getattr(carried, name) for name in COUNTS}
    names = {name: dict(getattr(carried, name)) for name in ("lost", "repeated", "missing")}
    refused = {str(place): reason for place, reason in carried.refused}
    return {name: value for name, value in {**counts, **names, "refused": refused}.items() if value}


def expected(case: dict[str, Any]) -> dict[str, Any]:
    return {name: case[name] for name in ("carried", "notices", "rows", "error") if name in case}


def every_case() -> Iterator[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any] | None]]:
    """The name of each case, the case, what comes out of it, and the case that it is a change of."""
    for case in LISTED:
        yield case["case"], case, expected(case), None
        for number, other in enumerate(case.get("but", ()), 1):
            name = other.get("case", f"{case['case']}, but {number}")
            yield name, changed_at(case, other), other.get("gives", {}), case


CASES = list(every_case())


@pytest.mark.parametrize(("case", "gives", "of"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_rows_are_converted_as_their_case_says(
    case: dict[str, Any], gives: dict[str, Any], of: dict[str, Any] | None, tmp_path: Path
) -> None:
    outcome = converted(case, tmp_path)
    assert shown(outcome if of is None else differences(expected(of), outcome)) == shown(gives)


if __name__ == "__main__":
    for case in LISTED:
        with TemporaryDirectory() as folder:
            case |= converted(case, Path(folder))
        for other in case.get("but", ()):
            with TemporaryDirectory() as folder:
                other["gives"] = differences(expected(case), converted(changed_at(case, other), Path(folder)))
    FILE.write_text(text_of(LISTED), encoding="utf-8")
