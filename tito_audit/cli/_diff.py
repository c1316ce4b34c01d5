"""`tito-audit repair --diff`: the changes of one row as a token diff with a few unchanged tokens around.

    at  token   id  mask  logprob
   190  │·it│  310     1  -0.2500
-  191  │·and│ 306     1  -0.7500
+  191  │·an│  274     1  -1.5000
+  192  │d│     67     1  -0.1250
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from tito_audit.align.runs import Gap, Run, gaps, paired_runs
from tito_audit.record.arrays import Ids
from tito_audit.record.column import ColumnRole
from tito_audit.record.outcome import Outcome
from tito_audit.record.rollout import Rollout, Turn
from tito_audit.record.runs import trained_runs
from tito_audit.terminal.boxes import shorten
from tito_audit.terminal.escape import visible
from tito_audit.terminal.sequence import TokenLine
from tito_audit.terminal.words import many


def changed_spans(old: TokenLine, new: TokenLine) -> list[Gap]:
    """The spans that differ, in order: other tokens, or the same tokens with another mask or logprob."""
    equal: list[Run] = []
    # Frequent tokens begin no run: a long run of one token (padding) would take quadratic time.
    for i, j, size in paired_runs(old.ids, new.ids, longest=8192, frequent_from=0):
        same = np.ones(size, np.bool_)
        for before, after in ((old.trained, new.trained), (old.logprobs, new.logprobs)):
            if before is not None and after is not None:
                a, b = before[i : i + size], after[j : j + size]
                same &= (a == b) | (np.isnan(a.astype(np.float64)) & np.isnan(b.astype(np.float64)))
            elif before is not after:
                same[:] = False
        equal += [Run(i + start, j + start, end - start) for start, end in trained_runs(same)]
    return list(gaps(equal, len(old.ids), len(new.ids)))


_CONTEXT = 3
"""How many unchanged tokens are shown before and after a change."""
_RUN_HEAD, _RUN_TAIL = 5, 2
"""How many tokens are shown at each end of a long run."""
_MOST_CHANGES = 12
"""How many changes of a sequence are shown."""
_STYLES = {"-": "red", "+": "green", " ": "dim"}
_Line = tuple[str, tuple[str, ...] | str]
"""A sign, and either the cells of one token or a text such as `… 40 more`."""


@dataclass(slots=True)
class RowDiff:
    """Draws the changes of one row. A change that later prompts repeat is drawn only once."""

    piece: Callable[[int], str] | None
    """The text of an id; None: only ids are shown."""
    _drawn_changes: set[tuple[object, ...]] = field(default_factory=set)

    def lines(self, title: str, old: TokenLine, new: TokenLine) -> Iterator[Text]:
        """A title with both lengths, then the changes; no lines if there are none."""
        changes: list[Gap] = []
        regions = changed_spans(old, new)
        marks = []
        for region in regions:
            # What a repeated change has in common: tokens, position, and which columns the sequence has.
            was, now = old.ids[region.start : region.end], new.ids[region.other : region.other_end]
            columns = old.trained is None, old.logprobs is None
            marks.append((was.tobytes(), now.tobytes(), region.other, *columns))
            changes += [region] if marks[-1] not in self._drawn_changes else []
        self._drawn_changes.update(marks)
        if not regions:
            return
        repeated = len(regions) - len(changes)
        again = f" · {repeated:,} change{'s' if repeated > 1 else ''} as above" if repeated else ""
        yield Text(f"  {title} · {length_words(old)} → {length_words(new)}{again}", style="bold")
        lines: list[_Line] = []
        shown, at = changes[:_MOST_CHANGES], 0
        for number, region in enumerate(shown):  # tokens between two close changes are drawn once
            start = max(region.other - _CONTEXT, at)
            lines += [(" ", "…")] if number and start > at else []
            lines += self._run_lines(" ", new, start, region.other)
            lines += self._run_lines("-", old, region.start, region.end)
            lines += self._run_lines("+", new, region.other, region.other_end)
            after = shown[number + 1].other if number + 1 < len(shown) else len(new.ids)
            at = min(region.other_end + _CONTEXT, after)
            lines += self._run_lines(" ", new, region.other_end, at)
        # A column that is empty everywhere gets width 0 and is left out.
        names = ("at", "" if self.piece is None else "token", "id", "mask", "logprob")
        full = [cells for _, cells in lines if isinstance(cells, tuple)]
        widths = [max((cell_len(cells[n]) for cells in full), default=0) for n in range(len(names))]
        widths = [max(width, cell_len(name)) if width else 0 for width, name in zip(widths, names, strict=True)]
        if full:
            yield Text("      " + _aligned(names, widths), style="dim")
        for sign, cells in lines:
            words = cells if isinstance(cells, str) else _aligned(cells, widths)
            yield Text(f"    {sign} {words}", style=_STYLES[sign])
        if len(changes) > _MOST_CHANGES:
            yield Text(f"    … {len(changes) - _MOST_CHANGES:,} more changes", style="dim")

    def _run_lines(self, sign: str, side: TokenLine, start: int, end: int) -> Iterator[_Line]:
        """One line per token; the middle of a long run is left out."""
        hidden = end - start - _RUN_HEAD - _RUN_TAIL
        for at in range(start, end):
            if hidden > 1 and start + _RUN_HEAD <= at < end - _RUN_TAIL:
                if at == start + _RUN_HEAD:
                    yield sign, f"… {hidden:,} more"
                continue
            token = int(side.ids[at])
            mask = "" if side.trained is None else str(int(side.trained[at]))
            logprob = "" if side.logprobs is None else f"{side.logprobs[at]:.4f}".replace("nan", "null")
            text = "" if self.piece is None else f"│{shorten(self.piece(token))}│"
            yield sign, (str(at), text, str(token), mask, logprob)


def length_words(side: TokenLine) -> str:
    """`197 tokens, 54 trained`."""
    trained = "" if side.trained is None else f", {int(side.trained.sum()):,} trained"
    return f"{many(len(side.ids), 'token')}{trained}"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    """The cells as a line of columns: the token is aligned left, numbers are aligned right."""
    out = []
    for number, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        pad = " " * (width - cell_len(cell))
        if width:
            out.append(cell + pad if number == 1 else pad + cell)
    return "  ".join(out).rstrip()


def diff_lines(outcome: Outcome, piece: Callable[[int], str] | None) -> Iterator[Text]:
    """The lines of one row: which repairs fixed what, then every change. `piece` is the text of an id."""
    by = [f"{name} ({', '.join(codes)})" if codes else name for name, codes in outcome.cured.items()]
    moved = outcome.quarantined is not None
    what = f"moved to quarantine: {outcome.quarantined}" if moved else f"repaired by {', '.join(by)}"
    yield Text(visible(str(outcome.place)), style="bold").append(visible(f" {what}"), style="not bold")
    if moved:
        return
    for note in outcome.notes:
        yield Text("  " + visible(note))
    changes = RowDiff(piece)
    changed = False
    before = [result.rollout for result in outcome.before if result.rollout is not None]
    after = [result.rollout for result in outcome.after if result.rollout is not None]
    forked = len(before) != len(after)
    for number, old in enumerate(before, 1):
        end = 1
        if forked:  # its parts end where a rollout is no part of it
            others = (n for n, other in enumerate(after) if not _is_part_of(old, other))
            end = len(after) if number == len(before) else next(others, len(after))
        lines = list(_rollout_lines(old, after[:end], changes))
        after = after[end:]
        changed = changed or bool(lines)
        if lines and len(outcome.before) > 1:
            yield Text(f"  rollout {old.place.item} of the row", style="bold")
        yield from lines
    if not changed:
        yield Text("  no token, mask or logprob changed, only how the row writes them")


def _is_part_of(old: Rollout, new: Rollout) -> bool:
    """Whether a new rollout comes from the old one: they share a completion or, without turns, begin alike."""
    if old.turns or new.turns:
        return any(_equal(a.completion_ids, b.completion_ids) for a in old.turns for b in new.turns)
    rows = [row.token_ids[:8] for row in (old.training_row, new.training_row) if row is not None]
    return len(rows) == 2 and _equal(*rows)


def _rollout_lines(old: Rollout, parts: list[Rollout], changes: RowDiff) -> Iterator[Text]:
    """The changes of one rollout; no lines if only its writing changed."""
    if len(parts) != 1:
        if not parts:
            yield Text("  left out")
        trained: set[int] = set()
        for at, part in enumerate(parts, 1):
            row = part.training_row
            seen = part.turns[-1].seen_ids if part.turns else None
            words = [f"  row {at} of {len(parts)}"]
            if row is not None:
                words.append(length_words(TokenLine(row.token_ids, row.loss_mask)))
            elif seen is not None:
                words.append(length_words(TokenLine(seen)))
            turns = [n for n in _origins(old.turns, part.turns, trained) if n is not None]
            trained.update(turns)
            if turns:
                words.append(f"trains turn{'s' if len(turns) > 1 else ''} {', '.join(map(str, turns))}")
            yield Text(" · ".join(words))
        return
    (new,) = parts
    numbers = _origins(old.turns, new.turns)
    gone = [str(n) for n in range(len(old.turns)) if n not in numbers]
    if gone:
        yield Text(f"  turn{'s' if len(gone) > 1 else ''} {', '.join(gone)} left out")
    for turn, number in zip(new.turns, numbers, strict=True):
        if number is None:
            continue
        was = old.turns[number]
        if was.prompt_ids is not None and turn.prompt_ids is not None:
            yield from changes.lines(
                f"turn {number} prompt", TokenLine(was.prompt_ids), TokenLine(turn.prompt_ids)
            )
        if was.completion_ids is not None and turn.completion_ids is not None:
            before = TokenLine(was.completion_ids, None, was.completion_logprobs)
            after = TokenLine(turn.completion_ids, None, turn.completion_logprobs)
            yield from changes.lines(f"turn {number} completion", before, after)
    rows = [row for row in (old.training_row, new.training_row) if row is not None]
    if len(rows) == 2:
        names = ("padding", "prompt length", "mask")
        written = [
            (
                f"{row.padding.left} left, {row.padding.right} right",
                str(row.prompt_length),
                ", ".join(str(each.encoding) for each in row.columns if each.role is ColumnRole.LOSS_MASK),
            )
            for row in rows
        ]
        facts = [f"{what} {a} → {b}" for what, a, b in zip(names, *written, strict=True) if a != b]
        if facts:
            yield Text(visible("  training row · " + " · ".join(facts)), style="bold")
        before, after = (TokenLine(row.token_ids, row.loss_mask, row.logprobs) for row in rows)
        yield from changes.lines("training row", before, after)


def _origins(old: Sequence[Turn], new: Sequence[Turn], trained: Collection[int] = frozenset()) -> list[int | None]:
    """For each new turn, the number of the old turn it comes from; None if there is none.

    That is the next old turn with the same completion, preferably with the same prompt too. Turns in `trained`
    already belong to another part of a fork.
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
