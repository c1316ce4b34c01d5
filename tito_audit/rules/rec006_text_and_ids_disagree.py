"""REC006: a completion whose text is not what its ids decode to."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.rule import rule
from tito_audit.rules._texts import (
    TextAgreement,
    agreement,
    answer_of,
    first_difference,
    first_token_past_stop,
    ids_contain,
    missing_part,
    prompt_in_answer,
    spelled_calls,
)
from tito_audit.rules._words import counted, head, quoted

_HARMLESS = {
    TextAgreement.TRIMMED: "white space around the text was trimmed; encoding it again gives other tokens",
    TextAgreement.STOP_STRING: "the text ends before the ids do, as if a stop string had been left out",
}


@rule("REC006", Severity.ERROR, headline="{n} whose text and ids disagree", needs=(Needs.COMPLETIONS,))
def text_and_ids_disagree(evidence: Evidence) -> Iterator[Hit]:
    """The text of a completion is not what its ids decode to.

    ## What it finds
    A logged text that differs from the decoded ids, and two copies of the ids that differ. Texts agree with
    special tokens kept or dropped, without the end token, without the reasoning before them, with broken
    characters as U+FFFD, and up to Unicode normalisation. Trimmed white space and a dropped stop string are notes;
    ids behind the stop string that ended the call, and spaces removed before punctuation, are a warning.

    Where the log keeps a message instead of the text, the ids have to contain the message; if not, it is a
    warning, since messages are often edited. Ids that hold only a part of the text belong to REC005.

    A prompt that is longer or shorter than the server counted (`usage.prompt_tokens`) is a warning if all messages
    are texts and neither BOS, cached tokens nor a resumed answer explain it.

    ## Why it matters
    Rewards are computed from the text, gradients from the ids. Where they differ, the answer that is rewarded is
    not the one that is trained.

    ## Example
    The text says 8, the ids say 9:

    ```text
    error REC006 turn 0 completion 1:3
      the ids decode to '9<|im_end|>' from here on, the text says '8'
      sampled      │9 │<|im_end|>│
                    24 2002
    ```

    ## Repair
    None is certain: the log does not say which one is true. `drop` moves the rollout aside.
    """
    copies = evidence.rollout.stated.copies_disagree
    spelled = spelled_calls(evidence)
    for number, turn in enumerate(evidence.rollout.turns):
        ids = turn.completion_ids
        if ids is None or not len(ids):
            continue
        if copies and number == 0:
            message = f"two copies of the completion ids differ: {copies}; only one of them was sampled"
            yield Hit(Where.COMPLETION, 0, len(ids), message, turn=0, cause="copies of the ids differ")
        usage, prompt = turn.usage, turn.prompt_ids
        if usage is not None and prompt is not None and usage.prompt:
            messages = evidence.rollout.messages or turn.prompt_messages or ()
            texts = all(isinstance(message.content, str | None) for message in messages)
            whole = texts and any(message.known_unsampled for message in messages)  # no images, no audio
            # If other completion tokens were counted, the server resumed an answer or added up calls.
            resumed = abs(usage.counted - usage.recorded) > 1
            # Some servers count BOS, others do not.
            if whole and not resumed and all(abs(len(prompt) - count) > 1 for count in usage.prompt):
                tokens = f"{counted(len(prompt), 'id')}, and the server counted {usage.prompt[0]:,} tokens"
                message = f"the prompt has {tokens}: these are not the ids that it was given"
                cause, side = "prompt of another length", head(evidence, prompt)
                yield Hit(Where.PROMPT, 0, len(prompt), message, number, cause, Severity.WARNING, side)
        if evidence.vocabulary is None or number in spelled:
            continue
        if turn.completion_text is not None:
            yield from _check_text(evidence, number, ids, turn.completion_text)
            continue
        answer = answer_of(evidence, turn)
        parts = () if answer is None else ((answer.text, "content"), (answer.reasoning or "", "reasoning"))
        for part, name in parts:
            if ids_contain(evidence, number, part) or missing_part(evidence, number, part) is not None:
                continue
            message = (
                f"the {name} of the message ({quoted(part.strip())}) is nowhere in what the ids decode to; "
                "the message was edited, or belongs to another completion"
            )
            cause, side = f"{name} is not in the ids", head(evidence, ids)
            yield Hit(Where.COMPLETION, 0, len(ids), message, number, cause, Severity.WARNING, side)


def _check_text(evidence: Evidence, number: int, ids: Ids, text: str) -> Iterator[Hit]:
    how = agreement(evidence, number)
    if how is TextAgreement.SAME or prompt_in_answer(evidence):
        return
    if how is TextAgreement.DIFFERENT and missing_part(evidence, number, text) is not None:
        return
    start, decoded, recorded = first_difference(evidence, number, text)
    start = min(start, len(ids) - 1)
    severity = Severity.NOTE
    stop = evidence.rollout.turns[number].stop_string
    if how is TextAgreement.STOP_STRING and stop is not None:
        message = f"the text is cut at the stop string {quoted(stop)}, which the ids hold to its last token"
    elif how in _HARMLESS:
        message = _HARMLESS[how]
    elif how is TextAgreement.PAST_STOP and stop is not None:
        severity = Severity.WARNING
        start = first_token_past_stop(evidence, number, text) or 0
        message = (
            f"the ids go on behind the stop string {quoted(stop)}, where the text was cut; a reward that reads "
            "the text does not see them"
        )
    elif how is TextAgreement.CLEANED:
        severity = Severity.WARNING
        message = "the decoder removed spaces before punctuation, so the text is not what was sampled"
    else:
        severity = Severity.ERROR
        message = f"the ids decode to {quoted(decoded)} from here on, the text says {quoted(recorded)}"
    side = head(evidence, ids[start:])
    yield Hit(Where.COMPLETION, start, len(ids), message, number, how.value, severity, side)
