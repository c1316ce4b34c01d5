"""TPL201: prompt encoded without its template."""

from __future__ import annotations

from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity, Where
from tito_audit.rule import Reason, cause
from tito_audit.rules._drift import sentence

__all__ = ["prompt_without_template"]


@cause("TPL201", Severity.ERROR, precedence=61, needs=(Needs.TOKENIZER, Needs.RENDERING | Needs.SEVERAL_CALLS))
def prompt_without_template(difference: Difference, evidence: Evidence) -> Reason | None:
    """Prompt encoded without its template.

    ## What it finds
    A prompt with no control token at all where the template writes role markers around the same text.

    ## Why it matters
    The sampler was asked to continue bare text. What it said is off-policy for a chat model, its logprobs are
    those of another task, and a trainer that renders the messages learns from a context nobody sampled in.

    ## Example
    Recorded `2+2?`, the template writes `<|im_start|>user\\n2+2?<|im_end|>\\n<|im_start|>assistant\\n`.

    ## Repair
    None: render the messages before sampling. `drop` takes the rollout out.
    """
    if difference.where is not Where.PROMPT or difference.turn is None or evidence.vocabulary is None:
        return None
    prompt = evidence.rollout.turns[difference.turn].prompt_ids
    special = evidence.vocabulary.special_ids
    if prompt is None or any(int(i) in special for i in prompt if int(i) != evidence.bos_id):
        return None
    if not any(int(i) in special for i in difference.canonical.ids):
        return None
    what = "the prompt holds no role markers: it was encoded without the chat template"
    return Reason("no template", sentence(difference, evidence, what))
