"""TPL206: system prompt inserted or missing."""

from __future__ import annotations

import re

from tito_audit.evidence.model import Against, Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity, Where
from tito_audit.rule import Reason, cause


@cause("TPL206", Severity.ERROR, precedence=62, needs=(Needs.TOKENIZER, Needs.RENDERING | Needs.SEVERAL_CALLS))
def system_prompt_inserted_or_missing(difference: Difference, evidence: Evidence) -> Reason | None:
    """System prompt inserted or missing.

    ## What it finds
    A system message on one side only: a default that the template inserts and the prompt lacks, or one in the
    prompt that the messages do not hold. Also, when the messages written that way give the recorded tokens: a
    system prompt other than the one in the messages, the template's default in its place, or one folded into the
    first user message or put into a turn of its own.

    ## Why it matters
    Sampler and trainer then condition on different instructions; every logprob after it belongs to another
    context.

    ## Example
    The template writes `<|im_start|>system\\nYou are a helpful assistant.<|im_end|>`; the recorded prompt begins
    with the user's turn.

    ## Repair
    Put the system prompt that was used into the messages, or pass the template that was used.
    """
    recorded, canonical = (_holds_system(side) for side in (difference.recorded.data, difference.canonical.data))
    near_start = difference.where is not Where.COMPLETION and difference.start <= 4
    if recorded == canonical or not near_start:
        return None
    later = difference.against in (Against.ROW, Against.NEXT_PROMPT)
    word = ("inserted" if later else "missing") if canonical else "dropped" if later else "not in the messages"
    return Reason(f"system prompt {word}", f"a system prompt is {word}")


def _holds_system(data: bytes) -> bool:
    """Whether the text holds a system or developer header."""
    return re.search(rb"(^|[>\n|])\s*(system|developer)\b", data) is not None or b"<<SYS>>" in data
