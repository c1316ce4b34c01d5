"""TPL206: system prompt inserted or missing."""

from __future__ import annotations

import re

from tito_audit.evidence.model import Against, Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity, Where
from tito_audit.rule import Reason, cause


@cause(
    "TPL206",
    Severity.ERROR,
    headline="{n} with a system prompt added or missing",
    precedence=62,
    places=(Where.PROMPT, Where.ROW),
    needs=(Needs.TOKENIZER, Needs.RENDERING | Needs.SEVERAL_CALLS),
)
def system_prompt_inserted_or_missing(difference: Difference, evidence: Evidence) -> Reason | None:
    """System prompt inserted or missing.

    ## What it finds
    A system message on one side only: a default that the template inserts and the prompt lacks, or one in the
    prompt that is not in the messages. Also, where rendering the messages that way gives the recorded tokens
    exactly: another system prompt than the one in the messages, the template's default instead of it, or a system
    prompt that is folded into the first user message or has a turn of its own.

    ## Why it matters
    Sampler and trainer then condition on different instructions, and every logprob after the system prompt belongs
    to another context.

    ## Example
    The messages hold a system prompt that the prompt lacks:

    ```text
    warning TPL206 turn 0 prompt at 0
      a system prompt is missing: the prompt has nothing, the template writes
      '<|im_start|>'+'s'+'yst'+'em'+'\\n'+'You'+' are'+' helpful' and 3 more tokens; the sampler was
      not given what the template writes for these messages
      prompt       │<|im_start|>│                                                                │
                    2001
      template     │<|im_start|>│s │yst │em │⏎  │You│·are│·helpful│. │<|im_end|>│⏎  │<|im_start|>│
                    2001         82 1132 316 198 692 524  1861     13 2002       198 2001
      prompt       │us │er │
                    314 257
      template     │us │er │
                    314 257
    ```

    ## Repair
    None for this log: put the system prompt that was used into the messages, or pass the template that was used
    (`--chat-template`).
    """
    if difference.start > 4:
        return None
    recorded, canonical = (
        (re.search(rb"(^|[>\n|])[^\S\n]*(system|developer)\b", side) is not None or b"<<SYS>>" in side)
        for side in (difference.recorded.data, difference.canonical.data)
    )
    if recorded == canonical:
        return None
    later = difference.against in (Against.ROW, Against.NEXT_PROMPT)
    word = ("inserted" if later else "missing") if canonical else "dropped" if later else "not in the messages"
    return Reason(f"system prompt {word}", f"a system prompt is {word}")
