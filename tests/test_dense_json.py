"""Text dense in brackets and quotes is cut as any other: windows give what single steps give."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tito_audit.storage import streams
from tito_audit.storage.streams import cut_values

PARTS = [
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
    b",",
    b"\\",
    b"1",
    b" ",
    b'"a"',
    b'"]"',
    b'"\\""',
    b"[[[[",
    b"]]]]",
    b'{"a":[]}',
]


def pieces(
    data: bytes, block: int, *, array: bool, dense: int, window: int
) -> list[tuple[bytes | None, bool, bytes]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_DENSE", dense)
        patch.setattr(streams, "_WINDOW", window)
        blocks = [data[at : at + block] for at in range(0, len(data), block)]
        cut = cut_values(blocks, array=array, limit=1 << 20, keep_gaps=True)
        return [(piece.data, piece.complete, piece.mark) for piece in cut]


@given(
    st.lists(st.sampled_from(PARTS), max_size=60).map(b"".join),
    st.booleans(),
    st.integers(1, 40),
    st.integers(1, 30),
)
def test_windows_give_what_single_steps_give(data: bytes, array: bool, block: int, window: int) -> None:
    alone = pieces(data, len(data) or 1, array=array, dense=10**9, window=window)
    assert pieces(data, block, array=array, dense=1, window=window) == alone


@pytest.mark.parametrize(
    "text", [b"[" * 40_000 + b"]" * 40_000, b"[" + b'"",' * 40_000 + b"1]", b"[[]" + b",[]" * 40_000 + b"]"]
)
def test_windows_are_looked_at(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    brackets = streams._BRACKET

    class Counted:
        def search(self, block: bytes, at: int) -> re.Match[bytes] | None:
            searches.append(at)
            return brackets.search(block, at)

    monkeypatch.setattr(streams, "_BRACKET", Counted())
    assert next(piece.data for piece in cut_values([text], array=False, limit=1 << 20)) == text
    assert len(searches) < 2_000
