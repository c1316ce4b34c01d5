"""Samples of a token-in, token-out stack: slime's column names with a mask over all tokens.

arb8020/research `rollouts/rollouts/training/types.py` (`Sample`). slime and miles write `response_length`
and a mask over the response alone; those rows are `slime`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tito_audit.format import Format, Row, Signature
from tito_audit.formats._beside import read_beside
from tito_audit.formats._calls import stated_facts, with_finish_reasons
from tito_audit.formats._columns import (
    first_text,
    ids_or_none,
    is_list,
    is_messages,
    logprob_column,
    other_columns,
    parsed_column,
)
from tito_audit.formats._kit import split_packed_row, training_rows
from tito_audit.formats._update import updated_row
from tito_audit.record.build import build_training_row
from tito_audit.record.message import as_messages, as_tools
from tito_audit.record.rollout import Place, Rollout

_OTHERS = ("rollout_log_probs", "response", "group_index", "status")
"""Two of these identify the format; `tokens` and `loss_mask` alone are too common."""


def read(row: Row, place: Place) -> Rollout:
    ids = ids_or_none(row["tokens"], "tokens")
    mask = row["loss_mask"]
    trained = None
    if ids is not None:
        trained = build_training_row(
            ids,
            mask=None if mask is None else ("loss_mask", mask),
            logprobs=logprob_column(row, "rollout_log_probs"),
            other=other_columns(row, {"tokens", "loss_mask", "rollout_log_probs"}),
            sentinel=0.0,
        )
        trained = replace(trained, extras=read_beside(row))
    value = parsed_column(row, "messages")
    messages = as_messages(value if is_messages(value) else None, "messages")
    return Rollout(
        place,
        FORMAT.name,
        messages,
        as_tools(parsed_column(row, "tools"), "tools"),
        training_row=with_finish_reasons(trained, row),
        stated=stated_facts(row).with_facts(text=first_text(row, ("response",))),
    )


FORMAT = Format(
    name="tito_sample",
    title="Token-in, token-out stack, one sample",
    signature=Signature("{tokens}, {loss_mask} over all of them, {rollout_log_probs}, no {response_length}"),
    precedence=265,
    matches=lambda row: (
        "response_length" not in row
        and sum(name in row for name in _OTHERS) > 1
        and is_list(row.get("tokens"))
        and is_list(row.get("loss_mask"))
        # A mask of another length, or null, covers a response, and it is unknown where that begins.
        and len(row["loss_mask"]) == len(row["tokens"])
        and not any(map(is_list, row["tokens"][:1]))
    ),
    **replace(training_rows(read, partial(updated_row, ids="tokens")), split=split_packed_row).functions,
    shows="The training row, its mask of weights and its logprobs, placed by their length. No calls; the "
    "prompt and the response are kept as text.",
)
