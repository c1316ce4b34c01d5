"""What options mean: rates, samples, and which rules a selection runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.command import run
from tests.tables import table
from tito_audit.cli import _options as options
from tito_audit.errors import SetupError
from tito_audit.report_objects import as_json
from tito_audit.rule import is_selected
from tito_audit.rules import all_rules
from tito_audit.run.scan import scan_rollouts
from tito_audit.settings.model import GateSettings, MaxRate, Settings
from tito_audit.settings.options import OPTIONS
from tito_audit.voice import messages_name_flags

CODES = [rule.code for rule in all_rules()]


@pytest.mark.parametrize(*table(__file__, "a_rate_is_of_codes_and_of_tokens_or_rollouts"))
def test_a_rate_is_of_codes_and_of_tokens_or_rollouts(text: str, rate: list[Any]) -> None:
    wanted = MaxRate(*rate)
    for spelling in (text, str(wanted)):
        assert options.gate_settings_of(max_rates=[spelling]).max_rates == (wanted,)


@pytest.mark.parametrize(*table(__file__, "a_rate_that_cannot_be_is_refused_with_what_to_write"))
def test_a_rate_that_cannot_be_is_refused_with_what_to_write(text: str, said: str) -> None:
    with pytest.raises(SetupError) as caught:
        options.gate_settings_of(max_rates=[text])
    words = caught.value.args[0]
    assert words.startswith(said)
    assert len(words.splitlines()) <= 2


def test_a_baseline_is_updated_only_where_one_is_named() -> None:
    gate = options.gate_settings_of(baseline="known.json", update_baseline=True)
    assert gate == GateSettings((), "known.json", True)
    with messages_name_flags(), pytest.raises(SetupError, match="--update-baseline: no baseline file is named"):
        options.gate_settings_of(update_baseline=True)


@pytest.mark.parametrize("share", [0, -0.5, 1.01, float("nan"), float("inf")])
def test_a_sample_is_a_share_above_nothing_and_at_most_all(share: float) -> None:
    with messages_name_flags(), pytest.raises(SetupError, match="--sample"):
        options.settings_of(sample=share)
    assert options.settings_of(sample=1).sample == 1
    assert options.settings_of().sample is None


@pytest.mark.parametrize(*table(__file__, "extend_select_adds_to_a_selection"))
def test_extend_select_adds_to_a_selection_and_yields_to_a_closer_ignore(
    select: list[str], ignore: list[str], extend: list[str], runs: list[str], not_these: list[str]
) -> None:
    chosen = {code for code in CODES if is_selected(code, select, ignore, extend)}
    assert {*runs} <= chosen
    assert not chosen.intersection(not_these)


prefixes = st.lists(st.sampled_from([*CODES, "TOK", "LPR", "SEQ", "T", "LPR5"]), max_size=3).map(tuple)


@given(prefixes, prefixes, prefixes)
def test_extending_a_selection_is_selecting_more(
    select: tuple[str, ...], ignore: tuple[str, ...], extend: tuple[str, ...]
) -> None:
    for code in CODES:
        both = is_selected(code, select, ignore, extend)
        assert both >= is_selected(code, select, ignore)
        if select:
            assert both == is_selected(code, (*select, *extend), ignore)
        assert is_selected(code, select, ignore, ()) == is_selected(code, select, ignore)


def test_a_code_of_extend_select_that_there_is_not_ends_the_run() -> None:
    with pytest.raises(SetupError, match='Unknown rule "TOKK": did you mean TOK'):
        options.settings_of(extend_select=["LPR,TOKK"])
    with pytest.raises(SetupError, match="No rule matches 'TOKK'"):
        list(scan_rollouts([], Settings(extend_select=("TOKK",))))


@pytest.mark.parametrize("number", ["inf", "-inf", "nan", "-NaN", "1e999"])
@pytest.mark.parametrize(
    "flag",
    [
        option.flag
        for option in OPTIONS
        if option.takes is float and not option.hidden and "scan" in option.commands
    ],
)
def test_a_number_is_finite(flag: str, number: str) -> None:
    code, _, err = run("scan", "nowhere.jsonl", f"{flag}={number}", "--no-config")
    assert code == 2
    assert flag in err
    assert "nowhere" not in err
    assert len(err.strip().splitlines()) <= 2


def test_a_whole_number_has_64_bits(tmp_path: Path) -> None:
    code, _, err = run("scan", "nowhere.jsonl", "--max-row-bytes", 10**30, "--no-config")
    assert code == 2
    assert "--max-row-bytes" in err
    assert len(err.strip().splitlines()) <= 2
    (tmp_path / "tito-audit.toml").write_text(f"max-row-bytes = {10**400}\n")
    code, _, err = run("scan", "nowhere.jsonl", "--config", tmp_path / "tito-audit.toml")
    assert code == 2
    assert "at most 9,223,372,036,854,775,807" in err


def test_numbers_of_more_than_64_bits_are_written_in_full() -> None:
    assert json.loads(as_json({"large": 10**30, "none": math.nan, "cut": "\ud83d"})) == {
        "large": 10**30,
        "none": None,
        "cut": "\\ud83d",
    }
