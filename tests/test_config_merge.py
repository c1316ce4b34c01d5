"""Keys written into a configuration file: what was there stays, and what would change is refused first."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import table
from tests.tiers import examples
from tito_audit.errors import SetupError
from tito_audit.settings.file import merge_config, read_config, toml_key, toml_value

KEYS: dict[str, Any] = {"tokenizer": "org/model", "template-args": {"enable_thinking": False, "a b": "x\ny"}}
OWN = """# ours
fail-on = "warning"   # as agreed

[max-rate]
TOK = 0.1

[[overrides]]
paths = "legacy/**"
tokenizer = "old"
"""
PROJECT = """[project]
name = "x"

[tool.tito-audit]
fail-on = "never"

[tool.other]
tokenizer = "not ours"
"""


def merged(path: Path, before: str | None, keys: dict[str, Any] = KEYS, **how: Any) -> dict[str, Any]:
    """The file after the merge, as TOML; it is written and read as a run reads it."""
    if before is not None:
        path.write_text(before, encoding="utf-8")
    result = merge_config(path, keys, **how)
    path.write_text(result.text, encoding="utf-8")
    read_config(path)
    return tomllib.loads(result.text)


def test_a_new_file_holds_the_keys(tmp_path: Path) -> None:
    assert merged(tmp_path / "tito-audit.toml", None) == KEYS


def test_keys_are_added_and_every_other_line_stays(tmp_path: Path) -> None:
    path = tmp_path / "tito-audit.toml"
    assert merged(path, OWN) == tomllib.loads(OWN) | KEYS
    new = {f"{name} = {toml_value(value)}" for name, value in KEYS.items()}
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line not in new] == OWN.splitlines()
    assert new <= set(lines)


def test_a_project_file_gets_them_in_our_table(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    before = tomllib.loads(PROJECT)
    before["tool"]["tito-audit"] |= KEYS
    assert merged(path, PROJECT) == before
    without = '[project]\nname = "x"'
    assert merged(path, without) == tomllib.loads(without) | {"tool": {"tito-audit": KEYS}}


def test_what_is_said_already_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "tito-audit.toml"
    path.write_text('tokenizer   =  "org/model"\n', encoding="utf-8")
    result = merge_config(path, {"tokenizer": "org/model"})
    assert result.is_unchanged
    assert result.text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(*table(__file__, "a_key_with_another_value_is_replaced_only_by_force"))
def test_a_key_with_another_value_is_replaced_only_by_force(tmp_path: Path, before: str) -> None:
    path = tmp_path / "tito-audit.toml"
    path.write_text(before, encoding="utf-8")
    with pytest.raises(SetupError, match=r"[Ff]orce"):
        merge_config(path, KEYS)
    assert merged(path, before, force=True) == tomllib.loads(before) | KEYS


def test_a_key_that_must_not_be_set_is_removed_only_by_force(tmp_path: Path) -> None:
    path = tmp_path / "tito-audit.toml"
    before = 'clock = "2025-01-01"  # then\nfail-on = "never"\n'
    path.write_text(before, encoding="utf-8")
    with pytest.raises(SetupError, match="clock = '2025-01-01', found: none"):
        merge_config(path, KEYS, ["clock"])
    assert merged(path, before, unset=["clock"], force=True) == {"fail-on": "never"} | KEYS


def test_a_line_inside_a_text_is_no_key(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    text = '[project]\ndescription = """\n[tool.tito-audit]\ntokenizer = "x"\n"""\n'
    after = merged(path, text + '[tool.tito-audit]\ntokenizer = "y"  # ours\n', force=True)
    assert after == tomllib.loads(text) | {"tool": {"tito-audit": KEYS}}
    assert path.read_text(encoding="utf-8").startswith(
        f'{text}[tool.tito-audit]\ntokenizer = "org/model"  # ours\n'
    )


@pytest.mark.parametrize(*table(__file__, "a_key_in_several_lines_is_replaced_whole"))
def test_a_key_in_several_lines_is_replaced_whole(tmp_path: Path, before: str) -> None:
    assert merged(tmp_path / "tito-audit.toml", before, force=True) == KEYS
    assert merged(tmp_path / "tito-audit.toml", before, {}, unset=["template-args"], force=True) == {}


@pytest.mark.parametrize(*table(__file__, "a_table_is_found_however_it_is_written"))
def test_a_table_is_found_however_it_is_written(tmp_path: Path, before: str) -> None:
    whole = tomllib.loads(before)
    whole["tool"]["tito-audit"] |= KEYS
    assert merged(tmp_path / "pyproject.toml", before) == whole


def test_a_file_that_the_editor_spoils_is_left_to_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tito-audit.toml"
    path.write_text(OWN, encoding="utf-8")
    for spoilt in (OWN, "tokenizer = ", OWN + f"tokenizer = {KEYS['tokenizer']!r}"):
        monkeypatch.setattr("tomlkit.dumps", lambda document, spoilt=spoilt: spoilt)
        with pytest.raises(SetupError, match="by hand"):
            merge_config(path, KEYS)


def test_a_value_that_no_key_takes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tito-audit.toml"
    for keys in ({"template-args": {"a": None}}, {"tokenizer": 3}):
        with pytest.raises(SetupError, match="cannot hold"):
            merge_config(path, keys)


def test_a_broken_file_is_said_to_be_one(tmp_path: Path) -> None:
    path = tmp_path / "tito-audit.toml"
    path.write_text("tokenizer = \n", encoding="utf-8")
    with pytest.raises(SetupError, match="not valid TOML"):
        merge_config(path, KEYS)


values = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(20, 400))
@given(st.dictionaries(st.text(), values, max_size=4))
def test_toml_that_is_written_is_read_back(table: dict[str, Any]) -> None:
    text = "".join(f"{toml_key(name)} = {toml_value(value)}\n" for name, value in table.items())
    assert tomllib.loads(text) == table
