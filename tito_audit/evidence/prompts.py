"""Each prompt, and the last answer, compared with what the template writes for the messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tito_audit.align.blocks import BlockKind
from tito_audit.align.drift import align
from tito_audit.chains.links import LinkKind
from tito_audit.errors import RenderError
from tito_audit.evidence.chains import Chains
from tito_audit.evidence.differences import Stretch, difference, region_of, stretches
from tito_audit.evidence.model import Against, Difference
from tito_audit.evidence.prefix_reuse import (
    Comparison,
    PiecesCache,
    SpelledTexts,
    compare_text,
    comparison_of_equal,
)
from tito_audit.evidence.reference import Reference
from tito_audit.record.finding import Severity
from tito_audit.record.message import Message
from tito_audit.record.rollout import Rollout
from tito_audit.render.renderer import Forms

_KEPT = "harmless as logged: the prompt keeps the tokens that were seen before; the template would write this"
_OFF_TEMPLATE = "the sampler was given tokens that the template does not write for these messages"
_SAME_BYTES = frozenset((BlockKind.MERGE, BlockKind.SPLIT, BlockKind.RESPLIT))


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A text that the template writes."""

    text: str
    matches_record: bool
    """True if it is known to encode as the recorded ids."""


RenderedTexts = dict[int | None, RenderedText]
"""Text by turn: what its prompt should be; under None, the conversation with its last answer."""


def prompt_messages(rollout: Rollout, turn: int) -> tuple[Message, ...] | None:
    """The messages that a call was sent; None when the log does not say."""
    call = rollout.turns[turn]
    if call.prompt_messages is not None:
        return call.prompt_messages
    if call.message_index is None:
        return None
    return rollout.messages[: call.message_index]


def render_texts(
    rollout: Rollout, reference: Reference
) -> tuple[RenderedTexts, tuple[tuple[int | None, str], ...]]:
    """The text of every prompt that can be rendered, and (turn, message) where the template refuses."""
    texts: RenderedTexts = {}
    errors: list[tuple[int | None, str]] = []
    jobs: list[tuple[int | None, Sequence[Message], bool]] = []
    for k, call in enumerate(rollout.turns):
        sent = prompt_messages(rollout, k)
        if sent and call.prompt_ids is not None:
            jobs.append((k, sent, True))
    last = rollout.turns[-1] if rollout.turns else None
    if last is not None and last.message_index is not None and last.prompt_messages is None:
        jobs.append((None, rollout.messages[: last.message_index + 1], False))
    spelled, forms = SpelledTexts(reference), Forms()
    for key, messages, opens in jobs:
        quick = reference.render_fast(
            messages, rollout.tools, rollout.template_kwargs, opens_answer=opens, forms=forms
        )
        recorded = rollout.turns[-1].seen_ids if key is None else rollout.turns[key].prompt_ids
        if quick is not None and recorded is not None:
            if reference.leads_to(quick, recorded, goes_on=key is None):
                texts[key] = RenderedText(quick, matches_record=True)
                if key is not None:
                    spelled.keep(quick, recorded)
                continue
            if key is not None and spelled.confirms(quick, recorded):
                texts[key] = RenderedText(quick, matches_record=False)
                continue
        try:
            text = reference.render(messages, rollout.tools, rollout.template_kwargs, opens_answer=opens)
            texts[key] = RenderedText(text, matches_record=False)
        except RenderError as error:
            if not errors or errors[-1][1] != str(error):
                errors.append((key, str(error)))
    return texts, tuple(errors)


def rendered_differences(
    rollout: Rollout, chains: Chains, texts: RenderedTexts, reference: Reference
) -> list[Difference]:
    """Where prompts and the last answer hold other tokens than the template writes, each difference once."""
    out: list[Difference] = []
    said: dict[int, set[tuple[int, int, bytes]]] = {}
    comparisons: dict[int, Comparison | None] = {}
    pieces = PiecesCache(reference)
    indices = tuple(turn.message_index for turn in rollout.turns)
    for k, turn in enumerate(rollout.turns):
        link = chains.link(k)
        parent = link.parent if link and link.kind is LinkKind.CONTINUES else None
        said[k] = set() if parent is None else said[parent]
        rendered = texts.get(k)
        if turn.prompt_ids is None or rendered is None or rendered.matches_record:
            continue
        old = link.at if link else 0
        regions = chains.regions[parent] if parent is not None else ()
        if regions:
            old = regions[-1].end
        # Differences in the parent's prompt were reported or skipped there.
        before = None if parent is None else _comparison(rollout, parent, texts, comparisons, reference)
        found, comparisons[k] = compare_text(rendered.text, turn.prompt_ids, before, reference, pieces)
        for stretch in found:
            in_answer = region_of(stretch, regions) is not None
            if stretch.key in said[k] or (in_answer and stretch.kind in _SAME_BYTES):
                continue
            said[k].add(stretch.key)
            kept = stretch.start < old or (in_answer and stretch.start == stretch.end)
            out.append(
                difference(
                    stretch,
                    Against.TEMPLATE,
                    Severity.NOTE if kept else Severity.WARNING,
                    _KEPT if kept else _OFF_TEMPLATE,
                    regions=regions,
                    turn=k,
                    message_indices=indices,
                )
            )
    return out + _last_answer(rollout, chains, texts, reference, said)


def _comparison(
    rollout: Rollout,
    turn: int,
    texts: RenderedTexts,
    known: dict[int, Comparison | None],
    reference: Reference,
) -> Comparison | None:
    """How the prompt of an earlier turn compares with its text; None where they are not the same bytes."""
    ids, rendered = rollout.turns[turn].prompt_ids, texts.get(turn)
    if turn not in known and ids is not None and rendered is not None and rendered.matches_record:
        known[turn] = comparison_of_equal(rendered.text, ids, reference)
    return known.get(turn)


def _last_answer(
    rollout: Rollout,
    chains: Chains,
    texts: RenderedTexts,
    reference: Reference,
    said: dict[int, set[tuple[int, int, bytes]]],
) -> list[Difference]:
    """Where the template would write the last answer differently; its missing end is not a difference."""
    last = len(rollout.turns) - 1
    seen = chains.seen[last] if last >= 0 else None
    rendered = texts.get(None)
    if seen is None or rendered is None or rendered.matches_record:
        return []
    encoded = reference.encode_as(rendered.text, seen)
    if np.array_equal(encoded[: len(seen)], seen):
        return []
    recorded, canonical = reference.pieces(seen), reference.pieces(encoded)
    own = chains.regions[last][-1]
    return [
        difference(
            stretch,
            Against.TEMPLATE,
            Severity.NOTE,
            "harmless as logged: a later prompt would hold what the template writes",
            regions=(own,),
            turn=last,
            message_indices=tuple(turn.message_index for turn in rollout.turns),
        )
        for stretch in stretches(recorded, canonical, align(recorded, canonical, open_end=True))
        if own.start <= stretch.start < len(recorded) and _is_new(stretch, said[last])
    ]


def _is_new(stretch: Stretch, said: set[tuple[int, int, bytes]]) -> bool:
    return stretch.kind not in _SAME_BYTES and stretch.key not in said
