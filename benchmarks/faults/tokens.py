"""Faults in the tokens of answers."""

from __future__ import annotations

import numpy as np

from benchmarks.faults.draft import Draft, Kit, fault

TRIES = 400
"""How many places of a row are tried for a fault that needs a specific pair of tokens."""
_TEXTS = (" cafe\u0301", " A\u030a")


@fault("TOK101")
def one_token_as_two(draft: Draft) -> bool:
    """A sampled token as two that read the same."""
    return _respelled(draft, 1)


@fault("TOK102", "TOK103")
def a_token_that_is_two_today(draft: Draft) -> bool:
    """A sampled token that encoding never gives: its text encodes as two."""
    strange = draft.kit.strange()
    if not strange:
        return False
    token = draft.pick(strange)
    return draft.append(draft.kit.vocabulary.piece(token), [token])


@fault("TOK103")
def two_tokens_cut_elsewhere(draft: Draft) -> bool:
    """Two sampled tokens as two others that read the same."""
    return _respelled(draft, 2)


def _respelled(draft: Draft, size: int) -> bool:
    """Replace this many sampled tokens with two others that read the same."""
    kit, spots = draft.kit, np.flatnonzero(draft.mask[: -size or None])
    for spot in draft.draw.permutation(spots)[:TRIES].tolist():
        old = [int(one) for one in draft.ids[spot : spot + size]]
        if not draft.mask[spot : spot + size].all() or not all(map(kit.plain, old)):
            continue
        for new in _cuts(kit, kit.bytes_of(old)):
            if new != old and kit.ids(kit.bytes_of(new).decode(errors="replace")) != new:
                draft.replace(spot, spot + size, new, sampled=True)
                return True
    return False


def _cuts(kit: Kit, data: bytes) -> list[list[int]]:
    """The bytes in two tokens."""
    halves = [(kit.token(data[:cut]), kit.token(data[cut:])) for cut in range(1, len(data))]
    return [[left, right] for left, right in halves if left is not None and right is not None]


@fault("TOK104")
def answer_begins_with_a_line_break(draft: Draft) -> bool:
    """The template's line break and the answer's become one token when encoded again."""
    runs, answers = draft.runs(), draft.answers()
    plain = [at for at, one in enumerate(answers[:-1]) if one["content"] and not one.get("tool_calls")]
    if not plain or draft.kit.token(b"\n") is None:
        return False
    at = draft.pick(plain)
    answers[at]["content"] = "\n" + answers[at]["content"]
    draft.replace(runs[at][0], runs[at][0], draft.kit.ids("\n"), sampled=True)
    return True


@fault("TOK105")
def control_token_in_letters(draft: Draft) -> bool:
    """An answer that spells a control token with ordinary tokens."""
    text = draft.kit.vocabulary.piece(draft.end)
    return draft.append(text, draft.kit.spelled(text))


@fault("TOK106", "REC006", "TPL299")
def half_a_character(draft: Draft) -> bool:
    """An answer that stops within a character."""
    half = draft.kit.token("🙂".encode()[:1])
    return half is not None and draft.append("\ufffd", [half])


@fault("TOK107", "TOK101", "TOK102", "TOK103")
def not_normalised(draft: Draft) -> bool:
    """A combining accent that encoding would join with its letter."""
    text = _TEXTS[int(draft.draw.integers(len(_TEXTS)))]
    ids = draft.kit.spelled(text)
    return draft.kit.ids(text) != ids and draft.append(text, ids)
