"""Whether names in a table's schema are unique: a row could show only one of two columns with the same name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tito_audit.errors import StorageError


def refuse_same_names(path: Path, schema: Any) -> None:
    """StorageError if two columns, or two fields of an object in a column, have the same name, or one no text."""
    try:
        where = next(_doubles((), schema), None)
    except UnicodeDecodeError:
        raise StorageError(
            f"{path}: the name of a column is not UTF-8, so its rows cannot be shown.\n"
            "The file is damaged: copy it again, or write it again."
        ) from None
    if where is not None:
        *outer, name = where
        what = f"two fields of {'.'.join(outer)!r}" if outer else "two of the columns"
        raise StorageError(
            f"{path}: {what} are named {name!r}, and a row can show only one.\nRename or drop one of them."
        )


def _doubles(outer: tuple[str, ...], fields: Iterable[Any]) -> Iterator[tuple[str, ...]]:
    """The path of every second field of the same name."""
    import pyarrow as pa

    seen: set[str] = set()
    for field in fields:
        inside = (*outer, field.name)
        if field.name in seen:
            yield inside
        seen.add(field.name)
        kind = field.type
        while (within := _within(kind)) is not None:
            kind = within
        if pa.types.is_struct(kind):
            yield from _doubles(inside, kind)


def _within(kind: Any) -> Any:
    """The type of the values in a list, a map, a dictionary or an extension; None for any other type."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type
    if pa.types.is_map(kind):
        return kind.item_type
    return getattr(kind, "value_type", None)
