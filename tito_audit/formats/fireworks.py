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
from tito_audit.format import Format, Row
from tito_audit.formats._calls import stated_facts
from tito_audit.formats._columns import as_logged, column_of, ids_or_none, is_list, other_columns, plain
from tito_audit.formats._kit import sample
from tito_audit.formats._update import updated_row, with_values
from tito_audit.record.build import training_row
from tito_audit.record.rollout import Place, Rollout, TrainingRow
from tito_audit.record.stated import Unread
from tito_audit.signature import keys, one_way

_IDS, _WEIGHTS = "token_ids", "token_weights"
_TARGETS, _LOSS = "training_target_token_ids", "training_loss_weights"


def _read(row: Row, place: Place) -> Rollout:
    ids, stated = ids_or_none(row[_IDS], _IDS), stated_facts(row)
    if ids is None:
        return Rollout(place, FORMAT.name, stated=stated.without_ids())
    if ids.min() < 0:
        stated = stated.not_read(Unread.IDS, "those of images are no tokens")
        notice = "Samples with images were not read: the ids of an image are no tokens."
        return Rollout(place, FORMAT.name, stated=replace(stated, notice=notice))
    trained = training_row(
        ids,
        mask=column_of(row, _WEIGHTS),
        other=other_columns(row, (_IDS, _WEIGHTS, _TARGETS, _LOSS)),
        whole=True,
    )
    return Rollout(place, FORMAT.name, training_row=trained, stated=stated)


def _written(row: Row, old: TrainingRow, new: TrainingRow) -> Row:
    """The sample with its new weights, and those of its targets."""
    flat = updated_row(row, old, new, _IDS)
    if flat[_IDS] is not row[_IDS]:
        raise RecordError("the ids of a rendered sample cannot change: it also holds the text of each")
    weights: Any = flat[_WEIGHTS]
    if weights is row[_WEIGHTS]:
        return flat
    was, own = plain(row[_WEIGHTS])[1:], row[_LOSS]
    now = [] if weights is None else plain(weights)[1:]
    if not is_list(own) or not len(own) == len(was) == len(now):
        raise RecordError(f"it is unclear which tokens the weights in {_LOSS} belong to")
    loss = [weight if (a > 0) == (b > 0) else b for weight, a, b in zip(plain(own), was, now, strict=True)]
    return with_values(flat, {_LOSS: as_logged(loss, own)})


FORMAT = Format(
    name="fireworks",
    title="Fireworks rendered samples",
    signature=one_way("token_ids", "token_weights", keys("training_loss_weights", before=" and ")),
    precedence=197,
    matches=lambda row: is_list(row.get(_IDS)) and {_WEIGHTS, _LOSS} <= row.keys(),
    **sample(_read, _written, "a rendered sample").functions,
    shows="The training row of supervised fine-tuning, with its mask from the weights. No messages, tools or "
    "logprobs: nothing in it was sampled. Samples with images are not read.",
)
