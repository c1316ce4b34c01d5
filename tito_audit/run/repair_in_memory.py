"""Repaired rows in memory: how they come back to the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from tito_audit.errors import SetupError
from tito_audit.record.outcome import COLUMN, Outcome
from tito_audit.settings.model import RepairSettings
from tito_audit.storage import Log, MemoryOutput, Output, RowsInMemory, open_memory_output
from tito_audit.summary import Summary


class InMemory:
    """The repaired rows of the logs of a run that are in memory."""

    def __init__(self) -> None:
        self.together: Callable[[list[Any]], Any] | None = None
        """Puts the rows of all logs together as the caller had them; None for files."""
        self.outputs: dict[Path, MemoryOutput] = {}
        """By log, what holds its repaired rows."""
        self.complete = False
        """Whether all logs are repaired and were scanned again."""

    @contextmanager
    def opened(self, log: Log, file: RowsInMemory, target: Path, repairs: RepairSettings) -> Iterator[Output]:
        """An output for the rows of a log; `target` is a file, or the log itself to keep them in memory."""
        added = (COLUMN,) if repairs.provenance else ()
        place = None if isinstance(target, RowsInMemory) else target
        with open_memory_output(log, file, place, overwrite=repairs.force, added=added) as (kept, out):
            self.outputs[file] = kept
            yield out

    def path(self, file: Path) -> Path | None:
        """The repaired rows of a log as a path; None if they are in a file."""
        kept = self.outputs.get(file)
        return kept.result if kept is not None and kept.target is None else None


class _Run(Protocol):
    in_memory: InMemory
    before: Summary

    def __iter__(self) -> Iterator[Outcome]: ...


def repaired_rows(run: _Run) -> Any:
    """Rows that were given in memory, repaired, as the caller had them: a list, a frame, a table, a data set.

    Repairs them if that was not done yet. SetupError for logs in files, which are written to `out`, and if the
    outcomes were not iterated to the end. What was given is not changed; rows without repairs are shared with it.
    """
    held = run.in_memory
    if held.together is None:
        raise SetupError("repaired: only rows given in memory come back; files are written to `out`.")
    if not held.complete and not run.before.files:
        for _ in run:
            pass
    if not held.complete:
        raise SetupError("repaired: the repair is not done yet; iterate over all outcomes first.")
    return held.together([output.result.value for output in held.outputs.values()])
