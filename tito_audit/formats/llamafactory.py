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
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._columns import as_logged, is_list, to_list
from tito_audit.formats._kit import SampleRows, read_sample, split_packed_row, updated_sample
from tito_audit.formats._update import with_values
from tito_audit.record.arrays import Mask
from tito_audit.record.prefix import common_ends
from tito_audit.record.repaired import RepairedRollout

_NAME = "llamafactory"
_IDS, _LABELS, _SEEN, _POSITIONS = "input_ids", "labels", "attention_mask", "position_ids"
_MEDIA, _BOUNDS = ("images", "videos", "audios"), "packing_params"


def _with_padding_hidden(row: Row) -> Row:
    """The row with an attention mask that hides its padding; the row itself if there is nothing to hide."""
    places, mask = row.get(_POSITIONS), row.get(_SEEN)
    if not is_list(places) or not is_list(mask) or not len(places) == len(mask) == len(row[_IDS]) or not len(mask):
        return row
    some = np.flatnonzero(np.asarray(places))
    start = int(some[-1]) + 1 if len(some) else 0
    trained = np.flatnonzero(np.asarray(row[_LABELS]) != -100)
    if not 0 < start < len(mask) or not mask[start] or (len(trained) and trained[-1] >= start):
        return row
    return {**row, _SEEN: as_logged([*to_list(mask)[:start], *[0] * (len(mask) - start)], mask)}


def _without_targets(row: Row) -> Row:
    """The row without labels of tokens that it does not hold; the row itself if it has none.

    With `efficient_eos` (Gemma) the label of the first token after an answer is the end of sequence.
    """
    labels, ids = row.get(_LABELS), row[_IDS]
    if not is_list(labels) or len(labels) != len(ids):
        return row
    targets = _foreign_targets(np.asarray(labels), np.asarray(ids))
    if not targets.any():
        return row
    return {**row, _LABELS: as_logged(np.where(targets, -100, labels), labels)}


def _foreign_targets(labels: NDArray[Any], ids: NDArray[Any]) -> Mask:
    """`[T]` which labels are of one other token, with an untrained token after each; none if only some are."""
    other = (labels != -100) & (labels != ids)
    after = np.append(labels[1:] == -100, True)
    alone: Mask = other & after
    return alone if len(set(labels[alone].tolist())) == 1 and (alone == other).all() else np.zeros_like(alone)


def update(row: Row, repaired: Sequence[RepairedRollout]) -> Sequence[Row]:
    """The row with its repaired samples; its padding is visible again."""
    bare = _without_targets(row)
    hiding = _with_padding_hidden(bare)
    new = list(_ROWS.update(hiding, repaired))
    if bare is not row:
        # With the labels that `_without_targets` left out.
        old = np.asarray(row[_IDS])
        targets = np.flatnonzero(_foreign_targets(np.asarray(row[_LABELS]), old)).tolist()
        for number, each in enumerate(new):
            if each.get(_LABELS) is bare[_LABELS]:
                new[number] = {**each, _LABELS: row[_LABELS]}
                continue
            ids, labels = np.asarray(each[_IDS]), to_list(each[_LABELS])
            head, tail = common_ends(old, ids)
            for at in targets:
                if head <= at < len(old) - tail:
                    raise RecordError("a label that is no token of the row would belong to another token")
                labels[at if at < head else at + len(ids) - len(old)] = int(row[_LABELS][at])
            new[number] = {**each, _LABELS: as_logged(labels, row[_LABELS])}
    if row.get(_BOUNDS) is not None:
        for number, each in enumerate(new):
            if each.get(_SEEN) is not hiding.get(_SEEN):
                seen = np.asarray(each[_SEEN])
                edges = [0, *(np.flatnonzero(np.diff(seen)) + 1).tolist(), len(seen)]
                bounds = {
                    "sequence_boundaries": as_logged(edges, each[_BOUNDS]["sequence_boundaries"]),
                    "right_padding_length": edges[-1] - edges[-2] if not seen[-1] else 0,
                }
                new[number] = {**each, _BOUNDS: {**each[_BOUNDS], **bounds}}
    if hiding is bare:
        return [row if all(each.get(name) is row[name] for name in row) else each for each in new]
    shown = [as_logged([1] * len(each[_SEEN]), row[_SEEN]) for each in new]
    return [
        row
        if all(each.get(name) is row[name] or each.get(name) is hiding[name] for name in row)
        else with_values(each, {_SEEN: row[_SEEN] if each[_SEEN] is hiding[_SEEN] else mask})
        for each, mask in zip(new, shown, strict=True)
    ]


_ROWS = SampleRows(lambda row, place: read_sample(row, place, _NAME, (_IDS,)), updated_sample, split_packed_row)
FORMAT = Format(
    name=_NAME,
    title="LLaMA-Factory tokenized sets",
    signature=Signature("{input_ids}, {labels}, {images?}, {videos?} and {audios?}"),
    precedence=196,
    matches=lambda row: {_LABELS, *_MEDIA} <= row.keys() and is_list(row.get(_IDS)),
    read=lambda row, place: _ROWS.read(_with_padding_hidden(_without_targets(row)), place),
    sources=lambda row, rollouts: _ROWS.sources(_with_padding_hidden(_without_targets(row)), rollouts),
    update=update,
    shows="The row for SFT, with its mask from the labels; each sample of a packed row. No messages, tools or "
    "logprobs: nothing in it was sampled. Pairs of its preference stages are `preference_pair`.",
)
