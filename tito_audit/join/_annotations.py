"""What a trainer wrote about the traces of a log, in files beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tito_audit.format import Format, Row
from tito_audit.formats import with_updates
from tito_audit.storage import RemoteFile, find_logs
from tito_audit.storage.random_access import RandomAccess, Ticket
from tito_audit.storage.spool import Spool


class Annotations:
    """Updates of traces by trace id, as the file monitor of prime-rl writes them.

    PrimeIntellect-ai/prime-rl `src/prime_rl/monitors/file/monitor.py` (`log_annotations`): episodes in
    `traces/stream/`; rows with `trace_id` and `branches` in `traces/annotations/PRODUCER/`, several for a trace.
    The updates stay in their files; where each is takes some 200 bytes.
    """

    def __init__(self, folder: Path, max_row_bytes: int) -> None:
        self.folder = folder
        spool = Spool()
        self._at: dict[str, list[tuple[RandomAccess, Ticket]]] = {}
        for file in find_logs([folder]):
            reader = RandomAccess(file, max_row_bytes=max_row_bytes, spool=spool)
            for ticket, raw in reader:
                trace = (raw.value or {}).get("trace_id")
                if raw.value is not None and isinstance(trace, str) and raw.value.get("branches"):
                    self._at.setdefault(trace, []).append((reader, ticket))

    @classmethod
    def beside(cls, files: Iterable[Path], max_row_bytes: int) -> dict[str, Annotations]:
        """By log, the annotations beside the folder `stream` that it is in."""
        of_folder: dict[Path, Annotations] = {}
        of_log: dict[str, Annotations] = {}
        for file in files:
            folder = file.parent.parent / "annotations"
            if file.parent.name != "stream" or isinstance(file, RemoteFile) or not folder.is_dir():
                continue
            if folder not in of_folder:
                of_folder[folder] = cls(folder, max_row_bytes)
            of_log[str(file)] = of_folder[folder]
        return of_log

    def onto(self, form: Format, row: Row) -> Row:
        """The row with the updates of its traces."""
        return with_updates(row, self.of) if form.name == "verifiers_v1" and self._at else row

    def notices(self) -> Iterator[str]:
        """What there is, for the summary."""
        updates = sum(map(len, self._at.values()))
        if updates:
            yield f"{self.folder}: {updates:,} annotations of {len(self._at):,} traces, joined on the trace's id."

    def of(self, trace: str) -> Iterator[Row]:
        """The updates of a trace, in the order in which they were written."""
        for reader, ticket in self._at.get(trace, ()):
            yield reader.row(ticket).value or {}
