"""Links: how the prompt of each call relates to the calls before it, and the chains that calls form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tito_audit.chains.histories import Histories, History
from tito_audit.record.arrays import Ids
from tito_audit.record.prefix import common_prefix, same_ids, starts_with

Chain: TypeAlias = tuple[int, ...]
"""Numbers of calls, each continuing the one before."""
Numbers: TypeAlias = NDArray[np.int64]
AT_ONCE = 1 << 17
"""Entries processed at once, where temporary arrays of all would double the memory."""


class LinkKind(StrEnum):
    """How a call relates to the calls before it."""

    CONTINUES = "continues"  # its prompt starts with everything its parent saw and sampled
    RETOKENIZED = "retokenized"  # the same text, other ids
    TEMPLATE = "template"  # the same messages, other text
    REWRITTEN = "rewritten"  # the history itself was changed, cut or compacted
    RETRY = "retry"  # the same prompt again
    SIBLING = "sibling"  # it continues its parent, not the last call
    ORPHAN = "orphan"  # shares no history with any call before it

    continues: bool
    """Whether the prompt starts with everything its parent saw and sampled."""
    only_tokens_differ: bool
    """Whether the messages of the history are the same."""
    breaks: bool
    """Whether the prompt neither starts with an earlier call's history nor repeats an earlier prompt."""

    def __init__(self, kind: str) -> None:
        self.continues = kind in ("continues", "sibling")
        self.only_tokens_differ = kind in ("retokenized", "template")
        self.breaks = kind not in ("continues", "sibling", "retry")


@dataclass(frozen=True, slots=True)
class Link:
    """How a turn's prompt relates to the calls before it."""

    turn: int
    parent: int | None
    """The turn whose prompt and completion it continues or breaks; None for an orphan."""
    kind: LinkKind
    at: int
    """First position of the prompt that differs from the parent's prompt + completion; its length if none."""
    seen_at: int = 0
    """The same position in the parent's prompt + completion."""
    detail: str = ""
    """What kind and cause do not say, in words."""


TEXT_UNKNOWN = "re-tokenized or re-rendered; the tokenizer of the log would tell which"
"""The detail of a link broken by ids whose text is unknown."""


def repeating_link(turn: int, prompt: Ids, earlier: Histories) -> Link | None:
    """The link of a call that repeats an earlier prompt; None for any other."""
    for history in reversed(earlier):
        if same_ids(prompt, history.prompt):
            detail = f"the same prompt as turn {history.turn}"
            return Link(turn, history.turn, LinkKind.RETRY, len(prompt), len(prompt), detail)
    return None


def link_without_text(turn: int, prompt: Ids, earlier: Histories) -> Link:
    """The link of any other call, if no text is known: it continues an earlier call or breaks its history."""
    parent = earlier.longest_prefix_or_closest(prompt)
    resumed = resumed_prompt(prompt, parent, earlier)
    if resumed is None and starts_with(prompt, parent.seen):
        return sibling_link(turn, prompt, parent, earlier.last)
    return broken_link(turn, prompt, resumed or parent, LinkKind.TEMPLATE, TEXT_UNKNOWN)


def resumed_prompt(prompt: Ids, branch: History, earlier: Histories) -> History | None:
    """The latest call with a longer prompt than `branch` saw, if this prompt starts with both."""
    if not starts_with(prompt, branch.seen):
        return None
    longer = (history for history in reversed(earlier) if len(history.prompt) > len(branch.seen))
    return next((history for history in longer if starts_with(prompt, history.prompt)), None)


def sibling_link(turn: int, prompt: Ids, parent: History, last: History) -> Link:
    """The link of a call that continues a call other than the last."""
    detail = f"continues turn {parent.turn}, not turn {last.turn}"
    return Link(turn, parent.turn, LinkKind.SIBLING, len(prompt), len(parent.seen), detail)


def broken_link(turn: int, prompt: Ids, parent: History, kind: LinkKind, detail: str = "") -> Link:
    """The link of a call whose prompt departs from its parent's prompt + completion."""
    at = common_prefix(prompt, parent.seen)
    return Link(turn, None if kind is LinkKind.ORPHAN else parent.turn, kind, at, at, detail)


def parents_of(links: Iterable[Link]) -> dict[int, int]:
    """By call, the earlier call that it continues."""
    return {link.turn: link.parent for link in links if link.kind.continues and link.parent is not None}


def chain_to(last: int, parents: Mapping[int, int]) -> Chain:
    """The chain that ends with a call, first call first."""
    chain = [last]
    while (parent := parents.get(chain[-1])) is not None:
        chain.append(parent)
    return tuple(reversed(chain))


def last_calls(calls: Iterable[int], parents: Mapping[int, int]) -> list[int]:
    """The calls that no call continues."""
    continued = set(parents.values())
    return [call for call in calls if call not in continued]


def connected_components(count: int, *links: Numbers) -> Numbers:
    """`[N]` the lowest number in each one's component; each of `links` is `[N]`: the number it links to, or -1."""
    label: NDArray[Any] = np.arange(count, dtype=np.uint32 if count < 1 << 32 else np.int64)
    while True:
        before = label.copy()
        for link in links:
            for start in range(0, count, AT_ONCE):
                calls = start + np.flatnonzero(link[start : start + AT_ONCE] >= 0)
                other = link[calls]
                low = np.minimum(label[calls], label[other])
                # The labels themselves are lowered too, so a whole component follows.
                for ends in (calls, other, before[calls], before[other]):
                    np.minimum.at(label, ends, low)
        label = label[label]
        if np.array_equal(label, before):
            labels: Numbers = label.astype(np.int64)
            return labels
