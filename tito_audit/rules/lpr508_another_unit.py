"""LPR508: logprobs in another unit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import attrgetter

import numpy as np

from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.arrays import Logprobs
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.rule import rule
from tito_audit.rules._logprobs import sampled_values
from tito_audit.rules._trainer import logprob_pairs, other_bases
from tito_audit.rules._words import counted, head
from tito_audit.terminal.words import decimal

_ROUNDED = 1.05
"""The most that probabilities of alternatives add up to if logprobs are rounded to two decimals."""
_FIRST = 16
"""How many values are looked at before all are."""
_CHANCE = -9.0
"""Decimal logarithm of the chance below which values that only fall, or only rise, are sums and no accident."""
_VOCABULARY = math.log(2**18)
"""Natural logarithm of the size of the largest vocabularies."""
_UNCERTAIN = -0.5
"""If the best alternative is below this (a probability of 0.7 in base 2), the others matter."""


@rule(
    "LPR508",
    Severity.ERROR,
    headline="{n} with logprobs in another unit",
    needs=(Needs.COMPLETION_LOGPROBS | Needs.ROW_LOGPROBS,),
)
def another_unit(evidence: Evidence) -> Iterator[Hit]:
    """Logprobs in another unit: base 2, base 10 or running sums.

    ## What it finds
    - Another base: the alternatives of a token (`top_logprobs`) add up to more than 1 as natural logarithms, which
      no probabilities do, at three tokens or more; if they fit base 10, the finding says so. Base 2 is reported if
      the alternatives of nine in ten uncertain tokens, of at least 12, add up to 1 within 2 % as powers of 2, none
      adds up to more, and these tokens are not alike: powers of 2 of natural logarithms add up to between 0.5 and
      2. Or the sampler's and the trainer's logprobs of at least 12 tokens have the ratio of two bases at nine of
      ten tokens.
    - Running sums: the values never rise within any span that was sampled without a break, as the sum of all
      logprobs up to each token does. It is reported if the chance that values in any order lie like this is below
      one in a billion (13 different values in one span). Sums from each token to the end never fall; since
      logprobs rise towards 0 where a model repeats itself, they are reported only if no sampler draws such values
      either: a token with a logprob of v is drawn with a chance of at most 262,144 times e^v, and all of them
      together with one below one in a billion.

    Probabilities belong to LPR504, one value for all tokens of a turn to LPR506. A base that no second column and
    no alternatives show cannot be told, and is not guessed.

    ## Why it matters
    A trainer takes exp(logprob) for a probability. In base 10 it reads 0.01 as 0.14, so the importance ratios of
    unlikely tokens are wrong by an order of magnitude; running sums weight a token by all that came before it.

    ## Example
    The sampler's logprobs are in base 10:

    ```text
    error LPR508 row 1:14
      `logprobs` holds logarithms of base 10: its values are those of `old_log_probs` times 0.434
           0 │2 │4    │4    │9    │2    │3    │5    │4    │4    │9    │2    │3    │5    │!    │
                 #     #     #     #     #     #     #     #     #     #     #     #     #
          id  17 19    19    24    17    18    20    19    19    24    17    18    20    0
     logprob  0  -0.22 -0.11 -0.22 -0.43 -0.87 -0.05 -0.33 -0.04 -0.13 -0.26 -0.17 -0.52 -0.09
      old_log_probs  0  -0.50  -0.25  -0.50  -1.00  -2.00  -0.12  -0.75  -0.10  -0.30  -0.60  -0.40  … 14 entries
    ```

    ## Repair
    None is certain: convert the column where it is written, or `drop` the rollout.
    """
    if any(map(attrgetter("alternatives"), evidence.rollout.turns)):
        yield from _impossible_alternatives(evidence)
    # A trainer's column shows, with the sampler's, that one of the two has another base.
    for name, (whose, base) in other_bases(evidence).items() if Needs.TRAINER_LOGPROBS in evidence.present else ():
        pair = next(candidate for candidate in logprob_pairs(evidence) if candidate.names[1] == name)
        wrong, right = pair.names if whose == "sampler" else pair.names[::-1]
        own, other = (pair.sampler, pair.trainer) if whose == "sampler" else (pair.trainer, pair.sampler)
        ratio = decimal(float(np.median(own[other < 0] / other[other < 0])), 3)
        message = f"`{wrong}` holds logarithms of {base}: its values are those of `{right}` times {ratio}"
        start, end = int(pair.at[0]), int(pair.at[-1]) + 1
        yield Hit(pair.where, start, end, message, pair.turn, base, recorded=head(evidence, pair.ids[start:end]))
    if _zigzags_early(evidence):
        return
    # The values of all calls, or of the row, may be sums up to each token.
    unshifted = [values for values in sampled_values(evidence) if not values.shifted]
    calls = [values for values in unshifted if values.where is Where.COMPLETION]
    rows = [values for values in unshifted if values.where is Where.ROW and values.expected is None]
    for together in (calls, rows):
        stretches = [values.logprobs[start:end] for values in together for start, end in values.runs]
        if any(_zigzags(run[:4]) for run in stretches) or not all(np.isfinite(run).all() for run in stretches):
            continue
        chance = 0.0  # the decimal logarithm of the chance that values in random order never rise
        for run in stretches:
            _, counts = np.unique(run, return_counts=True)
            orders = math.lgamma(len(run) + 1) - sum(math.lgamma(count + 1) for count in counts.tolist())
            chance -= orders / math.log(10)
        if chance >= _CHANCE:
            continue
        # No sampler draws tokens this unlikely: the chance of each is at most that times its vocabulary.
        drawn = sum(float(np.minimum(run + _VOCABULARY, 0).sum()) for run in stretches) / math.log(10)
        if all((run[1:] <= run[:-1]).all() for run in stretches):
            side, neighbours = "rise", "up to"
        elif drawn < _CHANCE and all((run[1:] >= run[:-1]).all() for run in stretches):
            side, neighbours = "fall", "from"
        else:
            continue
        message = (
            f"the {counted(sum(map(len, stretches)), 'logprob')} never {side} from token to token: each looks "
            f"like the sum of all logprobs {neighbours} its token; the difference of two neighbours is the logprob"
        )
        first = together[0]
        yield first.hit(evidence, first.runs[0][0], first.runs[-1][1], message, "sums")


def _impossible_alternatives(evidence: Evidence) -> Iterator[Hit]:
    """The finding on alternatives of tokens whose probabilities add up to more than 1."""
    if any(not values.all_plausible and (values.in_loss > 0).any() for values in sampled_values(evidence)):
        return  # LPR504 reports it
    turns = evidence.rollout.turns
    number = next(number for number, turn in enumerate(turns) if turn.alternatives)
    tops = [np.array(top) for turn in turns for top in turn.alternatives]
    tops = [top[np.isfinite(top)] for top in tops]
    with np.errstate(over="ignore"):
        sums = [float(np.exp(top).sum()) for top in tops]
    wrong = [total for total in sums if total > _ROUNDED]
    ids = turns[number].completion_ids
    if ids is None:
        return
    if not wrong and all(float(np.exp2(top).sum()) <= 1.005 for top in tops):
        uncertain = [top for top in tops if len(top) and top.max() < _UNCERTAIN]
        best = [float(top.max()) for top in uncertain]
        differ = len(best) >= 12 and max(best) - min(best) >= 0.5  # tokens with equal alternatives prove nothing
        if differ and np.mean([np.exp2(top).sum() > 0.98 for top in uncertain]) >= 0.9:
            message = (
                f"the alternatives of {counted(len(sums), 'token')} add up to 1 as logarithms of base 2, and to "
                f"a median of {decimal(float(np.median(sums)), 3)} as natural ones"
            )
            yield Hit(Where.COMPLETION, 0, len(ids), message, number, "base 2", recorded=head(evidence, ids))
    if len(wrong) < 3:
        return
    fits = all(float((10.0 ** np.minimum(top, 9)).sum()) <= _ROUNDED for top in tops)
    reading = "they fit logarithms of base 10" if fits else "they are not logarithms of probabilities"
    message = (
        f"the alternatives of {counted(len(wrong), 'token')} of {len(sums)} add up to more than 1 as natural "
        f"logarithms, up to {decimal(max(wrong), 3)}; {reading}"
    )
    cause = "base 10" if fits else "alternatives above 1"
    yield Hit(Where.COMPLETION, 0, len(ids), message, number, cause, recorded=head(evidence, ids))


def _zigzags_early(evidence: Evidence) -> bool:
    """Whether values of the row or of the first call rise and fall, as nearly always: then nothing is a sum."""
    row = evidence.rollout.training_row
    for turn in evidence.rollout.turns:
        if turn.completion_logprobs is not None:
            return _zigzags(turn.completion_logprobs[:_FIRST])
    if row is None or row.logprobs is None or not len(row.logprobs):
        return True
    if evidence.row is not None and evidence.row.spans:
        first = evidence.row.spans[0]
        few = row.logprobs[first.start : first.ends[0]][:3].tolist()
        if few not in (sorted(few), sorted(few, reverse=True)):
            return True
        return any(_zigzags(row.logprobs[span.start : span.ends[0]]) for span in evidence.row.spans)
    start = 0 if row.loss_mask is None else int(row.loss_mask.argmax())
    inside = row.logprobs[start : start + _FIRST]
    return _zigzags(inside if row.loss_mask is None else inside[row.loss_mask[start : start + _FIRST]])


def _zigzags(values: Logprobs) -> bool:
    before, behind = values[:-1], values[1:]
    return True in (behind > before) and True in (behind < before)  # `any` takes longer on a few values
