"""A misspelt name, flag or value: one line that says what was meant, and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.command import run
from tests.tables import table
from tests.world import FORMATS
from tito_audit.errors import SetupError
from tito_audit.storage import find_logs, skipped_files
from tito_audit.summary import RateCount
from tito_audit.terminal.words import decimal, limit_number, percent, rate_number, signed
from tito_audit.unknown import close_names, unknown_name

LOG = str(FORMATS / "nemo_gym.jsonl")


@pytest.mark.parametrize(*table(__file__, "a_mistake_in_a_command_line_is_answered_with_what_was_meant"))
def test_a_mistake_in_a_command_line_is_answered_with_what_was_meant(line: str, said: str) -> None:
    words = [LOG if word == "LOG" else word for word in line.split()]
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith("tito-audit: " + said.replace("LOG:", f"{LOG}:").replace("scan LOG", f"scan {LOG}"))
    assert err.count("\n") <= 2


def test_help_of_nothing_is_help() -> None:
    code, out, err = run()
    assert code == 2
    assert "Usage: " in out + err


@pytest.mark.parametrize("shape", ["text", "json", "markdown"])
def test_a_list_of_nothing_lists_what_can_be_listed(shape: str) -> None:
    code, out, err = run("list", "-f", shape)
    assert (code, err) == (0, "")
    if shape == "json":
        counts = {entry["kind"]: entry["count"] for entry in json.loads(out)["kinds"]}
        for kind, count in counts.items():
            assert len(json.loads(run("list", kind, "-f", "json")[1])[kind]) == count
    else:
        assert "tito-audit list rules" in out
    assert run("list", "rules", "-f", "markdown") == run("list", "rules", "--markdown")


def test_a_family_is_explained_by_its_rules() -> None:
    code, out, err = run("explain", "tok")
    assert (code, err) == (0, "")
    listed = json.loads(run("list", "rules", "-f", "json")[1])["rules"]
    rules = [rule for rule in listed if rule["code"].startswith("TOK")]
    assert json.loads(run("explain", "TOK", "-f", "json")[1])["rules"] == rules
    for entry in rules:
        assert entry["code"] in out
        assert entry["severity"] in out
    assert out.endswith("To read about one: tito-audit explain TOK101\n")
    everything = json.loads(run("explain", "-f", "json")[1])
    assert [rule for family in everything["families"] for rule in family["rules"]] != []
    assert run("explain", "tok101") == run("explain", "TOK101") == run("explain", "merged-tokens")
    assert json.loads(run("explain", "splice", "-f", "json")[1])["repair"] == "splice"


def test_a_name_is_quoted_on_one_line_however_it_looks() -> None:
    error = unknown_name("report", "a\x1b[31m\nb" + "x" * 500, ["json"], flag="--report")
    assert isinstance(error, SetupError)
    assert error.flag == "--report"
    assert str(error).isprintable()
    assert len(str(error)) < 200


@given(st.text(max_size=12), st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=6))
def test_only_names_that_exist_are_proposed(name: str, names: list[str]) -> None:
    close = close_names(name, names)
    assert set(close) <= set(names)
    assert len(close) <= 3
    if name in names:
        assert name in close or name.lower() in [proposed.lower() for proposed in close]


def test_a_folder_says_what_is_not_a_log(tmp_path: Path) -> None:
    logs, others = ["a.jsonl", "b.parquet", "sub/d.json"], ["README.md", "c.csv", "sub/tokenizer.json"]
    for name in [*logs, *others, ".hidden/e.txt", ".f"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}", encoding="utf-8")
    (tmp_path / "audit.json").write_text('{"summary":{"schema_version":1}}', encoding="utf-8")
    read = [str(path.relative_to(tmp_path)) for path in find_logs([str(tmp_path)])]
    skipped = [str(path.relative_to(tmp_path)) for path in skipped_files([str(tmp_path)])]
    assert read == logs
    assert skipped == sorted([*others, "audit.json"])
    assert skipped_files([str(tmp_path / "c.csv")]) == []


@pytest.mark.parametrize(*table(__file__, "a_number_is_written_without_an_exponent"))
def test_a_number_is_written_without_an_exponent(number: float, digits: int, text: str) -> None:
    assert decimal(number, digits) == text


@given(st.floats(-1e12, 1e12), st.integers(1, 12))
def test_a_number_keeps_its_size_and_sign(number: float, digits: int) -> None:
    text = decimal(number, digits)
    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(number, rel=10 ** (1 - digits), abs=1e-320)
    assert signed(number, digits).startswith(("+", "-"))


def test_a_share_is_off_by_less_than_its_last_digit() -> None:
    for part in range(1, 2000):
        number = percent(part / 2000).removesuffix(" %").removeprefix("over ")
        digits = len(number.partition(".")[2])
        assert abs(float(number) - part / 20) <= 0.5 * 10**-digits + 1e-9
    assert percent(199 / 200) == "99.5 %"


@given(st.integers(0, 3000), st.integers(1, 3000), st.floats(0, 1), st.booleans())
def test_a_rate_is_told_from_its_limit(findings: int, of: int, limit: float, by_rollout: bool) -> None:
    limits = f"TOK={limit:.12g}" + ("/rollout" if by_rollout else "")
    most = float(f"{limit:.12g}")
    count = RateCount(limits, findings, of, findings / of, findings / of > most)
    shown, against = rate_number(count), limit_number(most, by_rollout=by_rollout)
    assert shown.endswith(" %") != by_rollout
    numbers = [float(text.removesuffix(" %").replace(",", "")) for text in (shown, against)]
    assert (numbers[0] > numbers[1]) == count.failed or numbers[0] == pytest.approx(numbers[1], rel=1e-9)
