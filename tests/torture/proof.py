"""Proof that a repair lost nothing: log and repaired file compared by readers that share no code with the tool.

`lost` trusts one thing: the list `changed` of the repair's JSON report, which names the changed rows and the
places in them. Everything else of the file has to be as it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.torture.proof_named import Named, names_of
from tests.torture.proof_tables import lost_in_arrow, lost_in_parquet
from tests.torture.proof_text import lost_in_text

_PARQUET, _ARROW, _ZIP = b"PAR1", b"ARROW1", b"PK\x03\x04"
_STREAM = b"\xff\xff\xff\xff"


def lost(original: Path, repaired: Path, report: dict[str, Any]) -> list[str]:
    """What `repaired` lacks or has otherwise, of what `report` does not name as changed: one sentence each.

    [] if nothing is lost. `report` is the object of `repair --report json`.
    """
    named = names_of(original, repaired, report)
    if named is None:
        return [f"the report does not name {original} as repaired"]
    before, after = original.read_bytes(), repaired.read_bytes()
    losses = list(_counted(named, report))
    if not named.rows and before != after and original.suffix == repaired.suffix:
        losses.append("the report names no changed row, and the file has other bytes")
    if before[:4] == _PARQUET:
        return [*losses, *lost_in_parquet(original, repaired, named)]
    if before[:6] == _ARROW or before[:4] == _STREAM:
        return [*losses, *lost_in_arrow(before, after, named)]
    if before[:4] == _ZIP:  # a Torch file, whose pickles only the tool's own reader opens without running them
        return losses
    return [*losses, *lost_in_text(before, after, named, same_packing=original.suffix == repaired.suffix)]


def _counted(named: Named, report: dict[str, Any]) -> list[str]:
    """Where the list of changed rows and the counts of the report disagree."""
    rows = report["rows"]
    if len(report["files"]) != 1:
        return []
    most = rows["repaired"] + rows["quarantined"]
    if bool(named.rows) != bool(most):
        return [f"the report counts {most} changed rows and names {len(named.rows)}"]
    return []
