"""The conversations that miles writes next to its token columns: JSONL, one sample per line, no ids.

radixark/miles `miles/ray/rollout/debug_data.py` (`trajectory_rows`). The ids of `trajectory/ID.jsonl` are in
`dashboard_columns/rollout_ID.parquet`, joined on `sample_index`; tools are in neither.
"""

from __future__ import annotations

from collections.abc import Sequence

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row
from tito_audit.formats._columns import is_list, stated_facts
from tito_audit.formats._update import at_most_one_each
from tito_audit.record.message import as_messages
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.stated import Unread
from tito_audit.signature import Signature, absent, way

_TOKENS = "dashboard_columns/rollout_ID.parquet"


def _matches(row: Row) -> bool:
    if not {"sample_index", "messages", "group_index", "status"} <= row.keys() or "tokens" in row:
        return False
    return row["messages"] is None or is_list(row["messages"])


def _read(row: Row, place: Place) -> Sequence[Rollout]:
    facts = {name: row[name] for name in ("sample_index", "status") if isinstance(row[name], int | str)}
    stated = stated_facts(row).with_facts(**facts).without_ids()
    stated = stated.not_read(Unread.IDS, f"they are in {_TOKENS}, by sample_index")
    return (Rollout(place, FORMAT.name, as_messages(row["messages"], "messages"), stated=stated),)


def _update(row: Row, repaired: Sequence[RepairedRollout]) -> Sequence[Row]:
    if not repaired:
        return ()
    at_most_one_each(_read(row, repaired[0].rollout.place), repaired)
    if any(one.rollout.turns or one.rollout.training_row is not None for one in repaired):
        raise RecordError(f"a line of messages holds no ids; they are in {_TOKENS} next to it")
    return (row,)


FORMAT = Format(
    name="miles_trajectory",
    title="miles conversations",
    signature=Signature.of(way("sample_index", "group_index", "status", "messages", absent("tokens"))),
    precedence=180,
    matches=_matches,
    read=_read,
    update=_update,
    shows="Messages only. Their tokens are in the Parquet beside it, `dashboard_columns/rollout_ID.parquet`, on "
    "the same `sample_index`.",
)
