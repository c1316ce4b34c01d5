"""REC004: placeholder ids for tokens that were never recorded."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tito_audit.evidence.model import Evidence, Verified
from tito_audit.evidence.needs import Needs
from tito_audit.record.arrays import Ids, Logprobs
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.record.rollout import Turn, effective_loss_mask
from tito_audit.rule import rule
from tito_audit.rules._drift import hits_of_known_causes
from tito_audit.rules._logprobs import sampled_values
from tito_audit.rules._texts import TextAgreement, agreement, answer_of, ids_contain
from tito_audit.rules._words import head

_CONSTANT = 4
_UNSURE = -0.3
"""In the second half of 16 or more repetitions, a model in a loop has a higher mean logprob than this."""
_ONE_ID = "one id repeated"
_UNDECIDED = "undecided"


@rule(
    "REC004",
    Severity.ERROR,
    headline="{n} with placeholder ids",
    needs=(Needs.COMPLETIONS | Needs.PROMPTS | Needs.ROW,),
)
def placeholder_ids(evidence: Evidence) -> Iterator[Hit]:
    """The ids are placeholders, not tokens.

    ## What it finds
    Ids that the log itself calls dummies; a prompt and a completion of nothing but `[0]`; completions and rows
    that count 0, 1, 2, … or 1, 2, 3, …; and prompts, completions or rows that repeat one id at least four times
    and hold nothing else; answers of a row that repeat one id with one logprob. A completion counts as real if its
    logprobs differ or its text says the same. Where neither is logged, or the model was not sure for long, one id
    repeated after an ordinary prompt may still be a model in a loop, and is a warning (`undecided`).
    With a template, also padding before a prompt or at either end of a row that an attention mask hid from the
    sampler while nothing in the log does.

    ## Why it matters
    Servers without token ids, and tests, fill them in so that shapes fit. Training on them teaches the policy
    outputs that it never sampled in any context.

    ## Example
    A dummy server filled in 1, 2, 3:

    ```text
    error REC004 turn 0 completion 0:3
      the ids count from 1 to 3; they stand in for tokens that were not recorded and must not be
      trained
      sampled      │"│#│$│
                    1 2 3
    ```

    ## Repair
    `drop`: nothing in the log says what was sampled. Log the ids that the server sampled.
    """
    if evidence.explained:
        yield from hits_of_known_causes(evidence, "REC004")
    rollout = evidence.rollout
    stated = rollout.stated.dummy_tokens
    for number, turn in enumerate(rollout.turns):
        prompt, completion = turn.prompt_ids, turn.completion_ids
        # A quick look: most ids neither start at 0 or 1 nor begin as they end.
        for ids in (prompt, completion):
            if ids is not None and len(ids) and (stated or ids[0] <= 1 or ids[0] == ids[-1]):
                break
        else:
            continue
        dummy_prompt = False
        if prompt is not None and _one_id(prompt) and not _repeats_a_piece(turn.prompt_text, len(prompt)):
            dummy_prompt = True
            yield _hit(evidence, Where.PROMPT, number, prompt, _ONE_ID)
        if completion is None or not len(completion):
            continue
        cause = "stated by the log" if stated else _pattern(completion)
        if cause is None and prompt is not None and len(prompt) == 1 and not (prompt[0] or completion.any()):
            cause = "nothing but 0"
        real = None if stated or cause is None else _was_sampled(evidence, number, turn)
        if cause is not None and not real:
            looping = cause == _ONE_ID and real is None and not dummy_prompt and not stated
            cause, severity = (_UNDECIDED, Severity.WARNING) if looping else (cause, Severity.ERROR)
            yield _hit(evidence, Where.COMPLETION, number, completion, cause, severity)
    row = rollout.training_row
    if row is None:
        return
    ids = row.token_ids
    cause = None
    if len(ids) and (stated or ids[0] <= 1 or ids[0] == ids[-1]):  # the same quick look
        cause = "stated by the log" if stated else _pattern(ids)
    in_loop = False
    if cause == _ONE_ID and row.logprobs is not None:
        # Such a row may be the answer of a model in a loop, but has no prompt of that id.
        trained = effective_loss_mask(row)
        short_prompt = trained is None or int((~trained).sum()) < _CONSTANT
        in_loop = short_prompt and bool(_show_a_loop(row.logprobs if trained is None else row.logprobs[trained]))
    if cause is not None and not in_loop:
        yield _hit(evidence, Where.ROW, None, row.token_ids, cause)
    elif not rollout.turns and Verified.LOGPROBS not in evidence.verified:
        for values in sampled_values(evidence):
            for start, end in values.runs:
                ids = row.token_ids[start:end]
                if _one_id(ids) and _show_a_loop(values.logprobs[start:end]) is False:
                    yield _hit(evidence, Where.ROW, None, ids, _ONE_ID, start=start)


def _pattern(ids: Ids) -> str | None:
    """Why a whole sequence looks like filler; None if it does not."""
    if _one_id(ids):
        return _ONE_ID
    if len(ids) >= 3 and ids[0] in (0, 1) and (np.diff(ids) == 1).all():
        return "counting up"
    return None


def _one_id(ids: Ids) -> bool:
    """Whether a sequence is one id repeated often enough to mean something."""
    return len(ids) >= _CONSTANT and bool(ids[0] == ids[-1]) and bool((ids == ids[0]).all())


def _was_sampled(evidence: Evidence, number: int, turn: Turn) -> bool | None:
    """Whether logprobs that differ, or the logged text, show that the ids were sampled; None if nothing says."""
    ids = turn.completion_ids
    looping = None if turn.completion_logprobs is None else _show_a_loop(turn.completion_logprobs)
    if looping is not None:
        return looping
    answer = answer_of(evidence, turn)
    text = turn.completion_text or (answer.text if answer is not None else "")
    if not text or ids is None:
        return None
    if evidence.vocabulary is None:  # any text is one piece repeated once
        return _repeats_a_piece(text, len(ids)) if len(ids) >= _CONSTANT else None
    if turn.completion_text:
        return agreement(evidence, number) is not TextAgreement.DIFFERENT
    return ids_contain(evidence, number, text)


def _show_a_loop(logprobs: Logprobs) -> bool | None:
    """Whether logprobs are those of a model in a loop, which differ and soon come near zero; None if unclear."""
    values = logprobs[np.isfinite(logprobs)]
    if not len(values) or (values == values[0]).all():
        return False if len(values) else None
    return None if len(values) >= 16 and values[len(values) // 2 :].mean() < _UNSURE else True


def _repeats_a_piece(text: str | None, count: int) -> bool:
    """Whether a text is one piece repeated `count` times, as one token repeated decodes."""
    size, rest = divmod(len(text or ""), count)
    return text is not None and size > 0 and not rest and text == text[:size] * count


def _hit(
    evidence: Evidence,
    where: Where,
    turn: int | None,
    ids: Ids,
    cause: str,
    severity: Severity = Severity.ERROR,
    *,
    start: int = 0,
) -> Hit:
    why = {
        "stated by the log": "the log says that these ids are placeholders",
        _ONE_ID: f"all {len(ids)} ids are {ids[0]}",
        _UNDECIDED: f"all {len(ids)} ids are {ids[0]}, and neither logprobs nor text show a model in a loop",
        "counting up": f"the ids count from {ids[0]} to {ids[-1]}",
        "nothing but 0": "prompt and completion hold nothing but the id 0",
    }[cause]
    stand = "may stand" if cause == _UNDECIDED else "stand"
    message = f"{why}; they {stand} in for tokens that were not recorded and must not be trained"
    return Hit(where, start, start + len(ids), message, turn, cause, severity, recorded=head(evidence, ids))
