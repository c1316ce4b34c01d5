"""write_rollouts: writes a copy of a log with rollouts that the caller changed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tito_audit.errors import RecordError
from tito_audit.join import Join
from tito_audit.record.repaired import unrepaired
from tito_audit.record.rollout import Place, Rollout
from tito_audit.run.rows import LogGroup
from tito_audit.settings.model import Settings
from tito_audit.storage import open_output, output_path


def write_rollouts(
    log: str | Path,
    rollouts: Iterable[Rollout],
    out: str | Path,
    settings: Settings | None = None,
    *,
    overwrite: bool = False,
) -> int:
    """Write a copy of a log in which these rollouts replace its own; returns how many rows changed.

    Each rollout replaces the one with the same `place`. They come in the order of `read_rollouts`; some may be
    missing. Prompts, per-token columns and training rows may differ from what was read, completions and the number
    of turns may not. Everything else in the log is kept. RecordError if a row cannot hold its rollouts; then
    nothing is written.
    """
    settings = (settings or Settings()).at(log)
    group, reader = LogGroup(settings, join=Join.for_run(settings, [Path(log)])), LogGroup(settings)
    waiting = iter(rollouts)
    upcoming = next(waiting, None)
    written = 0
    source = group.open(Path(log), keep_text=True)
    with open_output(source, output_path(out), overwrite=overwrite, added=()) as whole:
        output = group.output(whole, source)
        for raw in group.rows(source):
            changed: dict[int, Rollout] = {}
            while upcoming is not None and upcoming.place.row == raw.index:
                changed[upcoming.place.item] = upcoming
                upcoming = next(waiting, None)
            if not changed or raw.value is None:
                output.keep(raw)
                continue
            read = reader.read_row(raw, Place(str(log), raw.index))
            now = [unrepaired(changed.get(old.place.item, old)) for old in read.rollouts]
            rows = [group.with_log_columns(raw.value, row) for row in read.format.update(read.row, now)]
            written += len(rows) != 1 or rows[0] is not raw.value
            output.replace(raw, rows)
        if upcoming is not None:
            raise RecordError(
                f"{upcoming.place}: no row of {log} is left for this rollout. "
                "Give rollouts in the order in which they are read."
            )
        output.finish(source)
    return written
