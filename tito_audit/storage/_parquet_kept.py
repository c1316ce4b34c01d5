"""What of the form of a Parquet file another one does not have, by their footers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any

from tito_audit.storage._parquet_footer import Footer
from tito_audit.storage._parquet_pages import (
    ABOUT,
    BLOOM,
    BOUNDS,
    CODEC,
    ENCODING_STATS,
    ENCODINGS,
    OFFSETS,
    STATISTICS,
    VALUES,
    path_of,
)
from tito_audit.storage._thrift import Struct
from tito_audit.terminal.words import listed

_NAMED = 3
"""How many columns are named."""
_LEVELS = {"RLE", "BIT_PACKED", "PLAIN"}
"""Encodings that every column may have besides its own."""
_ARROW = b"ARROW:schema"
_NAME, _CHILDREN = 4, 5
"""Fields of a node of the schema."""
# Numbers that footers have for encodings, codecs and types of pages, and fields of statistics.
_DICTIONARIES, _LEVEL_CODES, _PLAIN_DICTIONARY = {2, 8}, {0, 3, 4}, 2
_LZ4, _LZ4_RAW = 5, 7
_DATA_PAGES = {0, 3}
_NULLS, _LARGEST = 3, (1, 5)


def own_metadata(file: Any) -> dict[bytes, bytes]:
    """The file's metadata, without the copy of its schema, which is written anyway."""
    return {name: value for name, value in (file.metadata.metadata or {}).items() if name != _ARROW}


def not_kept(old: Any, new: Any, elements: Sequence[Struct]) -> Iterator[str]:
    """What the footer `old` shows of columns and `new` does not, in words; `new` may have more columns.

    `elements`: the nodes of the old schema as they are stored; pyarrow shows no more than one of two types that
    contradict each other.
    """
    shared = range(old.num_columns)
    found: dict[str, list[str]] = {}
    for place in shared:
        name = old.schema.column(place).path
        if str(old.schema.column(place)) != str(new.schema.column(place)):
            found.setdefault("type and name", []).append(name)
        if new.num_row_groups:
            for what in _column(*(_form(one, place) for one in (old, new))):
                found.setdefault(what, []).append(name)
    names = found.get("type and name", [])
    for name in _changed(elements, _stored_elements(new)):
        if not any(one == name or one.startswith(f"{name}.") for one in names):
            found["type and name"] = names = [*names, name]
    yield from _said(found)
    gone = [key for key, value in (old.metadata or {}).items() if key != _ARROW and new.metadata.get(key) != value]
    if gone:
        yield f"metadata {listed([repr(key.decode('utf-8', 'replace')) for key in gone])}"


def _stored_elements(metadata: Any) -> list[Struct]:
    """The nodes of the schema in the footer that pyarrow has written."""
    file = BytesIO()
    metadata.write_metadata_file(file)
    return Footer(file).elements


def _changed(old: Sequence[Struct], new: Sequence[Struct]) -> Iterator[str]:
    """The paths of nodes of a schema that lack something in the new one, as far as both have the same nodes."""
    above: list[list[Any]] = []
    for was, now in zip(old[1:], new[1:], strict=False):
        if was.get(_NAME) != now.get(_NAME):
            return
        while above and not above[-1][1]:
            above.pop()
        if above:
            above[-1][1] -= 1
        path = b".".join([*(name for name, _ in above), was.get(_NAME)])
        if any(now.fields.get(number) != value for number, value in was.fields.items()):
            yield path.decode("utf-8", "replace")
        if was.get(_CHILDREN):
            above.append([was.get(_NAME), was.get(_CHILDREN)])


class NotKept:
    """What column chunks that were written anew do not have of those they stand for."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {}

    def compare(self, old: Sequence[Struct], new: Sequence[Struct]) -> None:
        """Note what the footer says of old column chunks and not of the new ones."""
        for was, now in zip(old, new, strict=True):
            if not (was.get(ABOUT).get(VALUES) and now.get(ABOUT).get(VALUES)):
                continue
            name = b".".join(path_of(was).values).decode("utf-8", "replace")
            for what in _column(_stored(was), _stored(now)):
                names = self._found.setdefault(what, [])
                names += [name] if name not in names else []

    def words(self) -> Iterator[str]:
        """All of it, in words."""
        return _said(self._found)


def _said(found: dict[str, list[str]]) -> Iterator[str]:
    for what, names in found.items():
        more = [f"{len(names) - _NAMED:,} more"] if len(names) > _NAMED else []
        yield f"{what} of {listed([*names[:_NAMED], *more])}"


def _stored(chunk: Struct) -> dict[str, set[Any]]:
    """How a column chunk is stored, as the footer says."""
    about: Struct = chunk.get(ABOUT)
    codes, codec, stats = set(about.get(ENCODINGS).values), about.get(CODEC), about.get(STATISTICS)
    pages = about.get(ENCODING_STATS)
    of_data = [one.get(2) for one in pages.values if one.get(1) in _DATA_PAGES] if pages is not None else codes
    whole = bool(codes & _DICTIONARIES) and (pages is None or set(of_data) <= _DICTIONARIES)
    bounded = stats is not None and any(stats.get(number) is not None for number in _LARGEST)
    bounded |= stats is not None and stats.get(_NULLS) == about.get(VALUES)
    return {
        "codec": {_LZ4_RAW if codec == _LZ4 else codec},
        "encoding": {_PLAIN_DICTIONARY if one in _DICTIONARIES else one for one in codes} - _LEVEL_CODES,
        "dictionary of later pages": {True} if whole else set(),
        "statistics": {True} if bounded else set(),
        "page index": {True} if chunk.get(BOUNDS) or chunk.get(OFFSETS) else set(),
        "bloom filter": {True} if about.get(BLOOM) else set(),
    }


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
