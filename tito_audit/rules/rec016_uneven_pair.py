"""REC016: a preference pair whose sides do not differ in their answers alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tito_audit.evidence.model import Evidence, Occasion
from tito_audit.evidence.reference import headers_in, pieces_of
from tito_audit.evidence.roles import token_roles
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.record.runs import trained_runs
from tito_audit.rule import rule
from tito_audit.rules._texts import prompt_in_answer
from tito_audit.rules._words import counted, head, quoted


@rule("REC016", Severity.WARNING, headline="{n} of preference pairs that are uneven", when=Occasion.PAIR)
def uneven_pair(evidence: Evidence) -> Iterator[Hit]:
    """A preference pair differs in more than its answers, or not at all.

    ## What it finds
    Two sides whose prompts are not the same tokens (error; a warning if only the last token differs, which the
    encoder merged with an answer). Two answers that are the same tokens. An answer without an end token, which a
    maximum length or a template cut off, or with the same one several times in a row. An answer whose first token
    also holds the end of the prompt, where prompt and answer were encoded in one piece. Where no messages show
    what the prompt should be: one that begins with two BOS tokens, and one that lost its end to a maximum length,
    so that the answer begins inside a message of the user. All but the first two are found in KTO rows as well.

    ## Why it matters
    A preference loss compares the probabilities of two answers to one prompt. With two prompts it compares
    something else, and with two equal answers nothing: such a pair has no gradient in DPO. A side without its end
    teaches when to stop only by accident, and a policy that never trains an end runs on. A prompt that lost its
    end to the answer is not the prompt that the model gets when it is used.

    ## Example
    The maximum length cut the rejected answer:

    ```text
    warning REC016 turn 0 completion 1:2
      the rejected answer has no end token: it was cut, so it does not teach when to stop
      sampled      │!│
                    0
    ```

    ## Repair
    None: the tokens are not in the log. Tokenize the pair again, with one prompt and a larger maximum length;
    `drop` moves it aside.
    """
    side = evidence.rollout.stated.side
    if side is None:
        return
    # The ids from the answer to the end of the row, their sequence and turn, and where they begin in it.
    turns, row = evidence.rollout.turns, evidence.rollout.training_row
    ids, where, start = (turns[0].completion_ids if turns else None), Where.COMPLETION if turns else Where.ROW, 0
    turn = 0 if turns else None
    if row is not None and not turns:
        start = int(row.loss_mask.argmax()) if row.loss_mask is not None and row.loss_mask.any() else 0
        ids = row.token_ids[start:]
    if side.prompts_part is not None and side.name != "chosen":
        last = "; the encoder merged the last token with an answer" if side.at_seam else ""
        message = (
            f"the prompts of the chosen and the rejected answer differ from token {side.prompts_part} on{last}"
        )
        severity = Severity.WARNING if side.at_seam else Severity.ERROR
        cause = "prompts differ at the seam" if side.at_seam else "prompts differ"
        of = Where.ROW if turn is None else Where.PROMPT
        prompt = evidence.sequence(of, turn)
        assert prompt is not None
        part = prompt[side.prompts_part : start if turn is None else len(prompt)]
        end = side.prompts_part + len(part)
        yield Hit(of, side.prompts_part, end, message, turn, cause, severity, head(evidence, part))
    if ids is None or not len(ids):
        return
    end = start + len(ids)
    if side.same_answer and side.name != "chosen":
        message = (
            f"the chosen and the rejected answer are the same {counted(len(ids), 'token')}: nothing is preferred"
        )
        yield Hit(where, start, end, message, turn, "answers are the same", recorded=head(evidence, ids))
    yield from _check_prompt(evidence)
    # Nothing is known about the end of an answer in a row without a prompt.
    at, what, cause, vocabulary = -1, "", "", evidence.vocabulary
    if vocabulary is not None and evidence.end_ids and (row is None or start):
        places = np.isin(ids, list(evidence.end_ids)).nonzero()[0]
        if not len(places) or vocabulary.text(ids[places[-1] + 1 :]).strip():
            at, what, cause = len(ids) - 1, "has no end token: it was cut", "answer without an end"
        elif row is not None and row.loss_mask is not None and not row.loss_mask[start + places].any():
            at, what, cause = int(places[-1]), "does not train its end token", "end not trained"
    if cause:
        message = f"the {side.name} answer {what}, so it does not teach when to stop"
        recorded = head(evidence, ids[at : at + 1])
        yield Hit(where, start + at, start + at + 1, message, turn, cause, recorded=recorded)
    again = np.isin(ids[1:], list(evidence.end_ids)) & (ids[1:] == ids[:-1])
    if row is not None and row.loss_mask is not None:
        again &= row.loss_mask[start + 1 :] & row.loss_mask[start:-1]
    if again.any():
        low, high = trained_runs(again)[0]
        high += 1
        message = (
            f"the {side.name} answer trains the same end token {high - low} times in a row: padding is in the "
            "loss, or template and tokenizer both write the end"
        )
        ends = head(evidence, ids[low:high])
        yield Hit(where, start + low, start + high, message, turn, "end repeated", recorded=ends)
    more = prompt_in_answer(evidence) if turn is not None else ""
    if more:
        message = (
            f"the first token of the answer also holds {quoted(more)}, the end of the prompt: prompt and answer "
            "were encoded in one piece, so the prompt is not the one that the model gets when it is used"
        )
        yield Hit(where, start, start + 1, message, turn, "seam inside a token", recorded=head(evidence, ids[:1]))


def _check_prompt(evidence: Evidence) -> Iterator[Hit]:
    """Hits on a prompt that could not be compared with what the template writes."""
    turns, vocabulary = evidence.rollout.turns, evidence.vocabulary
    prompt, seen = (turns[0].prompt_ids, turns[0].seen_ids) if turns else (None, None)
    if prompt is None or seen is None or len(prompt) < 2 or evidence.rendered or vocabulary is None:
        return
    if evidence.bos_id is not None and (prompt[:2] == evidence.bos_id).all():
        message = (
            "the prompt begins with two BOS tokens: the template writes one and the tokenizer adds another; "
            "encode rendered text with `add_special_tokens=False`"
        )
        yield Hit(Where.PROMPT, 0, 2, message, 0, "BOS doubled", recorded=head(evidence, prompt[:2]))
    headers = headers_in(vocabulary, "", evidence.speakers)
    role = token_roles(pieces_of(seen, vocabulary), evidence.end_ids, headers)[len(prompt)]
    if role in ("system", "user"):
        message = (
            f"the answer begins inside a {role} message: a maximum length cut the end of the prompt, and with it "
            "the header of the answer"
        )
        last = len(prompt) - 1
        yield Hit(Where.PROMPT, last, last + 1, message, 0, "prompt cut", recorded=head(evidence, prompt[last:]))
