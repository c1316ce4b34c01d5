"""One command for every report, and each file held against what the format's own makers publish.

The schemas of SARIF and JUnit are fetched by tests/validators.sh; without them their tests are skipped.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from tests.command import run
from tests.report_results import golden
from tests.runner import commands
from tests.test_reports_in_ci import CONCISE, assert_inert, markdown_tokens
from tests.world import ROOT
from tito_audit.reports import all_reports, report_named

SHARED = ROOT.parent / "shared"
VALIDATORS = Path(os.environ.get("TITO_AUDIT_VALIDATORS") or ROOT / ".cache" / "validators")
SCHEMA = json.loads((files("tito_audit") / "schemas" / "report.schema.json").read_text(encoding="utf-8"))

FIXTURES = ["fixtures/formats", "-t", "fixtures/tokenizers/toy_bpe"]
ROLLOUTS = [
    *["../shared/rollouts/smollm2", "-t", "../shared/tokenizers/smollm2"],
    *["--limit", "60"],
]
LOGS = [
    pytest.param(FIXTURES, id="fixtures"),
    pytest.param(
        ROLLOUTS,
        id="rollouts",
        marks=[
            pytest.mark.shared,
            pytest.mark.skipif(
                not (SHARED / "rollouts").is_dir(), reason="no shared/rollouts beside the checkout"
            ),
        ],
    ),
]


def published(name: str) -> Path:
    """A schema that others publish; skipped with a word where it was not fetched."""
    path = VALIDATORS / name
    if not path.is_file():
        pytest.skip(f"{name} is not there: tests/validators.sh fetches it")
    return path


def ours(definition: str) -> Any:
    """Our own schema from one of its definitions on."""
    from jsonschema import Draft202012Validator  # takes seconds

    return Draft202012Validator({**SCHEMA, "oneOf": [{"$ref": f"#/$defs/{definition}"}]})


def is_json(text: str) -> None:
    ours("report").validate(json.loads(text))


def is_jsonl(text: str) -> None:
    *lines, last = text.split("\n")[:-1]
    finding = ours("finding")
    for line in lines:
        finding.validate(json.loads(line))
    ours("last_line").validate(json.loads(last))


def is_sarif(text: str) -> None:
    from jsonschema import Draft4Validator, FormatChecker

    schema = json.loads(published("sarif-2.1.0.json").read_text(encoding="utf-8"))
    Draft4Validator(schema, format_checker=FormatChecker()).validate(json.loads(text))


def is_junit(text: str) -> None:
    import xmlschema

    xmlschema.XMLSchema(str(published("junit-10.xsd"))).validate(text)


def is_github(text: str) -> None:
    printed = commands(text)
    assert len(printed) == text.count("\n")
    kinds = [command.name for command in printed]
    assert set(kinds) <= {"error", "warning", "notice"}
    assert all(kinds.count(kind) <= 10 for kind in kinds)
    for command in printed:
        assert set(command.properties) in ({"title"}, {"file", "title"}, {"file", "line", "title"})
        assert command.data
        assert len(command.data) <= 4096
        assert len(command.properties["title"]) <= 255


def is_concise(text: str) -> None:
    *lines, last, end = text.split("\n")
    assert end == ""
    assert last.startswith("tito-audit: ")
    for line in lines:
        assert CONCISE.fullmatch(line), line
        assert line.isprintable()


def is_markdown(text: str) -> None:
    assert len(text) < 65_536
    assert_inert(text)
    kinds = [token.type for token in markdown_tokens(text)]
    assert kinds[0] == "heading_open"
    assert kinds.count("td_open") % 7 == 0


def is_html(text: str) -> None:
    assert text.lower().startswith("<!doctype html>")


def is_text(text: str) -> None:
    assert text.startswith("tito-audit ")


def is_inert(text: str) -> None:
    """Whatever a report is, no character in it acts on a terminal."""
    assert not set(text) & set("\x1b\x07\x9b\u202e")


VALID: dict[str, Callable[[str], None]] = {
    report.name: globals().get(f"is_{report.name}", is_inert) for report in all_reports()
}
"""What a report of this name is; one that has no such function above is inert."""


@pytest.fixture(scope="module", params=LOGS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every report of a log, written by one command."""
    folder = tmp_path_factory.mktemp("reports")
    named = [word for report in all_reports() for word in ("--report", f"{report.name}={folder / report.name}")]
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(ROOT)
        code, out, err = run("scan", *request.param, *named, "--quiet", "--no-config")
    assert (code, out) == (1, ""), err
    return folder


@pytest.mark.parametrize("report", all_reports(), ids=lambda report: report.name)
def test_one_command_writes_a_file_that_its_validator_accepts(report: Any, written: Path) -> None:
    text = (written / report.name).read_bytes().decode()
    assert re.search("[A-Z]{3}[0-9]{3}", text), "a report of nothing would be valid"
    VALID[report.name](text)


@pytest.mark.parametrize("report", all_reports(), ids=lambda report: report.name)
def test_what_reports_write_of_hostile_results_is_valid(report: Any) -> None:
    if report.name == "markdown":
        assert_inert(golden(report))
    else:
        VALID[report.name](golden(report))


def test_the_schema_of_reports_is_a_schema_and_names_every_key() -> None:
    """What is written and not in the schema would be a key that nobody can look up."""
    ours("report").check_schema(SCHEMA)
    whole = json.loads(golden(report_named("json")))
    named = SCHEMA["$defs"]
    assert set(whole["findings"][0]) | {"folded"} == set(named["finding"]["properties"])
    # What a trainer's logprobs show stands there only if there are some.
    assert set(whole["summary"]) | {"mismatches"} == set(named["summary"]["properties"])
    for name, value in {
        "gate": whole["summary"]["gate"],
        "sampled": whole["summary"]["sampled"],
        "rule_count": whole["summary"]["findings"]["TOK101"],
        "rate": whole["summary"]["gate"]["rates"][0],
        "fixed": whole["summary"]["gate"]["fixed"][0],
    }.items():
        assert set(value) == set(named[name]["properties"]), name


BROKEN: list[tuple[str, Callable[[Any], Any]]] = [
    ("json", lambda text: text.replace('"severity":"error"', '"severity":"bad"', 1)),
    ("json", lambda text: text.replace('"rollouts":', '"rolls":', 1)),
    ("jsonl", lambda text: text.replace('"fingerprint":"', '"fingerprint":"x', 1)),
    ("jsonl", lambda text: text[: text.rindex("\n", 0, -1) + 1]),
    ("sarif", lambda text: text.replace('"level":"error","message"', '"level":"fatal","message"', 1)),
    ("sarif", lambda text: text.replace("logs/run.jsonl", "logs/a b.jsonl")),
    ("junit", lambda text: text.replace(' tests="', ' test="', 1)),
    ("junit", lambda text: text.replace("<failure", "<failed").replace("</failure", "</failed")),
    ("github", lambda text: text.replace("::error title", ":error title", 1)),
    ("github", lambda text: text * 3),
    ("concise", lambda text: text.replace(":12-14 ", " ", 1)),
]


@pytest.mark.parametrize(("name", "broken"), BROKEN)
def test_the_validators_refuse_what_is_broken(name: str, broken: Callable[[str], str]) -> None:
    text = golden(report_named(name))
    assert broken(text) != text
    VALID[name](text)
    with pytest.raises(Exception) as refused:  # noqa: PT011 - each validator has an error of its own
        VALID[name](broken(text))
    assert not isinstance(refused.value, TypeError | KeyError)
