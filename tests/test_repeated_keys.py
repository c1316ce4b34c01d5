"""A key that is there twice in one object of a row: never read as if it were there once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.command import run
from tito_audit.storage.row import find_repeated_key, may_repeat_keys, parse_row

ROOT = Path(__file__).resolve().parents[1]
TOY = ROOT / "fixtures" / "tokenizers" / "toy_bpe"
LOG = ROOT / "fixtures" / "formats" / "tito_sample.jsonl"
texts = st.text(st.sampled_from('a":\\ \t{}[],u0023é\n'), max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**63) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.lists(st.tuples(texts, inner), max_size=4).map(tuple),
    max_leaves=12,
)
"""JSON values in which an object is a tuple of pairs."""


def spelled(value: Any, draw: Any) -> str:
    """A value as JSON text, with white space and escapes as they come."""
    space = draw(st.sampled_from(["", "", " ", "\t", "\r\n"]))
    if isinstance(value, tuple):
        pairs = [f"{spelled(key, draw)}{space}:{spelled(inner, draw)}" for key, inner in value]
        return f"{{{space}{','.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{','.join(f'{space}{spelled(item, draw)}' for item in value)}]"
    if not isinstance(value, str):
        return json.dumps(value)
    ascii, other = (
        draw(st.booleans()),
        draw(st.sampled_from([{}, {'"': "\\u0022", ":": "\\u003a"}, {":": "\\u003A"}])),
    )
    return f'"{"".join(other.get(char) or json.dumps(char, ensure_ascii=ascii)[1:-1] for char in value)}"'


def repeats(value: Any) -> bool:
    """Whether an object at any depth has a key twice."""
    if isinstance(value, tuple):
        return len(dict(value)) < len(value) or any(repeats(inner) for _, inner in value)
    return isinstance(value, list) and any(map(repeats, value))


@given(values, st.data())
def test_a_repeated_key_is_found_however_the_text_is_spelled(value: Any, data: st.DataObject) -> None:
    text = spelled(value, data.draw).encode()
    read = orjson.loads(text)
    assert (find_repeated_key(text, read) is not None) == repeats(value)
    assert may_repeat_keys(text, read) or not repeats(value)


def test_what_writers_write_is_seen_to_be_sound_without_a_second_look() -> None:
    for log in sorted((ROOT / "fixtures" / "formats").glob("*.jsonl")):
        for line in log.read_bytes().splitlines():
            assert not may_repeat_keys(line, orjson.loads(line)), log
            spaced = json.dumps(json.loads(line), ensure_ascii=False).encode()
            assert not may_repeat_keys(spaced, orjson.loads(spaced)), log


def test_a_row_that_only_python_reads_is_looked_at_too() -> None:
    assert parse_row(0, b'{"a": NaN, "b": {"c": 1, "c": NaN}}').error is not None
    assert parse_row(0, b'{"a": NaN, "b": 1e999}').error is None


def twice(line: bytes, key: str) -> bytes:
    """A row with a key twice, the second time with what it held."""
    value = json.loads(line)[key]
    return line[:-1] + f', "{key}": {json.dumps(value)}}}'.encode()


@pytest.mark.parametrize("deep", [False, True])
def test_a_scan_finds_it_and_a_repair_keeps_every_byte(tmp_path: Path, deep: bool) -> None:
    lines = LOG.read_bytes().splitlines()
    key = next(iter(json.loads(lines[0])))
    lines[0] = lines[0][:-1] + b', "extra": {"a": 1, "a": 2}}' if deep else twice(lines[0], key)
    log, out = tmp_path / "log.jsonl", tmp_path / "out.jsonl"
    log.write_bytes(b"\n".join(lines) + b"\n")
    code, page, _ = run("scan", log, "-t", TOY, "--no-config")
    assert code == 1
    assert f"the key {'a' if deep else key!r} is there twice".replace("'", "") in " ".join(page.split()).replace(
        "'", ""
    )
    code, _, failed = run("repair", log, "-t", TOY, "-o", out, "--no-config")
    assert code in (0, 1), failed
    assert out.read_bytes().splitlines()[0] == lines[0]


def test_no_other_command_takes_one_of_the_two_values(tmp_path: Path) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "out.jsonl"
    line = LOG.read_bytes().splitlines()[0]
    log.write_bytes(twice(line, next(iter(json.loads(line)))) + b"\n")
    for words in (("show", log, "-t", TOY), ("inspect", log), ("convert", log, "--to", "tito_sample", "-o", out)):
        code, page, failed = run(*words, "--no-config")
        assert "twice" in " ".join((page + failed).split()), words
        assert code or words[0] != "convert"
        assert not out.exists() or not out.read_bytes()
