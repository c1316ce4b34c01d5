"""What the first rows of a log show about its calls: keys that could name conversations, and what these yield."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tito_audit.format import Row
from tito_audit.formats import format_named
from tito_audit.join._call_rows import CallRows, Decode
from tito_audit.join._keys import value_at
from tito_audit.join._reader import NAMES, SEEN, CallReader, key_in, keys_of, may_join, name_of
from tito_audit.join._sessions import joined_notices, own_key
from tito_audit.join.history import JoinedBy
from tito_audit.settings.model import Settings
from tito_audit.storage import open_log

_LIKE_A_KEY = re.compile(
    r"(?:^|[^a-z])(?:ids?|uuid|uid|guid|session|conversation|traj|trajectory|rollout|episode|thread|trace|chat|run)"
    r"(?:$|[^a-z])"
)
_BEFORE_A_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")


@dataclass(frozen=True, slots=True)
class KeySeen:
    """A column or path that could name the conversations of a log."""

    path: str
    rows: int
    """Calls that have a name there."""
    values: int
    """How many different names there are."""
    used: bool
    """Whether calls are joined by it."""


@dataclass(frozen=True, slots=True)
class CallsJoined:
    """The result of joining the calls."""

    rows: int
    """Calls that were joined to others."""
    conversations: int
    """How many conversations they are."""
    alone: int
    """Calls that were not joined to any other."""
    said: tuple[str, ...]
    """The same in words, with what joined them."""


@dataclass(frozen=True, slots=True)
class CallsSeen:
    """The single calls among the rows of a log that were read."""

    rows: int
    """How many rows are one call each."""
    keys: tuple[KeySeen, ...]
    joined: CallsJoined | None
    """None where nothing is joined."""


def calls_seen(
    path: Path, rows: Sequence[Row], count: int, settings: Settings, decode: Decode | None = None
) -> CallsSeen | None:
    """The calls among the first `count` rows of a log, of which `rows` can be read; None if there are fewer than
    two.

    StorageError if the log cannot be read a second time.
    """
    named = None if settings.format is None else format_named(settings.format)
    calls = [row for row in rows if may_join(row, named, stated=settings.session is not None)]
    if len(calls) < 2 or settings.columns or settings.rows_at or not path.is_file():
        return None
    if not settings.join:
        return CallsSeen(len(calls), tuple(_keys(calls, None)), None)
    stated = settings.session
    reader = CallReader(named, stated, key_in(calls[:SEEN]) if stated is None else None)
    log = open_log(path, max_row_bytes=settings.max_row_bytes)
    joined = CallRows([log], reader, decode, count, calls[:SEEN])
    used = stated or own_key(joined) or (reader.found if _believed(joined) else None)
    return CallsSeen(len(calls), tuple(_keys(calls, used)), _joined(joined, reader))


def _believed(rows: CallRows) -> bool:
    """Whether the key found in the log itself joins calls."""
    found = rows.traced
    return found is not None and (found.keys_believed or bool(found.by[JoinedBy.KEY]))


def _joined(rows: CallRows, reader: CallReader) -> CallsJoined:
    sizes = np.bincount(rows.root, minlength=len(rows.root))
    several = sizes > 1
    calls = rows.named + (0 if rows.traced is None else rows.traced.joined + rows.traced.alone)
    together = int(sizes[several].sum())
    return CallsJoined(together, int(several.sum()), calls - together, tuple(joined_notices(rows, reader)))


def _keys(calls: Sequence[Row], used: str | None) -> Iterator[KeySeen]:
    """Paths that could name the conversations of calls: the one in use first, then the usual ones."""
    paths = dict.fromkeys(path for row in calls for path in keys_of(row))
    usual = [path for path in paths if path.rpartition(".")[2] in NAMES]
    for path in dict.fromkeys([*([used] if used else []), *usual, *filter(_is_like_a_key, paths)]):
        names = [name for row in calls if (name := name_of(value_at(row, path))) is not None]
        values = len(set(names))
        # A value that no two calls share joins nothing.
        if path == used or path in usual or 1 < values < len(names):
            yield KeySeen(path, len(names), values, path == used and values > 0)


def _is_like_a_key(path: str) -> bool:
    name = _BEFORE_A_CAPITAL.sub("_", path.rpartition(".")[2]).lower()
    return _LIKE_A_KEY.search(name) is not None
