"""REC014: kept-token sets that do not fit the sampled tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.arrays import Ids, Mask
from tito_audit.record.finding import Hit, Severity
from tito_audit.record.token_extras import KeptSets
from tito_audit.rule import rule
from tito_audit.rules._beside import token_sequences
from tito_audit.rules._words import counted, head


@rule(
    "REC014",
    Severity.ERROR,
    headline="{n} beside kept-token sets that do not fit",
    needs=(Needs.KEPT_SETS_READ,),
)
def kept_token_sets(evidence: Evidence) -> Iterator[Hit]:
    """A sampled token is not in its kept-token set.

    ## What it finds
    Sets of the tokens that top-p or top-k sampling left to choose from (`rollout_top_p_token_ids` of slime,
    `rollout_sampling_mask` of miles, `output_token_sampling_mask` of SGLang, `kept_tokens` of verifiers,
    `sampling_mask` of prime-rl) that lack the token that was sampled; the finding says if they are the sets of
    the token before or after. More or fewer sets than there are tokens of the response, of the row, or sampled
    ones; offsets that do not belong to their ids; and ids that no vocabulary or not this one has. An empty set
    says nothing and is not judged.

    ## Why it matters
    The trainer renormalizes its probabilities over the set. A sampled token outside of it has probability zero:
    its logprob is minus infinity, and its ratio zero or NaN. Sets one place off do that to nearly every token.

    ## Example
    A set without the sampled token:

    ```text
    error REC014 row 2:3
      1 sampled token of 2 not in the set of `rollout_top_p_token_ids`
      training row │!│
                    0
    ```

    ## Repair
    None: only the sampler knows what it kept. A repair that changes tokens leaves the sets out. Log them with
    the tokens that they belong to, or train without replaying the sampling.
    """
    for sequence in token_sequences(evidence):
        for unfit in sequence.beside.unreadable:
            if unfit.contradicts_itself and not unfit.is_routing:
                yield sequence.hit(f"`{unfit.name}` has {unfit.because}", "offsets of other ids")
        for sets in sequence.beside.kept_sets:
            # Models have more ids than tokenizers: they are padded to a round number.
            size = 2 * evidence.vocabulary.size if evidence.vocabulary is not None else 1 << 31
            out = sets.ids[(sets.ids < 0) | (sets.ids >= size)]
            if len(out):
                message = f"`{sets.name}` holds the id {int(out[0])}, which the vocabulary does not have"
                yield sequence.hit(message, "ids outside the vocabulary")
                continue
            # A set for each token of the row, of the response, or for each that was sampled.
            count, sampled, start = len(sets.offsets) - 1, sequence.sampled.nonzero()[0], sequence.response
            if start is None:
                start = int(sampled[0]) if len(sampled) else len(sequence.ids)
            if count in (len(sequence.ids), len(sequence.ids) - start):
                places = np.arange(len(sequence.ids) - count, len(sequence.ids))
            elif count == len(sampled):
                places = sampled
            else:
                message = f"`{sets.name}` has {counted(count, 'set')} for {counted(len(sampled), 'sampled token')}"
                message += "; nothing says which token each set belongs to"
                yield sequence.hit(message, "sets of other tokens")
                continue
            ids = sequence.ids[places]
            judged = sequence.sampled[places] & (np.diff(sets.offsets) > 0)
            at = places[judged & ~_sets_hold(sets, ids)]
            if not len(at):
                continue
            message = (
                f"{counted(len(at), 'sampled token')} of {int(judged.sum()):,} not in the set of `{sets.name}`"
            )
            for by, side in ((1, "before"), (-1, "after")):
                both = judged & (np.arange(len(ids)) >= 1 if by > 0 else np.arange(len(ids)) < len(ids) - 1)
                if len(at) > 1 and both.any() and (_sets_hold(sets, np.roll(ids, by)) | ~both).all():
                    message += f"; the sets are those of the token {side} each"
            tokens = head(evidence, sequence.ids[int(at[0]) : int(at[-1]) + 1])
            yield replace(sequence.hit(message, "not in its set", at), recorded=tokens)


def _sets_hold(sets: KeptSets, ids: Ids) -> Mask:
    """`[sets]` whether each set holds the id at its place."""
    counts = np.diff(sets.offsets).astype(np.int64)
    owner = np.repeat(np.arange(len(counts)), counts)
    equal = sets.ids == np.repeat(ids, counts)
    return np.bincount(owner[equal], minlength=len(counts)) > 0
