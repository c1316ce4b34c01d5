"""What of the form of a Parquet file another one does not have, by their footers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tito_audit.terminal.words import listed

_NAMED = 3
"""How many columns are named."""
_LEVELS = {"RLE", "BIT_PACKED", "PLAIN"}
"""Encodings that every column may have besides its own."""
_ARROW = b"ARROW:schema"


def own_metadata(file: Any) -> dict[bytes, bytes]:
    """The file's metadata, without the copy of its schema, which is written anyway."""
    return {name: value for name, value in (file.metadata.metadata or {}).items() if name != _ARROW}


def not_kept(old: Any, new: Any) -> Iterator[str]:
    """What the footer `old` shows of columns and `new` does not, in words; `new` may have more columns."""
    shared = range(old.num_columns)
    found: dict[str, list[str]] = {}
    for place in shared:
        name = old.schema.column(place).path
        if str(old.schema.column(place)) != str(new.schema.column(place)):
            found.setdefault("type and name", []).append(name)
        if new.num_row_groups:
            for what in _column(*(_form(one, place) for one in (old, new))):
                found.setdefault(what, []).append(name)
    for what, names in found.items():
        more = [f"{len(names) - _NAMED:,} more"] if len(names) > _NAMED else []
        yield f"{what} of {listed([*names[:_NAMED], *more])}"
    gone = [key for key, value in (old.metadata or {}).items() if key != _ARROW and new.metadata.get(key) != value]
    if gone:
        yield f"metadata {listed([repr(key.decode('utf-8', 'replace')) for key in gone])}"


def _form(metadata: Any, place: int) -> dict[str, set[Any]]:
    """How a column is stored, over all row groups that have values."""
    groups = (metadata.row_group(group).column(place) for group in range(metadata.num_row_groups))
    chunks = [chunk for chunk in groups if chunk.num_values]
    encodings = {name for chunk in chunks for name in chunk.encodings}
    return {
        "codec": {chunk.compression for chunk in chunks},
        "encoding": {"DICTIONARY" if "DICTIONARY" in name else name for name in encodings} - _LEVELS,
        "statistics": {True for chunk in chunks if chunk.is_stats_set},
        "page index": {True for chunk in chunks if chunk.has_column_index or chunk.has_offset_index},
        "bloom filter": {True for chunk in chunks if getattr(chunk, "bloom_filter_length", None)},
    }


def _column(old: dict[str, set[Any]], new: dict[str, set[Any]]) -> Iterator[str]:
    return (what for what, was in old.items() if was - new[what])
