"""The changes of one sequence as lines: old tokens above new ones, with a few unchanged ones around them.

    at  token   id  mask  logprob
   190  │·it│  310     1  -0.2500
-  191  │·and│ 306     1  -0.7500
+  191  │·an│  274     1  -1.5000
+  192  │d│     67     1  -0.1250
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from tito_audit.cli._regions import Columns, Region, changed_regions
from tito_audit.terminal.boxes import shortened
from tito_audit.terminal.words import many

_CONTEXT = 3
"""How many unchanged tokens are shown before and after a change."""
_HEAD, _TAIL = 5, 2
"""How many tokens are shown at each end of a long run."""
_PLACES = 12
"""How many changes of a sequence are shown."""
_STYLES = {"-": "red", "+": "green", " ": "dim"}


@dataclass(frozen=True, slots=True)
class _Line:
    """One token, or, without cells, `left_out` tokens that are not shown."""

    sign: str
    cells: tuple[str, ...] = ()
    left_out: int = 0


@dataclass(slots=True)
class Changes:
    """Draws the changes of one row; a change that later prompts repeat is drawn once."""

    piece: Callable[[int], str] | None
    """The text of an id; None: only ids are shown."""
    _drawn: set[tuple[object, ...]] = field(default_factory=set)

    def lines(self, title: str, old: Columns, new: Columns) -> Iterator[Text]:
        """A title with both lengths, then the changes; no lines if there are none."""
        regions = changed_regions(old, new)
        if not regions:
            return
        fresh = [region for region in regions if _mark(region, old, new) not in self._drawn]
        self._drawn.update(_mark(region, old, new) for region in fresh)
        repeated = len(regions) - len(fresh)
        again = f" · {repeated:,} change{'s' if repeated > 1 else ''} as above" if repeated else ""
        yield Text(f"  {title} · {extent(old)} → {extent(new)}{again}", style="bold")
        yield from _table(list(self._tokens(fresh[:_PLACES], old, new)), self.piece is not None)
        if len(fresh) > _PLACES:
            yield Text(f"    … {len(fresh) - _PLACES:,} more changes", style="dim")

    def _tokens(self, regions: Sequence[Region], old: Columns, new: Columns) -> Iterator[_Line]:
        """Every change with the tokens around it, each of them once."""
        at = 0
        for number, region in enumerate(regions):
            start = max(region.new_start - _CONTEXT, at)
            if number and start > at:
                yield _Line(" ")
            yield from self._run(" ", new, start, region.new_start)
            yield from self._run("-", old, region.old_start, region.old_end)
            yield from self._run("+", new, region.new_start, region.new_end)
            after = regions[number + 1].new_start if number + 1 < len(regions) else len(new.ids)
            at = min(region.new_end + _CONTEXT, after)
            yield from self._run(" ", new, region.new_end, at)

    def _run(self, sign: str, side: Columns, start: int, end: int) -> Iterator[_Line]:
        """The tokens of one run, without the middle of a long one."""
        hidden = end - start - _HEAD - _TAIL
        if hidden <= 1:
            yield from (_Line(sign, self._cells(side, position)) for position in range(start, end))
            return
        yield from self._run(sign, side, start, start + _HEAD)
        yield _Line(sign, left_out=hidden)
        yield from self._run(sign, side, end - _TAIL, end)

    def _cells(self, side: Columns, at: int) -> tuple[str, ...]:
        token = int(side.ids[at])
        mask = "" if side.loss_mask is None else str(int(side.loss_mask[at]))
        logprob = "" if side.logprobs is None else _number(float(side.logprobs[at]))
        text = "" if self.piece is None else f"│{shortened(self.piece(token))}│"
        return str(at), text, str(token), mask, logprob


def extent(side: Columns) -> str:
    """`197 tokens, 54 trained`."""
    trained = "" if side.loss_mask is None else f", {int(side.loss_mask.sum()):,} trained"
    return f"{many(len(side.ids), 'token')}{trained}"


def _mark(region: Region, old: Columns, new: Columns) -> tuple[object, ...]:
    """A key that is equal for repeated changes: tokens, position, and which columns the sequence has."""
    was, now = old.ids[region.old_start : region.old_end], new.ids[region.new_start : region.new_end]
    return was.tobytes(), now.tobytes(), region.new_start, old.loss_mask is None, old.logprobs is None


def _number(value: float) -> str:
    return "null" if np.isnan(value) else f"{value:.4f}"


def _table(lines: Sequence[_Line], with_text: bool) -> Iterator[Text]:
    """The lines under one head, without columns that the sequence lacks."""
    names = ("at", "token" if with_text else "", "id", "mask", "logprob")
    full = [line.cells for line in lines if line.cells]
    widths = [max((cell_len(cells[n]) for cells in full), default=0) for n in range(len(names))]
    widths = [max(width, cell_len(name)) if width else 0 for width, name in zip(widths, names, strict=True)]
    if full:
        yield Text("      " + _row(names, widths), style="dim")
    for line in lines:
        words = _row(line.cells, widths) if line.cells else "…"
        if line.left_out:
            words += f" {line.left_out:,} more"
        yield Text(f"    {line.sign} {words}", style=_STYLES[line.sign])


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Cells in their columns: the token aligned left, numbers aligned right."""
    out = []
    for number, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        pad = " " * (width - cell_len(cell))
        if width:
            out.append(cell + pad if number == 1 else pad + cell)
    return "  ".join(out).rstrip()
