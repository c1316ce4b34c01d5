"""A scan over several processes: chunks of logs go out, results come back in the order of the rows."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from tito_audit.errors import StorageError
from tito_audit.jobs import in_order, sendable
from tito_audit.record.finding import Result, Skip
from tito_audit.record.rollout import Place, Rollout
from tito_audit.storage import Log, RawRow, open_log
from tito_audit.storage.chunks import Chunk, Reading, chunks_of
from tito_audit.storage.log import lost_row
from tito_audit.summary import Summary

__all__ = ["Audit", "Encoder", "Spread", "bare", "chunk_bytes", "spread"]

Audit: TypeAlias = Callable[[RawRow, Place], Iterable[Result]]
"""The results of one row of a log: one a rollout, or one that says why it cannot be read."""

Encoder: TypeAlias = Callable[[], tuple[str | None, str | None]]
"""What encodes in this process, as a summary names it, and why no fast encoder does, if none does."""

_LARGEST = 8 << 20
_SMALLEST = 1 << 18
_EACH = 8
"""Chunks for each process where logs are small, so that none waits long for the last."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How a scan is spread."""

    jobs: int
    chunk: int
    """Bytes of a chunk, about."""
    max_row_bytes: int
    limit: int | None
    """Rows after which to stop."""
    arrays: Mapping[str, str]
    """Columns that are read as arrays, as `open_log` takes them."""
    chunks: Callable[[Log, int], Iterator[Chunk]] = chunks_of
    """How a log becomes chunks."""


def chunk_bytes(total: int, jobs: int) -> int:
    """How large chunks of logs of `total` bytes should be."""
    return min(max(total // (jobs * _EACH), _SMALLEST), _LARGEST)


def bare(result: Result) -> Result:
    """The result with no more of its rollout than place and format, which is cheap to hand around."""
    if result.rollout is None:
        return result
    return replace(result, rollout=Rollout(result.rollout.place, result.rollout.format))


def spread(
    files: Sequence[Path],
    audit: Audit,
    how: Spread,
    summary: Summary,
    progress: Callable[[int, int, int], None] | None,
    encoder: Encoder = lambda: (None, None),
) -> Generator[Result, None, None]:
    """The results of all rows, with bare rollouts, as one process would give them.

    Files, notices and the encoder of a process that went without a fast one go into the summary. What cannot
    be read raises StorageError in its turn, behind the results before it.
    """
    log = _Merged(audit, how.limit, summary)
    total = sum(file.stat().st_size for file in files if file.is_file())
    done = 0
    work = partial(_audited, audit=audit, limit=how.limit, encoder=encoder)
    with closing(in_order(_planned(files, how), work, how.jobs)) as parts:
        for part, answer in parts:
            if isinstance(part, StorageError):
                raise part
            if isinstance(part, _Begun):
                done += log.size
                log.begin(part)
                continue
            if answer is not None:
                yield from log.results(answer)
            if log.stopped:
                return
            if progress is not None:
                progress(log.count, done + part.done, total)


@dataclass(frozen=True, slots=True)
class _Begun:
    """The rows from here on are those of this file."""

    file: Path
    size: int


@dataclass(frozen=True, slots=True)
class _Part:
    """A chunk as its results come back; as text it says where it lies."""

    file: Path
    done: int

    def __str__(self) -> str:
        return f"{self.file}, rows before byte {self.done:,}"


@dataclass(slots=True)
class _Audited:
    """What a process says of a chunk."""

    rows: list[tuple[int, tuple[Result, ...]]] = field(default_factory=list)
    """Row by row, counted from 0 at the start of the chunk."""
    size: int = 0
    damage: str | None = None
    encoder: tuple[str | None, str | None] = (None, None)
    error: BaseException | None = None


def _planned(files: Sequence[Path], how: Spread) -> Iterator[tuple[_Begun | _Part | StorageError, Chunk | None]]:
    """The chunks of all files; a file that cannot be read ends them with the reason."""
    for file in files:
        try:
            yield _Begun(file, file.stat().st_size if file.is_file() else 0), None
            log = open_log(file, max_row_bytes=how.max_row_bytes, arrays=how.arrays)
            for chunk in how.chunks(log, how.chunk):
                yield _Part(file, chunk.done), chunk
        except StorageError as error:
            yield error, None
            return


def _audited(chunk: Chunk, audit: Audit, limit: int | None, encoder: Encoder) -> _Audited:
    """The results of a chunk; past `limit` rows only that there is one more."""
    found = _Audited()
    reading = Reading(chunk)
    skips: dict[tuple[Skip, ...], tuple[Skip, ...]] = {}
    try:
        for raw in reading:
            if limit is not None and len(found.rows) == limit:
                found.rows.append((raw.index, ()))
                break
            results = [bare(result) for result in audit(raw, Place(str(chunk.path), raw.index))]
            # Most rollouts lack the same: one tuple for all of them is pickled once.
            shared = (replace(one, skips=skips.setdefault(one.skips, one.skips)) for one in results)
            found.rows.append((raw.index, tuple(shared)))
    except Exception as error:
        found.error = sendable(error)
    found.size, found.damage, found.encoder = reading.size, reading.damage, encoder()
    return found


class _Merged:
    """Rows of chunks, counted on."""

    def __init__(self, audit: Audit, limit: int | None, summary: Summary) -> None:
        self.count = 0
        """Rows of all files."""
        self.size = 0
        """Bytes of this file."""
        self.stopped = False
        """Whether the limit was met."""
        self._audit = audit
        self._limit = limit
        self._summary = summary
        self._file = Path()
        self._start = 0
        """The row at which the next chunk starts."""
        self._last = -1
        self._broken = False

    def begin(self, news: _Begun) -> None:
        """Go on with another file."""
        self._summary.files.append(str(news.file))
        self.size = news.size
        self._file, self._start, self._last, self._broken = news.file, 0, -1, False

    def results(self, chunk: _Audited) -> Iterator[Result]:
        """The results of the next chunk of the file."""
        if self._broken:
            return
        for number, results in chunk.rows:
            if not self._counted():
                return
            self._last = self._start + number
            for result in results:
                yield _moved(result, self._start)
        name, notice = chunk.encoder
        if notice is not None:
            self._summary.encoder = name
            if notice not in self._summary.notices:
                self._summary.notices.append(notice)
        if chunk.error is not None:
            raise chunk.error
        if chunk.damage is not None:
            self._broken = True
            raw = lost_row(self._file, self._last, chunk.damage)
            if self._counted():
                yield from map(bare, self._audit(raw, Place(str(self._file), raw.index)))
        self._start += chunk.size

    def _counted(self) -> bool:
        """Whether one more row is within the limit."""
        if self._limit is not None and self.count >= self._limit:
            self._summary.notices.append(f"Stopped after {self.count} rows, as asked by --limit.")
            self.stopped = True
            return False
        self.count += 1
        return True


def _moved(result: Result, rows: int) -> Result:
    """The result of a rollout so many rows further on."""
    if not rows:
        return result
    place = replace(result.place, row=result.place.row + rows)
    findings = tuple(replace(finding, place=place) for finding in result.findings)
    rollout = replace(result.rollout, place=place) if result.rollout is not None else None
    return replace(result, place=place, rollout=rollout, findings=findings)
