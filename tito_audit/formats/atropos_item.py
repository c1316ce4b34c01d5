"""Atropos items: a single completion, with a group's columns unnested by one list.

NousResearch/atropos `atroposlib/envs/base.py` (`ScoredDataItem`).
"""

from __future__ import annotations

from functools import partial

from tito_audit.format import Format, Row, Signature
from tito_audit.formats._atropos import read_sample_row, sample_columns, sample_messages
from tito_audit.formats._calls import stated_facts, with_finish_reasons
from tito_audit.formats._columns import is_list
from tito_audit.formats._kit import training_rows
from tito_audit.formats._update import updated_row
from tito_audit.record.rollout import Place, Rollout


def read(row: Row, place: Place) -> Rollout:
    trained = read_sample_row(
        row["tokens"],
        ("masks", row["masks"]),
        ("inference_logprobs", row.get("inference_logprobs")),
        sample_columns(row, None),
        "tokens",
    )
    messages = sample_messages(row.get("messages"), "messages")
    trained = with_finish_reasons(trained, row)
    return Rollout(place, FORMAT.name, messages, training_row=trained, stated=stated_facts(row))


FORMAT = Format(
    name="atropos_item",
    title="Atropos items (ScoredDataItem)",
    signature=Signature("{tokens}, {masks} as flat lists, {scores} as a number"),
    precedence=110,
    matches=lambda row: (
        {"tokens", "masks", "scores"} <= row.keys()
        and not is_list(row["scores"])
        and (row["tokens"] is None or (is_list(row["tokens"]) and not any(map(is_list, row["tokens"][:1]))))
    ),
    **training_rows(read, partial(updated_row, ids="tokens")).functions,
    shows="One training row with its mask (labels or 0/1) and logprobs; messages when the run included them.",
)
