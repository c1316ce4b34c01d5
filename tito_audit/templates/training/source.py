"""The tags of a chat template with the place of each token: Jinja's own tree knows only lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_OPENS, _CLOSES = "([{", ")]}"
_BOOLEAN = ("and", "or", "not", "if", "else", ",")
_COMPARES = ("==", "!=", "<", ">", "<=", ">=", "in", "is")


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an expression."""

    start: int
    end: int
    kind: str
    """`name`, `operator`, `string`, `integer` or `float`, as Jinja says."""
    text: str


@dataclass(frozen=True, slots=True)
class Tag:
    """One `{% … %}` or `{{ … }}`."""

    start: int
    end: int
    """Where it ends, without the whitespace that its end strips."""
    line: int
    tokens: tuple[Token, ...]
    is_statement: bool

    @property
    def word(self) -> str:
        """The first word of a statement, such as `if`; "" for an expression."""
        return self.tokens[0].text if self.is_statement and self.tokens else ""


def read_tags(source: str) -> tuple[Tag, ...]:
    """Every tag of a template that Jinja can read, in order; newlines in it must be plain."""
    return tuple(_tags(tuple(_placed(source))))


def _placed(source: str) -> Iterator[tuple[int, Token]]:
    """Each piece of Jinja's lexer with its line; the lexer omits whitespace that tags strip."""
    import jinja2

    lexer = jinja2.Environment(keep_trailing_newline=True, extensions=["jinja2.ext.loopcontrols"]).lexer
    at = 0
    for line, kind, text in lexer.tokeniter(source, None):
        start = source.index(text, at)
        at = start + len(text)
        yield line, Token(start, at, kind, text)


def _tags(pieces: Sequence[tuple[int, Token]]) -> Iterator[Tag]:
    inside: list[Token] = []
    begun: tuple[int, Token] | None = None
    for line, piece in pieces:
        if piece.kind in ("block_begin", "variable_begin"):
            begun, inside = (line, piece), []
        elif piece.kind in ("block_end", "variable_end") and begun is not None:
            end = piece.start + len(piece.text.rstrip())
            yield Tag(begun[1].start, end, begun[0], tuple(inside), piece.kind == "block_end")
            begun = None
        elif begun is not None and piece.kind != "whitespace":
            inside.append(piece)


def depths(tokens: Sequence[Token]) -> list[int]:
    """How many brackets are open around each token; a bracket itself counts as outside."""
    found, depth = [], 0
    for token in tokens:
        closes = token.kind == "operator" and token.text in _CLOSES
        depth -= closes
        found.append(depth)
        depth += token.kind == "operator" and token.text in _OPENS
    return found


def conditions(tag: Tag) -> list[tuple[Token, ...]]:
    """Everything boolean in a tag: whole conditions and their parts; the longer first."""
    tokens = tag.tokens
    found: dict[tuple[int, int], tuple[Token, ...]] = {}
    if tag.word in ("if", "elif"):
        tokens = tokens[1:]
        _add(found, tokens)
    elif tag.word == "set":
        after = next((i for i, token in enumerate(tokens) if token.text == "="), len(tokens))
        tokens = tokens[after + 1 :]
    elif tag.word not in ("", "for"):
        return []
    for run in _runs(tokens, truths=tag.word in ("if", "elif")):
        _add(found, run)
    return sorted(found.values(), key=lambda run: run[0].start - run[-1].end)


def _add(found: dict[tuple[int, int], tuple[Token, ...]], run: Sequence[Token]) -> None:
    if run:
        found[run[0].start, run[-1].end] = tuple(run)


def _runs(tokens: Sequence[Token], *, truths: bool) -> Iterator[tuple[Token, ...]]:
    """The parts of an expression that are conditions; `truths`: if the whole of it is one."""
    levels = depths(tokens)
    cuts = [i for i in range(len(tokens)) if levels[i] == 0 and _divides(tokens, i)]
    for begin, end in zip([-1, *cuts], [*cuts, len(tokens)], strict=True):
        run = tuple(tokens[begin + 1 : end])
        around = {tokens[i].text for i in (begin, end) if 0 <= i < len(tokens)}
        boolean = bool(around & {"and", "or", "not"}) or (begin >= 0 and tokens[begin].text == "if")
        compares = any(one.text in _COMPARES for one, level in zip(run, depths(run), strict=True) if not level)
        if run and (compares or boolean or truths):
            yield run
    yield from _ternaries(tokens, levels)
    yield from _inside(tokens, levels)


def _divides(tokens: Sequence[Token], at: int) -> bool:
    """Whether a token stands between conditions; the `not` of `is not` and `not in` does not."""
    text = tokens[at].text
    if text == "not":
        follows = tokens[at + 1].text if at + 1 < len(tokens) else ""
        return not (follows == "in" or (at and tokens[at - 1].text == "is"))
    return tokens[at].kind in ("name", "operator") and text in _BOOLEAN


def _ternaries(tokens: Sequence[Token], levels: Sequence[int]) -> Iterator[tuple[Token, ...]]:
    """The whole condition of each `a if … else b`."""
    for i, token in enumerate(tokens):
        if token.kind == "name" and token.text == "if" and levels[i] == 0:
            ends = (j for j in range(i + 1, len(tokens)) if levels[j] == 0 and tokens[j].text in ("else", ","))
            yield tuple(tokens[i + 1 : next(ends, len(tokens))])


def _inside(tokens: Sequence[Token], levels: Sequence[int]) -> Iterator[tuple[Token, ...]]:
    """The conditions within brackets."""
    begin: int | None = None
    for i, token in enumerate(tokens):
        if levels[i]:
            continue
        if token.kind == "operator" and token.text in _CLOSES and begin is not None:
            yield from _runs(tokens[begin + 1 : i], truths=False)
            begin = None
        elif token.kind == "operator" and token.text in _OPENS:
            begin = i
