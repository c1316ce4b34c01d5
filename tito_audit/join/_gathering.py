"""Logs whose rows are single calls, as logs of rollouts; and the calls written back to their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tito_audit.format import Row
from tito_audit.join._calls import CALLS, CallsOfRollout
from tito_audit.storage import Log, Output, RawRow
from tito_audit.storage.chunk import Chunk, Reading
from tito_audit.storage.lines import ParseRow
from tito_audit.storage.random_access import RandomAccess, Ticket, line_at, unpacked
from tito_audit.storage.sampling import Sample


@dataclass(frozen=True, slots=True)
class CallKey:
    """What a row that is one call says of itself."""

    conversation: str
    """The name of its rollout or conversation."""
    form: str
    """The format of the row."""
    context: int = 0
    """Calls of another model, with other tools or other template arguments have another number."""


class KeyOf(Protocol):
    """Says of a row which conversation it is a call of."""

    by_key: bool
    """Whether a stated key names the conversation. Its only call then stays the row that it is; the only line of
    a token capture is gathered too."""

    def __call__(self, row: Row) -> CallKey | None:
        """None for a row that stays as it is."""


@dataclass(slots=True)
class _Group:
    """Rows that are read as one."""

    tickets: list[Ticket]
    key: CallKey | None
    form: str = ""
    """The format of the calls; "" for a row that stays as it is."""

    @property
    def first(self) -> int:
        """The index of its first row, which is where it stands."""
        return self.tickets[0][0]


class Gathering:
    """The rows of a log: one for each conversation, at its first call; other rows as they are."""

    def __init__(self, log: Log, key_of: KeyOf) -> None:
        self.path = log.path
        self._log = log
        self._parse = log.parse
        self._by_key = key_of.by_key
        self._reader = RandomAccess(log.path, max_row_bytes=log.max_row_bytes, parse=log.parse)
        self.groups: list[_Group] = []
        known: dict[CallKey, _Group] = {}
        for ticket, raw in self._reader:
            key = key_of(raw.value) if raw.value is not None else None
            if key is not None and key in known:
                known[key].tickets.append(ticket)
                continue
            self.groups.append(_Group([ticket], key))
            if key is not None:
                known[key] = self.groups[-1]
        for key, group in known.items():
            group.form = key.form if len(group.tickets) > 1 or not key_of.by_key else ""
        self.calls = sum(len(group.tickets) for group in known.values())
        self.conversations = len(known)
        self.names = len({key.conversation for key in known})
        """How many rows are calls, of how many conversations, with how many names, in the whole log."""
        self._left_out = [0] * (len(self.groups) + 1)
        """How many rollouts are left out before each, and in all, where a share of the log is wanted."""
        if log.share is not None:
            self._choose(Sample(log.share))

    def _choose(self, sample: Sample) -> None:
        """Keep the rollouts that the sample takes, by their first row and their name."""
        left_out, kept = [], []
        for group in self.groups:
            before = sample.left_out
            name = group.key.conversation.encode("utf-8", "surrogatepass") if group.key is not None else b""
            if sample.takes(group.first, group.first, name, len(name)):
                left_out.append(before)
                kept.append(group)
        self.groups, self._left_out = kept, [*left_out, sample.left_out]

    def __iter__(self) -> Iterator[RawRow]:
        for group, left_out in zip(self.groups, self._left_out, strict=False):
            self._log.left_out = left_out
            raws = [self._reader.row(ticket) for ticket in group.tickets]
            yield _gathered_row(raws, group.form, self._log.max_row_bytes, by_key=self._by_key)
            self._log.position = self._log.size * group.first // max(self.groups[-1].first, 1)
        self._log.left_out = self._left_out[-1]

    @property
    def lines(self) -> int:
        """How many rows the wanted rollouts have."""
        return sum(len(group.tickets) for group in self.groups)

    def chunks(self, size: int) -> Iterator[Chunk]:
        """The same rows in chunks of about `size` bytes, if rows are about equally long."""
        each = max(size * self.lines // max(self._log.size, 1), 1)
        start = 0
        if not self.groups and self._left_out[-1]:
            chunk = _Gathered(self.path, self._log.max_row_bytes, self._log.size, [], self._parse, self._by_key)
            chunk.share, chunk.left_out = self._log.share, self._left_out
            yield chunk
        while start < len(self.groups):
            stop, held = start, 0
            while stop < len(self.groups) and held < each:
                held += len(self.groups[stop].tickets)
                stop += 1
            part = [self._packed(group) for group in self.groups[start:stop]]
            done = self._log.size * stop // len(self.groups)
            chunk = _Gathered(self.path, self._log.max_row_bytes, done, part, self._parse, self._by_key)
            if self._log.share is not None:
                # Rollouts left out after the last one count for its chunk.
                chunk.share, first = self._log.share, self._left_out[start] if start else 0
                chunk.left_out = [left_out - first for left_out in self._left_out[start : stop + 1]]
            yield chunk
            start = stop

    def _packed(self, group: _Group) -> _Packed:
        packed = [self._reader.packed(ticket) for ticket in group.tickets]
        return _Packed(group.form, group.tickets, packed)


@dataclass(frozen=True, slots=True)
class _Packed:
    """The rows of a group as they go to another process."""

    form: str
    tickets: Sequence[Ticket]
    packed: Sequence[bytes | None]
    """None for a row that is read by offset."""


@dataclass(slots=True)
class _Gathered(Chunk):
    """A chunk of the rollouts of gathered calls, numbered as in the file."""

    groups: list[_Packed]
    parse: ParseRow
    by_key: bool
    left_out: Sequence[int] = field(default=())
    """How many rollouts are left out before each, and in all; () where none are."""

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """One row for each rollout; the size of the reading stays 0, since rows are numbered as in the file."""
        for number, group in enumerate(self.groups):
            if reading.sample is not None:
                reading.sample.left_out = self.left_out[number]
            raws = [
                unpacked(data) if data is not None else line_at(self.path, ticket, self.limit, self.parse)
                for ticket, data in zip(group.tickets, group.packed, strict=True)
            ]
            yield _gathered_row(raws, group.form, self.limit, by_key=self.by_key)
        if reading.sample is not None:
            reading.sample.left_out = self.left_out[-1]


def _gathered_row(raws: Sequence[RawRow], form: str, limit: int, *, by_key: bool) -> RawRow:
    """The calls of a rollout as one row; a row that is no call, or cannot be read, as it is."""
    first = raws[0]
    if not form:
        return first
    size = sum(len(raw.text or b"") for raw in raws)
    if len(raws) > 1 and size > limit:
        return RawRow(
            first.index,
            None,
            f"the {len(raws)} calls of this rollout are {size:,} bytes together, over the limit of {limit:,}; "
            "raise --max-row-bytes to read them",
        )
    return RawRow(first.index, CallsOfRollout(raws, form, by_key=by_key))


class GatheredOutput:
    """An output that takes gathered rollouts and writes their calls in their old places."""

    def __init__(self, out: Output, log: Log, calls: Gathering) -> None:
        self.changed = False
        self._out = out
        self._lines = iter(log)
        self._waiting: RawRow | None = None
        self._groups = {group.first: [index for index, _ in group.tickets] for group in calls.groups}
        self._said: dict[int, Sequence[Row] | None] = {}
        """What to write for each row of the rollouts taken so far; None: the row as it was."""

    def keep(self, raw: RawRow) -> None:
        """Write the rows of a rollout as they were."""
        self._said.update(dict.fromkeys(self._groups[raw.index]))
        self._write()

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        """Write other rows for a rollout; [] leaves them out."""
        if not isinstance(raw.value, CallsOfRollout):
            self._said[raw.index] = rows
        elif not rows:
            self._said.update(dict.fromkeys(self._groups[raw.index], ()))
        else:
            (row,) = rows
            added = {name: value for name, value in row.items() if name != CALLS}
            for one, call in zip(raw.value.raws, row[CALLS], strict=True):
                same = call is one.value
                self._said[one.index] = None if same else [{**call, **added}]
        self._write()

    def finish(self, log: Log) -> None:
        """Write what followed the last row."""
        self._write()
        self._out.finish(log)

    def _write(self) -> None:
        """Write rows as far as it is known what to write."""
        while True:
            line = self._waiting or next(self._lines, None)
            if line is None or line.index not in self._said:
                self._waiting = line
                return
            self._waiting = None
            rows = self._said.pop(line.index)
            if rows is None:
                self._out.keep(line)
            else:
                self._out.replace(line, rows)
                self.changed = self._out.changed
