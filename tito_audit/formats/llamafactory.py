"""Tokenized sets of LLaMA-Factory: the Arrow folder of `tokenized_path`, each row one sample or several packed.

hiyouga/LLaMA-Factory 0.9.5 `data/processor/supervised.py` writes `images`, `videos` and `audios` into every row,
null where there are none, and `data/loader.py` saves the splits. With `packing` each row is padded to the cutoff
length, and the padding is visible: only its positions, all 0, tell it from tokens. With `neat_packing` the
attention mask numbers the samples, and is 0 there; `packing_params` says where they end. Rows of its preference
stages are `preference_pair`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row
from tito_audit.formats._columns import as_logged, is_list, plain
from tito_audit.formats._kit import SampleRows, packed, sample_rollout, updated_sample
from tito_audit.formats._update import with_values
from tito_audit.record.arrays import Mask
from tito_audit.record.repaired import RepairedRollout
from tito_audit.signature import keys, one_way

_NAME = "llamafactory"
_IDS, _LABELS, _SEEN, _POSITIONS = "input_ids", "labels", "attention_mask", "position_ids"
_MEDIA, _BOUNDS = ("images", "videos", "audios"), "packing_params"


def _hiding_padding(row: Row) -> Row:
    """The row with an attention mask that hides its padding; the row itself if it has none, or hides it."""
    places, mask = row.get(_POSITIONS), row.get(_SEEN)
    if not is_list(places) or not is_list(mask) or not len(places) == len(mask) == len(row[_IDS]) or not len(mask):
        return row
    some = np.flatnonzero(np.asarray(places))
    start = int(some[-1]) + 1 if len(some) else 0
    trained = np.flatnonzero(np.asarray(row[_LABELS]) != -100)
    if not 0 < start < len(mask) or not mask[start] or (len(trained) and trained[-1] >= start):
        return row
    return {**row, _SEEN: as_logged([*plain(mask)[:start], *[0] * (len(mask) - start)], mask)}


def _without_targets(row: Row) -> Row:
    """The row without labels that are no token of it: with `efficient_eos` (Gemma), the first token behind an
    answer has the end of sequence as its label. The row itself if it has none."""
    labels, ids = row.get(_LABELS), row[_IDS]
    if not is_list(labels) or len(labels) != len(ids):
        return row
    targets = _targets(np.asarray(labels), np.asarray(ids))
    if not targets.any():
        return row
    return {**row, _LABELS: as_logged(np.where(targets, -100, labels), labels)}


def _with_targets(new: Row, bare: Row, row: Row) -> Row:
    """A written row with the labels that are no token of it; RecordError if it is unclear where they belong."""
    if bare is row or new[_LABELS] is bare[_LABELS]:
        return new if bare is row else {**new, _LABELS: row[_LABELS]}
    if len(new[_IDS]) != len(row[_IDS]) or plain(new[_IDS]) != plain(row[_IDS]):
        raise RecordError("labels that are no tokens of the row would belong to others")
    targets = _targets(np.asarray(row[_LABELS]), np.asarray(row[_IDS]))
    return {**new, _LABELS: as_logged(np.where(targets, row[_LABELS], new[_LABELS]), row[_LABELS])}


def _targets(labels: NDArray[Any], ids: NDArray[Any]) -> Mask:
    """`[T]` labels of one other token, if no token behind them is trained."""
    other = (labels != -100) & (labels != ids)
    after = np.append(labels[1:] == -100, True)
    alone: Mask = other & after
    return alone if len(set(labels[alone].tolist())) == 1 and (alone == other).all() else np.zeros_like(alone)


def _update(row: Row, repaired: Sequence[RepairedRollout]) -> Sequence[Row]:
    """The row with its repaired samples, and with its padding visible again.

    RecordError if `packing_params` would say of other tokens where samples end.
    """
    bare = _without_targets(row)
    hiding = _hiding_padding(bare)
    new = [_with_targets(each, bare, row) for each in _ROWS.update(hiding, repaired)]
    if row.get(_BOUNDS) is not None and any(each[_SEEN] is not hiding[_SEEN] for each in new):
        raise RecordError(f"{_BOUNDS} counts the tokens of each sample and of the padding, which would be others")
    if hiding is bare:
        return [row if all(each[name] is row[name] for name in row) else each for each in new]
    shown = [as_logged([1] * len(each[_SEEN]), row[_SEEN]) for each in new]
    return [
        row
        if all(each[name] is row[name] or each[name] is hiding[name] for name in row)
        else with_values(each, {_SEEN: row[_SEEN] if each[_SEEN] is hiding[_SEEN] else mask})
        for each, mask in zip(new, shown, strict=True)
    ]


_ROWS = SampleRows(
    lambda row, place: sample_rollout(row, place, _NAME, (_IDS,)),
    updated_sample,
    packed,
)
FORMAT = Format(
    name=_NAME,
    title="LLaMA-Factory tokenized sets",
    signature=one_way(_IDS, _LABELS, *_MEDIA[:2], keys(_MEDIA[2], before=" and ")),
    precedence=196,
    matches=lambda row: {_LABELS, *_MEDIA} <= row.keys() and is_list(row.get(_IDS)),
    read=lambda row, place: _ROWS.read(_hiding_padding(_without_targets(row)), place),
    sources=lambda row, rollouts: _ROWS.sources(_hiding_padding(_without_targets(row)), rollouts),
    update=_update,
    shows="The row for SFT, with its mask from the labels; each sample of a packed row. No messages, tools or "
    "logprobs: nothing in it was sampled. Pairs of its preference stages are `preference_pair`.",
)
