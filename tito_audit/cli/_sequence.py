"""One recorded sequence as a reader sees it: tokens in boxes, and beneath them what is said of each.

       12 │Skin│ny│·cat│<|im_end|>│
           ^^^^ ##  ===  =========

The marks carry everything that colours do: `^` a finding, `=` trained, `#` both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.cells import cell_len
from rich.text import Text

from tito_audit.record.arrays import Ids, Mask
from tito_audit.record.rollout import trained_runs
from tito_audit.reports._boxes import shortened

__all__ = ["BOTH", "FINDING", "TRAINED", "sequence_lines"]

FINDING, TRAINED, BOTH = "^", "=", "#"
_GUTTER = 9
_EDGE = 16
"""Tokens shown at both ends of a sequence and around every finding."""
_SEAM = 6
"""Tokens shown around every place where training begins or ends."""
_GAP = 12
"""Fewer tokens than this are not left out: the line that says so would take as much room."""
_STYLES = {FINDING: "bold red", BOTH: "bold red", TRAINED: "green", " ": ""}


@dataclass(frozen=True, slots=True)
class _Token:
    position: int
    piece: str
    mark: str

    @property
    def width(self) -> int:
        return cell_len(self.piece)


def sequence_lines(
    ids: Ids,
    piece: Callable[[int], str] | None,
    ranges: Sequence[tuple[int, int]],
    *,
    width: int,
    trained: Mask | None = None,
    start: int = 0,
    full: bool = False,
) -> Iterator[Text]:
    """The lines of one sequence from position `start` on.

    `piece` says how an id reads (None: the id itself), `ranges` are those of findings. Without `full`,
    stretches far from a finding, an end or an edge of the loss mask are left out with their count.
    """
    shown = _near(len(ids), ranges, trained, start)
    line: list[_Token] = []
    used = hidden = 0
    for position in range(start, len(ids)):
        if not full and position not in shown:
            hidden += 1
            continue
        if hidden or used > width - _GUTTER - 2:
            yield from _drawn(line)
            line, used = [], 0
        if hidden:
            yield _left_out(hidden)
            hidden = 0
        token = _Token(position, _piece(int(ids[position]), piece), _mark(position, ranges, trained))
        if line and used + token.width + 1 > width - _GUTTER - 1:
            yield from _drawn(line)
            line, used = [], 0
        line.append(token)
        used += token.width + 1
    yield from _drawn(line)
    if hidden:
        yield _left_out(hidden)


def _near(count: int, ranges: Sequence[tuple[int, int]], trained: Mask | None, start: int) -> set[int]:
    """Positions worth showing."""
    spots = [(start, start + 2 * _EDGE), (count - 2 * _EDGE, count)]
    spots += [(begin - _EDGE, begin + _EDGE) for begin, _ in ranges]
    spots += [(end - _EDGE, end + _EDGE) for _, end in ranges]
    runs = trained_runs(trained) if trained is not None else []
    spots += [(edge - _SEAM, edge + _SEAM) for run in runs for edge in run]
    shown = {position for begin, end in spots for position in range(max(begin, start), min(max(end, 0), count))}
    for one, other in pairwise(sorted(shown)):
        if other - one <= _GAP:
            shown.update(range(one, other))
    return shown


def _piece(token_id: int, piece: Callable[[int], str] | None) -> str:
    return shortened(piece(token_id)) if piece is not None else str(token_id)


def _mark(position: int, ranges: Sequence[tuple[int, int]], trained: Mask | None) -> str:
    # A range of no tokens marks the place between two: the token after it carries the mark.
    found = any(start <= position < max(end, start + 1) for start, end in ranges)
    if trained is not None and trained[position]:
        return BOTH if found else TRAINED
    return FINDING if found else " "


def _drawn(line: list[_Token]) -> Iterator[Text]:
    if not line:
        return
    tokens = Text(f"{line[0].position:>{_GUTTER - 1}} ", style="dim")
    tokens.append("│")
    marks = Text(" " * (_GUTTER + 1))
    for token in line:
        tokens.append(token.piece, style="not dim " + _STYLES[token.mark])
        tokens.append("│")
        marks.append(token.mark * token.width + " ", style=_STYLES[token.mark])
    yield tokens
    marks.rstrip()
    if marks.plain.strip():
        yield marks


def _left_out(number: int) -> Text:
    return Text(f"{'…':>{_GUTTER - 1}} {number:,} tokens left out", style="dim")
