"""How a provider is named and opened, and what is missing is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.command import run
from tests.tables import table
from tito_audit.errors import SetupError
from tito_audit.providers import _http, all_providers, open_provider


def test_every_kind_is_found_by_its_file_and_listed():
    names = [kind.name for kind in all_providers()]
    assert names == ["hf", "sglang", "trl", "vllm"]
    _, listed, _ = run("list", "providers")
    for kind in all_providers():
        assert f"{kind.name}={kind.where}" in listed
        assert kind.title in listed


@pytest.mark.parametrize(*table(__file__, "what_names_no_provider_is_an_error"))
def test_what_names_no_provider_is_an_error(spec, said):
    with pytest.raises(SetupError) as refused:
        open_provider(spec)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("missing", "spec", "extra"),
    [
        ("torch", "hf=FOLDER", "hf"),
        ("aiohttp", "vllm=http://127.0.0.1:1", "serve"),
        ("aiohttp", "sglang=http://127.0.0.1:1", "serve"),
        ("aiohttp", "trl=http://127.0.0.1:1", "serve"),
    ],
)
def test_a_missing_extra_is_named(missing, spec, extra, monkeypatch, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SetupError, match=rf"pip install 'tito-audit\[{extra}\]'") as refused:
        open_provider(spec.replace("FOLDER", str(tmp_path)))
    assert "\n" not in str(refused.value)


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1), max_size=6),
    st.sampled_from(["\n", "\r\n"]),
    st.lists(st.integers(1, 9), min_size=1),
)
def test_events_are_the_same_wherever_their_bytes_are_cut(texts, end, sizes):
    data = "".join(f": comment{end}id: 3{end}data: {text}{end}{end}" for text in texts).encode()
    events, contents, turn = _http.EventParser(), [], 0
    while data:
        size = sizes[turn % len(sizes)]
        contents += events.feed(data[:size])
        data, turn = data[size:], turn + 1
    assert contents == [text.encode() for text in texts]


def test_an_event_of_several_lines_is_one_text():
    assert list(_http.EventParser().feed(b"data: {\ndata:}\n\ndata: 2\n\ndata: 3\n")) == [b"{\n}", b"2"]


@pytest.mark.parametrize("line", [b"x" * 90, b"data: " + b"x" * 50 + b"\ndata: " + b"x" * 50 + b"\n"])
def test_an_event_without_an_end_is_not_kept(line, monkeypatch):
    monkeypatch.setattr(_http, "_MAX_EVENT", 80)
    with pytest.raises(ValueError, match="longer than"):
        list(_http.EventParser().feed(line))
