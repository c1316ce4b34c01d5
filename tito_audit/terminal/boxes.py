"""The picture of one finding: the tokens of both sides, each side named by what holds it, with ids below.

    sampled      │Skin│ny│·cat│
                  4821 77  922
    next prompt  │Skinny │·cat│
                  10233    922

If both sides are the same text, tokens that begin and end together are aligned.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile

from rich.cells import cell_len
from rich.text import Text

from tito_audit.record.finding import Hit, Side
from tito_audit.terminal.encoding import written_in
from tito_audit.terminal.escape import visible

_LABEL = 13
"""Columns of the labels, `training row` being the longest."""
DIFFERS = "bold magenta"
"""The colour of tokens that differ, on both sides: neither is right or wrong by itself."""
_HEAD, _TAIL = 8, 4
"""Tokens shown at the start and end of a long side."""
_PIECE = 28
"""Maximum characters shown of one token; a run of blanks can have a thousand."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One token as it is drawn, or a placeholder for tokens left out."""

    piece: str
    token_id: str
    raw: str | None = None
    """The unescaped piece, for alignment; None for tokens left out."""

    @property
    def width(self) -> int:
        return max(cell_len(self.piece), cell_len(self.token_id))


@dataclass(frozen=True, slots=True)
class _Block:
    """Cells of both sides that cover the same text."""

    recorded: tuple[Cell, ...]
    canonical: tuple[Cell, ...]

    @property
    def width(self) -> int:
        return max(_width(self.recorded), _width(self.canonical))

    @property
    def same(self) -> bool:
        return [cell.token_id for cell in self.recorded] == [cell.token_id for cell in self.canonical]


def boxes(hit: Hit, width: int, encoding: str = "utf-8") -> Iterator[Text]:
    """The lines of the picture, at most `width` columns each; none if both sides are empty.

    The sampled side is on top; an empty side is drawn only if the other has tokens and equal tokens surround it.
    """
    sides = hit.sampled_first
    around = (
        (cells_of(hit.before, encoding), cells_of(hit.after, encoding))
        if any(side.ids or side.pieces for side in sides)
        else ((), ())
    )
    top, bottom = ((*around[0], *cells_of(side, encoding), *around[1]) if side.label else () for side in sides)
    labels = sides[0].label, sides[1].label
    room = width - _LABEL - 1
    if top and bottom:
        ends_top = list(accumulate(len(cell.raw or "") for cell in top))
        ends_bottom = list(accumulate(len(cell.raw or "") for cell in bottom))
        text = "".join(cell.raw or "" for cell in top)
        if text and text == "".join(cell.raw or "" for cell in bottom):
            cuts = sorted(set(ends_top) & set(ends_bottom))
            edges = [(bisect_right(ends_top, cut), bisect_right(ends_bottom, cut)) for cut in cuts]
        else:
            before = _common(top, bottom)
            after = _common(top[before:][::-1], bottom[before:][::-1])
            edges = [(i, i) for i in range(1, before + 1)]
            edges += [(len(top) - i, len(bottom) - i) for i in range(after, -1, -1)]
        ends = ((*start, *end) for start, end in pairwise([(0, 0), *edges]) if start != end)
        blocks = _elided([_Block(top[i:end], bottom[j:other]) for i, j, end, other in ends], encoding)
        if all(block.width < room for block in blocks):
            for line in _lines(blocks, room):
                styled = [(block, block.width, "" if block.same else f"not dim {DIFFERS}") for block in line]
                yield from _drawn(labels[0], [(block.recorded, size, style) for block, size, style in styled])
                yield from _drawn(labels[1], [(block.canonical, size, style) for block, size, style in styled])
            return
    for label, cells in zip(labels, (top, bottom), strict=True):
        if cells:
            style = f"not dim {DIFFERS}" if top and bottom else "not dim"
            for line in _lines([_Block((cell,), ()) for cell in _short(cells, encoding)], room):
                shown = tuple(block.recorded[0] for block in line)
                yield from _drawn(label, [(shown, _width(shown), style)])
                label = ""


def cells_of(side: Side, encoding: str = "utf-8") -> tuple[Cell, ...]:
    """One cell per token; without a tokenizer, ids only."""
    ids = [str(number) for number in side.ids]
    if ids and len(side.pieces) != len(ids):
        return tuple(Cell(number, "", number) for number in ids)
    ids = ids or [""] * len(side.pieces)
    pairs = zip(side.pieces, ids, strict=True)
    return tuple(Cell(shortened(piece, encoding), number, piece) for piece, number in pairs)


def shortened(piece: str, encoding: str = "utf-8") -> str:
    """A token's text made visible in an encoding; if it is long, its middle is left out."""
    if len(piece) > 4 * _PIECE:
        piece = piece[: 2 * _PIECE] + piece[-2 * _PIECE :]
    shown = written_in(visible(piece, edges=True), encoding)
    if cell_len(shown) <= _PIECE:
        return shown
    half = _PIECE // 2 - 1
    while cell_len(shown[:half]) + cell_len(shown[-half:]) >= _PIECE:  # wide characters
        half -= 1
    return written_in(f"{shown[:half]}…{shown[-half:]}", encoding)


def _common(top: tuple[Cell, ...], bottom: tuple[Cell, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(top, bottom, strict=False)))


def _elided(blocks: list[_Block], encoding: str) -> list[_Block]:
    """The blocks, with the middle of long ones and of a long sequence of blocks left out."""
    short = [_Block(_short(block.recorded, encoding), _short(block.canonical, encoding)) for block in blocks]
    if len(short) <= _HEAD + _TAIL + 1:
        return short
    middle = blocks[_HEAD:-_TAIL]
    left_out = _Block(
        _left_out(sum(len(block.recorded) for block in middle), encoding),
        _left_out(sum(len(block.canonical) for block in middle), encoding),
    )
    return [*short[:_HEAD], left_out, *short[-_TAIL:]]


def _short(cells: tuple[Cell, ...], encoding: str) -> tuple[Cell, ...]:
    hidden = len(cells) - _HEAD - _TAIL
    return cells if hidden <= 1 else (*cells[:_HEAD], *_left_out(hidden, encoding), *cells[-_TAIL:])


def _left_out(number: int, encoding: str) -> tuple[Cell, ...]:
    return (Cell(written_in(f"… {number:,} tokens …", encoding), ""),)


def _width(cells: tuple[Cell, ...]) -> int:
    return sum(cell.width for cell in cells) + max(len(cells) - 1, 0)


def _lines(blocks: list[_Block], room: int) -> Iterator[list[_Block]]:
    line: list[_Block] = []
    used = 0
    for block in blocks:
        if line and used + block.width + 1 > room:
            yield line
            line, used = [], 0
        line.append(block)
        used += block.width + 1
    if line:
        yield line


def _drawn(label: str, parts: list[tuple[tuple[Cell, ...], int, str]]) -> Iterator[Text]:
    """Two lines, pieces and ids; each part is (cells, width to fill, style)."""
    pieces = Text(f"{label:<{_LABEL}}│", style="dim")
    numbers = Text(" " * (_LABEL + 1), style="dim")
    for cells, width, style in parts:
        spare = width - _width(cells)
        for index, cell in enumerate(cells):
            wide = cell.width + (spare if index == len(cells) - 1 else 0)
            pieces.append(cell.piece + " " * (wide - cell_len(cell.piece)), style=style)
            pieces.append("│")
            numbers.append(cell.token_id + " " * (wide - cell_len(cell.token_id) + 1))
        if not cells:
            pieces.append(" " * width + "│")
            numbers.append(" " * (width + 1))
    yield pieces
    numbers.rstrip()
    if numbers.plain:
        yield numbers
