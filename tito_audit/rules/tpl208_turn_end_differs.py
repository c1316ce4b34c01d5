"""TPL208: turn end missing, doubled or a different stop token."""

from __future__ import annotations

from tito_audit.evidence.history_edits import unspaced
from tito_audit.evidence.model import Against, Difference, Evidence, TextSide
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity, Where
from tito_audit.rule import Reason, cause
from tito_audit.rules._drift import only_turn_ends
from tito_audit.rules._texts import TextAgreement, agreement

_LATER = frozenset((Against.NEXT_PROMPT, Against.ROW))
"""The other side is later than the recorded one here: it has lost or gained what differs."""


@cause(
    "TPL208",
    Severity.ERROR,
    headline="{n} with a missing, doubled or different turn end",
    precedence=66,
    needs=(Needs.TOKENIZER, Needs.RENDERING | Needs.SEVERAL_CALLS),
)
def turn_end_differs(difference: Difference, evidence: Evidence) -> Reason | None:
    """Turn end missing, doubled or a different stop token.

    ## What it finds
    Only turn-end tokens and the white space around them differ, or a turn end is missing and its neighbours merged
    into one token. Also an answer whose text was cut at a stop string that its ids hold.

    ## Why it matters
    Where to stop is the first thing a policy learns. A sampled `<|endoftext|>` that comes back as `<|im_end|>`
    trains a stop that was not sampled; a doubled or missing end shifts everything after it.

    ## Example
    The next prompt closes the turn with a different token:

    ```text
    error TPL208 turn 0 completion 1:2
      the turn ends on a different token: sampled '<|endoftext|>', turn 1's prompt has '<|im_end|>';
      turn 1 saw the rewritten tokens
      sampled      │4 │<|endoftext|>│
                    19 2000
      next prompt  │4 │<|im_end|>   │
                    19 2002
    ```

    ## Repair
    `splice` puts the sampled ids back where the log proves that the sampler saw them. `fork` gives one row per
    unbroken run of calls. `mask` takes the span out of the loss.
    """
    what = _cut_at_stop(difference, evidence)
    if what is not None:
        return Reason("stop string cut", what)
    recorded, canonical = (only_turn_ends(side, evidence) for side in (difference.recorded, difference.canonical))
    if recorded and canonical:
        return Reason("another stop token", "the turn ends on a different token")
    if recorded and not difference.canonical.data.strip():
        return _reason_for_lone_end(difference.recorded, difference, evidence)
    if canonical and not difference.recorded.data.strip():
        return _reason_for_lone_end(difference.canonical, difference, evidence)
    # The text of each side without end tokens and white space, and how many ends it has.
    texts: list[bytes] = []
    ends: list[int] = []
    vocabulary = evidence.vocabulary
    for side in (difference.recorded, difference.canonical):
        inner_ids = [i for i in side.ids.tolist() if i not in evidence.end_ids]
        texts.append(b"" if vocabulary is None else unspaced(b"".join(map(vocabulary.token_bytes, inner_ids))))
        ends.append(len(side.ids) - len(inner_ids))
    more = difference.canonical.data.removeprefix(difference.recorded.data)
    # An answer that was cut, and a prompt that continues with white space in place of its end.
    cut = difference.sampled and difference.against is Against.NEXT_PROMPT and not difference.recorded.after
    if all(texts) and len(set(texts)) == 1 and len(set(ends)) > 1:
        fewer = ends[0] < ends[1]
        word = "missing" if fewer is not (difference.against in _LATER) else "added"
    elif cut and len(difference.recorded.ids) and more.isspace() and len(more) < len(difference.canonical.data):
        word = "missing"
    else:
        return None
    what = f"the end of the turn is {word}, and the text around it is encoded together"
    return Reason(f"turn end {word}, its neighbours merged", what)


def _cut_at_stop(difference: Difference, evidence: Evidence) -> str | None:
    """How a stop string cut a completion, as a clause; None unless only the text from there on differs."""
    if difference.where is not Where.COMPLETION or difference.turn is None or evidence.vocabulary is None:
        return None
    turn, end_ids = evidence.rollout.turns[difference.turn], evidence.end_ids
    ids, text = turn.completion_ids, turn.completion_text
    if ids is None or (text is None and turn.stop_string is None):
        return None
    if not end_ids.issuperset(ids[difference.end :].tolist()):
        return None
    data = evidence.vocabulary.bytes_of
    inner_ids = [i for i in difference.canonical.ids.tolist() if i not in end_ids]
    cut = (data(ids[: difference.start]) + b"".join(map(evidence.vocabulary.token_bytes, inner_ids))).rstrip()
    whole = data(ids)
    rest = whole[len(cut) :]
    if not rest or not whole.startswith(cut):
        return None
    if turn.stop_string is not None:
        stop = turn.stop_string.strip().encode()
        behind = cut.endswith(stop)
        if not behind and not rest.lstrip().startswith(stop):
            return None
        return f"the answer is cut {'behind' if behind else 'before'} its stop string {turn.stop_string!r}"
    if text is None or cut != text.encode("utf-8", "surrogatepass").strip():
        return None
    stopped = agreement(evidence, difference.turn) is TextAgreement.STOP_STRING
    return "the answer is cut where its text ends, as if at a stop string" if stopped else None


def _reason_for_lone_end(side: TextSide, difference: Difference, evidence: Evidence) -> Reason:
    """The reason for an end token that only this side of a difference has."""
    assert evidence.vocabulary is not None
    is_recorded, later = side is difference.recorded, difference.against in _LATER
    if not is_recorded and not later:
        return Reason("turn end missing", "the end of the turn is missing")
    own, after = side.data.strip(), side.after.lstrip()
    ends = [evidence.vocabulary.token_bytes(i) for i in evidence.end_ids]
    # The text before a difference begins at the nearest control token.
    before = (difference.recorded.before.strip(), difference.canonical.before.strip())
    adjacent = [end for end in ends if end and (after.startswith(end) or end in before)]
    if own in adjacent:
        return Reason("turn end doubled", "the turn ends twice")
    if adjacent and is_recorded:
        what = f"the turn ends on a different token, next to the template's own {adjacent[0].decode()}"
        return Reason("another stop token", what)
    if later and is_recorded:
        return Reason("turn end dropped", "the end of the turn is left out")
    return Reason("turn end added", "there is an end of a turn too many")
