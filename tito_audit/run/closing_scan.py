"""The closing scan of a repair: what was written, read and audited like any log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tito_audit.chains.ledger import Ledger
from tito_audit.errors import StorageError
from tito_audit.record.finding import Result
from tito_audit.record.rollout import Place
from tito_audit.run.auditor import unreadable
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.once import Once
from tito_audit.run.progress import CHECKING, Progress, entered
from tito_audit.run.row_repair import failing
from tito_audit.run.rows import every_row
from tito_audit.run.scan import Scan
from tito_audit.settings.model import Settings
from tito_audit.storage import open_log
from tito_audit.storage.journal import Journal
from tito_audit.summary import Summary


def closing_scan(
    written: Sequence[tuple[Path, Path]],
    settings: Settings,
    progress: Progress | None,
    flow: RowFlow,
    journal: Journal | None,
) -> tuple[Summary, int]:
    """The counts of the files that were written, each with its log before it, and how many findings fail the run.

    A file that is no log any more is a finding, since it was written: if a repair moves all rows but damaged ones,
    what is left may look like other data.
    """
    refused = {target: why for _, target in written if (why := _refused(target)) is not None}
    logs = {str(target): str(log) for log, target in written}
    scan = Scan(
        [one for _, one in written if one not in refused], every_row(settings), entered(progress, CHECKING)
    )
    scan.journal = journal
    scan.loader = flow.loader
    scan.standing_for = {target: log for log, target in written}
    failed = 0
    if scan.logs or not written:
        failed = sum(failing(flow, logs[result.place.file], result) for result in scan)
    for target, why in refused.items():
        group = flow.groups[logs[str(target)]]
        result = unreadable(Place(str(target), 0), why, group.auditor.codes)
        scan.summary.files.append(str(target))
        scan.summary.add(result)
        failed += failing(flow, logs[str(target)], result)
    return scan.summary, failed


def count_trained_again(ledger: Ledger, summary: Summary) -> Sequence[Result]:
    """Count what the rows of a run train more than once, or never; the findings, as a scan has them."""
    if not len(ledger):
        return ()
    once = Once.of(ledger)
    results = tuple(once.results())
    for result in results:
        summary.add(result)
    summary.notices += once.notices()
    return results


def _refused(target: Path) -> str | None:
    """Why a written file cannot be read as a log; None where it can."""
    try:
        open_log(target).kind  # noqa: B018  # reads the beginning of the file
    except StorageError as error:
        return f"the repaired file is no log any more: {str(error).splitlines()[0]}"
    return None
