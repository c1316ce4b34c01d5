"""realign: moves logprobs and masks back onto their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.evidence.judgement import judgement, restored_logprobs, restored_mask, row_mask_slide
from tito_audit.evidence.logprob_values import IMPOSSIBLE, first_covered
from tito_audit.evidence.logprobs import ROUNDING, logprob_shifts
from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.column import Alignment, Column, ColumnRole, MaskEncoding, expand
from tito_audit.record.finding import Finding, Where
from tito_audit.record.repaired import unrepaired
from tito_audit.record.rollout import TrainingRow, Turn
from tito_audit.repair import Proposal, Safety, repair
from tito_audit.repairs._carry import UNTRAINED, column_of, edit_row
from tito_audit.settings.model import RepairChoices


def _logprobs_moved_back(evidence: Evidence) -> tuple[Logprobs, Mask, bool] | None:
    """The logprobs of the row back on their tokens; the tokens whose value fell off an end and is not recorded
    elsewhere; and whether the calls prove it. None if the logprobs are not shifted.

    RecordError if they are wrong and no offset is proven to put them right.
    """
    shifted, row, view = logprob_shifts(evidence), evidence.rollout.training_row, evidence.row
    if not shifted or row is None or row.logprobs is None:
        return None
    offset = shifted[0].offset
    if shifted[0].is_undecided:
        raise RecordError("the row alone does not show how far its logprobs are shifted")
    if not offset:
        raise RecordError("the row's logprobs do not match the calls' at any offset")
    judged = judgement(evidence)
    if not shifted[0].by_calls and judged is not None:
        logprobs, lost = restored_logprobs(row, judged)
        return logprobs, lost, False
    assert view is not None
    assert view.expected_logprobs is not None
    first, expected = first_covered(row), view.expected_logprobs
    # The fill is the sentinel, else the most frequent entry of tokens without a logprob.
    entries, counts = np.unique(row.logprobs[~view.sampled][first:], return_counts=True)
    fill = float(entries[counts.argmax()]) if len(counts) and 2 * counts.max() > counts.sum() else np.nan
    if row.sentinel is not None:
        fill = row.sentinel
    elif judged is not None and judged.values is not None:
        fill = judged.values.fill
    source = np.arange(len(row.logprobs)) + offset
    inside = (source >= first) & (source - offset >= first) & (source < len(source))
    source = np.where(inside, source, 0)
    whole = np.where(inside, row.logprobs[source], fill)
    whole[:first] = row.logprobs[:first]
    right = inside & (np.abs(row.logprobs[source] - expected) <= ROUNDING)
    within_turn = inside & (view.turn >= 0) & (view.turn == view.turn[source])
    within_turn &= view.turn_offset[source] - view.turn_offset == source - np.arange(len(source))
    if not (within_turn & np.isfinite(expected) & ~right & ~view.drifted).any():
        # The whole column is shifted by this offset. The call supplies a value that fell off an end.
        values = np.where(np.isfinite(expected) & ~right, expected, whole)
        lost = ~inside & ~np.isfinite(expected)
    else:
        # Only the shifted turns move back; a value that lay outside its turn leaves fill behind.
        moving = np.isin(view.turn, [shift.turn for shift in shifted if shift.turn is not None])
        values = row.logprobs.copy()
        vacated = source[moving & right]
        values[vacated[~view.sampled[vacated]]] = fill
        values[moving] = np.where(right, row.logprobs[source], expected)[moving]
        lost = moving & ~right & np.isnan(expected)
    trained = row.loss_mask if row.loss_mask is not None else np.zeros(len(source), np.bool_)
    lost &= trained
    return np.where(lost, fill, values), lost, True


def is_fill(values: Logprobs, sentinel: float | None) -> Mask:
    """`[N]` True where an entry is fill: null, 1.0, -9999, or the sentinel; without a sentinel, also 0.0."""
    marks = (*IMPOSSIBLE, 0.0 if sentinel is None else sentinel)
    return np.asarray(np.isnan(values) | np.isin(values, marks))


def fit_by_values(values: Logprobs, expected: Logprobs) -> Logprobs | None:
    """The column made as long as `expected`, `[N]`, if its values then agree with it; else None.

    An extra entry is removed, or the missing entry inserted with its expected value. NaN in `expected` agrees with
    anything.
    """
    extra = len(values) - len(expected)
    if np.isfinite(expected).sum() < 2 or abs(extra) != 1:  # one value that agrees may do so by chance
        return None
    size = min(len(values), len(expected))
    front = _agree(values[:size], expected[:size])
    back = _agree(values[len(values) - size :], expected[len(expected) - size :])
    # At place j: all entries before j agree in place, and all after it agree one place further on.
    before = np.concatenate(([True], np.logical_and.accumulate(front)))
    after = np.concatenate((np.logical_and.accumulate(back[::-1])[::-1], [True]))
    places = np.flatnonzero(before & after)
    if not len(places):
        return None
    if extra > 0:
        # Of several places take one at an end, else any, if all give the same column: up to rounding where values
        # are expected, exactly elsewhere.
        ends = places[(places == 0) | (places == len(expected))]
        first, *others = (np.delete(values, place) for place in (ends if len(ends) else places))
        compared = np.isfinite(expected)
        alike = all(
            (np.abs(first[compared] - other[compared]) <= 2 * ROUNDING).all()
            and np.array_equal(first[~compared], other[~compared], equal_nan=True)
            for other in others
        )
        return first if alike else None
    place = next((int(p) for p in places if np.isfinite(expected[p])), None)
    return None if place is None else np.insert(values, place, expected[place])


def fit_by_mask(values: Logprobs, trained: Mask, sentinel: float | None) -> Logprobs | None:
    """The column without its first or last entry, if that is fill and the values then lie exactly under the mask.

    Fill is accepted inside a trained run, but not at its ends: 0.0 may also be the logprob of a certain token.
    """
    if len(values) != len(trained) + 1 or not trained.any() or trained.all():
        return None
    padded = np.concatenate(([False], trained, [False]))
    ends = trained & ~(padded[:-2] & padded[2:])
    fitting = []
    for rest, end in ((values[1:], values[:1]), (values[:-1], values[-1:])):
        real = ~is_fill(rest, sentinel)
        if is_fill(end, sentinel)[0] and not (real & ~trained).any() and real[ends].all():
            fitting.append(rest)
    return fitting[0] if len(fitting) == 1 else None


def fit_by_null(values: Logprobs, length: int, sentinel: float | None) -> Logprobs | None:
    """The column without its only entry that cannot be a logprob, if that is at an end; else None."""
    if len(values) != length + 1:
        return None
    marks: Sequence[float] = (*IMPOSSIBLE, *((sentinel,) if sentinel else ()))
    impossible = np.flatnonzero(np.isnan(values) | np.isin(values, marks))
    if len(impossible) != 1 or int(impossible[0]) not in (0, length):
        return None
    return np.delete(values, int(impossible[0]))


def unprovable_entry(name: str) -> RecordError:
    """The refusal of a column in which nothing shows the wrong entry."""
    return RecordError(f"column {name!r}: this log does not prove which entry is extra or missing")


def _agree(values: Logprobs, expected: Logprobs) -> Mask:
    return np.asarray(~np.isfinite(expected) | (np.abs(values - expected) <= ROUNDING))


def _describe_proof(evidence: Evidence, verb: str) -> str:
    """How a slide is known without calls, as a clause."""
    judged = judgement(evidence)
    if judged is not None and judged.slide == evidence.conventions.slide:
        return "as --assume states"
    return f"as the edges of every span {verb}"


@dataclass(slots=True)
class _Progress:
    """What was done so far, and what could not be done."""

    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    untrained: int = 0


@repair(
    "realign",
    cures=("LPR501", "LPR502", "MSK401", "MSK402", "MSK404"),
    safety=Safety.SAFE,
    precedence=20,
    # A slid mask, logprobs at an offset, or one entry too many or too few.
    fits=lambda evidence, finding: (
        (finding.code.startswith("MSK") and row_mask_slide(evidence) != 0)
        or (finding.code == "LPR502" and any(shift.offset for shift in logprob_shifts(evidence)))
        or (finding.code == "LPR501" and finding.hit.cause in ("one too many", "one too few"))
    ),
)
def realign(evidence: Evidence, findings: tuple[Finding, ...], choices: RepairChoices) -> Proposal | None:
    """Puts logprobs and masks back on their tokens.

    ## What it does
    A logprob column that is some places early or late, or has one entry too many or too few, is moved so that
    every value is at its token. A mask whose trained runs are all shifted off the sampled ones is moved back onto
    them. Values that fell off an end are taken from the calls; where no call has them, their tokens leave the
    loss. Other columns are not touched.

    ## When it is safe
    Always: it moves only what is provable, by the values or the tokens that the calls recorded; or by where
    answers, trained runs and values begin and end, if no convention of a right row explains them and a single
    slide does. It leaves everything else as it is, unless the run states the slide (`--assume`).

    ## What it costs
    Nothing, or the few tokens whose value fell off an end.

    ## Example
    ```text
    tokens    assistant  \\n    Hello  !     <|im_end|>
    logprobs    0.0    -1.3   -0.2  -0.01     0.0       one place early
    logprobs    0.0     0.0   -1.3  -0.2     -0.01      after
    ```
    """
    progress = _Progress()
    rollout = evidence.rollout
    if _any_of(findings, "LPR501", Where.COMPLETION):
        turns = tuple(_with_fitted_turn(evidence, k, turn, progress) for k, turn in enumerate(rollout.turns))
        if any(new is not old for new, old in zip(turns, rollout.turns, strict=True)):
            rollout = replace(rollout, turns=turns)
    row = rollout.training_row
    for step, wanted in (
        (_with_mask_back, _any_of(findings, "MSK", Where.ROW)),
        (_with_fitted_row, _any_of(findings, "LPR501", Where.ROW)),
        (_with_logprobs_back, _any_of(findings, "LPR502", Where.ROW)),
    ):
        if wanted and row is not None:
            try:  # each step judges the row as logged: with the mask moved back, the logprobs may be open
                row = step(evidence, row, progress)
            except RecordError as error:
                progress.problems.append(str(error))
    if row is not rollout.training_row:
        rollout = replace(rollout, training_row=row)
    if rollout is evidence.rollout:
        if progress.problems:
            raise RecordError("; ".join(progress.problems))
        return None
    adds = UNTRAINED if progress.untrained else frozenset()
    return Proposal((unrepaired(rollout),), notes=tuple(progress.notes), adds=adds)


def _any_of(findings: Sequence[Finding], code: str, where: Where) -> bool:
    return any(finding.code.startswith(code) and finding.hit.where is where for finding in findings)


def _with_mask_back(evidence: Evidence, row: TrainingRow, progress: _Progress) -> TrainingRow:
    """The row with every trained run moved back onto its sampled run."""
    view, slide = evidence.row, row_mask_slide(evidence)
    if not slide or view is None or row.loss_mask is None:
        return row
    back = restored_mask(evidence)
    assert back is not None
    shown = "as the calls show" if view.proven else _describe_proof(evidence, "show")
    progress.notes.append(f"the mask was moved by {-slide:+d}, {shown}")
    progress.untrained += int(np.count_nonzero(view.sampled & ~back))
    # Columns with entries for trained tokens only keep them: the i-th belongs to the i-th trained token.
    compact = [column for column in row.columns if column.alignment is Alignment.SAMPLED]
    if compact and back.sum() != row.loss_mask.sum():
        raise RecordError(f"column {compact[0].name!r} would lack entries: the row cuts off a trained run")
    bare = tuple(column for column in row.columns if column.alignment is not Alignment.SAMPLED)
    moved = edit_row(replace(row, columns=bare), loss_mask=back)
    rest = {column.name: column for column in moved.columns}
    old = column_of(row, ColumnRole.LOSS_MASK)
    if old is not None and old.name in rest and old.encoding is MaskEncoding.FLOAT:
        weights = np.unique(old.values[old.values > 0])
        if len(weights) > 1:
            raise RecordError(
                f"column {old.name!r} holds several weights, and which token has which is not recorded"
            )
        values = np.where(rest[old.name].values > 0, weights[0], 0.0).astype(old.values.dtype)
        rest[old.name] = replace(rest[old.name], values=values)
    columns = tuple(rest.get(column.name, column) for column in row.columns)
    logprobs = row.logprobs
    for column in compact:
        if column.role is ColumnRole.LOGPROBS:
            logprobs = expand(column.values, Alignment.SAMPLED, full=len(back), trained=back)
    return replace(moved, columns=columns, logprobs=logprobs)


def _with_logprobs_back(evidence: Evidence, row: TrainingRow, progress: _Progress) -> TrainingRow:
    """The row with its logprobs back on their tokens; a token whose value is lost leaves the loss."""
    moved = _logprobs_moved_back(evidence)
    if moved is None:
        return row
    logprobs, lost, by_calls = moved
    proof = "as the calls prove" if by_calls else _describe_proof(evidence, "prove")
    notes = [f"the logprobs were moved by {-logprob_shifts(evidence)[0].offset:+d}, {proof}"]
    left = None
    lost = lost if row.loss_mask is None else lost & row.loss_mask
    if count := int(lost.sum()):
        if row.loss_mask is None or column_of(row, ColumnRole.LOSS_MASK) is None:
            raise RecordError("a value fell off the end, and there is no mask to leave its token out")
        left = row.loss_mask & ~lost
        if not left.any():
            raise RecordError("nothing would be left to train")
        progress.untrained += count
        notes.append(f"{count} trained token{'s' * (count > 1)} left the loss, since no value is recorded")
    progress.notes += notes
    return edit_row(row, loss_mask=left, logprobs=logprobs)


def _with_fitted_row(evidence: Evidence, row: TrainingRow, progress: _Progress) -> TrainingRow:
    """The row with a logprob column of the right length; RecordError if nothing proves which entry is wrong."""
    unfit = (c for c in row.columns if c.role is ColumnRole.LOGPROBS and c.alignment is None)
    column = next((c for c in unfit if len(c.values)), None)
    if column is None or row.logprobs is not None:
        return row
    full = len(row.token_ids)
    expected = evidence.row.expected_logprobs if evidence.row is not None else None
    # The alignments that a logprob column of the row may have, each with the tokens `[T]` that it then covers.
    everything = np.ones(len(row.token_ids), np.bool_)
    covered = [(Alignment.FULL, everything)]
    if row.prompt_length:
        covered.append((Alignment.RESPONSE, np.arange(len(everything)) >= row.prompt_length))
    if row.loss_mask is not None:
        covered.append((Alignment.SAMPLED, row.loss_mask))
    for alignment, tokens in covered:
        values = fit_by_values(column.values, expected[tokens]) if expected is not None else None
        if values is None and expected is None and row.loss_mask is not None:
            if alignment is Alignment.SAMPLED:
                values = fit_by_null(column.values, int(tokens.sum()), column.sentinel)
            else:
                values = fit_by_mask(column.values, row.loss_mask[tokens], column.sentinel)
        if values is not None:
            progress.notes.append(_note_on_length(column, len(values)))
            fitted = replace(column, values=values, alignment=alignment)
            columns = tuple(fitted if old is column else old for old in row.columns)
            length, trained = row.prompt_length, row.loss_mask
            logprobs = expand(values, alignment, full=full, prompt_length=length, trained=trained)
            return replace(row, logprobs=logprobs, columns=columns)
    raise unprovable_entry(column.name)


def _with_fitted_turn(evidence: Evidence, number: int, turn: Turn, progress: _Progress) -> Turn:
    """The call with a logprob column as long as its completion; the call unchanged if nothing proves the entry."""
    column = next((c for c in turn.columns if c.role is ColumnRole.LOGPROBS and c.alignment is None), None)
    if column is None or turn.completion_ids is None or not len(turn.completion_ids):
        return turn
    length = len(turn.completion_ids)
    by_null = fit_by_null(column.values, length, column.sentinel)
    # `[C]` the values of the training row for this completion, NaN where it has none; None if it has no value.
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.logprobs is None or view is None or not view.proven:
        expected = None
    else:
        places = np.flatnonzero(view.turn == number)
        places = places[~is_fill(row.logprobs[places], row.sentinel)]
        out = np.full(length, np.nan)
        out[view.turn_offset[places]] = row.logprobs[places]
        expected = out if np.isfinite(out).any() else None
    values = fit_by_values(column.values, expected) if expected is not None else by_null
    if values is None or (by_null is not None and not np.array_equal(by_null, values, equal_nan=True)):
        progress.problems.append(str(unprovable_entry(column.name)) + f" (turn {number})")
        return turn
    progress.notes.append(f"turn {number}: {_note_on_length(column, length)}")
    fitted = replace(column, values=values, alignment=Alignment.CALL)
    columns = tuple(fitted if old is column else old for old in turn.columns)
    return replace(turn, completion_logprobs=values, columns=columns)


def _note_on_length(column: Column, length: int) -> str:
    what = "the extra entry was removed" if len(column.values) > length else "the missing entry was inserted"
    return f"{column.name}: {what}"
