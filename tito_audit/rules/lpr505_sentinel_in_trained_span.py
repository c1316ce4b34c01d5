"""LPR505: trained tokens whose logprob is a placeholder."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter

from tito_audit.evidence.logprobs import placeholder_zeros
from tito_audit.evidence.model import Evidence, Verified
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Hit, Severity
from tito_audit.record.runs import trained_runs
from tito_audit.rule import rule
from tito_audit.rules._logprobs import LONG_RUN, MAX_CHANCE, SampledValues, certainty, sampled_values
from tito_audit.rules._words import counted

_EDGE_CHANCE, _LONG_CHANCE = -4, -3.5
"""Decimal logarithms of the chance below which a run of exact zeros is a note: one of three or more at the edge of
an answer, which may show a shifted or padded column, and a long one."""


@rule(
    "LPR505",
    Severity.ERROR,
    headline="{n} with placeholder logprobs",
    needs=(Needs.COMPLETION_LOGPROBS | Needs.ROW_LOGPROBS,),
    silent=Verified.LOGPROBS,
)
def sentinel_in_trained_span(evidence: Evidence) -> Iterator[Hit]:
    """Placeholders instead of logprobs.

    ## What it finds
    1.0, -9999 or the format's own sentinel in a completion or under the loss mask; 0.0 where the call recorded
    another value, farther from 0 than the row rounds its other values. Without calls an exact 0.0 is suspect but
    no proof, since a certain token reaches it: a run of eight or more is a warning, a run of three or more at the
    edge of an answer a note (`undecided`), and only where zeros are so rare among the other values that chance
    does not explain the run.

    Where the rollout holds values just below zero (-0.0000001, or the last decimals of a column that is rounded
    and holds lone zeros too), its model was certain at times, and may stay so through a loop, a copy or markup.
    Then a run of zeros is left alone if it lies beside such a value or if answers hold runs of all lengths inside;
    else it is a note, and a warning only if it is much longer than certainty lasts.

    ## Why it matters
    A trainer reads a placeholder as a logprob: 0.0 says that the token was certain, 1.0 gives a ratio of 0.37
    times the trainer's own probability, -9999 an infinite one. Columns padded to fit look like this.

    ## Example
    A short column was padded with 1.0:

    ```text
    error LPR505 row 12:13
      1 token in the loss has the placeholder 1 instead of a logprob; its importance ratio uses a
      probability that was never recorded
           0 │<|im_start|>│us  │er  │⏎   │2   │<|im_end|>│⏎   │<|im_start|>│assistant│⏎   │4    │
                                                                                           =
          id  2001         314  257  198  17   2002       198  2001         1620      198  19
     logprob  1.00         1.00 1.00 1.00 1.00 1.00       1.00 1.00         1.00      1.00 -0.50
          11 │!    │<|im_end|>│
              =     ##########
          id  0     2002
     logprob  -0.25 1.00
    ```

    ## Repair
    `splice` takes the values of the calls. `mask` takes the tokens out of the loss.
    """
    for values in sampled_values(evidence):
        if values.shifted:
            continue
        for start, end in () if values.all_plausible else trained_runs(values.placeholders & values.trained):
            shows = f"{values.logprobs[start]:g}"
            clause = f"the placeholder {shows} instead of a logprob"
            yield _hit(evidence, values, start, end, clause, f"sentinel {shows}")
        if values.expected is not None:
            refuted = values.zeros & values.trained & placeholder_zeros(values.logprobs, values.expected)
            for start, end in chain.from_iterable(values.constant_groups):
                refuted[start:end] = False  # a stretch of nothing but zeros is LPR506's
            for start, end in trained_runs(refuted):
                clause = "a logprob of 0 where the call recorded another value"
                yield _hit(evidence, values, start, end, clause, "sentinel 0")
            continue
        marked = values.zeros & values.trained
        if not marked.any():
            continue
        total, zeros = int(values.trained.sum()), int(marked.sum())
        begins, ends = {start for start, _ in values.runs}, {end for _, end in values.runs}
        whole = sorted(chain.from_iterable(values.constant_groups))
        for start, end in trained_runs(marked):
            run = end - start
            around = bisect_right(whole, start, key=itemgetter(0)) - 1
            if around >= 0 and end <= whole[around][1]:
                continue  # a stretch of nothing but zeros is LPR506's
            at_edge = start in begins or end in ends
            chance = run * math.log10((zeros - run + 1) / (total - run + 2))
            if run < (3 if at_edge else LONG_RUN) or chance >= (_LONG_CHANCE if run >= LONG_RUN else _EDGE_CHANCE):
                continue
            certain, padded = certainty(evidence), run >= LONG_RUN and chance < MAX_CHANCE
            if certain.near:
                if not padded or certain.is_like_others(values, start, end):
                    continue
                padded = not certain.may_be_sampled(values, start, end)
            why = "which looks like padding" if padded else "certain or never recorded"
            clause = f"a logprob of exactly 0, {why}"
            cause, severity = ("run of zeros", Severity.WARNING) if padded else ("undecided", Severity.NOTE)
            yield _hit(evidence, values, start, end, clause, cause, severity)


def _hit(
    evidence: Evidence,
    values: SampledValues,
    start: int,
    end: int,
    clause: str,
    cause: str,
    severity: Severity | None = None,
) -> Hit:
    tokens = f"{counted(end - start, 'token')} in the loss {'has' if end - start == 1 else 'have'}"
    message = f"{tokens} {clause}; its importance ratio uses a probability that was never recorded"
    return values.hit(evidence, start, end, message, cause, severity)
