"""Which rows of a log are the calls of one conversation: lines of a token capture, or rows with a stated key."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from tito_audit.errors import RecordError, SetupError
from tito_audit.format import Format, Row
from tito_audit.formats import pick_format
from tito_audit.join._calls import CAPTURE
from tito_audit.join._gathering import CallKey, Gathering
from tito_audit.join._keys import id_text, value_at
from tito_audit.record.rollout import Place, Rollout
from tito_audit.storage import open_log

_NOWHERE = Place("", 0)
_SEEN = 16
"""How many rows are read to find keys like the one that was named."""
_MOST_KEYS = 64
_DEPTH = 4
_LISTED = 16


class CaptureKey:
    """Gathers the lines of a token capture by the rollout that they name."""

    by_key = False

    def __call__(self, row: Row) -> CallKey | None:
        """The rollout of a line; None for a row that is no such line."""
        name = _rollout_id(row)
        return CallKey(name, CAPTURE) if name is not None and is_capture(row) else None


def is_capture(row: Row) -> bool:
    """Whether a row is a line of a token capture that names its rollout."""
    try:
        return pick_format(row).name == CAPTURE and _rollout_id(row) is not None
    except RecordError:
        return False


def _rollout_id(row: Mapping[str, Any]) -> str | None:
    name = row.get("rollout_id")
    return name if isinstance(name, str) and name else None


@dataclass(slots=True)
class SessionKey:
    """Gathers rows that are one call each by the conversation that they name at `path`, and counts all rows."""

    path: str
    named: Format | None
    """The format of all rows; None: detected row by row."""
    by_key: bool = True
    unnamed: int = 0
    """Rows that name no conversation."""
    others: int = 0
    """Rows that name one and are not a single call."""
    contexts: dict[bytes, int] = field(default_factory=dict)

    def __call__(self, row: Row) -> CallKey | None:
        """The conversation of a row that is one call; None for any other row."""
        name = _name(value_at(row, self.path))
        if name is None:
            self.unnamed += 1
            return None
        form = self._form(row)
        call = _only_call(form, row) if form is not None else None
        if form is None or call is None:
            self.others += 1
            return None
        stated = call.stated
        context = repr((stated.model, stated.attempt, call.tools, sorted(call.template_kwargs.items())))
        known = blake2b(context.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return CallKey(name, form.name, self.contexts.setdefault(known, len(self.contexts)))

    def _form(self, row: Row) -> Format | None:
        """The format of a row; None if it has none, or if its rows may not have keys of others."""
        try:
            form = self.named or pick_format(row)
        except RecordError:
            return None
        return form if not form.open_object else None


def _only_call(form: Format, row: Row) -> Rollout | None:
    """The rollout of a row that is one call and nothing else."""
    try:
        rollouts = form.read(row, _NOWHERE)
    except (RecordError, AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None  # The audit says why.
    if len(rollouts) != 1 or len(rollouts[0].turns) != 1 or rollouts[0].training_row is not None:
        return None
    return rollouts[0]


def _name(value: object) -> str | None:
    """A text or a whole number as JSON; None if it names nothing."""
    text = id_text(value)
    return json.dumps(text) if isinstance(value, str) and text is not None else text


# What a summary says


@dataclass(frozen=True, slots=True)
class Joined:
    """How the rows of one log were joined by `--session`."""

    calls: int
    conversations: int
    names: int
    unnamed: int
    others: int

    @classmethod
    def of(cls, rows: Gathering, key: SessionKey) -> Joined:
        """How many rows became what."""
        return cls(rows.calls, rows.conversations, rows.names, key.unnamed, key.others)


def session_notice(joined: Mapping[Path, Joined], path: str) -> str:
    """How many rows became how many conversations, and what was left as it is."""
    where = str(next(iter(joined))) if len(joined) == 1 else f"{len(joined)} logs"
    calls, conversations, names, unnamed, others = (
        sum(getattr(one, name) for one in joined.values()) for name in Joined.__dataclass_fields__
    )
    said = [
        f"{_rows(calls)} read as the calls of {conversations:,} conversation{'s' * (conversations != 1)}, "
        f"by `{path}`"
    ]
    if conversations > names:
        said.append(
            f"calls of one `{path}` in another format, of another model, or with other tools or template "
            "arguments are conversations of their own"
        )
    if unnamed:
        said.append(f"{unnamed:,} row{'s' * (unnamed != 1)} without it stay{'s' * (unnamed == 1)} alone")
    if others:
        said.append(
            f"{others:,} row{'s' * (others != 1)} with it {'is' if others == 1 else 'are'} not a single call and "
            f"stay{'s' * (others == 1)} as {'it is' if others == 1 else 'they are'}"
        )
    return f"{where}: {'; '.join(said)}."


def _rows(count: int) -> str:
    return "1 row was" if count == 1 else f"{count:,} rows were"


# A key that no row has


def refuse_unknown(path: str, logs: Sequence[Path], max_row_bytes: int) -> None:
    """SetupError, with keys that are like it, if no row of the logs has a name at this path."""
    seen: list[Row] = []
    for log in logs:
        for raw in open_log(log, max_row_bytes=max_row_bytes):
            if raw.value is None:
                continue
            if _name(value_at(raw.value, path)) is not None:
                return
            if len(seen) < _SEEN:
                seen.append(raw.value)
    if not seen:
        return
    keys = list(dict.fromkeys(key for row in seen for key in _keys(row)))
    close = _close(path, keys)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    where = str(logs[0]) if len(logs) == 1 else f"the {len(logs)} logs"
    listed = ", ".join(keys[:_LISTED]) + (", …" if len(keys) > _LISTED else "")
    has = f"\nText and whole numbers are in {listed}." if keys else ""
    raise SetupError(f"--session {path}: no row of {where} names a conversation there.{hint}{has}")


def _close(path: str, keys: Sequence[str]) -> list[str]:
    """Keys with a similar path, or whose own name is similar."""
    last = path.rpartition(".")[2]
    ends = {key: key.rpartition(".")[2] for key in keys}
    like = difflib.get_close_matches(last, list(dict.fromkeys(ends.values())), n=3)
    own = [key for end in like for key in keys if ends[key] == end]
    return list(dict.fromkeys([*difflib.get_close_matches(path, keys, n=2), *own]))[:3]


def _keys(row: Mapping[str, Any], above: str = "", depth: int = 0) -> Iterator[str]:
    """The paths of everything in a row that could name a conversation."""
    for key, value in islice(row.items(), _MOST_KEYS):
        where = f"{above}{key}"
        if _name(value) is not None:
            yield where
        elif isinstance(value, Mapping) and depth < _DEPTH:
            yield from _keys(value, f"{where}.", depth + 1)
