"""Settings of one log: which overrides fit it, and what they change."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import table
from tito_audit.settings.model import Override, Settings


def fits(pattern: str, file: str | Path) -> bool:
    return Override((pattern,), {}).fits(file)


@pytest.mark.parametrize(*table(__file__, "a_pattern_is_of_the_whole_path"))
def test_a_pattern_is_of_the_whole_path(pattern: str, those: list[str], not_those: list[str]) -> None:
    assert [file for file in those if not fits(pattern, file)] == []
    assert [file for file in not_those if fits(pattern, file)] == []


@given(st.text("ab*?.", min_size=1, max_size=8), st.text("ab.*", min_size=1, max_size=8))
def test_within_one_name_patterns_are_those_of_the_shell(pattern: str, name: str) -> None:
    below = pattern == "**"
    if name not in (".", ".."):
        assert fits(f"/gone/{pattern}", f"/gone/{name}") == (below or fnmatchcase(name, pattern))


def test_a_log_is_met_by_its_own_name_and_by_that_of_what_it_links_to(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "blob").write_text("{}")
    (tmp_path / "logs").symlink_to("store")
    (tmp_path / "store" / "train.jsonl").symlink_to("blob")
    monkeypatch.chdir(tmp_path)
    real = Path(os.path.realpath(tmp_path))
    for pattern in (f"{real}/store/blob", f"{real}/store/*.jsonl", "/**/train.jsonl", f"{tmp_path}/logs/*"):
        assert fits(pattern, "logs/train.jsonl"), pattern
    assert not fits(f"{real}/logs/blob", "logs/train.jsonl")


def test_settings_of_a_log_are_those_of_the_run_where_no_override_fits() -> None:
    plain = Settings(tokenizer="x")
    assert plain.at("/a/b.jsonl") is plain
    some = Settings(overrides=(Override(("/b/**",), {"tokenizer": "y"}),))
    assert some.at("/a/b.jsonl") is some


def test_of_overrides_that_fit_the_later_one_wins_key_by_key() -> None:
    settings = Settings(
        tokenizer="x",
        select=("TOK",),
        overrides=(
            Override(("/a/**",), {"tokenizer": "y", "select": ("LPR",), "format": "auto"}),
            Override(("/b/**",), {"tokenizer": "never"}),
            Override(("/a/c.jsonl", "/a/d.jsonl"), {"tokenizer": "z"}),
        ),
    )
    at = settings.at(Path("/a/c.jsonl"))
    assert at == Settings(tokenizer="z", select=("LPR",))
    assert settings.at("/a/e.jsonl") == Settings(tokenizer="y", select=("LPR",))
    assert at.at("/b/x") is at
