"""What a training row shows about how its log was written."""

from __future__ import annotations

from dataclasses import replace

from tito_audit.evidence.judgement import Judgement, judge, judgement
from tito_audit.evidence.logprobs import shifts, slides_against_mask
from tito_audit.evidence.masks import left_out
from tito_audit.evidence.model import Evidence
from tito_audit.evidence.sft import sft_facts
from tito_audit.record.reading import NO_CONVENTIONS, Conventions
from tito_audit.record.testimony import MAX_IDS, AnswerEnds, Verdict, Witness


def witness(evidence: Evidence) -> Witness | None:
    """What the training row shows; None without one, or if it shows nothing."""
    shown = _witness(evidence)
    facts = sft_facts(evidence)
    if not facts:
        return shown
    return replace(shown or Witness(Verdict.CLEAN), sft=tuple(fact for fact, count in facts.items() if count))


def _witness(evidence: Evidence) -> Witness | None:
    row, view, judged = evidence.rollout.training_row, evidence.row, judgement(evidence)
    if row is None:
        return None
    if judged is None or view is None:
        slides = () if shifts(evidence) else slides_against_mask(row)
        return Witness(Verdict.OPEN, slides, slides) if slides else None
    if judged.exact:
        every = zip(judged.spans, judged.ends, strict=True)
        trained = [end == span.ends[-1] for span, end in every if len(span.ends) > 1]
        ends = None if not trained else AnswerEnds.TRAINED if any(trained) else AnswerEnds.OPEN
        return Witness(Verdict.CLEAN, first=0, ends=ends)
    left = left_out(evidence)
    first, ends = (None, None) if left is None else (left.first, left.ends)
    if view.proven:
        return Witness(Verdict.CLEAN, first=first, ends=ends)
    # A row that supposes nothing unusual is not asked for slides, which all suppose more.
    slides = tuple(fit.slide for fit in judged.fits) if judged.departures != 0 else ()
    contradicted = _contradicted(evidence, judged)
    if not judged.right:
        return Witness(Verdict.FAULTY, () if judged.missing else slides, contradicts=contradicted)
    assert judged.departures is not None
    simplest = tuple(fit.slide for fit in judged.fits if fit.departures <= judged.departures)
    certain: tuple[int, ...] = ()
    values, mask = judged.values, row.loss_mask
    if simplest and values is not None and mask is not None:
        # Trained first tokens of answers whose logprob is the fill.
        starts = [span.start + int(mask[span.start : span.ends[-1]].argmax()) for span in judged.spans]
        certain = tuple(
            sorted({int(row.token_ids[at]) for at in starts if mask[at] and not values.real[at]})[:MAX_IDS]
        )
    verdict = Verdict.OPEN if judged.open else Verdict.CLEAN
    return Witness(verdict, slides, simplest, certain, first, ends, contradicted)


def _contradicted(evidence: Evidence, judged: Judgement) -> tuple[str, ...]:
    """The flags of the run that say otherwise than the row."""
    stated, row = evidence.conventions, evidence.rollout.training_row
    if stated is NO_CONVENTIONS or row is None:
        return ()
    flags = []
    if stated.slide is not None and judged.slide != stated.slide:
        flags.append("--assume")
    alone = (Conventions(stated.first, stated.tokens), Conventions(end=stated.end))
    as_it_is = judge(row, judged.spans, replace(stated, first=None, tokens=0, end=None))
    for convention, flag in zip(alone, ("--convention first", "--convention end"), strict=True):
        if convention == NO_CONVENTIONS or as_it_is is None or not as_it_is.right:
            continue
        narrowed = judge(row, judged.spans, convention)
        if narrowed is not None and not narrowed.right:
            flags.append(flag)
    return tuple(flags)
