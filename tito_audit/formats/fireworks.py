"""Rendered samples of Fireworks' supervised fine-tuning: a conversation as the trainer gets it.

The file that a job offers as Render Samples; fw-ai/cookbook `training/recipes/sft_loop.py`
(`_write_render_samples`), docs.fireworks.ai `fine-tuning/debug-sft-tokenization`. Weights are positive where a
token is trained and may be scaled to a sum of 1; targets and their weights repeat ids and weights without the
first. Images are negative ids, which stand for no token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._calls import stated_facts
from tito_audit.formats._columns import as_logged, ids_or_none, is_list, other_columns, per_token_column, to_list
from tito_audit.formats._kit import training_rows
from tito_audit.formats._update import updated_row, with_values
from tito_audit.record.build import build_training_row
from tito_audit.record.prefix import common_ends
from tito_audit.record.rollout import Place, Rollout, TrainingRow
from tito_audit.record.stated import Unread

_IDS, _WEIGHTS = "token_ids", "token_weights"
_TARGETS, _LOSS = "training_target_token_ids", "training_loss_weights"


def read(row: Row, place: Place) -> Rollout:
    ids, stated = ids_or_none(row[_IDS], _IDS), stated_facts(row)
    if ids is None:
        return Rollout(place, FORMAT.name, stated=stated.without_ids())
    if ids.min() < 0:
        stated = stated.not_read(Unread.IDS, "those of images are no tokens")
        notice = "Samples with images were not read: the ids of an image are no tokens."
        return Rollout(place, FORMAT.name, stated=replace(stated, notice=notice))
    trained = build_training_row(
        ids,
        mask=per_token_column(row, _WEIGHTS),
        other=other_columns(row, (_IDS, _WEIGHTS, _TARGETS, _LOSS)),
        whole=True,
    )
    return Rollout(place, FORMAT.name, training_row=trained, stated=stated)


def write(row: Row, old: TrainingRow, new: TrainingRow) -> Row:
    """The sample with its new ids and weights, and those of its targets; the text of a new token is unknown."""
    flat = updated_row(row, old, new, _IDS)
    size, width = len(old.token_ids), len(new.token_ids)
    values: dict[str, Any] = {}
    if flat[_IDS] is not row[_IDS]:
        head, tail = common_ends(old.token_ids, new.token_ids)
        texts, chunks = row.get("decoded_tokens"), row.get("rendered_chunks")
        if is_list(texts) and len(texts) == size:
            unknown = [None] * (width - head - tail)
            values["decoded_tokens"] = [*texts[:head], *unknown, *texts[size - tail :]]
        if size != width and is_list(chunks) and len(chunks) == 1:
            values["rendered_chunks"] = [{**chunks[0], "token_count": width}]
        values |= {name: as_logged(new.token_ids[1:], row[name]) for name in (_TARGETS,) if is_list(row.get(name))}
    if flat[_WEIGHTS] is not row[_WEIGHTS]:
        was, own = to_list(row[_WEIGHTS])[1:], row[_LOSS]
        now = [] if flat[_WEIGHTS] is None else to_list(flat[_WEIGHTS])[1:]
        if not now or not is_list(own) or len(own) != len(was) or (size != width and to_list(own) != was):
            raise RecordError(f"it is unclear which tokens the weights in {_LOSS} belong to")
        if size == width:
            now = [
                weight if (a > 0) == (b > 0) else b for weight, a, b in zip(to_list(own), was, now, strict=True)
            ]
        values[_LOSS] = as_logged(now, own)
    return with_values(flat, values)


FORMAT = Format(
    name="fireworks",
    title="Fireworks rendered samples",
    signature=Signature("{token_ids}, {token_weights} and {training_loss_weights}"),
    precedence=197,
    matches=lambda row: _WEIGHTS in row and _LOSS in row and is_list(row.get(_IDS)),
    **training_rows(read, write, "a rendered sample").functions,
    shows="The training row of supervised fine-tuning, with its mask from the weights. No messages, tools or "
    "logprobs: nothing in it was sampled. Samples with images are not read.",
)
