"""The first rows of logs, read and joined as a scan reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from tito_audit.errors import RecordError
from tito_audit.record.rollout import Place, Rollout
from tito_audit.run.log_groups import RowFlow
from tito_audit.settings.model import Settings
from tito_audit.summary import Summary


@dataclass(slots=True)
class FirstRows:
    """The rollouts of the first rows of some logs."""

    rollouts: list[Rollout] = field(default_factory=list)
    rows: int = 0
    unreadable: dict[Place, str] = field(default_factory=dict)
    """Why rows could not be read."""
    stopped: bool = False
    """Whether there are more rows."""
    notices: list[str] = field(default_factory=list)
    """Notices from joining calls and other files."""


def first_rows(files: Sequence[Path], settings: Settings, rows: int) -> FirstRows:
    """The first rows of logs: `rows` in total, the same number from each log if it has enough."""
    found = FirstRows()
    flow = RowFlow(files, replace(settings, limit=None), audits=False)
    left = rows
    for number, file in enumerate(files):
        quota = -(-left // (len(files) - number))
        left -= _read(flow, file, quota, found)
    summary = Summary()
    flow.say_joined(summary)
    found.notices += summary.notices
    return found


def _read(flow: RowFlow, file: Path, quota: int, found: FirstRows) -> int:
    """Read up to `quota` rows of a log; returns how many there were."""
    group = flow.group(str(file))
    count = 0
    log = group.open_quick(file)
    for raw in islice(group.rows(log), quota + 1):
        if count == quota:
            found.stopped = True
            break
        count += 1
        place = Place(str(file), raw.index)
        try:
            found.rollouts += group.read(raw, place).rollouts
        except RecordError as error:
            found.unreadable[place] = str(error)
    found.rows += count
    return count
