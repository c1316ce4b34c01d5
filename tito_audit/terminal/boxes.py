"""Draws one finding: the tokens of both sides as boxes with their ids below, each side under its label.

    sampled      │Skin│ny│·cat│
                  4821 77  922
    next prompt  │Skinny │·cat│
                  10233    922

Where both sides are the same text, boxes that end at the same character are aligned.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile

from rich.cells import cell_len
from rich.text import Text

from tito_audit.record.finding import Hit, Side
from tito_audit.terminal.encoding import as_encoded
from tito_audit.terminal.escape import visible

_LABEL_WIDTH = 13
"""Columns for the labels; the longest is `training row`."""
DIFFERS = "bold magenta"
"""The style of differing tokens. Both sides share it: neither is right or wrong by itself."""
_HEAD, _TAIL = 8, 4
"""Tokens shown at the start and end of a long side."""
_MAX_PIECE = 28
"""Maximum characters shown of one token; a run of blanks can have a thousand."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One token as drawn, or the placeholder for tokens left out."""

    piece: str
    token_id: str
    raw: str | None = None
    """The unescaped piece, to align by; None for the placeholder."""

    @property
    def width(self) -> int:
        return max(cell_len(self.piece), cell_len(self.token_id))


@dataclass(frozen=True, slots=True)
class _Block:
    """Cells of both sides that are drawn above each other: the same text, where both sides have the same."""

    recorded: tuple[Cell, ...]
    canonical: tuple[Cell, ...]

    @property
    def width(self) -> int:
        return max(_width_of(self.recorded), _width_of(self.canonical))

    @property
    def is_same(self) -> bool:
        return [cell.token_id for cell in self.recorded] == [cell.token_id for cell in self.canonical]


def draw_boxes(hit: Hit, width: int, encoding: str = "utf-8") -> Iterator[Text]:
    """Draw the tokens of both sides, in lines of at most `width` columns; nothing if both sides are empty.

    The sampled side is on top. An empty side is drawn only between equal tokens that surround it.
    """
    sides = hit.sampled_first
    around = (
        (cells_of(hit.before, encoding), cells_of(hit.after, encoding))
        if any(side.ids or side.pieces for side in sides)
        else ((), ())
    )
    top, bottom = ((*around[0], *cells_of(side, encoding), *around[1]) if side.label else () for side in sides)
    labels = sides[0].label, sides[1].label
    room = width - _LABEL_WIDTH - 1
    if top and bottom:
        blocks = _align_cells(top, bottom, encoding)
        if all(block.width < room for block in blocks):
            for line in _wrap_blocks(blocks, room):
                styled = [(block, block.width, "" if block.is_same else f"not dim {DIFFERS}") for block in line]
                yield from _draw_side(labels[0], [(block.recorded, size, style) for block, size, style in styled])
                yield from _draw_side(labels[1], [(block.canonical, size, style) for block, size, style in styled])
            return
    for label, cells in zip(labels, (top, bottom), strict=True):
        if cells:
            style = f"not dim {DIFFERS}" if top and bottom else "not dim"
            for line in _wrap_blocks([_Block((cell,), ()) for cell in _cut_side(cells, encoding)], room):
                shown = tuple(block.recorded[0] for block in line)
                yield from _draw_side(label, [(shown, _width_of(shown), style)])
                label = ""


def _align_cells(top: tuple[Cell, ...], bottom: tuple[Cell, ...], encoding: str) -> list[_Block]:
    """Both sides in blocks: cut wherever both have a token end, or if their texts differ, around what differs.

    The middle of long blocks is left out, and so are the middle blocks of many.
    """
    text = "".join(cell.raw or "" for cell in top)
    if text and text == "".join(cell.raw or "" for cell in bottom):
        ends_top = list(accumulate(len(cell.raw or "") for cell in top))
        ends_bottom = list(accumulate(len(cell.raw or "") for cell in bottom))
        common_ends = sorted(set(ends_top) & set(ends_bottom))
        cuts = [(bisect_right(ends_top, end), bisect_right(ends_bottom, end)) for end in common_ends]
    else:
        before = _common_prefix(top, bottom)
        after = _common_prefix(top[before:][::-1], bottom[before:][::-1])
        cuts = [(number, number) for number in range(1, before + 1)]
        cuts += [(len(top) - left, len(bottom) - left) for left in range(after, -1, -1)]
    spans = (span for span in pairwise([(0, 0), *cuts]) if span[0] != span[1])
    blocks = [_Block(top[i:top_end], bottom[j:bottom_end]) for (i, j), (top_end, bottom_end) in spans]
    short = [_Block(_cut_side(block.recorded, encoding), _cut_side(block.canonical, encoding)) for block in blocks]
    if len(short) <= _HEAD + _TAIL + 1:
        return short
    middle = blocks[_HEAD:-_TAIL]
    left_out = _Block(
        _gap_cell(sum(len(block.recorded) for block in middle), encoding),
        _gap_cell(sum(len(block.canonical) for block in middle), encoding),
    )
    return [*short[:_HEAD], left_out, *short[-_TAIL:]]


def cells_of(side: Side, encoding: str = "utf-8") -> tuple[Cell, ...]:
    """One cell per token; without a tokenizer, ids only."""
    ids = [str(number) for number in side.ids]
    if ids and len(side.pieces) != len(ids):
        return tuple(Cell(number, "", number) for number in ids)
    ids = ids or [""] * len(side.pieces)
    pairs = zip(side.pieces, ids, strict=True)
    return tuple(Cell(shorten(piece, encoding), number, piece) for piece, number in pairs)


def shorten(piece: str, encoding: str = "utf-8") -> str:
    """A token's text made visible, at most 28 columns wide: the middle of a longer one becomes `…`."""
    if len(piece) > 4 * _MAX_PIECE:
        piece = piece[: 2 * _MAX_PIECE] + piece[-2 * _MAX_PIECE :]
    shown = as_encoded(visible(piece, edges=True), encoding)
    if cell_len(shown) <= _MAX_PIECE:
        return shown
    half = _MAX_PIECE // 2 - 1
    while cell_len(shown[:half]) + cell_len(shown[-half:]) >= _MAX_PIECE:  # wide characters
        half -= 1
    return as_encoded(f"{shown[:half]}…{shown[-half:]}", encoding)


def _common_prefix(top: tuple[Cell, ...], bottom: tuple[Cell, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(top, bottom, strict=False)))


def _cut_side(cells: tuple[Cell, ...], encoding: str) -> tuple[Cell, ...]:
    hidden = len(cells) - _HEAD - _TAIL
    return cells if hidden <= 1 else (*cells[:_HEAD], *_gap_cell(hidden, encoding), *cells[-_TAIL:])


def _gap_cell(number: int, encoding: str) -> tuple[Cell, ...]:
    return (Cell(as_encoded(f"… {number:,} tokens …", encoding), ""),)


def _width_of(cells: tuple[Cell, ...]) -> int:
    return sum(cell.width for cell in cells) + max(len(cells) - 1, 0)


def _wrap_blocks(blocks: list[_Block], room: int) -> Iterator[list[_Block]]:
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


def _draw_side(label: str, parts: list[tuple[tuple[Cell, ...], int, str]]) -> Iterator[Text]:
    """The pieces of one side and, if it has ids, a line of them; each part is (cells, width to fill, style)."""
    pieces = Text(f"{label:<{_LABEL_WIDTH}}│", style="dim")
    numbers = Text(" " * (_LABEL_WIDTH + 1), style="dim")
    for cells, width, style in parts:
        spare = width - _width_of(cells)
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
