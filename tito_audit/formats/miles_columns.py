"""The token columns that miles mirrors for its dashboard: Parquet, one sample per row, six columns.

radixark/miles `miles/ray/rollout/debug_data.py` (`save_dashboard_columns`). The conversations are in
`trajectory/ID.jsonl` next to it, joined on `sample_index`; `rollout_data/ID.pt` repeats the ids.
"""

from __future__ import annotations

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._columns import is_list, lists_or_null
from tito_audit.formats._kit import training_rows
from tito_audit.formats._slime_samples import read_sample_row, updated_sample
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.stated import NOTHING_STATED

# A repaired file has the column `tito_audit` too.
_COLUMNS = {"sample_index", "response_length", "total_length", "tokens", "loss_mask", "rollout_log_probs"}


def read(row: Row, place: Place) -> Rollout:
    tokens, total = row["tokens"], row["total_length"]
    size = len(tokens) if is_list(tokens) else 0
    if tokens is not None and (type(total) is not int or total != size):
        logged = total if type(total) is int else "not a number"
        raise RecordError(f"total_length is {logged}, but the column 'tokens' holds {size} ids")
    index = row["sample_index"]
    stated = NOTHING_STATED.with_facts(sample_index=index if type(index) is int else None)
    return Rollout(place, FORMAT.name, training_row=read_sample_row(row), stated=stated)


FORMAT = Format(
    name="miles_columns",
    title="miles dashboard columns",
    signature=Signature("exactly {sample_index}, the two lengths, {tokens}, {loss_mask}, {rollout_log_probs}"),
    precedence=20,
    matches=lambda row: row.keys() - {"tito_audit"} == _COLUMNS and lists_or_null(row, "tokens"),
    **training_rows(read, updated_sample, "a sample").functions,
    shows="The training row, its mask and its logprobs, no text. The messages are in `trajectory/*.jsonl`, and "
    "the same ids in `rollout_data/*.pt`, which a repair of this file does not touch.",
)
