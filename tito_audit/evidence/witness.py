"""Reads from a training row how its log was written, to be compared with the other rows of the log."""

from __future__ import annotations

from dataclasses import replace

from tito_audit.evidence.judgement import Judgement, judge_spans, judgement
from tito_audit.evidence.logprobs import logprob_shifts, slides_against_mask
from tito_audit.evidence.masks import left_out
from tito_audit.evidence.model import Evidence
from tito_audit.evidence.sft import sft_facts
from tito_audit.record.reading import NO_CONVENTIONS, Conventions
from tito_audit.record.testimony import MAX_IDS, AnswerEnds, Verdict, Witness


def witness(evidence: Evidence) -> Witness | None:
    """What the training row shows of how its log was written; None without a row, or if it shows nothing."""
    shown = _row_witness(evidence)
    facts = sft_facts(evidence)
    if not facts:
        return shown
    return replace(shown or Witness(Verdict.CLEAN), sft=tuple(fact for fact, count in facts.items() if count))


def _row_witness(evidence: Evidence) -> Witness | None:
    row, view, judged = evidence.rollout.training_row, evidence.row, judgement(evidence)
    if row is None:
        return None
    if judged is None or view is None:
        slides = () if logprob_shifts(evidence) else slides_against_mask(row)
        return Witness(Verdict.OPEN, slides, slides) if slides else None
    if judged.exact:
        ended = zip(judged.spans, judged.ends, strict=True)
        trained = [end == span.ends[-1] for span, end in ended if len(span.ends) > 1]
        ends = None if not trained else AnswerEnds.TRAINED if any(trained) else AnswerEnds.OPEN
        return Witness(Verdict.CLEAN, first=0, ends=ends)
    left = left_out(evidence)
    first, ends = (None, None) if left is None else (left.first, left.ends)
    if view.proven:
        return Witness(Verdict.CLEAN, first=first, ends=ends)
    # A row without departures shows no slide: every slide supposes at least one.
    slides = tuple(fit.slide for fit in judged.fits) if judged.departures != 0 else ()
    contradicted = _contradicted_flags(evidence, judged)
    if not judged.is_plausible:
        return Witness(Verdict.FAULTY, () if judged.may_lack_values else slides, contradicts=contradicted)
    assert judged.departures is not None
    simplest = tuple(fit.slide for fit in judged.fits if fit.departures <= judged.departures)
    certain: tuple[int, ...] = ()
    values, mask = judged.values, row.loss_mask
    if simplest and values is not None and mask is not None:
        # The first trained tokens of answers whose logprob is the fill.
        starts = [span.start + int(mask[span.start : span.ends[-1]].argmax()) for span in judged.spans]
        certain = tuple(
            sorted({int(row.token_ids[at]) for at in starts if mask[at] and not values.real[at]})[:MAX_IDS]
        )
    verdict = Verdict.OPEN if judged.is_open else Verdict.CLEAN
    return Witness(verdict, slides, simplest, certain, first, ends, contradicted)


def _contradicted_flags(evidence: Evidence, judged: Judgement) -> tuple[str, ...]:
    """The flags of the run that the row contradicts."""
    stated, row = evidence.conventions, evidence.rollout.training_row
    if stated is NO_CONVENTIONS or row is None:
        return ()
    flags = []
    if stated.slide is not None and judged.slide != stated.slide:
        flags.append("--assume")
    alone = (Conventions(stated.first, stated.tokens), Conventions(end=stated.end))
    without = judge_spans(row, judged.spans, replace(stated, first=None, tokens=0, end=None))
    for convention, flag in zip(alone, ("--convention first", "--convention end"), strict=True):
        if convention == NO_CONVENTIONS or without is None or not without.is_plausible:
            continue
        with_convention = judge_spans(row, judged.spans, convention)
        if with_convention is not None and not with_convention.is_plausible:
            flags.append(flag)
    return tuple(flags)
