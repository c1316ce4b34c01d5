"""One recorded sequence as text: tokens in boxes, with marks, ids and logprobs below them.

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
from tito_audit.terminal.boxes import DIFFERS, shortened
from tito_audit.terminal.words import many

FINDING, TRAINED, BOTH, ASKED = "^", "=", "#", "*"
CONTEXT = 16
"""Tokens shown around every finding; twice as many at both ends of a sequence."""
LOW = math.log(0.001)
"""A sampled token less likely than this is marked."""
_GUTTER = 9
_SEAM = 6
"""Tokens shown around every edge of the loss mask."""
_GAP = 12
"""Shorter gaps are shown: the line that counts them would take as much room."""
_FAR = 2**31
_STYLES = {FINDING: DIFFERS, BOTH: DIFFERS, ASKED: "bold yellow", TRAINED: "green", " ": ""}


@dataclass(frozen=True, slots=True)
class TokenLine:
    """What is known of each token of a sequence."""

    ids: Ids
    trained: Mask | None = None
    """`[N]`; None if the sequence has no loss mask."""
    logprobs: Logprobs | None = None
    """`[N]`, NaN where none was recorded; None if the sequence has no logprobs."""

    @property
    def sampled(self) -> Mask:
        """`[N]` where a logprob should be: everywhere, unless a mask says which tokens are trained."""
        return np.ones(len(self.ids), np.bool_) if self.trained is None else self.trained


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """What is drawn of sequences, and how wide."""

    width: int = 100
    piece: Callable[[int], str] | None = None
    """The text of an id; None: show ids only."""
    control: Container[int] = frozenset()
    """Ids of control tokens, which are coloured."""
    context: int = CONTEXT
    full: bool = False
    """Whether to show every token."""
    ids: bool = False
    logprobs: bool = False
    encoding: str = "utf-8"
    """That of the stream."""


@dataclass(frozen=True, slots=True)
class DrawnLines:
    """Lines of one block: some tokens, or a gap."""

    lines: tuple[Text, ...]
    end: int
    """Position after the last token that these lines draw or leave out."""
    gap: bool = False
    """True for the line that says how many tokens are left out."""


@dataclass(frozen=True, slots=True)
class _Token:
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
    """The lines of one sequence from position `start` on; `findings` and `wanted` are token ranges.

    Unless `full`, tokens far from a finding, an end of the sequence or an edge of the loss mask are left out and
    counted; with `wanted`, all tokens far from what was asked for.
    """
    count = len(tokens.ids)
    shown = (
        _near(tokens, findings, start, options.context)
        if wanted is None
        else _around(count, wanted, options.context)
    )
    make = _maker(tokens, options, findings, wanted or ())
    room = options.width - _GUTTER - 1
    line: list[_Token] = []
    used = hidden = 0
    for position in range(start, count):
        if (not options.full or wanted is not None) and not shown[position]:
            hidden += 1
            continue
        token = make(position)
        if line and (hidden or used + token.width + 1 > room):
            yield DrawnLines(tuple(_lines(line)), line[-1].position + 1)
            line, used = [], 0
        if hidden:
            yield DrawnLines((_left_out(hidden),), position, gap=True)
            hidden = 0
        line.append(token)
        used += token.width + 1
    if line:
        at_end = not hidden and any(begin == end == count for begin, end in findings)
        yield DrawnLines(tuple(_lines(line, at_end=at_end)), line[-1].position + 1)
    if hidden:
        yield DrawnLines((_left_out(hidden),), count, gap=True)


def logprob_words(value: float) -> str:
    """A logprob in few characters: two decimals, `0` for an exact zero, `?` if it was not recorded."""
    if math.isnan(value):
        return "?"
    if value == 0:
        return "0"
    if abs(value) < 100:
        return f"{value:.2f}"
    return f"{value:.0f}" if abs(value) < 100_000 else f"{value:.1g}"


def _maker(
    tokens: TokenLine, options: DrawOptions, findings: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> Callable[[int], _Token]:
    count = len(tokens.ids)
    with_finding, wanted, sampled = _covered(count, findings), _covered(count, spans), tokens.sampled
    logprobs = tokens.logprobs if options.logprobs else None

    def make(position: int) -> _Token:
        token_id = int(tokens.ids[position])
        trained = tokens.trained is not None and bool(tokens.trained[position])
        mark = ASKED if wanted[position] else TRAINED if trained else " "
        if with_finding[position]:
            mark = BOTH if trained else FINDING
        value = float(logprobs[position]) if logprobs is not None else math.nan
        has_logprob = logprobs is not None and (bool(sampled[position]) or not math.isnan(value))
        low = has_logprob and bool(sampled[position]) and value < LOW
        words = (logprob_words(value) + ("!" if low else "")) if has_logprob else ""
        return _Token(
            position,
            shortened(options.piece(token_id), options.encoding) if options.piece is not None else str(token_id),
            mark,
            _STYLES[mark] or ("cyan" if token_id in options.control else ""),
            str(token_id) if options.ids and options.piece is not None else "",
            words,
            "bold yellow" if low or words == "?" else "" if sampled[position] else "dim",
        )

    return make


def _covered(count: int, ranges: Iterable[tuple[int, int]]) -> Mask:
    """`[N]` True inside a range. An empty range is a place between two tokens and marks the token after it."""
    covered = np.zeros(count, np.bool_)
    for start, end in ranges:
        covered[min(start, _FAR) : min(max(end, start + 1), _FAR)] = True
    return covered


def _near(tokens: TokenLine, findings: Sequence[tuple[int, int]], start: int, context: int) -> Mask:
    """`[N]` the tokens worth showing."""
    count = len(tokens.ids)
    spots = [(start, start + 2 * context), (count - 2 * context, count)]
    spots += [(begin - context, begin + context) for begin, _ in findings]
    spots += [(end - context, end + context) for _, end in findings]
    runs = trained_runs(tokens.trained) if tokens.trained is not None else []
    seam = min(_SEAM, context)
    spots += [(edge - seam, edge + seam) for run in runs for edge in run]
    shown = _spotted(count, spots)
    shown[:start] = False
    return _joined(shown, min(_GAP, context))


def _around(count: int, spans: Sequence[tuple[int, int]], context: int) -> Mask:
    """`[N]` the ends of what was asked for, with context; the middle of long ranges is left out."""
    spots = []
    for begin, end in spans:
        inside = max(context, _SEAM)
        end = max(end, begin + 1)
        spots += [(begin - context, min(begin + inside, end + context)), (max(end - inside, begin), end + context)]
    gap = min(_GAP, context)
    shown = _joined(_spotted(count, spots), gap)
    if shown[: gap + 1].any():
        shown[: int(shown.argmax())] = True
    if shown[::-1][: gap + 1].any():
        shown[count - int(shown[::-1].argmax()) :] = True
    return shown


def _spotted(count: int, spots: Iterable[tuple[int, int]]) -> Mask:
    shown = np.zeros(count, np.bool_)
    for begin, end in spots:
        shown[max(begin, 0) : max(end, 0)] = True
    return shown


def _joined(shown: Mask, gap: int) -> Mask:
    """The same, with small gaps filled."""
    for shown_at, next_at in pairwise(np.flatnonzero(shown).tolist()):
        if 1 < next_at - shown_at <= gap:
            shown[shown_at:next_at] = True
    return shown


def _lines(line: list[_Token], *, at_end: bool = False) -> Iterator[Text]:
    pieces = Text(f"{line[0].position:>{_GUTTER - 1}} ", style="dim")
    pieces.append("│")
    marks = Text(" " * (_GUTTER + 1))
    ids = Text(f"{'id':>{_GUTTER - 1}}  ", style="dim")
    logprobs = Text()
    logprobs.append(f"{'logprob':>{_GUTTER - 1}}  ", style="dim")
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


def _left_out(number: int) -> Text:
    return Text(f"{'…':>{_GUTTER - 1}} {many(number, 'token')} left out", style="dim")
