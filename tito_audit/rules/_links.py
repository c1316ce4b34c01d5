"""The findings of the SEQ rules on a broken link between calls."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from tito_audit.chains.links import TEXT_UNKNOWN, Link, LinkKind
from tito_audit.evidence.model import CONTEXT_TOKENS, Against, Evidence
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import NEXT_PROMPT, PREVIOUS_CALL, PROMPT, SAMPLED, Hit, Side, Where
from tito_audit.record.memo import memoized
from tito_audit.record.prefix import same_ids
from tito_audit.rule import SHOWN_TOKENS
from tito_audit.terminal.words import listed

_SHOWN = 8
"""How many tokens of each side a finding holds if no difference says where it ends."""


@memoized
def _differences_by_turn(evidence: Evidence) -> dict[int | None, array[int]]:
    """The indices in `explained` of the differences that broke links, by the turn whose prompt is broken."""
    numbers: dict[int | None, array[int]] = {}
    for number, explained in enumerate(evidence.explained):
        if explained.difference.against is Against.NEXT_PROMPT:
            numbers.setdefault(explained.difference.later_turn, array("q")).append(number)
    return numbers


def broken_prefixes(evidence: Evidence, *, by_tokenizer: bool) -> Iterator[Hit]:
    """Hits for links broken by re-tokenization, or else by the template.

    A break is re-tokenization if the tokenizer or decoding alone explains it.
    """
    for link in evidence.links:
        if not link.kind.only_tokens_differ or (link.kind is LinkKind.RETOKENIZED and not by_tokenizer):
            continue
        codes: set[str] = set()
        counts: dict[str, int] = {}
        for number in _differences_by_turn(evidence).get(link.turn, ()):
            each = evidence.explained[number]
            codes.add(each.code)
            counts[each.cause] = counts.get(each.cause, 0) + 1
        text_kept = bool(codes) and all([code.startswith("TOK") for code in codes])  # noqa: C419  # quicker
        if (link.kind is LinkKind.RETOKENIZED or text_kept) is not by_tokenizer:
            continue
        what = listed([cause if n == 1 else f"{n} × {cause}" for cause, n in counts.items()]) or link.detail
        same = "same text" if link.kind is LinkKind.RETOKENIZED else "what decoding made of the text"
        lead = f"{same}, other ids" if by_tokenizer else "same messages, other text"
        if not by_tokenizer and "TPL299" in codes:
            lead, what = "other text", what.replace("other text", "no cause found")
        if link.detail == TEXT_UNKNOWN:
            lead = "other tokens"
        yield link_hit(link, evidence, f"{lead} ({what})", "; ".join(sorted(counts)) or "cause unknown")


def link_hit(link: Link, evidence: Evidence, what: str, cause: str) -> Hit:
    """A hit at the first token of the prompt that breaks the link, with what its parent holds there."""
    prompt = evidence.rollout.turns[link.turn].prompt_ids
    assert prompt is not None  # only turns with known prompts have links
    size = len(prompt)
    start = min(link.at, size)
    parent = f"turn {link.parent}" if link.parent is not None else "every earlier call"
    message = f"turn {link.turn}'s prompt departs from {parent} at token {start}: {what}"
    if link.at >= size:
        message = f"turn {link.turn}'s prompt ends inside {parent}: {what}"
    if link.kind in (LinkKind.RETRY, LinkKind.SIBLING, LinkKind.ORPHAN):
        message = f"turn {link.turn}: {what}"
    end = min(start + 1, size)
    turn, shown = link.turn, prompt[start : start + _SHOWN]
    if link.kind in (LinkKind.RETRY, LinkKind.SIBLING):
        recorded = evidence.side(shown, PROMPT)
        return Hit(Where.PROMPT, start, end, message, turn, cause, None, recorded, later_turn=turn)
    recorded, canonical, before, after = _sides_at_break(link, evidence, prompt, start)
    sides = recorded, canonical, before, after, turn, (tuple(shown.tolist()), ())
    return Hit(Where.PROMPT, start, end, message, turn, cause, None, *sides)


def _sides_at_break(link: Link, evidence: Evidence, prompt: Ids, start: int) -> tuple[Side, Side, Side, Side]:
    """What the prompt and its parent hold where they part, and the equal tokens before and after."""
    parent = evidence.rollout.turns[link.parent] if link.parent is not None else None
    if parent is None or parent.prompt_ids is None or parent.completion_ids is None:
        return evidence.side(prompt[start : start + _SHOWN], NEXT_PROMPT), Side(), Side(), Side()
    # What the parent holds, from its completion on if they part there, which spares a copy of its prompt.
    offset, label, seen = len(parent.prompt_ids), SAMPLED, parent.completion_ids
    if link.seen_at < offset:
        offset, label, seen = 0, PREVIOUS_CALL, np.concatenate([parent.prompt_ids, seen])
    seen_at = link.seen_at - offset
    at = min(seen_at, len(seen))
    stop, seen_stop, equal = min(start + _SHOWN, len(prompt)), min(at + _SHOWN, len(seen)), 0
    # A difference that begins where they part says where it ends.
    for number in _differences_by_turn(evidence).get(link.turn, ()):
        difference = evidence.explained[number].difference
        if difference.turn != link.parent or difference.where is not Where.COMPLETION:
            continue
        # The two may share the first tokens of a difference.
        shared = link.seen_at - (len(parent.prompt_ids) + difference.start)
        begin, seen_begin = link.at - shared, seen_at - shared
        end, seen_end = begin + len(difference.canonical.ids), seen_begin + len(difference.recorded.ids)
        if shared < 0 or begin < 0 or link.at > end or seen_at > seen_end:
            continue
        here = same_ids(prompt[begin:end], difference.canonical.ids)
        if here and same_ids(seen[seen_begin:seen_end], difference.recorded.ids):
            if max(end - link.at, seen_end - seen_at) <= SHOWN_TOKENS:
                stop, seen_stop = end, seen_end
                room = min(CONTEXT_TOKENS, len(prompt) - stop, len(seen) - seen_stop)
                while equal < room and prompt[stop + equal] == seen[seen_stop + equal]:
                    equal += 1
            break
    return (
        evidence.side(prompt[start:stop], NEXT_PROMPT),
        evidence.side(seen[at:seen_stop], label),
        evidence.side(prompt[max(start - CONTEXT_TOKENS, 0) : start]),
        evidence.side(prompt[stop : stop + equal]),
    )
