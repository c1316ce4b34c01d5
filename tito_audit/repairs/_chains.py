"""The unbroken chains of a rollout's calls, as its links have them."""

from __future__ import annotations

import numpy as np

from tito_audit.evidence.model import Break, Evidence, Link

__all__ = ["BROKEN", "broken_links", "chains_of", "row_chains"]

BROKEN = frozenset((Break.RETOKENIZED, Break.TEMPLATE))
"""Breaks in which the history is still the same and only its tokens are others."""


def broken_links(evidence: Evidence) -> list[Link]:
    """The links at which a prompt holds the history in other tokens than were seen."""
    return evidence.once("broken links", lambda evidence: [link for link in evidence.links if link.kind in BROKEN])


def chains_of(evidence: Evidence) -> list[list[int]]:
    """Every chain of turns in which each prompt starts with everything before it, by its last turn."""
    turns = evidence.rollout.turns
    parent = {link.turn: link.parent for link in evidence.links if link.kind is Break.EXTENDS}
    # A retry beside an answered prompt extends the call before both.
    parent |= {
        link.turn: link.parent
        for link in evidence.links
        if link.kind is Break.RETRY and link.detail.startswith("continues")
    }
    known = [k for k, turn in enumerate(turns) if turn.prompt_ids is not None and turn.completion_ids is not None]
    extended = {p for p in parent.values() if p is not None}
    chains = []
    for leaf in known:
        if leaf in extended:
            continue
        chain = [leaf]
        while (above := parent.get(chain[-1])) is not None:
            chain.append(above)
        chains.append(chain[::-1])
    return chains


def row_chains(evidence: Evidence) -> list[list[int]]:
    """The chains of which the training row holds tokens that no chain before it holds, the fullest first."""
    view = evidence.row
    if view is None or not view.proven:
        return []
    held = {int(turn): int(count) for turn, count in zip(*np.unique(view.turn, return_counts=True), strict=True)}
    found = []
    for chain in sorted(chains_of(evidence), key=lambda one: -sum(held.get(turn, 0) for turn in one)):
        if sum([held.pop(turn, 0) for turn in chain]):
            found.append(chain)
    return found
