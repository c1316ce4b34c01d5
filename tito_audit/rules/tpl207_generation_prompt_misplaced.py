"""TPL207: generation prompt or prefill missing, doubled or misplaced."""

from __future__ import annotations

import re

from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity, Where
from tito_audit.rule import Reason, cause
from tito_audit.rules._drift import is_repeated

_ONLY_HEADER = re.compile(
    r"(?:<[^<>\s]{1,40}>|\s)*"
    r"(?:<[^<>\s]{1,40}>\s*(?:assistant|model)|(?:assistant|model)\s*<[^<>\s]{1,40}>|<[|｜]Assistant[|｜]>)"
    r"(?:<[^<>\s]{1,40}>|\s)*"
)
"""An opener, wherever it is cut: `<|im_start|>assistant`, `assistant\n<|im_start|>`."""
_HEADER = re.compile(rb"assistant|<start_of_turn>model|Assistant")


@cause(
    "TPL207",
    Severity.ERROR,
    headline="{n} with a missing, doubled or misplaced generation prompt",
    precedence=63,
    places=(Where.PROMPT, Where.ROW),
    needs=(Needs.TOKENIZER, Needs.RENDERING | Needs.SEVERAL_CALLS),
)
def generation_prompt_misplaced(difference: Difference, evidence: Evidence) -> Reason | None:
    """Generation prompt or prefill missing, doubled or misplaced.

    ## What it finds
    The opener of the answer (`<|im_start|>assistant`, a `<think>` prefill) on one side only: at the end of a
    prompt, or before an answer in a row.

    ## Why it matters
    Without the opener the model first has to sample the header itself; with two of them it answers after an empty
    turn. The start of the completion, and with it what is trained, is then off by those tokens.

    ## Example
    The prompt ends before the opener of the answer:

    ```text
    warning TPL207 turn 0 prompt at 7
      the opener of the answer is missing: the prompt has nothing, the template writes
      '<|im_start|>'+'assistant'+'\\n'; the sampler was not given what the template writes for these
      messages
      prompt       │2 │<|im_end|>│⏎  │                          │
                    17 2002       198
      template     │2 │<|im_end|>│⏎  │<|im_start|>│assistant│⏎  │
                    17 2002       198 2001         1620      198
    ```

    ## Repair
    None for this log: render with `add_generation_prompt=True` exactly once, and pass a prefill as a template
    argument.
    """
    if difference.where is Where.ROW:
        # The row lacks the opener of an answer or repeats it, and differs in nothing else.
        data, lacking = difference.recorded.data, difference.canonical.data
        if (data and lacking) or not _ONLY_HEADER.fullmatch((data or lacking).decode("utf-8", "replace")):
            return None
        word = "missing" if lacking else "doubled" if is_repeated(difference, evidence) else "misplaced"
        return Reason(f"generation prompt {word}", f"the opener of the answer is {word}")
    if difference.sampled:
        return None
    if difference.recorded.after and difference.canonical.after:
        return None  # it is not at the end
    recorded, canonical = (
        (b"<think>" in side or _HEADER.search(side) is not None)
        for side in (difference.recorded.data, difference.canonical.data)
    )
    if recorded == canonical:
        return None
    own = difference.recorded if recorded else difference.canonical
    if not _HEADER.search(own.data):
        word = "added" if recorded else "missing"
        return Reason(f"reasoning prefill {word}", f"a prefill of the answer is {word}")
    doubled = recorded and (
        _HEADER.search(difference.recorded.before) is not None or is_repeated(difference, evidence)
    )
    word = "missing" if canonical else "doubled" if doubled else "misplaced"
    return Reason(f"generation prompt {word}", f"the opener of the answer is {word}")
