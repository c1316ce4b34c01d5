"""Lines of a token capture, each one call, as rollouts: gathered by rollout id and chained by their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tito_audit.chains.capture import order_calls
from tito_audit.errors import RecordError
from tito_audit.format import Format, Row
from tito_audit.formats import format_named, pick_format
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.sources import CallSource, Sources
from tito_audit.signature import Signature
from tito_audit.storage import Log, Output, RawRow
from tito_audit.storage.chunk import Chunk, Reading
from tito_audit.storage.lines import ParseRow
from tito_audit.storage.random_access import RandomAccess, Ticket, line_at, unpacked
from tito_audit.storage.sampling import Sample

_NAME = "nemo_gym_tokens"
_CALLS = "calls_of_rollout"


class CallsOfRollout(dict[str, Any]):
    """The lines of one rollout as one row, `{"calls_of_rollout": [line, …]}`, with their places."""

    def __init__(self, raws: Sequence[RawRow]) -> None:
        super().__init__()
        self.raws = tuple(raws)
        self[_CALLS] = [raw.value for raw in raws]

    def with_calls(self, calls: Sequence[Row]) -> CallsOfRollout:
        """The same row with these lines; itself when they are the same objects."""
        if all(new is old for new, old in zip(calls, self[_CALLS], strict=True)):
            return self
        return CallsOfRollout([replace(raw, value=call) for raw, call in zip(self.raws, calls, strict=True)])


def is_capture(row: Row) -> bool:
    """Whether a row is a line of a token capture that names its rollout."""
    try:
        return pick_format(row).name == _NAME and _rollout_id(row) is not None
    except RecordError:
        return False


# Reading and writing one rollout of calls


def _read(row: Row, place: Place) -> Sequence[Rollout]:
    form = format_named(_NAME)
    if not isinstance(row, CallsOfRollout):
        return form.read(row, place)
    lines = []
    for raw in row.raws:
        if raw.value is None:
            raise RecordError(f"line {raw.index} of the same rollout: {raw.error}")
        try:
            (line,) = form.read(raw.value, replace(place, row=raw.index))
        except RecordError as error:
            raise RecordError(
                f"line {raw.index} of the same rollout: {error}" if len(row.raws) > 1 else str(error)
            ) from None
        lines.append(line)
    times = [_number(raw.value.get("created_at"), raw.index) for raw in row.raws if raw.value is not None]
    order, chain = order_calls([line.turns[0] for line in lines], times)
    first = lines[order[0]]
    # The id is that of one call.
    facts = {name: value for name, value in first.stated.facts.items() if name != "id"}
    stated = replace(first.stated, chain=chain, lines=order, facts=facts)
    return (Rollout(place, _NAME, turns=tuple(lines[k].turns[0] for k in order), stated=stated),)


def _update(row: Row, mended: Sequence[RepairedRollout]) -> Sequence[Row]:
    form = format_named(_NAME)
    if not isinstance(row, CallsOfRollout):
        return form.update(row, mended)
    if not mended:
        return ()
    if len(mended) > 1:
        raise RecordError(
            "a capture holds calls, from which the trainer makes rows: it has no place for the parts of a fork"
        )
    (before,), (one,) = _read(row, mended[0].rollout.place), mended
    if one.turns_from != tuple(range(len(before.turns))):
        raise RecordError("each line is one call, and the call cannot be removed from it")
    calls = list(row[_CALLS])
    for line, turn in zip(before.stated.lines, one.rollout.turns, strict=True):
        # The conversation is in another file, not in the line.
        own = replace(turn, message_index=None, prompt_messages=None)
        alone = Rollout(before.place, _NAME, turns=(own,))
        (calls[line],) = form.update(calls[line], (RepairedRollout(alone, (0,)),))
    return (row.with_calls(calls),)


def _sources(row: Row, rollouts: Sequence[Rollout]) -> Sequence[Sources]:
    return [
        Sources(calls=tuple(CallSource(entry=(_CALLS, line)) for line in rollout.stated.lines))
        for rollout in rollouts
    ]


GATHERED = Format(_NAME, "", Signature(), 0, lambda row: isinstance(row, CallsOfRollout), _read, _sources, _update)
"""The format of calls gathered by rollout; that of a single line is `nemo_gym_tokens`."""


# Files


class Capture:
    """The rows of a capture: one for each rollout, at its first line; other lines are rows as they are."""

    def __init__(self, log: Log) -> None:
        self.path = log.path
        self._log = log
        self._parse = log.parse
        self._reader = RandomAccess(log.path, max_row_bytes=log.max_row_bytes, parse=log.parse)
        self.groups: list[list[Ticket]] = []
        known: dict[str, list[Ticket]] = {}
        for ticket, raw in self._reader:
            name = _rollout_id(raw.value) if raw.value is not None and is_capture(raw.value) else None
            if name is not None and name in known:
                known[name].append(ticket)
                continue
            self.groups.append([ticket])
            if name is not None:
                known[name] = self.groups[-1]
        self._left_out = [0] * (len(self.groups) + 1)
        """How many rollouts are left out before each, and in all, where a share of the log is wanted."""
        if log.share is not None:
            self._choose(Sample(log.share), {group[0][0]: name for name, group in known.items()})

    def _choose(self, sample: Sample, names: Mapping[int, str]) -> None:
        """Keep the rollouts that the sample takes, by their first line and their id."""
        left_out, kept = [], []
        for group in self.groups:
            index = group[0][0]
            before = sample.left_out
            name = names.get(index, "").encode("utf-8", "surrogatepass")
            if sample.takes(index, index, name, len(name)):
                left_out.append(before)
                kept.append(group)
        self.groups, self._left_out = kept, [*left_out, sample.left_out]

    def __iter__(self) -> Iterator[RawRow]:
        for group, left_out in zip(self.groups, self._left_out, strict=False):
            self._log.left_out = left_out
            yield _gathered_row([self._reader.row(ticket) for ticket in group], self._log.max_row_bytes)
            self._log.position = self._log.size * group[0][0] // max(self.groups[-1][0][0], 1)
        self._log.left_out = self._left_out[-1]

    def chunks(self, size: int) -> Iterator[Chunk]:
        """The same rows in chunks of about `size` bytes, if lines are about equally long."""
        lines = sum(map(len, self.groups))
        each = max(size * lines // max(self._log.size, 1), 1)
        start = 0
        if not self.groups and self._left_out[-1]:
            chunk = _Gathered(self.path, self._log.max_row_bytes, self._log.size, [], [], self._parse)
            chunk.share, chunk.left_out = self._log.share, self._left_out
            yield chunk
        while start < len(self.groups):
            stop, held = start, 0
            while stop < len(self.groups) and held < each:
                held += len(self.groups[stop])
                stop += 1
            part = self.groups[start:stop]
            packed = [[self._reader.packed(ticket) for ticket in group] for group in part]
            done = self._log.size * stop // len(self.groups)
            chunk = _Gathered(self.path, self._log.max_row_bytes, done, part, packed, self._parse)
            if self._log.share is not None:
                # Rollouts left out after the last one count for its chunk.
                chunk.share, first = self._log.share, self._left_out[start] if start else 0
                chunk.left_out = [left_out - first for left_out in self._left_out[start : stop + 1]]
            yield chunk
            start = stop


@dataclass(slots=True)
class _Gathered(Chunk):
    """A chunk of a capture's rollouts, numbered as in the file."""

    groups: list[list[Ticket]]
    packed: list[list[bytes | None]]
    parse: ParseRow
    left_out: Sequence[int] = ()
    """How many rollouts are left out before each, and in all; () where none are."""

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """One row for each rollout; the size of the reading stays 0, since rows are numbered as in the file."""
        for number, (group, packed) in enumerate(zip(self.groups, self.packed, strict=True)):
            if reading.sample is not None:
                reading.sample.left_out = self.left_out[number]
            raws = [
                unpacked(data) if data is not None else line_at(self.path, ticket, self.limit, self.parse)
                for ticket, data in zip(group, packed, strict=True)
            ]
            yield _gathered_row(raws, self.limit)
        if reading.sample is not None:
            reading.sample.left_out = self.left_out[-1]


def _gathered_row(raws: Sequence[RawRow], limit: int) -> RawRow:
    """The lines of a rollout as one row; a line that is not a call, or cannot be read, as it is."""
    first = raws[0]
    if first.value is None or not is_capture(first.value):
        return first
    size = sum(len(raw.text or b"") for raw in raws)
    if len(raws) > 1 and size > limit:
        return RawRow(
            first.index,
            None,
            f"the {len(raws)} calls of this rollout are {size:,} bytes together, over the limit of {limit:,}; "
            "raise --max-row-bytes to read them",
        )
    return RawRow(first.index, CallsOfRollout(raws))


class GatheredOutput:
    """An output that takes a capture's rollouts and writes its lines in their old places."""

    def __init__(self, out: Output, log: Log, calls: Capture) -> None:
        self.changed = False
        self._out = out
        self._lines = iter(log)
        self._waiting: RawRow | None = None
        self._groups = {group[0][0]: [index for index, _ in group] for group in calls.groups}
        self._said: dict[int, Sequence[Row] | None] = {}
        """What to write for each line of the rollouts taken so far; None: the line as it was."""

    def keep(self, raw: RawRow) -> None:
        """Write the lines of a rollout as they were."""
        self._said.update(dict.fromkeys(self._groups[raw.index]))
        self._write()

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        """Write other lines for a rollout; [] leaves them out."""
        if not isinstance(raw.value, CallsOfRollout):
            self._said[raw.index] = rows
        elif not rows:
            self._said.update(dict.fromkeys(self._groups[raw.index], ()))
        else:
            (row,) = rows
            added = {name: value for name, value in row.items() if name != _CALLS}
            for one, call in zip(raw.value.raws, row[_CALLS], strict=True):
                same = call is one.value
                self._said[one.index] = None if same else [{**call, **added}]
        self._write()

    def finish(self, log: Log) -> None:
        """Write what followed the last line."""
        self._write()
        self._out.finish(log)

    def _write(self) -> None:
        """Write lines as far as it is known what to write."""
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


def _number(value: object, otherwise: float) -> float:
    """When a call ended; if the log does not say, a number that keeps the order of lines."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float(otherwise)


def _rollout_id(row: Mapping[str, Any]) -> str | None:
    name = row.get("rollout_id")
    return name if isinstance(name, str) and name else None
