"""TPL201: prompt encoded without the chat template."""

from __future__ import annotations

import numpy as np

from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity, Where
from tito_audit.rule import Reason, cause
from tito_audit.rules._drift import only_turn_ends
from tito_audit.ways.recorded_values import holds_marker


@cause(
    "TPL201",
    Severity.ERROR,
    headline="{n} encoded without the chat template",
    precedence=57,
    places=(Where.PROMPT, Where.ROW),
    needs=(Needs.TOKENIZER, Needs.RENDERING | Needs.SEVERAL_CALLS),
)
def prompt_without_template(difference: Difference, evidence: Evidence) -> Reason | None:
    """Prompt encoded without the chat template.

    ## What it finds
    A prompt or row without a single control token, where the template writes role markers around the same text.

    ## Why it matters
    The sampler was asked to continue bare text. For a chat model that is off-policy, and a trainer that renders
    the messages learns from a context in which nothing was sampled.

    ## Example
    The prompt is the bare question:

    ```text
    warning TPL201 turn 0 prompt 0:1
      the prompt holds no role markers: it was encoded without the chat template: the prompt has
      '2', the template writes '<|im_start|>'+'us'+'er'+'\\n'+'2'+'<|im_end|>'+'\\n'+'<|im_start|>'
      and 2 more tokens; the sampler was given tokens that the template does not write for these
      messages
      prompt       │2                                                                    │
                    17
      template     │<|im_start|>│us │er │⏎  │2 │<|im_end|>│⏎  │<|im_start|>│assistant│⏎  │
                    2001         314 257 198 17 2002       198 2001         1620      198
    ```

    ## Repair
    None for this log: apply the chat template before sampling. `drop` removes the rollout.
    """
    ids, vocabulary = evidence.sequence(difference.where, difference.turn), evidence.vocabulary
    if ids is None or vocabulary is None or not len(ids):
        return None
    # BOS at the start is no role marker, nor is a turn end in a row.
    inner = ids[1:] if ids[0] == evidence.bos_id else ids
    if difference.where is Where.ROW:
        inner = inner[~np.isin(inner, list(evidence.end_ids))]
    if vocabulary.control(inner).any() or holds_marker(vocabulary.text(inner)):
        return None
    side = difference.canonical
    if only_turn_ends(side, evidence):
        return None
    if not holds_marker(side.in_context.decode("utf-8", "replace")):
        # The template may write BOS before a sequence that differs as a whole.
        whole = difference.start == 0 and difference.end == len(ids)
        bos = None if evidence.bos_id is None else vocabulary.token_bytes(evidence.bos_id)
        if bos is None or not whole or not side.after.startswith(bos):
            return None
    word = "prompt" if difference.where is Where.PROMPT else "row"
    what = f"the {word} holds no role markers: it was encoded without the chat template"
    return Reason("no template", what)
