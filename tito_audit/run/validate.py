"""validate_rollouts: reads logs for the level of what they hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.levels.facts import LACKS_ALL, RecordLevel, record_mask
from tito_audit.levels.tally import LogRecord, level_failures, log_records
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.progress import Progress, RowCounts
from tito_audit.settings.model import Settings
from tito_audit.storage import Logs, find_logs, log_names
from tito_audit.summary import RecordCounts, Summary, count_record


@dataclass(frozen=True, slots=True)
class Validated:
    """The level of each log, and what it lacks for the next."""

    logs: tuple[LogRecord, ...]
    because: tuple[str, ...] = ()
    """Why logs are below the level that `Settings.require_level` demands; () if none is."""
    required: bool = False
    """Whether a level is demanded of any log."""

    def as_object(self) -> dict[str, Any]:
        """The JSON object, of the schema `validate.schema.json`."""
        return {
            "schema_version": 1,
            "level": None if self.level is RecordLevel.NONE else str(self.level),
            "failed": bool(self.because),
            "because": list(self.because),
            "logs": [log.as_object() for log in self.logs],
        }

    @property
    def level(self) -> RecordLevel:
        """The level that all logs have."""
        return min((log.level for log in self.logs), default=RecordLevel.NONE)


def validate_rollouts(logs: Logs, settings: Settings | None = None, progress: Progress | None = None) -> Validated:
    """Read logs (files, folders, globs, or rows in memory) for their levels; no row is audited."""
    settings = replace(Settings.given(settings), row=None, tokenizer=None, chat_template=None)
    flow, counts = RowFlow(find_logs(log_names(logs)), settings, audits=False), RecordCounts()
    for raw, place in flow.rows(Summary(), progress, RowCounts()):
        group = flow.groups[place.file]
        try:
            read = group.read_row(raw, place)
        except RecordError:
            count_record(counts, place, "", LACKS_ALL)
            continue
        rows = group.logged_rows(raw, read)
        for rollout in read.rollouts:
            count_record(counts, rollout.place, rollout.format, record_mask(rollout, rows))
    required = any(group.settings.require_level is not None for group in flow.groups.values())
    files = [str(file) for file in flow.files]
    return Validated(tuple(log_records(counts, files)), tuple(level_failures(counts, files, settings)), required)
