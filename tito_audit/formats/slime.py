"""Samples of slime and miles, from their Torch files or converted to JSON.

THUDM/slime `slime/utils/types.py` (`Sample`), dumped by `slime/observability/rollout_data_utils.py`;
radixark/miles `miles/utils/types.py`, dumped by `miles/ray/rollout/debug_data.py`. The engine may omit the
stop token that ended a response, so a sample without one is not a fault.
"""

from __future__ import annotations

from tito_audit.format import Format, Row, Signature
from tito_audit.formats._calls import FINISH_REASON_OF_STATUS, stated_facts, with_finish_reasons
from tito_audit.formats._columns import has_entries, is_list, is_messages, parsed_column
from tito_audit.formats._kit import training_rows
from tito_audit.formats._slime_samples import read_sample_row, updated_sample
from tito_audit.formats._update import object_at
from tito_audit.record.message import as_messages, as_tools
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.speakers import UNSAMPLED_SPEAKERS, speaker_of


def matches(row: Row) -> bool:
    if not {"tokens", "response_length"} <= row.keys():
        return False
    tokens, length, mask = row["tokens"], row["response_length"], row.get("loss_mask")
    if tokens is not None and (not is_list(tokens) or (len(tokens) and is_list(tokens[0]))):
        return False
    if type(length) is not int:
        return sum(name in row for name in ("rollout_log_probs", "status", "response", "loss_mask")) > 1
    # The loss mask covers the response rather than all tokens.
    return not has_entries(tokens) or not is_list(mask) or len(mask) == length or len(mask) != len(tokens)


def read(row: Row, place: Place) -> Rollout:
    metadata = object_at(row, "metadata")
    logged = [parsed_column(row, "messages"), metadata.get("messages")]
    # Messages without an answer are only the prompt, from which the row was not rendered.
    messages = next(
        (
            value
            for value in logged
            if is_messages(value)
            and any(m["role"] and speaker_of(str(m["role"])) not in UNSAMPLED_SPEAKERS for m in value)
        ),
        None,
    )
    listed = [parsed_column(row, "tools"), parsed_column(metadata, "tools")]
    tools = next((value for value in listed if has_entries(value)), listed[0])
    text_keys = (("text", "response"), ("prompt_text", "prompt"), ("status", "status"))
    texts = {name: row[key] for name, key in text_keys if isinstance(row.get(key), str)}
    return Rollout(
        place,
        FORMAT.name,
        as_messages(messages, "messages"),
        as_tools(tools, "tools"),
        template_kwargs=object_at(row, "apply_chat_template_kwargs"),
        training_row=with_finish_reasons(read_sample_row(row), row),
        stated=stated_facts(row).with_facts(
            **texts,
            finish_reason=FINISH_REASON_OF_STATUS.get(texts.get("status", "")),
            remove_sample=True if row.get("remove_sample") is True else None,
        ),
    )


FORMAT = Format(
    name="slime",
    title="slime and miles samples",
    signature=Signature("{tokens} + {response_length}, {loss_mask} over the response or null"),
    precedence=190,
    matches=matches,
    **training_rows(read, updated_sample, "a sample").functions,
    shows="The training row, its mask and its logprobs; a null mask trains the whole response. No calls; "
    "messages and tools only where `metadata` keeps them. Torch files need the extra `torch`.",
)
