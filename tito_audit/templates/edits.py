"""Edits of single places in a chat template that may make it keep history; which of them do is proved later.

They are found by its tags with the place of each token: Jinja's own tree knows only lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise

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
class SourceTag:
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


def read_tags(source: str) -> tuple[SourceTag, ...]:
    """Every tag of a template that Jinja can read, in order; newlines in it must be plain."""
    import jinja2

    lexer = jinja2.Environment(keep_trailing_newline=True, extensions=["jinja2.ext.loopcontrols"]).lexer
    tags: list[SourceTag] = []
    inside: list[Token] = []
    begun: tuple[int, int] | None = None
    at = 0
    for line, kind, text in lexer.tokeniter(source, None):
        start = source.index(text, at)  # the lexer omits whitespace that tags strip
        at = start + len(text)
        if kind in ("block_begin", "variable_begin"):
            begun, inside = (start, line), []
        elif kind in ("block_end", "variable_end") and begun is not None:
            begin, first_line = begun
            tags.append(
                SourceTag(begin, start + len(text.rstrip()), first_line, tuple(inside), kind == "block_end")
            )
            begun = None
        elif begun is not None and kind != "whitespace":
            inside.append(Token(start, at, kind, text))
    return tuple(tags)


def depths(tokens: Sequence[Token]) -> list[int]:
    """How many brackets are open around each token; a bracket itself counts as outside."""
    levels, depth = [], 0
    for token in tokens:
        closes = token.kind == "operator" and token.text in _CLOSES
        depth -= closes
        levels.append(depth)
        depth += token.kind == "operator" and token.text in _OPENS
    return levels


def conditions(tag: SourceTag) -> list[tuple[Token, ...]]:
    """Everything boolean in a tag: whole conditions and their parts; the longer first."""
    tokens, runs = tag.tokens, []
    if tag.word in ("if", "elif"):
        tokens = tokens[1:]
        runs.append(tokens)
    elif tag.word == "set":
        after = next((i for i, token in enumerate(tokens) if token.text == "="), len(tokens))
        tokens = tokens[after + 1 :]
    elif tag.word not in ("", "for"):
        return []
    runs += _runs(tokens, truths=tag.word in ("if", "elif"))
    unique = {(run[0].start, run[-1].end): run for run in runs if run}
    return sorted(unique.values(), key=lambda run: run[0].start - run[-1].end)


def _runs(tokens: Sequence[Token], *, truths: bool) -> Iterator[tuple[Token, ...]]:
    """The parts of an expression that are conditions; `truths`: if the whole of it is one."""
    levels = depths(tokens)
    cuts: list[int] = []
    for i, token in enumerate(tokens):
        follows = tokens[i + 1].text if i + 1 < len(tokens) else ""
        # The `not` of `is not` and `not in` does not stand between conditions.
        part = token.text == "not" and (follows == "in" or (i > 0 and tokens[i - 1].text == "is"))
        if levels[i] == 0 and token.kind in ("name", "operator") and token.text in _BOOLEAN and not part:
            cuts.append(i)
    for begin, end in zip([-1, *cuts], [*cuts, len(tokens)], strict=True):
        run = tuple(tokens[begin + 1 : end])
        around = {tokens[i].text for i in (begin, end) if 0 <= i < len(tokens)}
        boolean = bool(around & {"and", "or", "not"}) or (begin >= 0 and tokens[begin].text == "if")
        compares = any(token.text in _COMPARES for token, level in zip(run, depths(run), strict=True) if not level)
        if run and (compares or boolean or truths):
            yield run
    # The whole condition of each `a if … else b`
    for i, token in enumerate(tokens):
        if token.kind == "name" and token.text == "if" and levels[i] == 0:
            ends = (j for j in range(i + 1, len(tokens)) if levels[j] == 0 and tokens[j].text in ("else", ","))
            yield tuple(tokens[i + 1 : next(ends, len(tokens))])
    # The conditions within brackets
    opened: int | None = None
    for i, token in enumerate(tokens):
        if levels[i]:
            continue
        if token.kind == "operator" and token.text in _CLOSES and opened is not None:
            yield from _runs(tokens[opened + 1 : i], truths=False)
            opened = None
        elif token.kind == "operator" and token.text in _OPENS:
            opened = i


_CUTS = frozenset(("trim", "strip", "lstrip", "rstrip", "split", "rsplit", "partition", "rpartition", "replace"))
_PLACES = re.compile(r"\bloop\.|\blast\w*|_ind?e?x|index|_idx|\bns\d?\.")
_THOUGHTS = re.compile(r"think|reason|thought|channel", re.IGNORECASE)


class EditKind(IntEnum):
    """What an edit does; the kinds most likely to be enough first."""

    DROP_CUT = 0
    """A block that only cuts text is left out."""
    BY_PLACE = 1
    """A condition on a message's position becomes true or false."""
    BY_THOUGHT = 2
    """A condition on reasoning becomes true or false."""
    UNCUT = 3
    """Text is no longer trimmed or split."""
    UNCUT_ANSWERS = 4
    """The same for answers of the model alone."""
    ANY = 5
    """Another condition becomes true or false."""


@dataclass(frozen=True, slots=True)
class TemplateEdit:
    """One place in a template, and its replacement."""

    start: int
    end: int
    new: str
    kind: EditKind
    line: int
    was: str
    in_answer: bool = False
    """Whether it is where the template writes answers."""

    @property
    def does(self) -> str:
        """What it does, in one line."""
        was = " ".join(self.was.split())
        if self.kind is EditKind.DROP_CUT:
            return f"leaves out {was}"
        if self.kind in (EditKind.UNCUT, EditKind.UNCUT_ANSWERS):
            return f"writes {self.new} in place of {was}"
        return f"takes {was} for {self.new}"

    def overlaps(self, other: TemplateEdit) -> bool:
        """Whether both change the same text."""
        return self.start < other.end and other.start < self.end


def plain_newlines(source: str) -> str:
    """The template with newlines normalized as Jinja does."""
    return source.replace("\r\n", "\n").replace("\r", "\n")


def apply_edits(source: str, edits: Sequence[TemplateEdit]) -> str:
    """The template with these edits, none of which overlap."""
    for edit in sorted(edits, key=lambda each: each.start, reverse=True):
        source = source[: edit.start] + edit.new + source[edit.end :]
    return source


def possible_edits(source: str) -> list[TemplateEdit]:
    """Every edit worth a try, the most promising first."""
    tags = read_tags(source)
    edits = [*_dropped(source, tags), *_conditions(source, tags), *_cuts(source, tags)]
    unique: dict[tuple[int, int, str], TemplateEdit] = {}
    for edit in edits:
        unique.setdefault((edit.start, edit.end, edit.new), edit)
    # Where the branches for assistant messages begin and end
    answers: list[tuple[int, int]] = []
    opened: list[int | None] = []
    for tag in tags:
        if tag.word in ("elif", "else", "endif") and opened:
            begin = opened.pop()
            if begin is not None:
                answers.append((begin, tag.start))
        if tag.word in ("if", "elif", "else"):
            names_it = any(token.kind == "string" and token.text[1:-1] == "assistant" for token in tag.tokens)
            opened.append(tag.end if names_it else None)
    placed = (
        replace(edit, in_answer=any(start <= edit.start < end for start, end in answers))
        for edit in unique.values()
    )
    return sorted(placed, key=lambda edit: (not edit.in_answer, edit.kind, edit.start, -edit.end))


def _dropped(source: str, tags: Sequence[SourceTag]) -> Iterator[TemplateEdit]:
    """Blocks `{% if … %}{% set … %}{% endif %}` that cut text and do nothing else."""
    opened: list[int] = []
    for i, tag in enumerate(tags):
        if tag.word == "if":
            opened.append(i)
        elif tag.word == "endif" and opened:
            begin = opened.pop()
            body, text = tags[begin + 1 : i], source[tags[begin].start : tag.end]
            only_sets = all(inner.word in ("set", "if", "else", "elif", "endif") for inner in body)
            between = all(not source[a.end : b.start].strip() for a, b in pairwise(tags[begin : i + 1]))
            if only_sets and between and any(any(token.text in _CUTS for token in inner.tokens) for inner in body):
                yield TemplateEdit(tags[begin].start, tag.end, "", EditKind.DROP_CUT, tags[begin].line, text)


def _conditions(source: str, tags: Sequence[SourceTag]) -> Iterator[TemplateEdit]:
    for tag in tags:
        for run in conditions(tag):
            start, end = run[0].start, run[-1].end
            was = source[start:end]
            if was in ("true", "false"):
                continue
            kind = EditKind.ANY
            if _PLACES.search(was):
                kind = EditKind.BY_PLACE
            elif _THOUGHTS.search(was):
                kind = EditKind.BY_THOUGHT
            for new in ("true", "false"):
                yield TemplateEdit(start, end, new, kind, source.count("\n", 0, start) + 1, was)


def _cuts(source: str, tags: Sequence[SourceTag]) -> Iterator[TemplateEdit]:
    loops: list[str] = []
    for tag in tags:
        if tag.word == "for" and len(tag.tokens) > 1:
            loops.append(tag.tokens[1].text)
        elif tag.word == "endfor" and loops:
            loops.pop()
        if tag.word not in ("", "if", "elif", "set", "for"):
            continue
        for begin, cut, end in _cut_chains(tag.tokens):
            base, whole = source[begin:cut].rstrip(), source[begin:end]
            line = source.count("\n", 0, begin) + 1
            texts = [base]  # stripped on the left only, if it was stripped at both ends
            if re.fullmatch(r"\.strip\(.*\)", source[cut:end]):
                texts.insert(0, base + source[cut:end].replace(".strip(", ".lstrip(", 1))
            elif re.fullmatch(r"\s*\|\s*trim", source[cut:end]):
                texts.insert(0, f"{base}.lstrip()")
            for new in texts:
                yield TemplateEdit(begin, end, new, EditKind.UNCUT, line, whole)
                if loops:
                    of_answers = f"({new} if {loops[0]}['role'] == 'assistant' else {whole})"
                    yield TemplateEdit(begin, end, of_answers, EditKind.UNCUT_ANSWERS, line, whole)


def _cut_chains(tokens: Sequence[Token]) -> Iterator[tuple[int, int, int]]:
    """Where a text begins that is cut, where its cutting begins, and where that ends, the longest first."""
    levels = depths(tokens)
    for i, token in enumerate(tokens):
        if token.text not in _CUTS or not i or tokens[i - 1].text not in (".", "|"):
            continue
        begin = _base(tokens, levels, i - 1)
        if begin is None:
            continue
        # The last token of the cut, and of each cut that follows it at once
        ends: list[int] = []
        end, following = i, "."
        while following in (".", "|") and tokens[end].text in _CUTS:
            if end + 1 < len(tokens) and tokens[end + 1].text == "(":
                end = _closing(levels, end + 1)
            while end + 1 < len(tokens) and tokens[end + 1].text == "[":
                end = _closing(levels, end + 1)
            ends.append(end)
            following = tokens[end + 1].text if end + 2 < len(tokens) else ""
            end += 2
        for end in reversed(ends):
            yield tokens[begin].start, tokens[i - 1].start, tokens[end].end


def _base(tokens: Sequence[Token], levels: Sequence[int], before: int) -> int | None:
    """The index of the token that the text before a cut begins with."""
    level, i = levels[before], before - 1
    while i >= 0:
        if levels[i] > level or tokens[i].text in ("]", ")"):
            i -= 1
            continue
        follows_name = i > 0 and (tokens[i - 1].text in (".", "|"))
        if levels[i] == level and follows_name:
            i -= 2
            continue
        opens = tokens[i].text in ("[", "(")
        if opens and i > 0 and (tokens[i - 1].kind == "name" or tokens[i - 1].text in ("]", ")")):
            i -= 1
            continue
        return i
    return None


def _closing(levels: Sequence[int], opening: int) -> int:
    """The index of the bracket that closes one."""
    return next(i for i in range(opening + 1, len(levels)) if levels[i] == levels[opening])
