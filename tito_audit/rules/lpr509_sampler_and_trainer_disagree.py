"""LPR509: the sampler's and the trainer's logprobs of a row disagree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter

import numpy as np

from tito_audit.align.mismatch import explain_mismatch, sample_points
from tito_audit.evidence.logprob_values import MAX_SLIDE
from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.arrays import Logprobs
from tito_audit.record.finding import Hit, Severity
from tito_audit.record.mismatch import MISMATCH, CauseShare, MismatchCause, RowMismatch
from tito_audit.record.reading import shift_in_words
from tito_audit.rule import rule
from tito_audit.rules._trainer import PairedLogprobs, join_pairs, logprob_pairs, notes_on_causes, other_bases
from tito_audit.rules._words import counted, head, quoted
from tito_audit.terminal.mismatch import cause_words
from tito_audit.terminal.words import decimal, listed, percent, signed

_BOUND = math.log(1.05)
"""What two engines with the same weights differ by at most in the mean. NeMo-RL's tests hold the mean of
exp(|difference|) below 1.05 (`token_mult_prob_error`, NVIDIA-NeMo/RL `docs/adding-new-models.md`); as exp is
convex, a mean |difference| above log(1.05) breaks that bound whatever its tokens are."""
_FEWEST = 8
"""With fewer tokens no mean is judged."""
_STRANGE, _ONE_SIDED = 0.5, 0.02
"""What no arithmetic makes of a row within the bound: a token that differs more, and so few tokens that the
trainer finds likelier."""
_WORST = 3


@rule(
    "LPR509",
    Severity.WARNING,
    headline="{n} where sampler and trainer logprobs disagree",
    needs=(Needs.COMPLETION_LOGPROBS | Needs.ROW_LOGPROBS, Needs.TRAINER_LOGPROBS),
)
def sampler_and_trainer_disagree(evidence: Evidence) -> Iterator[Hit]:
    """Sampler and trainer logprobs disagree.

    ## What it finds
    Rows or calls with two columns for the policy's logprobs: the sampler's, and those that the trainer computed
    (`old_log_probs`, `prev_logprobs`, `trainer_logprobs`, `log_probs` next to `rollout_log_probs`, …). It is a
    warning if the mean absolute difference, less two standard errors, is above log(1.05) = 0.049, the bound of
    NeMo-RL's tests for two engines with the same weights, or if one token in a thousand is one of confident
    disagreement, above 0.99 at the sampler and below 0.01 at the trainer; else a note if single tokens differ by
    more than 1. The
    message gives the mean of trainer minus sampler, the estimates k1 and k3 of the divergence of the sampler from
    the trainer, and the worst tokens, and says whether they are where the row's tokens drifted. If the trainer's
    column holds the sampler's values some places late or early, the message says so: at that offset alone the two
    agree within the bound, on eight tokens or more that differ in place. Rows within the bounds are not reported.
    Tokens without a logprob on either side, and the 0.0 of LPR505, are left out. A column that equals the
    sampler's to the bit is a note, unless its values are rounded.

    The message also says which shares of the total difference have which cause: drift, a temperature that one side
    has, truncated sampling, stale weights, other experts, a placeholder, numerics; or that the log does not tell.
    The cause of the finding is the one with most of it. The reports give the shares of the whole log. `tito-audit
    rescore` compares the sampler's logprobs with a model's, as the column `rescored_logprobs`.

    ## Why it matters
    The gradient assumes that the tokens were sampled from the policy that is trained. Weights that were not
    updated, other kernels or precision, a temperature that only one side applied, or other tokens than were
    sampled make the run off-policy, and no metric says so.

    ## Example
    Every logprob of the trainer is far off:

    ```text
    warning LPR509 row 16:17
      `old_log_probs` differs from `logprobs`: over 8 tokens, trainer minus sampler has a mean of
      -0.456 and a mean size of 0.456 (k1 0.456, k3 0.0945); the worst: token 16 '!' (-0.75 and
      -1.45), token 11 '4' (-0.25 and -0.75) and token 13 '2' (-1 and -1.5)
           0 │<|im_start|>│us │er │⏎  │2 │<|im_end|>│⏎  │<|im_start|>│assistant│⏎  │4    │4    │
                                                                                    =     =
          id  2001         314 257 198 17 2002       198 2001         1620      198 19    19
     logprob  0            0   0   0   0  0          0   0            0         0   -0.50 -0.25
          12 │9    │2    │3    │5    │!    │<|im_end|>│
              =     =     =     =     #     ==========
          id  24    17    18    20    0     2002
     logprob  -0.50 -1.00 -2.00 -0.12 -0.75 -0.01
      old_log_probs  0  0  0  0  0  0  0  0  0  0  -0.90  -0.75  … 18 entries
    ```

    ## Repair
    None: the log does not say which side is right. A column that is early or late may be the trainer's convention:
    log each value beside its own token. Where tokens drifted, `splice` or `fork` cures the cause;
    otherwise compare both engines on one prompt, or correct with importance ratios.
    """
    units = other_bases(evidence)
    by_column: dict[str, list[PairedLogprobs]] = {}
    for pair in logprob_pairs(evidence):
        if pair.names[1] not in units:
            by_column.setdefault(pair.names[1], []).append(pair)
    mismatches: list[RowMismatch] = []
    for column in by_column.values():
        every = np.concatenate([pair.trainer - pair.sampler for pair in column])
        apart, (sampler, trainer) = np.abs(every), column[0].names
        # The mean is above the bound even with two standard errors taken off.
        above = len(apart) >= _FEWEST and apart.mean() - 2 * apart.std(ddof=1) / math.sqrt(len(apart)) > _BOUND
        if above or apart.max() > 1:
            offset = _find_offset(column) if above else 0
            mismatches.append(_explain_mismatch(evidence, column, shifted=bool(offset)))
            yield _describe_disagreement(evidence, column, mismatches[-1], offset, above=bool(above))
            continue
        # Numerics alone, unless a cheap look shows other causes.
        strange = not apart.any() or apart.max() > _STRANGE or (every > 0).sum() <= _ONE_SIDED * len(every)
        if strange or evidence.present & (Needs.WEIGHT_VERSIONS | Needs.EXPERTS):
            mismatch = _explain_mismatch(evidence, column, near=not strange)
        else:
            share = CauseShare(len(apart), float(apart.sum()))
            of_sampler = np.concatenate([pair.sampler for pair in column])
            of_trainer = np.concatenate([pair.trainer for pair in column])
            points = sample_points(of_sampler, of_trainer, np.ones(len(apart), np.bool_))
            causes = ((MismatchCause.NUMERICS.value, share),)
            mismatch = RowMismatch(sampler, trainer, len(apart), causes, points=points)
        mismatches.append(mismatch)
        if mismatch.shares[0][0] == MismatchCause.COPIED:
            pair, at = column[0], int(column[0].at[0])
            message = (
                f"`{trainer}` equals `{sampler}` to the bit over {counted(len(every), 'token')}: one is a copy "
                "of the other, or the trainer computed both; they cannot show a mismatch, and where the clip "
                "compares with this column, the first ratio is 1 at every token"
            )
            token = head(evidence, pair.ids[at : at + 1])
            yield Hit(pair.where, at, at + 1, message, pair.turn, MismatchCause.COPIED.value, Severity.NOTE, token)
    evidence.memo[MISMATCH] = tuple(mismatches)


def _describe_disagreement(
    evidence: Evidence, column: list[PairedLogprobs], mismatch: RowMismatch, offset: int, *, above: bool
) -> Hit:
    """The finding on a trainer's column that is above the bound, or differs by more than 1 at single tokens."""
    every = np.concatenate([pair.trainer - pair.sampler for pair in column])
    sampler, trainer = column[0].names
    far = int((np.abs(every) > 1).sum())
    mean, size = signed(every.mean(), 3), decimal(np.abs(every).mean(), 3)
    with np.errstate(over="ignore"):  # Schulman's estimate, at least 0 (joschu.net/blog/kl-approx.html)
        k3 = float((np.expm1(every) - every).mean())
    numbers = (
        f"over {counted(len(every), 'token')}, trainer minus sampler has a mean of {mean} and a mean size of "
        f"{size} (k1 {decimal(-every.mean(), 3)}, k3 {decimal(k3, 3)})"
    )
    more = f"; {counted(far, 'token')} ({percent(far / len(every))}) differ by more than 1" if far else ""
    sizes = [(pair, np.abs(pair.trainer - pair.sampler)) for pair in column]
    spots = [(own[k], pair, k) for pair, own in sizes for k in np.argsort(-own, kind="stable")[:_WORST].tolist()]
    worst = sorted(spots, key=itemgetter(0), reverse=True)[:_WORST]
    words = []
    for _, pair, k in worst:
        at = int(pair.at[k])
        piece = "" if evidence.vocabulary is None else f" {quoted(evidence.vocabulary.piece(int(pair.ids[at])))}"
        turn = "" if pair.turn is None else f"turn {pair.turn} "
        words.append(f"{turn}token {at}{piece} ({decimal(pair.sampler[k], 3)} and {decimal(pair.trainer[k], 3)})")
    if any(pair.drifted.any() for pair in column):
        drifted = sum(bool(pair.drifted[k]) for _, pair, k in worst)
        words[-1] += f", {drifted} of {len(worst)} where the row's tokens drifted"
    message = f"`{trainer}` differs from `{sampler}`: {numbers}{more}; the worst: {listed(words)}"
    many_confident = mismatch.confident * 1000 >= mismatch.tokens > 0 and mismatch.confident
    severity = Severity.WARNING if above or many_confident else Severity.NOTE
    if offset:
        cause = f"shifted by {offset:+d}"
        again = decimal(_distances(column, offset)[1].mean(), 3)
        message = (
            f"`{trainer}` holds the values of `{sampler}` {shift_in_words(offset)}: over "
            f"{counted(len(every), 'token')} the two differ by {size} in the mean, and by {again} once moved "
            "back; unless the trainer does that, each importance ratio is taken of two different tokens"
        )
    else:
        leading, share = mismatch.shares[0]
        named = share.size >= mismatch.size / 2 and leading not in (MismatchCause.NUMERICS, MismatchCause.UNKNOWN)
        other = "whole column" if above else "confident disagreement" if many_confident else "single tokens"
        cause = leading if named and (above or many_confident) else other
        if causes := listed(list(cause_words(mismatch))):
            message += f"; {causes}"
        if mismatch.confident:
            message += (
                f"; {counted(mismatch.confident, 'token')} that the sampler gave more than 0.99 and the trainer "
                "less than 0.01: no arithmetic does that"
            )
    _, pair, k = worst[0]
    place = int(pair.at[k])
    side = head(evidence, pair.ids[place : place + 1])
    return Hit(pair.where, place, place + 1, message, pair.turn, cause, severity, side)


def _explain_mismatch(
    evidence: Evidence, column: list[PairedLogprobs], *, shifted: bool = False, near: bool = False
) -> RowMismatch:
    mismatch = explain_mismatch(join_pairs(evidence, column), *column[0].names, shifted=shifted, near=near)
    return replace(mismatch, notes=tuple(notes_on_causes(evidence, mismatch)))


def _find_offset(column: list[PairedLogprobs]) -> int:
    """How many places late (+) or early (-) the trainer's values are; 0 unless one offset alone explains them."""
    fits = []
    for offset in (*range(-MAX_SLIDE, 0), *range(1, MAX_SLIDE + 1)):
        in_place, moved = _distances(column, offset)
        # Values near zero agree at every offset: only tokens that differ in place show one.
        shows = (in_place > _BOUND) & (moved <= _BOUND)
        if shows.sum() >= _FEWEST and moved.mean() <= 2 * _BOUND and 10 * moved.mean() <= in_place.mean():
            fits.append(offset)
    return fits[0] if len(fits) == 1 else 0


def _distances(column: list[PairedLogprobs], offset: int) -> tuple[Logprobs, Logprobs]:
    """`[N]` how far the two sides of a token are apart in place, and with the trainer's values moved back."""
    in_place, moved = [], []
    for pair in column:
        there = np.searchsorted(pair.at, pair.at + offset)
        here = there < len(pair.at)
        here[here] = pair.at[there[here]] == pair.at[here] + offset
        in_place.append(np.abs(pair.trainer - pair.sampler)[here])
        moved.append(np.abs(pair.trainer[there[here]] - pair.sampler[here]))
    return np.concatenate(in_place), np.concatenate(moved)
