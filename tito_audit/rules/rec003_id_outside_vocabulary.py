"""REC003: token ids that the vocabulary does not have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tito_audit.evidence.model import Evidence, Verified
from tito_audit.evidence.needs import Needs
from tito_audit.record.arrays import Ids, Mask, empty_ids
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.record.prefix import common_prefix
from tito_audit.record.runs import trained_runs
from tito_audit.rule import rule
from tito_audit.rules._words import counted, head
from tito_audit.terminal.words import listed

_NAMED = 4
_PADDED = "padding of the embedding"


@rule(
    "REC003",
    Severity.ERROR,
    headline="{n} with ids outside the vocabulary",
    needs=(Needs.COMPLETIONS | Needs.PROMPTS | Needs.ROW,),
    silent=Verified.IDS,
)
def id_outside_vocabulary(evidence: Evidence) -> Iterator[Hit]:
    """Token ids outside the vocabulary.

    ## What it finds
    Ids in prompts, completions and the row that are no token of the tokenizer; without a tokenizer, ids below
    zero. Ids just above the vocabulary, which a padded embedding accepts, have a cause of their own; untrained
    ones in the row are a warning. What a later prompt repeats is reported once.

    ## Why it matters
    Such an id is a padding or image marker that was left in, a label mask in the wrong column, or an id of another
    tokenizer, in which case every other id means something else too. On the GPU it reads outside the embedding
    table, or a row of it that was never trained.

    ## Example
    An id far above the vocabulary in a completion:

    ```text
    error REC003 turn 0 completion 1:2
      1 id (999999) is outside the vocabulary of 2,007 tokens; no text and no trained embedding
      belongs to it
      sampled      │<unknown id 999999>│
                    999999
    ```

    ## Repair
    None is certain: audit with the tokenizer that sampled, or `drop` the rollout. `mask` takes ids of the padded
    embedding out of the loss.
    """
    turns, new, repeated = evidence.rollout.turns, list[Ids](), dict[int, int]()
    for link in evidence.links:
        if link.kind.continues:
            repeated[link.turn] = link.seen_at
    for number, turn in enumerate(turns):
        if turn.prompt_ids is not None:
            new.append(turn.prompt_ids[repeated.get(number, 0) :])
        if turn.completion_ids is not None:
            new.append(turn.completion_ids)
    wrong, seen = len(new) > 0 and b"\1" in _unknown(evidence, np.concatenate(new)).tobytes(), empty_ids()
    for number, turn in enumerate(turns if wrong else ()):
        whole, shared = turn.seen_ids, 0 if turn.prompt_ids is None else common_prefix(seen, turn.prompt_ids)
        seen = seen if whole is None else whole
        if turn.prompt_ids is not None:
            yield from _check_ids(evidence, Where.PROMPT, number, turn.prompt_ids, shared)
        if turn.completion_ids is not None:
            yield from _check_ids(evidence, Where.COMPLETION, number, turn.completion_ids, 0)
    row = evidence.rollout.training_row
    if row is not None and b"\1" in _unknown(evidence, row.token_ids).tobytes():
        for hit in _check_ids(evidence, Where.ROW, None, row.token_ids, 0):
            trained = row.loss_mask is None or row.loss_mask[hit.start : hit.end].any()
            yield hit if trained or hit.cause != _PADDED else replace(hit, severity=Severity.WARNING)


def _check_ids(evidence: Evidence, where: Where, turn: int | None, ids: Ids, skipped: int) -> Iterator[Hit]:
    """One hit for each run of unknown ids after the first `skipped` ones."""
    for first, last in trained_runs(_unknown(evidence, ids[skipped:])):
        start, end = first + skipped, last + skipped
        wrong = ids[start:end]
        named = [str(i) for i in wrong[:_NAMED]] + (["…"] if len(wrong) > _NAMED else [])
        size = evidence.vocabulary.size if evidence.vocabulary is not None else 0
        of = f" of {size:,} tokens" if evidence.vocabulary is not None else ""
        verb = "is" if len(wrong) == 1 else "are"
        message = (
            f"{counted(len(wrong), 'id')} ({listed(named)}) {verb} outside the vocabulary{of}; no text and "
            "no trained embedding belongs to it"
        )
        if (wrong < 0).any():
            cause = "below zero"
        elif wrong.min() < size:
            cause = "hole in the vocabulary"
        else:  # embeddings are padded to a round number of rows, never by more than this
            cause = _PADDED if wrong.max() < size + 1024 else "above the vocabulary"
        yield Hit(where, start, end, message, turn, cause, recorded=head(evidence, wrong))


def _unknown(evidence: Evidence, ids: Ids) -> Mask:
    """`[N]` True where the id is not a token; without a vocabulary, where it is below zero."""
    if evidence.vocabulary is None:
        return np.asarray(ids < 0)
    return np.asarray(~evidence.vocabulary.known(ids))
