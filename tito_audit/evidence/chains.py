"""Call by call: whether each prompt starts with everything seen before it, and if not, what broke."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from tito_audit.align.drift import align
from tito_audit.align.pieces import Pieces
from tito_audit.align.prefix import common_byte_prefix, common_prefix, starts_with
from tito_audit.chains.histories import Histories, History
from tito_audit.chains.links import Link, LinkKind, broken_link, link_by_ids, link_without_text, sibling_link
from tito_audit.evidence.built_tools import tools_in
from tito_audit.evidence.differences import Region, difference, region_of
from tito_audit.evidence.many import GrowingDifferences
from tito_audit.evidence.model import Against, Difference, TextSide
from tito_audit.evidence.prefix_reuse import PiecesCache
from tito_audit.evidence.reference import Reference
from tito_audit.evidence.roles import GENERATION_PROMPT, TEMPLATE, TURN_END, UNKNOWN, Roles, token_roles
from tito_audit.evidence.stretches import Stretch, starting_before, stretches
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Severity
from tito_audit.record.message import Message
from tito_audit.record.rollout import Rollout, Turn
from tito_audit.record.speakers import ASSISTANT

_OPENER = 8
"""The most tokens that a template puts around an answer; a longer stretch holds another message too."""
_ANSWER_ROLES = frozenset((ASSISTANT, GENERATION_PROMPT, TURN_END))


@dataclass(frozen=True, slots=True)
class Chains:
    """The links between a rollout's turns, with the differences that these show."""

    links: tuple[Link, ...]
    """In turn order."""
    regions: tuple[tuple[Region, ...], ...]
    """For turn k, the completions known to be in its prompt + completion, and where."""
    seen: tuple[Ids | None, ...]
    """For turn k, its prompt + completion; None without ids."""
    differences: Sequence[Difference]
    """Where later prompts hold tokens other than the sampled ones."""

    def link(self, turn: int) -> Link | None:
        """The link of a turn; None for the first."""
        at = bisect_left(self.links, turn, key=attrgetter("turn"))
        return self.links[at] if at < len(self.links) and self.links[at].turn == turn else None


_NO_CALLS = Chains((), (), (), ())


def chain_turns(rollout: Rollout, reference: Reference | None) -> Chains:
    """Every turn linked to the one it continues or breaks, with the differences where it breaks."""
    turns = rollout.turns
    if not turns:
        return _NO_CALLS
    seen = tuple(turn.seen_ids for turn in turns)
    links: list[Link] = []
    regions: list[tuple[Region, ...]] = []
    differences = GrowingDifferences()
    pieces = PiecesCache(reference) if reference is not None else None
    earlier = Histories()
    for k, turn in enumerate(turns):
        found: Sequence[Stretch] = []
        link = None
        if turn.prompt_ids is not None and earlier:
            link, found = _link(turns, k, earlier, regions, reference, pieces)
            links.append(link)
        if link is not None and link.parent is not None:
            differences.extend(
                difference(
                    stretch,
                    Against.NEXT_PROMPT,
                    Severity.ERROR,
                    f"turn {k} saw the {_other(stretch)} tokens",
                    regions=regions[link.parent],
                    turn=link.parent,
                    turns=turns,
                    later_turn=k,
                )
                for stretch in found
            )
        regions.append(_regions(k, turn, link, regions))
        if turn.prompt_ids is not None and (mine := seen[k]) is not None:
            earlier.add(History(k, turn.prompt_ids, mine))
    return Chains(tuple(links), tuple(regions), seen, differences.done())


def _other(stretch: Stretch) -> str:
    """What a later prompt made of sampled tokens: others for the same text, or another text."""
    return "re-encoded" if stretch.recorded.data == stretch.canonical.data else "rewritten"


def _regions(k: int, turn: Turn, link: Link | None, before: Sequence[tuple[Region, ...]]) -> tuple[Region, ...]:
    """The completions in this turn's prompt, known when it continues its parent, and its own."""
    inherited = before[link.parent] if link and link.kind is LinkKind.CONTINUES and link.parent is not None else ()
    if turn.prompt_ids is None or turn.completion_ids is None:
        return ()
    start = len(turn.prompt_ids)
    return (*inherited, Region(k, start, start + len(turn.completion_ids)))


def _link(
    turns: Sequence[Turn],
    k: int,
    earlier: Histories,
    regions: Sequence[tuple[Region, ...]],
    reference: Reference | None,
    pieces: PiecesCache | None,
) -> tuple[Link, Sequence[Stretch]]:
    """How turn k relates to the turns before it, and the stretches where its prompt differs from what was seen."""
    prompt = turns[k].prompt_ids
    assert prompt is not None
    link = link_by_ids(k, prompt, earlier)
    if link is not None:
        return link, []
    if reference is None or pieces is None:
        return link_without_text(k, prompt, earlier), []
    last = earlier.last
    data, last_data = pieces.of(prompt), pieces.of(last.seen)
    if data.data.startswith(last_data.data):
        found = stretches_in_seen(last_data, data, 0, frozenset())
        return broken_link(k, prompt, last, LinkKind.RETOKENIZED), found
    linear = _messages_changed(turns[last.turn], turns[k]) is False
    parent = earlier.closest(prompt) if linear else earlier.longest_prefix_or_closest(prompt)
    inside = data.data.startswith(pieces.of(last.prompt).data)
    # A parent longer than the last call's prompt holds another complete answer to that prompt.
    is_sibling = not inside or len(parent.seen) > len(last.prompt)
    if parent is not last and is_sibling and starts_with(prompt, parent.seen):
        return sibling_link(k, prompt, parent, last), []
    return _other_text(turns, k, last if inside else parent, data, pieces, regions, reference)


def _other_text(
    turns: Sequence[Turn],
    k: int,
    parent: History,
    prompt: Pieces,
    pieces: PiecesCache,
    every_region: Sequence[tuple[Region, ...]],
    reference: Reference,
) -> tuple[Link, Sequence[Stretch]]:
    """The link of a prompt whose text differs: rendered differently, rewritten on purpose, or of another chain."""
    seen, regions = pieces.of(parent.seen), every_region[parent.turn]
    at = common_prefix(prompt.ids, seen.ids)
    end_ids = reference.end_ids()
    changed = _messages_changed(turns[parent.turn], turns[k])
    found = stretches_in_seen(seen, prompt, regions[-1].start if regions else 0, end_ids)

    def broken(kind: LinkKind, detail: str = "") -> Link:
        return broken_link(k, prompt.ids, parent, kind, detail)

    if changed is False and (_lost_turns(found, regions) or _cut_out(prompt.ids, seen.ids, at, regions)):
        return broken(LinkKind.REWRITTEN, "older turns dropped"), []
    first = _first_message(seen, regions, end_ids)
    if at < first and not _other_tools(found, first, len(seen)):
        return broken(
            LinkKind.ORPHAN, "its prompt does not share even its first message with any earlier call"
        ), []
    roles = token_roles(seen, end_ids)
    what = next((s for s in found if _is_given(s, roles, regions)), None) if at >= first else None
    if changed or (changed is None and what is not None):
        detail = f"{roles[what.start]} text changed" if what and what.end > what.start else "messages changed"
        return broken(LinkKind.REWRITTEN, detail), []
    return broken(LinkKind.TEMPLATE), found


def stretches_in_seen(
    seen: Pieces, prompt: Pieces, answer_start: int, end_ids: frozenset[int]
) -> Sequence[Stretch]:
    """Where a prompt differs from what was seen before it; what it adds after that is new and not included.

    When the texts diverge inside the last answer, that answer is compared with the prompt only up to the next turn
    end, so no later message is paired with it.
    """
    parted = common_byte_prefix(seen.data, prompt.data)
    if answer_start and parted >= int(seen.end[answer_start - 1]):
        closes = np.flatnonzero(np.isin(prompt.ids, np.fromiter(end_ids, np.int64)) & (prompt.end > parted))
        if len(closes):
            prompt = prompt.part(0, int(closes[0]) + 1)
    blocks = align(seen, prompt, open_end=True)
    return starting_before(stretches(seen, prompt, blocks), len(seen))


def _is_given(stretch: Stretch, roles: Roles, regions: tuple[Region, ...]) -> bool:
    """Whether a stretch changes text that was given to the model, in more than white space."""
    if region_of(stretch, regions) is not None:
        given = set(range(stretch.start, stretch.end))
        for region in regions:
            given.difference_update(range(region.start, region.end))
        return any(roles[position] not in _ANSWER_ROLES | {TEMPLATE, UNKNOWN} for position in given)
    recorded = re.sub(rb"\s+", b"", stretch.recorded.data)
    if recorded == re.sub(rb"\s+", b"", stretch.canonical.data):
        return False
    mine = set(roles[stretch.start : stretch.end])
    return not mine <= _ANSWER_ROLES | {TEMPLATE} or (TEMPLATE in mine and len(mine) > 1)


def _messages_changed(parent: Turn, turn: Turn) -> bool | None:
    """Whether the call's messages change those of its parent; None if the log does not say."""
    if parent.prompt_messages is None or turn.prompt_messages is None:
        same_list = parent.message_index is not None and turn.message_index is not None
        return False if same_list and parent.message_index != turn.message_index else None
    before, after = parent.prompt_messages, turn.prompt_messages
    return len(after) < len(before) or any(
        _said(a) != _said(b) for a, b in zip(before, after[: len(before)], strict=True)
    )


def _said(message: Message) -> tuple[object, ...]:
    return message.role, message.text, message.tool_calls


def _lost_turns(found: Sequence[Stretch], regions: Sequence[Region]) -> bool:
    """Whether a prompt drops an older answer and the messages around it but keeps the last answer."""
    for stretch in found:
        lost = [one for one in regions if stretch.start - 1 <= one.start and one.end <= stretch.end + 1]
        more = sum(one.end - one.start for one in lost) + _OPENER < stretch.end - stretch.start
        if lost and more and stretch.canonical_start == stretch.canonical_end and lost[-1] is not regions[-1]:
            return True
    return False


def _cut_out(prompt: Ids, seen: Ids, at: int, regions: Sequence[Region]) -> bool:
    """Whether a prompt that departs from what was seen at `at` resumes it after an older answer."""
    if at >= len(prompt) or not regions:
        return False
    for skipped in (np.flatnonzero(seen[at:] == prompt[at]) + at).tolist():
        lost = any(at <= one.start + 1 and one.end <= skipped + 1 for one in regions[:-1])
        if lost and skipped <= regions[-1].start and starts_with(prompt[at:], seen[skipped:]):
            return True
    return False


def _other_tools(found: Sequence[Stretch], first: int, size: int) -> bool:
    """Whether only tool definitions in the first message differ, and a history follows it."""
    if not found or first >= size or found[-1].start > first:
        return False
    return all(tools_in(_around(stretch.recorded)) != tools_in(_around(stretch.canonical)) for stretch in found)


def _around(side: TextSide) -> str:
    return (side.before + side.data + side.after).decode("utf-8", "replace")


def _first_message(pieces: Pieces, regions: Sequence[Region], end_ids: frozenset[int]) -> int:
    """How many tokens there are up to the first turn end or answer; sequences that share fewer share no
    history."""
    ends = np.flatnonzero(np.isin(pieces.ids, np.fromiter(end_ids, np.int64)))
    first = int(ends[0]) if len(ends) else len(pieces) // 4
    return min(first, regions[0].start) if regions else first
