"""What summaries and `inspect` say about joined calls, and the error for a `--session` key that no row has."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import SetupError
from tito_audit.format import Row
from tito_audit.formats import format_named
from tito_audit.join._call_rows import CallRows
from tito_audit.join._keys import value_at
from tito_audit.join._reader import (
    NAMES,
    SEEN,
    CallReader,
    conversation_name,
    find_conversation_key,
    is_joinable,
    possible_key_paths,
)
from tito_audit.join.history import JoinedBy
from tito_audit.join.traces import Decode
from tito_audit.settings.model import Settings
from tito_audit.storage import open_log
from tito_audit.terminal.words import listed, many

_LISTED = 16


def joined_notices(rows: CallRows, read: CallReader) -> list[str]:
    """How many rows became how many conversations, by what, and what stayed as it was."""
    where = f"{rows.paths[0]}" if len(rows.paths) == 1 else f"{len(rows.paths)} logs"
    path = read.stated or key_of_format(rows)
    by_name: list[str] = []
    if path is not None:
        conversations = rows.conversations_named
        by_name.append(
            f"{_rows(rows.named)} read as the calls of {many(conversations, 'conversation')}, by `{path}`"
        )
        if conversations > len(np.unique(np.frombuffer(rows.keys, np.uint64))):
            by_name.append(
                f"calls with the same `{path}` but another format, model, tools or template arguments are "
                "separate conversations"
            )
        if read.stated is not None and rows.unnamed and rows.joined is None:
            by_name.append(f"{many(rows.unnamed, 'row')} without it stay{_s(rows.unnamed)} separate")
        if read.stated is not None and rows.others:
            by_name.append(
                f"{many(rows.others, 'row')} with it {'is' if rows.others == 1 else 'are'} not a "
                f"single call and stay{_s(rows.others)} as {'it is' if rows.others == 1 else 'they are'}"
            )
    by_history: list[str] = []
    if rows.joined is not None:
        joined, conversations = count_joined(rows.joined.of)
        alone, unsure = len(rows.joined.of) - joined, rows.joined.unsure
        if not joined and read.stated is not None:
            by_history.append(
                f"{_rows(alone, 'has', 'have')} no `{read.stated}` and continue{_s(alone)} no other call"
            )
        elif not joined and alone > 1 and (len(unsure) or rows.forms[1:] != ["generic"]):
            # Not said of rows of plain columns, which may just as well be whole rollouts of one call.
            by_history.append(f"{_rows(alone, 'is', 'are')} a single call each; none continues another")
        elif joined:
            ways = {JoinedBy.KEY: f"`{read.found_key}`"}
            if not rows.joined.keys_believed:
                ways |= {JoinedBy.IDS: "token ids", JoinedBy.MESSAGES: "messages", JoinedBy.TEXT: "text"}
                ways = {by: words for by, words in ways.items() if by in rows.joined.by}
            of, by = many(conversations, "conversation"), listed([*ways.values()])
            by_history.append(f"{_rows(joined)} read as the calls of {of}, by {by}")
            if alone:
                by_history.append(f"{many(alone, 'call')} {'is' if alone == 1 else 'are'} joined to no other")
            if len(unsure):
                file, (index, _) = rows.place(rows.traced[int(unsure[0])])
                first = f"{rows.paths[file]}:{index}"
                by_history.append(f"{len(unsure):,} could continue more than one call (first {first})")
    stay = "stays as it is" if rows.several == 1 else "stay as they are"
    several = f"{_rows(rows.several, 'holds', 'hold')} several calls or choices and {stay}"
    notices = [by_name, [*by_history, *([several] if rows.several else [])]]
    return [f"{where}: {'; '.join(each)}." for each in notices if each]


def key_of_format(rows: CallRows) -> str | None:
    """The key by which rows were joined because their format names it; None if there are no such rows."""
    if not rows.named:
        return None
    own = (format_named(form).conversation for form in rows.forms[1:])
    return next((key for key in own if key), None)


def _rows(count: int, singular: str = "was", plural: str = "were") -> str:
    """`1 row was`, `3 rows were`."""
    return f"{many(count, 'row')} {singular if count == 1 else plural}"


def _s(count: int) -> str:
    """The end of a verb: `1 row stays`, `3 rows stay`."""
    return "s" * (count == 1)


def refuse_unknown_key(path: str, logs: Sequence[Path], max_row_bytes: int) -> None:
    """Raises SetupError, with similar keys, if no row of the logs names a conversation at this path."""
    seen: list[Row] = []
    for log in logs:
        for raw in open_log(log, max_row_bytes=max_row_bytes):
            if raw.value is None:
                continue
            if conversation_name(value_at(raw.value, path)) is not None:
                return
            if len(seen) < SEEN:
                seen.append(raw.value)
    if not seen:
        return
    keys = list(dict.fromkeys(key for row in seen for key in possible_key_paths(row)))
    last = path.rpartition(".")[2]
    ends = {key: key.rpartition(".")[2] for key in keys}
    like = difflib.get_close_matches(last, list(dict.fromkeys(ends.values())), n=3)
    own = [key for end in like for key in keys if ends[key] == end]
    close = list(dict.fromkeys([*difflib.get_close_matches(path, keys, n=2), *own]))[:3]
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    where = str(logs[0]) if len(logs) == 1 else f"the {len(logs)} logs"
    listed = ", ".join(keys[:_LISTED]) + (", …" if len(keys) > _LISTED else "")
    has = f"\nText and whole numbers are in {listed}." if keys else ""
    raise SetupError(f"--session {path}: no row of {where} names a conversation there.{hint}{has}")


_LIKE_A_KEY = re.compile(
    r"(?:^|[^a-z])(?:ids?|uuid|uid|guid|session|conversation|traj|trajectory|rollout|episode|thread|trace|chat|run)"
    r"(?:$|[^a-z])"
)
_BEFORE_A_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")


@dataclass(frozen=True, slots=True)
class PossibleKey:
    """A column or path that could name the conversations of a log."""

    path: str
    rows: int
    """Calls with a name there."""
    values: int
    """Different names."""
    used: bool
    """Whether calls are joined by it."""


@dataclass(frozen=True, slots=True)
class CallsJoined:
    """The result of joining calls."""

    rows: int
    """Calls joined to others."""
    conversations: int
    """The conversations that these are."""
    alone: int
    """Calls joined to no other."""
    said: tuple[str, ...]
    """The same in words, with what joined them."""


@dataclass(frozen=True, slots=True)
class CallsInspected:
    """The single calls among the rows of a log that were read."""

    rows: int
    """Rows that are one call each."""
    keys: tuple[PossibleKey, ...]
    joined: CallsJoined | None
    """None where nothing is joined."""


def inspect_calls(
    path: Path, rows: Sequence[Row], count: int, settings: Settings, decode: Decode | None = None
) -> CallsInspected | None:
    """The calls among the first `count` rows of a log, of which `rows` can be read; None if fewer than two.

    StorageError if the log cannot be read a second time.
    """
    stated = settings.session
    calls = [row for row in rows if is_joinable(row, settings.format, stated=stated is not None)]
    if len(calls) < 2 or settings.columns or settings.rows_at or not path.is_file():
        return None
    if not settings.join:
        return CallsInspected(len(calls), tuple(_possible_keys(calls, None)), None)
    reader = CallReader(settings.format, stated, find_conversation_key(calls[:SEEN]) if stated is None else None)
    log = open_log(path, max_row_bytes=settings.max_row_bytes)
    joined = CallRows([log], reader, decode, count, calls[:SEEN])
    history = joined.joined
    by_key = history is not None and (history.keys_believed or JoinedBy.KEY in history.by)
    used = stated or key_of_format(joined) or (reader.found_key if by_key else None)
    several, conversations = count_joined(joined.root)
    alone = joined.named + len(joined.traced) - several
    result = CallsJoined(several, conversations, alone, tuple(joined_notices(joined, reader)))
    return CallsInspected(len(calls), tuple(_possible_keys(calls, used)), result)


def count_joined(of: NDArray[np.integer]) -> tuple[int, int]:
    """How many calls are joined to others, and into how many conversations; `of` `[N]`: each one's first call."""
    sizes = np.bincount(of, minlength=1)
    return int(sizes[sizes > 1].sum()), int((sizes > 1).sum())


def _possible_keys(calls: Sequence[Row], used: str | None) -> Iterator[PossibleKey]:
    """The paths that could name the conversations of calls: the used one first, then the usual ones."""
    paths = dict.fromkeys(path for row in calls for path in possible_key_paths(row))
    usual = [path for path in paths if path.rpartition(".")[2] in NAMES]
    own_names = {path: _BEFORE_A_CAPITAL.sub("_", path.rpartition(".")[2]).lower() for path in paths}
    alike = [path for path, name in own_names.items() if _LIKE_A_KEY.search(name)]
    for path in dict.fromkeys([*([used] if used else []), *usual, *alike]):
        names = [name for row in calls if (name := conversation_name(value_at(row, path))) is not None]
        values = len(set(names))
        # A value that no two calls share joins nothing.
        if path == used or path in usual or 1 < values < len(names):
            yield PossibleKey(path, len(names), values, path == used and values > 0)
