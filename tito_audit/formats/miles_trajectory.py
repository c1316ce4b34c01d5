"""The conversations that miles writes next to its token columns: JSONL, one sample per line, no ids.

radixark/miles `miles/ray/rollout/debug_data.py` (`trajectory_rows`). The ids of `trajectory/ID.jsonl` are in
`dashboard_columns/rollout_ID.parquet`, joined on `sample_index`; tools are in neither.
"""

from __future__ import annotations

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._calls import stated_facts
from tito_audit.formats._columns import lists_or_null
from tito_audit.formats._kit import SampleRows
from tito_audit.record.message import as_messages
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.stated import Unread

_TOKENS = "dashboard_columns/rollout_ID.parquet"


def read(row: Row, place: Place) -> Rollout:
    facts = {name: row[name] for name in ("sample_index", "status") if isinstance(row[name], int | str)}
    stated = stated_facts(row).with_facts(**facts).without_ids()
    stated = stated.not_read(Unread.IDS, f"they are in {_TOKENS}, by sample_index")
    return Rollout(place, FORMAT.name, as_messages(row["messages"], "messages"), stated=stated)


def update_sample(row: Row, before: Rollout, after: RepairedRollout) -> Row:
    if after.rollout.turns or after.rollout.training_row is not None:
        raise RecordError(f"a line of messages holds no ids; they are in {_TOKENS} next to it")
    return row


FORMAT = Format(
    name="miles_trajectory",
    title="miles conversations",
    signature=Signature("{sample_index}, {group_index}, {status}, {messages}, no {tokens}"),
    precedence=180,
    matches=lambda row: (
        {"sample_index", "group_index", "status"} <= row.keys()
        and "tokens" not in row
        and lists_or_null(row, "messages")
    ),
    **SampleRows(read, update_sample).functions,
    shows="Messages only. Their tokens are in Parquet next to it, `dashboard_columns/rollout_ID.parquet`, on "
    "the same `sample_index`.",
)
