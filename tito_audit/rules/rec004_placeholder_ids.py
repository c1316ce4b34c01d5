"""REC004: placeholder ids for tokens that were never recorded."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.record.rollout import Turn
from tito_audit.rule import rule
from tito_audit.rules._drift import built_hits
from tito_audit.rules._texts import Agreement, agreement, answer_of, contained
from tito_audit.rules._words import shown

_CONSTANT = 4
_COUNTING = 3


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
    and hold nothing else. A completion counts as real if its logprobs differ or its ids decode to the logged text.
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
    yield from built_hits(evidence, "REC004")
    rollout = evidence.rollout
    stated = rollout.stated.dummy_tokens
    for number, turn in enumerate(rollout.turns):
        for where, ids, cause in _of_turn(evidence, number, turn, stated):
            yield _hit(evidence, where, number, ids, cause)
    if rollout.training_row is not None:
        ids = rollout.training_row.token_ids
        guess = "stated by the log" if stated and len(ids) else _pattern(ids)
        if guess is not None:
            yield _hit(evidence, Where.ROW, None, ids, guess)


def _of_turn(evidence: Evidence, number: int, turn: Turn, stated: bool) -> Iterator[tuple[Where, Ids, str]]:
    """The placeholder sequences of a call, with the reason each counts as one."""
    prompt, completion = turn.prompt_ids, turn.completion_ids
    if prompt is not None and _one_id(prompt):
        yield Where.PROMPT, prompt, "one id repeated"
    if completion is None or not len(completion):
        return
    cause = "stated by the log" if stated else _pattern(completion)
    if cause is None and prompt is not None and np.array_equal(prompt, [0]) and not completion.any():
        cause = "nothing but 0"
    if cause is not None and (stated or not _is_real(evidence, number, turn)):
        yield Where.COMPLETION, completion, cause


def _pattern(ids: Ids) -> str | None:
    """Why a whole sequence looks filled in; None when it does not."""
    if _one_id(ids):
        return "one id repeated"
    if len(ids) >= _COUNTING and ids[0] in (0, 1) and (np.diff(ids) == 1).all():
        return "counting up"
    return None


def _one_id(ids: Ids) -> bool:
    """Whether a sequence is one id repeated often enough to mean something."""
    return len(ids) >= _CONSTANT and bool(ids[0] == ids[-1]) and bool((ids == ids[0]).all())


def _is_real(evidence: Evidence, number: int, turn: Turn) -> bool:
    """Whether the ids have logprobs that differ, or decode to the text in the log."""
    logprobs = turn.completion_logprobs
    if logprobs is not None and len(np.unique(logprobs)) > 1:
        return True
    if evidence.vocabulary is None:
        return False
    if turn.completion_text:
        return agreement(evidence, number) is not Agreement.DIFFERENT
    answer = answer_of(evidence, turn)
    return answer is not None and bool(answer.text) and contained(evidence, number, answer.text)


def _hit(evidence: Evidence, where: Where, turn: int | None, ids: Ids, cause: str) -> Hit:
    why = {
        "stated by the log": "the log says that these ids are placeholders",
        "one id repeated": f"all {len(ids)} ids are {ids[0]}",
        "counting up": f"the ids count from {ids[0]} to {ids[-1]}",
        "nothing but 0": "prompt and completion hold nothing but the id 0",
    }[cause]
    message = f"{why}; they stand in for tokens that were not recorded and must not be trained"
    return Hit(where, 0, len(ids), message, turn, cause, recorded=shown(evidence, ids))
