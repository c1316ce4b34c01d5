"""`tito-audit repair --diff`: the changes of one row, old tokens above new ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
from rich.text import Text

from tito_audit.cli._changes import Changes, extent
from tito_audit.cli._regions import Columns
from tito_audit.record.arrays import Ids
from tito_audit.record.column import ColumnRole
from tito_audit.record.finding import Result
from tito_audit.record.outcome import Outcome
from tito_audit.record.rollout import Rollout, TrainingRow, Turn
from tito_audit.terminal.escape import visible


def diff_lines(outcome: Outcome, piece: Callable[[int], str] | None) -> Iterator[Text]:
    """The lines of one row: which repairs fixed what, and every change. `piece` gives the text of an id."""
    yield _header(outcome)
    if outcome.quarantined is not None:
        return
    for note in outcome.notes:
        yield Text("  " + visible(note))
    changes = Changes(piece)
    changed = False
    for old, parts in _pairs(outcome.before, outcome.after):
        lines = list(_rollout(old, parts, changes))
        changed = changed or bool(lines)
        if lines and len(outcome.before) > 1:
            yield Text(f"  rollout {old.place.item} of the row", style="bold")
        yield from lines
    if not changed:
        yield Text("  no token, mask or logprob changed, only how the row writes them")


def _header(outcome: Outcome) -> Text:
    line = Text(visible(str(outcome.place)), style="bold")
    if outcome.quarantined is not None:
        return line.append(visible(f" moved to quarantine: {outcome.quarantined}"), style="not bold")
    by = [f"{name} ({', '.join(codes)})" if codes else name for name, codes in outcome.cured.items()]
    return line.append(visible(f" repaired by {', '.join(by)}"), style="not bold")


def _pairs(before: Sequence[Result], after: Sequence[Result]) -> Iterator[tuple[Rollout, list[Rollout]]]:
    """Each rollout as read, with what replaces it: nothing, one rollout, or the parts of a fork."""
    old = [result.rollout for result in before if result.rollout is not None]
    new = [result.rollout for result in after if result.rollout is not None]
    if len(old) == len(new):
        yield from ((rollout, [other]) for rollout, other in zip(old, new, strict=True))
        return
    for number, rollout in enumerate(old, 1):
        others = (n for n, other in enumerate(new) if not _akin(rollout, other))
        end = len(new) if number == len(old) else next(others, len(new))
        yield rollout, new[:end]
        new = new[end:]


def _akin(old: Rollout, new: Rollout) -> bool:
    """Whether one may be the repaired other: they share a completion, or have none and begin with the same
    tokens.
    """
    if old.turns or new.turns:
        return any(_equal(a.completion_ids, b.completion_ids) for a in old.turns for b in new.turns)
    a, b = old.training_row, new.training_row
    return a is not None and b is not None and _equal(a.token_ids[:8], b.token_ids[:8])


def _rollout(old: Rollout, parts: list[Rollout], changes: Changes) -> Iterator[Text]:
    """The changes of one rollout; no lines if no token, mask or logprob changed."""
    if len(parts) != 1:
        if not parts:
            yield Text("  left out")
        yield from _forked(old, parts)
        return
    (new,) = parts
    numbers = _numbers(old.turns, new.turns)
    gone = [str(n) for n in range(len(old.turns)) if n not in numbers]
    if gone:
        yield Text(f"  turn{'s' if len(gone) > 1 else ''} {', '.join(gone)} left out")
    for turn, number in zip(new.turns, numbers, strict=True):
        if number is not None:
            yield from _turn(old.turns[number], turn, number, changes)
    if old.training_row is not None and new.training_row is not None:
        yield from _row(old.training_row, new.training_row, changes)


def _forked(old: Rollout, parts: Sequence[Rollout]) -> Iterator[Text]:
    """The parts of a fork: the length of each, and the turns that it trains."""
    trained: set[int] = set()
    for number, part in enumerate(parts, 1):
        row = part.training_row
        seen = part.turns[-1].seen_ids if part.turns else None
        words = [f"  row {number} of {len(parts)}"]
        if row is not None:
            words.append(extent(Columns(row.token_ids, row.loss_mask)))
        elif seen is not None:
            words.append(extent(Columns(seen)))
        turns = [n for n in _numbers(old.turns, part.turns, trained) if n is not None]
        trained.update(turns)
        if turns:
            words.append(f"trains turn{'s' if len(turns) > 1 else ''} {', '.join(map(str, turns))}")
        yield Text(" · ".join(words))


def _numbers(old: Sequence[Turn], new: Sequence[Turn], trained: Collection[int] = frozenset()) -> list[int | None]:
    """For each new turn the number of the old one: the next with the same completion, best with its prompt too.

    Numbers in `trained` are those of turns in other parts of a fork.
    """
    numbers: list[int | None] = []
    at = 0
    for turn in new:
        left = (n for n in range(at, len(old)) if n not in trained)
        same = [n for n in left if _equal(old[n].completion_ids, turn.completion_ids)]
        whole = (n for n in same if _equal(old[n].prompt_ids, turn.prompt_ids))
        number = next(whole, same[0] if same else None)
        numbers.append(number)
        if number is not None:
            at = number + 1
    return numbers


def _equal(ids: Ids | None, other: Ids | None) -> bool:
    return ids is other or (ids is not None and other is not None and np.array_equal(ids, other))


def _turn(old: Turn, new: Turn, number: int, changes: Changes) -> Iterator[Text]:
    """The changes of prompt and completion of one call."""
    if old.prompt_ids is not None and new.prompt_ids is not None:
        yield from changes.lines(f"turn {number} prompt", Columns(old.prompt_ids), Columns(new.prompt_ids))
    if old.completion_ids is not None and new.completion_ids is not None:
        before = Columns(old.completion_ids, None, old.completion_logprobs)
        after = Columns(new.completion_ids, None, new.completion_logprobs)
        yield from changes.lines(f"turn {number} completion", before, after)


def _row(old: TrainingRow, new: TrainingRow, changes: Changes) -> Iterator[Text]:
    """The changes of the training row, in its tokens and in how it is written."""
    sides = zip(_facts(old), _facts(new), strict=True)
    facts = [f"{what} {before} → {after}" for (what, before), (_, after) in sides if before != after]
    if facts:
        yield Text(visible("  training row · " + " · ".join(facts)), style="bold")
    before, after = (Columns(row.token_ids, row.loss_mask, row.logprobs) for row in (old, new))
    yield from changes.lines("training row", before, after)


def _facts(row: TrainingRow) -> Iterator[tuple[str, str]]:
    """How the row is written."""
    yield "padding", f"{row.padding.left} left, {row.padding.right} right"
    yield "prompt length", str(row.prompt_length)
    yield "mask", ", ".join(str(column.encoding) for column in row.columns if column.role is ColumnRole.LOSS_MASK)
