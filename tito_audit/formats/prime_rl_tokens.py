"""prime-rl token exports: one trained sequence per line, with the sampler's and the trainer's data for each token.

What the trainer computed (logprobs, entropies, ratios, clipping) holds for exactly these ids: after a change it
is unknown from the changed token on. PrimeIntellect-ai/prime-rl
`src/prime_rl/trainer/rl/token_export.py`.
"""

from __future__ import annotations

from functools import partial

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._calls import stated_model, with_finish_reasons
from tito_audit.formats._columns import columns_of_lengths, first_text, ids_or_none, per_token_column
from tito_audit.formats._kit import training_rows
from tito_audit.formats._update import updated_row
from tito_audit.record.build import build_training_row
from tito_audit.record.rollout import Place, Rollout

_MASK, _LOGPROBS = "loss_mask", "inference_logprobs"


def read(row: Row, place: Place) -> Rollout:
    version = row.get("schema_version")
    if isinstance(version, int) and version > 1:
        raise RecordError(f"schema_version is {version}; only version 1 of token exports is known")
    stated = stated_model(row).with_facts(env_name=first_text(row, ("env_name",)))
    ids = ids_or_none(row["token_ids"], "token_ids")
    if ids is None:
        return Rollout(place, FORMAT.name, stated=stated.without_ids())
    trained = build_training_row(
        ids,
        mask=per_token_column(row, _MASK),
        logprobs=per_token_column(row, _LOGPROBS),
        other=columns_of_lengths(row, ("token_ids", _MASK, _LOGPROBS), (len(ids),)),
        sentinel=0.0,
        whole=True,
    )
    return Rollout(place, FORMAT.name, training_row=with_finish_reasons(trained, row), stated=stated)


FORMAT = Format(
    name="prime_rl_tokens",
    title="prime-rl token exports",
    signature=Signature("{export_sequence_idx}, {token_ids}, {loss_mask}, {inference_logprobs}"),
    precedence=70,
    matches=lambda row: type(row.get("export_sequence_idx")) is int and {_MASK, "token_ids"} <= row.keys(),
    **training_rows(read, partial(updated_row, ids="token_ids")).functions,
    shows="The trained sequence with mask, the sampler's logprobs and all that the trainer computed. No text, "
    "tools or model: only merged and split tokens, masks and logprobs can be checked.",
)
