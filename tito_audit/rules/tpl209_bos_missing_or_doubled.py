"""TPL209: BOS missing or doubled."""

from __future__ import annotations

from tito_audit.evidence.model import Against, Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity, Where
from tito_audit.rule import Reason, cause


@cause(
    "TPL209",
    Severity.ERROR,
    headline="{n} with a missing or doubled BOS",
    precedence=60,
    places=(Where.PROMPT, Where.ROW),
    needs=(Needs.TOKENIZER, Needs.RENDERING | Needs.SEVERAL_CALLS),
)
def bos_missing_or_doubled(difference: Difference, evidence: Evidence) -> Reason | None:
    """BOS missing or doubled.

    ## What it finds
    A prompt or row with one beginning-of-sequence token more or fewer than the template writes.

    ## Why it matters
    A template that writes BOS and a tokenizer that adds it too make two. The model then runs on an input it was
    never trained on, and every logprob of the rollout is conditioned on it.

    ## Example
    The tokenizer adds BOS to the template's own:

    ```text
    warning TPL209 turn 0 prompt 0:1
      the beginning-of-sequence token is doubled: the prompt has '<s>', the template writes nothing;
      the sampler was given tokens that the template does not write for these messages
      prompt       │<s>│<s>│·[ │I  │
                    1   1   552 298
      template     │<s>│   │·[ │I  │
                    1       552 298
    ```

    ## Repair
    `splice` puts the sampled ids back where only the training row has the extra token. Otherwise none: encode
    rendered text with `add_special_tokens=False` and sample again.
    """
    if evidence.bos_id is None or difference.start:
        return None
    # The side to judge, and the one it should equal: the later sequence is judged if there is one.
    recorded_side, wanted = difference.recorded, difference.canonical
    if difference.against in (Against.ROW, Against.NEXT_PROMPT):
        recorded_side, wanted = wanted, recorded_side
    more = recorded_side.ids.tolist().count(evidence.bos_id) - wanted.ids.tolist().count(evidence.bos_id)
    if not more or max(len(recorded_side.ids), len(wanted.ids)) > 2:
        return None
    tokens = evidence.vocabulary
    again = tokens is not None and recorded_side.after.startswith(tokens.token_bytes(evidence.bos_id))
    word = "missing" if more < 0 else "doubled" if again else "added"
    return Reason(f"BOS {word}", f"the beginning-of-sequence token is {word}")
