"""A tokenizer whose files hold anything in the place of anything: it loads, or one message says where it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import run
from tests.tiers import one_in
from tito_audit.errors import TokenizerError
from tito_audit.tokens.hub import read_summary
from tito_audit.tokens.load import load_tokenizer

LOADS_ANEW = True

ROOT = Path(__file__).resolve().parents[1]
TOY = ROOT / "fixtures" / "tokenizers" / "toy_bpe"
SMALL: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {"id": 3, "content": "<e>", "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
}
SETTINGS: dict[str, Any] = {
    "eos_token": {"content": "<e>"},
    "pad_token": "<p>",
    "extra_special_tokens": {"x_token": "<x>"},
    "additional_special_tokens": ["<y>"],
    "added_tokens_decoder": {"3": {"content": "<e>", "special": True}},
    "chat_template": [{"name": "default", "template": "{{ messages }}"}],
}
ODD: list[Any] = [
    None,
    True,
    -1,
    2**70,
    1e308,
    "",
    "x",
    [],
    [[]],
    [{}],
    {},
    {"content": {}},
    {"type": {}},
    [None, 1],
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a value but the whole."""
    if path:
        yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield from places(entry, (*path, key))


def replaced(whole: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a place."""
    copy = json.loads(json.dumps(whole))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copy


def refusal(folder: Path) -> str:
    """Why a tokenizer does not load; "" if it does."""
    try:
        load_tokenizer(str(folder))
    except TokenizerError as error:
        return str(error)
    return ""


def test_anything_in_the_place_of_anything_is_one_message(tmp_path: Path) -> None:
    parts = [("tokenizer.json", SMALL), ("tokenizer_config.json", SETTINGS)]
    for name, whole in parts:
        (tmp_path / name).write_text(json.dumps(whole))
    assert load_tokenizer(str(tmp_path)).eos_ids == (3,)
    refused = 0
    cases = [(name, whole, path, odd) for name, whole in parts for path in places(whole) for odd in ODD]
    for name, whole, path, odd in one_in(7, cases):
        if path[0] in ("pre_tokenizer", "normalizer"):
            continue  # these start processes
        (tmp_path / name).write_text(json.dumps(replaced(whole, path, odd)))
        message = refusal(tmp_path)
        refused += bool(message)
        assert not message or str(tmp_path) in message, (name, path, odd)
        read_summary(tmp_path)
        (tmp_path / name).write_text(json.dumps(whole))
    assert refused > 10


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokenizer.json", {"added_tokens": True}),
        ("tokenizer.json", {"normalizer": {"type": {}}}),
        ("tokenizer_config.json", {"chat_template": [{"name": {}, "template": "x"}]}),
    ],
)
def test_a_scan_with_an_odd_definition_names_its_place(tmp_path: Path, name: str, change: dict[str, Any]) -> None:
    for file in TOY.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / name).write_text(json.dumps(json.loads((TOY / name).read_text()) | change))
    log = ROOT / "fixtures" / "formats" / "tito_sample.jsonl"
    code, _, err = run("scan", log, "-t", tmp_path, "--no-config")
    assert "Traceback" not in err
    assert code in (0, 1) or (code == 2 and str(tmp_path) in err)


def test_what_a_glance_cannot_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": "b"}}, "added_tokens": [{"id": 1e400}]}')
    assert read_summary(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": "b"}}, "added_tokens": [{"id": 1}]}')
    assert read_summary(tmp_path) is None
