"""Splice: what the model saw and sampled, put back into a re-rendered prompt.

A chat server re-renders and re-tokenizes the whole conversation for every call. Where that yields tokens other
than those given and sampled, the next call continues a history that never existed. NeMo-RL repairs this while
serving (`replace_prefix_tokens`): it counts the end-of-sequence ids in the re-tokenized history and cuts the new
prompt after that many. `splice_prefix` takes the same three sequences but finds the cut by aligning turns. So it
copes with several stop ids, turns cut by length, turns that the template drops, and stop tokens spelled in a text.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import SpliceError
from tito_audit.record.arrays import Ids, as_ids
from tito_audit.record.prefix import common_ends, common_prefix, starts_with

_PAIRS = 250_000
"""Up to this many pairs of turns, all are compared; beyond it, only those near the diagonal."""
_MOST_PAIRS = 1_000_000
_MATCH, _SKIP, _LAST = 10_000, 10, 15_000
"""Scores of an alignment: as many turns as possible, then few skipped in the new prompt, then their similarity. A
pair for the last turn counts for more than one other: a template that keeps an equal turn keeps this one too, and
what looks like a dropped end is then a dropped beginning."""
_SAME, _INSIDE, _ALIKE, _UNLIKE = 3, 2, 1, 0
_JOINED = 8
"""Pieces of a turn, cut at stop tokens spelled in it, that are joined to find it without its middle."""
_SHORTEST, _TELLING, _LONG = 2, 3, 8
"""In tokens: a shorter turn matches only if equal; a common end of this length is no accident; a turn of this
length matches without a common start."""


def splice_prefix(
    seen_ids: Sequence[int] | NDArray[Any],
    template_prefix_ids: Sequence[int] | NDArray[Any],
    template_ids: Sequence[int] | NDArray[Any],
    stop_ids: int | Collection[int],
) -> list[int]:
    """The next prompt: `template_ids` with the part that repeats what was seen replaced by `seen_ids`.

    seen_ids             `[S]` the conversation so far as the model was given and sampled it: the previous
                         prompt and the previous completion, end token included when it was sampled
    template_prefix_ids  `[P]` what template and tokenizer write today for the same messages, with or
                         without the last turn's end, scaffolding after it or a generation prompt; the seen
                         ids decoded and encoded again also work
    template_ids         `[N]` what they write for those messages and the new ones
    stop_ids             every id that a sampled turn or a turn of the template may end with: the end
                         tokens of the generation settings, and the template's own (for gpt-oss `<|end|>`,
                         `<|return|>` and `<|call|>`)

    The ids are lists, tuples or integer arrays. A plain list is returned, for a server to send on; it starts
    with `seen_ids` and ends with the rest of `template_ids`. A sampled stop token is kept and the template's
    dropped; a turn that was cut by length gets the template's. With nothing seen, or where `template_ids` already
    starts with `seen_ids`, it is `template_ids`.

    The turn is looked for at its own position first. Where the template writes an earlier turn differently
    (reasoning removed, an empty message dropped), both prompts are cut at the stop ids and the turns aligned in
    order; the place is after the last turn's counterpart or, when the template dropped that turn, after that of
    the turn before. SpliceError when there is none, RecordError if an argument is not token ids.

    It cannot detect a dropped last turn in a template that ends only the assistant's turns (Mistral, DeepSeek):
    there the preceding question has no end of its own and would appear twice.

    With 9 ending a turn, the model sampled 5, 6 where the tokenizer writes 7:

        >>> splice_prefix([1, 9, 5, 6, 9], [1, 9, 7, 9], [1, 9, 7, 9, 2, 9, 3], 9)
        [1, 9, 5, 6, 9, 2, 9, 3]
    """
    seen = as_ids(seen_ids, "seen_ids")
    prefix = as_ids(template_prefix_ids, "template_prefix_ids")
    template = as_ids(template_ids, "template_ids")
    stops = frozenset(map(int, [stop_ids] if isinstance(stop_ids, int | np.integer) else stop_ids))
    if not stops:
        raise SpliceError(
            "stop_ids is empty.\nWithout the ids that end a turn, it is unknown where one ends.\n"
            "Pass the end tokens of the model's generation settings."
        )
    if starts_with(template, seen):
        return list(template.tolist())
    old, new = _split_turns(prefix, stops), _split_turns(template, stops)
    agreed, ended = common_prefix(prefix, template), int(seen[-1]) in stops
    ends_next = agreed == len(prefix) < len(template) and int(template[agreed]) in stops
    has_tail = len(old.tail()) > 0
    if not old.ends or (has_tail and (ends_next or _ends_in_open_turn(_split_turns(seen, stops), old))):
        old = _Turns(old.ids, [*old.ends, len(old.ids)])
    rest = _find_cut(old, new, agreed, stops, ended)
    return [*seen.tolist(), *new.ids[rest:].tolist()]


class _TurnTokens:
    """The tokens of a turn without its end token; `data` is their bytes, which compare faster."""

    __slots__ = ("data", "first", "ids", "last")

    def __init__(self, ids: Ids) -> None:
        self.ids, self.data = ids, ids.tobytes()
        self.first: int | None = int(ids[0]) if len(ids) else None
        self.last: int | None = int(ids[-1]) if len(ids) else None

    def __len__(self) -> int:
        return len(self.ids)

    def starts_with(self, other: _TurnTokens) -> bool:
        return self.data.startswith(other.data)

    def ends_with(self, other: _TurnTokens) -> bool:
        return self.data.endswith(other.data)


@dataclass(frozen=True, slots=True, eq=False)
class _Turns:
    """A sequence cut at the ids that end a turn."""

    ids: Ids
    ends: list[int]
    """Positions of the stop ids; then the length of the sequence, if its last turn has none."""

    def turn_tokens(self, turn: int) -> _TurnTokens:
        return _TurnTokens(self.ids[self.ends[turn - 1] + 1 if turn else 0 : self.ends[turn]])

    def tail(self) -> _TurnTokens:
        """The tokens after the last stop id."""
        return _TurnTokens(self.ids[self.ends[-1] + 1 if self.ends else 0 :])


def _split_turns(ids: Ids, stops: frozenset[int]) -> _Turns:
    ends = np.isin(ids, np.fromiter(stops, np.int64)).nonzero()[0]
    return _Turns(ids, ends.tolist())


def _ends_in_open_turn(seen: _Turns, prefix: _Turns) -> bool:
    """Whether the prefix ends inside its last turn; if not, scaffolding or a generation prompt follows that.

    What looks more like the last turn seen decides, the tokens after the prefix's last end or those before it; if
    neither does, the number of ends.
    """
    after = prefix.tail()
    ended = bool(seen.ends) and seen.ends[-1] == len(seen.ids) - 1
    ends = seen.ends[:-1] if ended else seen.ends
    body = _TurnTokens(seen.ids[ends[-1] + 1 if ends else 0 : len(seen.ids) - ended])
    as_many_ends = len(prefix.ends) <= len(ends)
    turn = prefix.turn_tokens(len(prefix.ends) - 1)
    in_rest, in_turn = common_ends(after.ids, body.ids), common_ends(turn.ids, body.ids)
    if len(after) < len(body) and body.starts_with(after):
        # As a generation prompt is.
        return as_many_ends and sum(in_rest) >= sum(in_turn)
    if in_rest[1] >= in_turn[1] + _TELLING:
        # The last answer ends like this, so the stop before it was spelled in the turn.
        return True
    return sum(in_rest) > sum(in_turn) or (as_many_ends and sum(in_rest) == sum(in_turn))


def _find_cut(old: _Turns, new: _Turns, agreed: int, stops: frozenset[int], ended: bool) -> int:
    """Where in the new prompt the rest begins: after the end of the old prompt's last turn, or with that end if
    the model did not sample one (`ended`)."""
    end = old.ends[-1]
    if agreed >= end:
        if end == len(new.ids):
            return end
        if int(new.ids[end]) in stops:
            return end + ended
        later = bisect_left(new.ends, end)
        if end == len(old.ids) and later < len(new.ends):
            # The old prompt stops inside its last turn, and the new one goes on before it ends the turn.
            return new.ends[later] + 1 if ended else end
    # The turn of the new prompt that is the last turn of the old one; -1 if there is none.
    turn, last = -1, old.turn_tokens(len(old.ends) - 1)
    if agreed < len(old.ids):
        same = bisect_left(old.ends, agreed)
        turn, is_last = _align_turns(*_differing_turns(old, new, same))
        turn += same
        if (
            not is_last
            and len(last)
            and any(last.data == new.turn_tokens(place).data for place in range(min(same, len(new.ends))))
        ):
            # The template kept an equal turn, so it kept this one and dropped the beginning.
            turn, is_last = _align_turns(*_differing_turns(old, new, 0))
        opener = new.tail()
        if not is_last and len(opener) >= _SHORTEST and turn + 1 < len(new.ends):
            starts = [body.starts_with(opener) for body in (last, new.turn_tokens(turn + 1))]
            # Both are turns of the model: one turn, rewritten too much to match.
            turn += all(starts)
    if turn < 0:
        # The error, with what was looked for and how far it got.
        shown = f"{'… ' if len(last) > 6 else ''}{', '.join(map(str, last.ids[-6:].tolist()))}"
        ids = ", ".join(map(str, sorted(stops)))
        count = bisect_right(new.ends, agreed)
        raise SpliceError(
            f"template_ids ({len(new.ids)} tokens, {len(new.ends)} turn ends) holds no end of the last turn of "
            f"template_prefix_ids ({len(old.ids)} tokens, {len(old.ends)} turns), which reads [{shown}], nor of a "
            f"turn before it; turn ends are the ids {ids}. Both agree in {agreed} tokens ({count} turn ends).\n"
            "Without that place what was seen cannot be joined to what is new: tokens would be lost or doubled.\n"
            "Check that both render the same messages with the same template and tools, and that stop_ids holds "
            "the id that the template ends a turn with. If the history was changed on purpose, start a new "
            "training row."
        )
    return new.ends[turn] + ended


def _differing_turns(old: _Turns, new: _Turns, same: int) -> tuple[list[_TurnTokens], list[_TurnTokens]]:
    """The turns of both from number `same` on; SpliceError if there are too many to align."""
    olds, news = len(old.ends) - same, max(len(new.ends) - same, 0)
    if olds * min(news, abs(news - olds) + 2 * _band_width(olds)) > _MOST_PAIRS:
        raise SpliceError(
            f"{olds} turns of template_prefix_ids and {news} of template_ids differ, too many to align.\n"
            "Aligning them would hold up the caller for seconds.\n"
            "Check that stop_ids holds only ids that end a turn, and that both render the same messages."
        )
    return [old.turn_tokens(same + k) for k in range(olds)], [new.turn_tokens(same + k) for k in range(news)]


def _band_width(turns: int) -> int:
    """How far from the diagonal turns are compared."""
    return max(16, _PAIRS // max(1, turns))


def _align_turns(old: list[_TurnTokens], new: list[_TurnTokens]) -> tuple[int, bool]:
    """The turn of `new` paired with the last turn of `old` that has a pair (-1: none has), and whether that is the
    last of `old`.

    Dynamic programming over one row of scores; `scores[j]` is for the first j turns of `new`.
    """
    width = _band_width(len(old))
    scores = [-_SKIP * j for j in range(len(new) + 1)]
    earlier: list[list[int]] = []
    places = [(-1, False)] * (len(new) + 1)
    for i, turn in enumerate(old):
        is_last = i == len(old) - 1
        worth = _MATCH + _LAST * is_last
        first = max(0, i + min(0, len(new) - len(old)) - width)
        end = min(len(new), i + max(0, len(new) - len(old)) + width + 1)
        earlier = [*earlier[-_JOINED:], scores]
        scores = scores.copy()
        for j in range(first, end):
            likeness = _similarity(turn, new[j])
            score = earlier[-1][j] + worth + likeness
            if not likeness and (back := _find_cut_turn(old, i, new[j])):
                # Worth less than any pair of whole turns.
                likeness, score = _ALIKE, earlier[-1 - back][j] + _MATCH
            if likeness and score >= scores[j + 1]:
                scores[j + 1], places[j + 1] = score, (j, is_last)
            if scores[j] - _SKIP > scores[j + 1]:
                scores[j + 1], places[j + 1] = scores[j] - _SKIP, places[j]
    return places[scores.index(max(scores))]


def _similarity(a: _TurnTokens, b: _TurnTokens) -> int:
    """Whether two turns look like one turn written in two ways: _SAME, _INSIDE, _ALIKE or _UNLIKE.

    A template takes a piece out of a turn or puts one in; its start and its end stay. So one turn is the other
    without a piece, or they share start and end and little else. A common start alone only shows that the same
    role speaks.
    """
    if a.data == b.data:
        return _SAME
    n = min(len(a), len(b))
    if n < _SHORTEST:
        return _UNLIKE
    if a.last != b.last:
        return _INSIDE if a.starts_with(b) or b.starts_with(a) else _UNLIKE
    if a.first != b.first:
        return _INSIDE if n >= _LONG and (a.ends_with(b) or b.ends_with(a)) else _UNLIKE
    head, tail = common_ends(a.ids, b.ids)
    if head + tail == n and (head or n >= _LONG):
        return _INSIDE
    return _ALIKE if head and tail and 3 * (head + tail) >= 2 * n else _UNLIKE


def _find_cut_turn(old: list[_TurnTokens], i: int, turn: _TurnTokens) -> int:
    """How many pieces before `old[i]` the turn begins that is `turn` without its middle; 0 if none does.

    Reasoning that spells a stop token is cut there, and the template removes both sides of the cut.
    """
    if i == 0 or old[i].last != turn.last:
        return 0
    openings = [back for back in range(1, min(i, _JOINED) + 1) if old[i - back].first == turn.first]
    if not openings:
        return 0
    _, tail = common_ends(old[i].ids, turn.ids)
    head = _TurnTokens(turn.ids[: len(turn) - tail])
    if not tail or len(head) < _SHORTEST:
        return 0
    return next((back for back in openings if old[i - back].starts_with(head)), 0)
