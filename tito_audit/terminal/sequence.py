"""Draws one recorded sequence: its tokens as boxes, with marks, ids and logprobs below.

         12 │Skin │ny   │·cat │<|im_end|>│
             ^^^^  ##    ====  ==========
         id  19290 3834  8251  151645
    logprob  -0.31 -7.2! -0.02 ?

The marks say everything that colours do: `^` a finding, `=` trained, `#` both, `*` asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from tito_audit.record.arrays import Ids, Logprobs, Mask
from tito_audit.record.runs import trained_runs
from tito_audit.terminal.boxes import DIFFERS, shorten
from tito_audit.terminal.words import many

FINDING, TRAINED, BOTH, ASKED = "^", "=", "#", "*"
CONTEXT = 16
"""Default of `DrawOptions.context`."""
UNLIKELY = math.log(0.001)
"""A sampled token less likely than this is marked."""
_GUTTER_WIDTH = 9
_EDGE = 6
"""Maximum tokens shown around each edge of the loss mask."""
_STYLES = {FINDING: DIFFERS, BOTH: DIFFERS, ASKED: "bold yellow", TRAINED: "green", " ": ""}


@dataclass(frozen=True, slots=True)
class TokenLine:
    """A sequence of tokens with what is recorded of each."""

    ids: Ids
    trained: Mask | None = None
    """`[N]`; None if the sequence has no loss mask."""
    logprobs: Logprobs | None = None
    """`[N]`, NaN where none was recorded; None if the sequence has no logprobs."""

    @property
    def sampled(self) -> Mask:
        """`[N]` True where a logprob is expected: at trained tokens, or at all if there is no mask."""
        return np.ones(len(self.ids), np.bool_) if self.trained is None else self.trained


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """What to draw of a sequence, and how wide."""

    width: int = 100
    piece: Callable[[int], str] | None = None
    """The text of an id; None: show ids only."""
    control: Container[int] = frozenset()
    """Ids of control tokens, which are coloured."""
    context: int = CONTEXT
    """Tokens shown around each finding; twice as many at both ends of the sequence."""
    full: bool = False
    """Whether to show every token."""
    ids: bool = False
    logprobs: bool = False
    encoding: str = "utf-8"
    """The encoding of the stream."""


@dataclass(frozen=True, slots=True)
class DrawnLines:
    """One block of lines: some tokens, or the count of tokens left out."""

    lines: tuple[Text, ...]
    end: int
    """Position after the last token that these lines draw or leave out."""
    gap: bool = False
    """Whether this is the line that counts tokens left out."""


@dataclass(frozen=True, slots=True)
class _TokenCell:
    position: int
    piece: str
    mark: str
    style: str
    token_id: str
    logprob: str
    logprob_style: str

    @property
    def width(self) -> int:
        return max(cell_len(self.piece), cell_len(self.token_id), cell_len(self.logprob))


def draw_tokens(
    tokens: TokenLine,
    options: DrawOptions,
    *,
    findings: Sequence[tuple[int, int]] = (),
    wanted: Sequence[tuple[int, int]] | None = None,
    start: int = 0,
) -> Iterator[DrawnLines]:
    """Draw a sequence from position `start` on; `findings` and `wanted` are half-open token ranges.

    Unless `full`, tokens far from a finding, an end of the sequence or an edge of the loss mask are left out and
    counted; with `wanted`, all tokens far from what was asked for.
    """
    count = len(tokens.ids)
    shown = _shown_tokens(tokens, findings, wanted, start, options.context)
    with_finding, asked_for = _covered(count, findings), _covered(count, wanted or ())
    logprobs = tokens.logprobs if options.logprobs else None
    room = options.width - _GUTTER_WIDTH - 1
    line: list[_TokenCell] = []
    used = hidden = 0
    for position in range(start, count):
        if (not options.full or wanted is not None) and not shown[position]:
            hidden += 1
            continue
        token_id, is_sampled = int(tokens.ids[position]), bool(tokens.sampled[position])
        trained = tokens.trained is not None and bool(tokens.trained[position])
        mark = ASKED if asked_for[position] else TRAINED if trained else " "
        if with_finding[position]:
            mark = BOTH if trained else FINDING
        value = float(logprobs[position]) if logprobs is not None else math.nan
        has_logprob = logprobs is not None and (is_sampled or not math.isnan(value))
        low = has_logprob and is_sampled and value < UNLIKELY
        words = (logprob_words(value) + ("!" if low else "")) if has_logprob else ""
        token = _TokenCell(
            position,
            shorten(options.piece(token_id), options.encoding) if options.piece is not None else str(token_id),
            mark,
            _STYLES[mark] or ("cyan" if token_id in options.control else ""),
            str(token_id) if options.ids and options.piece is not None else "",
            words,
            "bold yellow" if low or words == "?" else "" if is_sampled else "dim",
        )
        if line and (hidden or used + token.width + 1 > room):
            yield DrawnLines(tuple(_token_lines(line)), line[-1].position + 1)
            line, used = [], 0
        if hidden:
            yield DrawnLines((_gap_line(hidden),), position, gap=True)
            hidden = 0
        line.append(token)
        used += token.width + 1
    if line:
        at_end = not hidden and any(begin == end == count for begin, end in findings)
        yield DrawnLines(tuple(_token_lines(line, at_end=at_end)), line[-1].position + 1)
    if hidden:
        yield DrawnLines((_gap_line(hidden),), count, gap=True)


def logprob_words(value: float) -> str:
    """A logprob in few characters: two decimals, `0` for an exact zero, `?` if it was not recorded."""
    if math.isnan(value):
        return "?"
    if value == 0:
        return "0"
    if abs(value) < 100:
        return f"{value:.2f}"
    return f"{value:.0f}" if abs(value) < 100_000 else f"{value:.1g}"


def _covered(count: int, ranges: Iterable[tuple[int, int]]) -> Mask:
    """`[N]` True inside a range. An empty range, a place between two tokens, covers the token after it."""
    return _mask_of(count, ((start, max(end, start + 1)) for start, end in ranges))


def _shown_tokens(
    tokens: TokenLine,
    findings: Sequence[tuple[int, int]],
    wanted: Sequence[tuple[int, int]] | None,
    start: int,
    context: int,
) -> Mask:
    """`[N]` True for tokens near the start or the end of a wanted span; the middle of a long one is left out.

    Without `wanted`, for those near a finding, an end of the sequence or an edge of the loss mask.
    """
    count, ranges = len(tokens.ids), []
    gap = min(12, context)  # fewer tokens are not left out: the line that counts them would take as much room
    if wanted is None:
        ranges += [(start, start + 2 * context), (count - 2 * context, count)]
        ranges += [(edge - context, edge + context) for finding in findings for edge in finding]
        runs = trained_runs(tokens.trained) if tokens.trained is not None else []
        seam = min(_EDGE, context)
        ranges += [(edge - seam, edge + seam) for run in runs for edge in run]
        shown = _mask_of(count, ranges)
        shown[:start] = False
        return _fill_gaps(shown, gap)
    inside = max(context, _EDGE)
    for begin, end in wanted:
        end = max(end, begin + 1)
        ranges += [
            (begin - context, min(begin + inside, end + context)),
            (max(end - inside, begin), end + context),
        ]
    shown = _fill_gaps(_mask_of(count, ranges), gap)
    if shown[: gap + 1].any():
        shown[: int(shown.argmax())] = True
    if shown[::-1][: gap + 1].any():
        shown[count - int(shown[::-1].argmax()) :] = True
    return shown


def _mask_of(count: int, ranges: Iterable[tuple[int, int]]) -> Mask:
    """`[N]` True inside a range; ranges may reach beyond both ends."""
    mask = np.zeros(count, np.bool_)
    for start, end in ranges:
        mask[max(start, 0) : max(end, 0)] = True
    return mask


def _fill_gaps(shown: Mask, gap: int) -> Mask:
    """The mask with small gaps filled, in place."""
    for shown_at, next_at in pairwise(np.flatnonzero(shown).tolist()):
        if 1 < next_at - shown_at <= gap:
            shown[shown_at:next_at] = True
    return shown


def _token_lines(line: list[_TokenCell], *, at_end: bool = False) -> Iterator[Text]:
    """Lines of pieces, marks, ids and logprobs; `at_end` marks a finding behind the last token."""
    pieces = Text(f"{line[0].position:>{_GUTTER_WIDTH - 1}} ", style="dim")
    pieces.append("│")
    marks = Text(" " * (_GUTTER_WIDTH + 1))
    ids = Text(f"{'id':>{_GUTTER_WIDTH - 1}}  ", style="dim")
    logprobs = Text()
    logprobs.append(f"{'logprob':>{_GUTTER_WIDTH - 1}}  ", style="dim")
    for token in line:
        width = token.width
        pieces.append(token.piece, style=f"not dim {token.style}")
        pieces.append(" " * (width - cell_len(token.piece)) + "│")
        marks.append(token.mark * cell_len(token.piece), style=_STYLES[token.mark])
        marks.append(" " * (width - cell_len(token.piece) + 1))
        ids.append(token.token_id + " " * (width - len(token.token_id) + 1))
        logprobs.append(token.logprob, style=token.logprob_style)
        logprobs.append(" " * (width - len(token.logprob) + 1))
    if at_end:
        marks.append(FINDING, style=_STYLES[FINDING])
    yield pieces
    rows = (
        (marks, bool(marks.plain.strip())),
        (ids, any(token.token_id for token in line)),
        (logprobs, any(token.logprob for token in line)),
    )
    for row, has_words in rows:
        if has_words:
            row.rstrip()
            yield row


def _gap_line(number: int) -> Text:
    return Text(f"{'…':>{_GUTTER_WIDTH - 1}} {many(number, 'token')} left out", style="dim")
