"""Checks call by call that each prompt starts with everything seen before it, and says what broke if not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from tito_audit.align.alignment import align
from tito_audit.align.pieces import Pieces
from tito_audit.chains.histories import Histories, History
from tito_audit.chains.links import (
    Link,
    LinkKind,
    broken_link,
    chain_to,
    link_without_text,
    repeating_link,
    resumed_prompt,
    sibling_link,
)
from tito_audit.evidence.differences import (
    CompletionSpan,
    Stretch,
    compare_between_controls,
    difference,
    starting_before,
    stretches,
)
from tito_audit.evidence.history_edits import (
    INSERTED,
    contains_answer,
    describe_history_edit,
    messages_changed,
    opens_another_answer,
    repeats_question,
    tools_differ,
    write_one_conversation,
)
from tito_audit.evidence.model import Against, Difference
from tito_audit.evidence.reference import Reference
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Severity
from tito_audit.record.prefix import common_byte_prefix, common_prefix, starts_with
from tito_audit.record.rollout import Rollout, Turn
from tito_audit.tokens.segments import KnownText


class Completions:
    """For each turn, the completions known to be in its prompt + completion, in order; found when asked for."""

    def __init__(self, turns: Sequence[Turn], parents: Mapping[int, int]) -> None:
        """`parents` are by turn the one that it continues; turns may be added to them later."""
        self._turns, self._parents = turns, parents
        self._by_turn: dict[int | None, tuple[CompletionSpan, ...]] = {None: ()}

    def __getitem__(self, number: int) -> tuple[CompletionSpan, ...]:
        for k in chain_to(number, self._parents) if number not in self._by_turn else ():
            turn, before = self._turns[k], self._by_turn[self._parents.get(k)]
            self._by_turn[k] = ()
            if turn.prompt_ids is not None and turn.completion_ids is not None:
                start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.completion_ids)
                self._by_turn[k] = (*before, CompletionSpan(k, start, end, turn.message_index))
        return self._by_turn[number]


@dataclass(frozen=True, slots=True)
class Chains:
    """The links between a rollout's turns, with the differences that these show."""

    links: tuple[Link, ...]
    """In turn order."""
    completions: Completions
    seen: tuple[Ids | None, ...]
    """For each turn, its prompt + completion; None without ids."""
    differences: Sequence[Difference]
    """Where later prompts hold other tokens than those seen or sampled before."""


_NO_CALLS = Chains((), Completions((), {}), (), ())


def chain_turns(rollout: Rollout, reference: Reference | None) -> Chains:
    """Link every turn to the one it continues or breaks, with the differences where it breaks."""
    turns = rollout.turns
    if not turns:
        return _NO_CALLS
    seen: list[Ids | None] = []
    links: list[Link] = []
    parents: dict[int, int] = {}
    completions = Completions(turns, parents)
    differences: list[Difference] = []
    earlier, last, last_seen = Histories(), -1, None
    for number, turn in enumerate(turns):
        prompt, sampled = turn.prompt_ids, turn.completion_ids
        own = None if prompt is None or sampled is None else np.concatenate([prompt, sampled])
        seen.append(own)
        if prompt is None:
            continue
        if last_seen is not None and starts_with(prompt, last_seen):
            links.append(Link(number, last, LinkKind.CONTINUES, len(prompt), len(last_seen)))
            parents[number] = last
        elif last_seen is not None:
            # Most rollouts have no such call, and need no histories.
            for k in range(earlier.last.turn + 1 if len(earlier) else 0, number):
                tokens, begin = seen[k], turns[k].prompt_ids
                if tokens is not None and begin is not None:
                    earlier.add(History(k, begin, tokens))
            differing: Sequence[Stretch] = []
            link = repeating_link(number, prompt, earlier)
            if link is None and reference is not None:
                link, differing = _link_changed_prompt(rollout, number, earlier, completions, reference)
            link = link or link_without_text(number, prompt, earlier)
            links.append(link)
            parent = link.parent
            for stretch in differing:
                assert parent is not None, "only an orphan has none, and no differences"
                if not len(stretch.canonical.ids):
                    effect = f"turn {number} did not see these tokens"
                elif not len(stretch.recorded.ids):
                    effect = f"turn {number} saw tokens that turn {parent} lacks"
                else:
                    same = stretch.recorded.data == stretch.canonical.data
                    effect = f"turn {number} saw the {'re-encoded' if same else 'rewritten'} tokens"
                spans = completions[parent]
                new = difference(stretch, Against.NEXT_PROMPT, Severity.ERROR, effect, parent, spans, number)
                differences.append(new)
        if own is not None:
            last, last_seen = number, own
    return Chains(tuple(links), completions, tuple(seen), differences)


def _link_changed_prompt(
    rollout: Rollout,
    number: int,
    earlier: Histories,
    completions: Completions,
    reference: Reference,
) -> tuple[Link, Sequence[Stretch]]:
    """The link of a turn whose prompt neither starts with the last call nor repeats an earlier prompt, and the
    stretches where it differs from what was seen."""
    prompt = rollout.turns[number].prompt_ids
    assert prompt is not None
    last = earlier.last
    whole = KnownText(reference.tokenizer.control_tokens, "", prompt)
    changed = compare_between_controls(whole, last.seen, reference, open_end=True)
    if changed is not None and not changed[1].texts:
        return broken_link(number, prompt, last, LinkKind.RETOKENIZED), starting_before(changed[0], len(last.seen))
    data, last_data = reference.pieces(prompt), reference.pieces(last.seen)
    if data.data.startswith(last_data.data):
        differing = stretches_in_history(last_data, data, 0, frozenset())
        return broken_link(number, prompt, last, LinkKind.RETOKENIZED), differing
    last_prompt = reference.vocabulary.bytes_of(last.prompt)
    inside = data.data.startswith(last_prompt)
    goes_on = messages_changed(rollout, last.turn, number, last_prompt, data.data) is False
    if goes_on or write_one_conversation(rollout, last.turn, number):
        parent = earlier.closest(prompt)
    else:
        parent = earlier.longest_prefix_or_closest(prompt)
    if starts_with(prompt, parent.seen):
        # The latest call after the parent whose answer the prompt holds in other tokens or after other messages.
        resumed = last if inside and len(last.prompt) >= len(parent.seen) else None
        resumed = resumed or resumed_prompt(prompt, parent, earlier)
        rest = data.data[reference.vocabulary.byte_count(parent.seen) :]
        if resumed is None and opens_another_answer(data, rest):
            ends, latest = _turn_end_bytes(reference), islice(reversed(earlier), 32)
            for history in [each for each in latest if each.turn > parent.turn and completions[each.turn]]:
                seen, answer = reference.pieces(history.seen), completions[history.turn][-1]
                if contains_answer(rest, seen, answer, ends) or repeats_question(rest, seen, answer):
                    resumed = history
                    break
        if resumed is None:
            return sibling_link(number, prompt, parent, last), []
        parent = last if starts_with(last.prompt, parent.seen) else resumed
    return _link_by_text(rollout, number, last if inside else parent, data, completions, reference)


def _link_by_text(
    rollout: Rollout,
    number: int,
    parent: History,
    prompt: Pieces,
    by_turn: Completions,
    reference: Reference,
) -> tuple[Link, Sequence[Stretch]]:
    """The link of a prompt whose text differs: rendered otherwise, edited on purpose, or of another chain."""
    seen, completions = reference.pieces(parent.seen), by_turn[parent.turn]
    end_ids = reference.end_ids()
    differing = stretches_in_history(seen, prompt, completions[-1].start if completions else 0, end_ids)
    # Sequences that do not share even the tokens up to the first turn end or answer share no history.
    turn_ends = np.isin(seen.ids, np.fromiter(end_ids, np.int64)).nonzero()[0]
    first = int(turn_ends[0]) if len(turn_ends) else len(seen) // 4
    first = min(first, completions[0].start) if completions else first
    if common_prefix(prompt.ids, seen.ids) < first:
        followed = bool(differing) and first < len(seen) and differing[-1].start <= first
        ends = _turn_end_bytes(reference)
        if not (
            (followed and all(map(tools_differ, differing)))
            or write_one_conversation(rollout, parent.turn, number)
            or any(contains_answer(prompt.data, seen, completion, ends) for completion in completions)
        ):
            alone = "its prompt does not share even its first message with any earlier call"
            return broken_link(number, prompt.ids, parent, LinkKind.ORPHAN, alone), []
    changed = messages_changed(
        rollout, parent.turn, number, reference.vocabulary.bytes_of(parent.prompt), prompt.data
    )
    what = describe_history_edit(differing, seen, prompt, completions, rollout, reference)
    if changed or (what is not None and (changed is None or what.endswith(INSERTED))):
        return broken_link(number, prompt.ids, parent, LinkKind.REWRITTEN, what or "messages changed"), []
    return broken_link(number, prompt.ids, parent, LinkKind.TEMPLATE), differing


def _turn_end_bytes(reference: Reference) -> list[bytes]:
    return [reference.vocabulary.token_bytes(token) for token in reference.end_ids()]


def stretches_in_history(
    seen: Pieces, prompt: Pieces, answer_start: int, end_ids: frozenset[int]
) -> Sequence[Stretch]:
    """Where a prompt differs from what was seen before it; what it adds after that is left out.

    If the texts diverge inside the last answer, the prompt is compared only up to the next turn end, so no later
    message is paired with that answer; or up to the next message, if only the answer's end is missing.
    """
    diverges_at = common_byte_prefix(seen.data, prompt.data)
    if answer_start and diverges_at >= int(seen.end[answer_start - 1]):
        ends, later = np.fromiter(end_ids, np.int64), prompt.end > diverges_at
        is_turn_end = np.isin(prompt.ids, ends)
        closers, openers = (is_turn_end & later).nonzero()[0], (prompt.control & ~is_turn_end & later).nonzero()[0]
        answer_end = int(closers[0]) + 1 if len(closers) else len(prompt)
        rest = seen.ids[int(seen.end.searchsorted(diverges_at, side="right")) :]
        if len(rest) and len(openers) and np.isin(rest, ends).all():  # only the end of the answer is missing
            first = int(later.argmax())
            if not prompt.data[diverges_at : int(prompt.end[openers[0] - 1])].strip():
                exact = first and int(prompt.end[first - 1]) == diverges_at
                answer_end = first if exact else int(openers[0])
        prompt = prompt.slice(0, answer_end)
    blocks = align(seen, prompt, open_end=True)
    return starting_before(stretches(seen, prompt, blocks), len(seen))
