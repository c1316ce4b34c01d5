"""Single edits of a chat template that may make it keep history; `training.py` proves which of them do.

They are found with Jinja's lexer, which gives the position of each token: its syntax tree knows only lines.
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
    """Before the whitespace that a `-%}` strips."""
    line: int
    tokens: tuple[Token, ...]
    is_statement: bool

    @property
    def keyword(self) -> str:
        """The first word of a statement, such as `if`; "" for an expression."""
        return self.tokens[0].text if self.is_statement and self.tokens else ""


def read_tags(source: str) -> tuple[SourceTag, ...]:
    """Every tag of a valid template, in order; see `plain_newlines`."""
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


def bracket_depths(tokens: Sequence[Token]) -> list[int]:
    """How many brackets are open around each token; a bracket itself is outside of its pair."""
    levels, depth = [], 0
    for token in tokens:
        closes = token.kind == "operator" and token.text in _CLOSES
        depth -= closes
        levels.append(depth)
        depth += token.kind == "operator" and token.text in _OPENS
    return levels


def find_conditions(tag: SourceTag) -> list[tuple[Token, ...]]:
    """Every boolean expression in a tag, whole conditions and their parts, the longest first."""
    tokens, runs = tag.tokens, []
    if tag.keyword in ("if", "elif"):
        tokens = tokens[1:]
        runs.append(tokens)
    elif tag.keyword == "set":
        after = next((i for i, token in enumerate(tokens) if token.text == "="), len(tokens))
        tokens = tokens[after + 1 :]
    elif tag.keyword not in ("", "for"):
        return []
    runs += _split_conditions(tokens, truths=tag.keyword in ("if", "elif"))
    unique = {(run[0].start, run[-1].end): run for run in runs if run}
    return sorted(unique.values(), key=lambda run: run[0].start - run[-1].end)


def _split_conditions(tokens: Sequence[Token], *, truths: bool) -> Iterator[tuple[Token, ...]]:
    """The parts of an expression that are conditions; `truths`: the whole expression is one too."""
    levels = bracket_depths(tokens)
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
        outside = [token for token, level in zip(run, bracket_depths(run), strict=True) if not level]
        compares = any(token.text in _COMPARES for token in outside)
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
            yield from _split_conditions(tokens[opened + 1 : i], truths=False)
            opened = None
        elif token.kind == "operator" and token.text in _OPENS:
            opened = i


_CUTTING = frozenset(
    ["trim", "strip", "lstrip", "rstrip", "split", "rsplit", "partition", "rpartition", "replace"]
)
_POSITION = re.compile(r"\bloop\.|\blast\w*|_ind?e?x|index|_idx|\bns\d?\.")
_REASONING = re.compile(r"think|reason|thought|channel", re.IGNORECASE)


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
    """Text of the model's answers is no longer trimmed or split."""
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
        """What the edit does, in one line."""
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


def find_edits(source: str) -> list[TemplateEdit]:
    """Every edit worth trying, the most promising first."""
    tags = read_tags(source)
    edits: list[TemplateEdit] = []
    # Leave out a block `{% if … %}{% set … %}{% endif %}` which only cuts text
    ifs: list[int] = []
    for i, tag in enumerate(tags):
        if tag.keyword == "if":
            ifs.append(i)
        elif tag.keyword == "endif" and ifs:
            block = tags[ifs.pop() : i + 1]
            start, body = block[0].start, block[1:-1]
            only_sets = all(inner.keyword in ("set", "if", "else", "elif", "endif") for inner in body)
            only_tags = all(not source[a.end : b.start].strip() for a, b in pairwise(block))
            cuts = any(token.text in _CUTTING for inner in body for token in inner.tokens)
            if only_sets and only_tags and cuts:
                text = source[start : tag.end]
                edits.append(TemplateEdit(start, tag.end, "", EditKind.DROP_CUT, block[0].line, text))
    # Make a condition true or false
    for run in [run for tag in tags for run in find_conditions(tag)]:
        start, end = run[0].start, run[-1].end
        was, line = source[start:end], source.count("\n", 0, start) + 1
        kind = EditKind.ANY
        if _POSITION.search(was):
            kind = EditKind.BY_PLACE
        elif _REASONING.search(was):
            kind = EditKind.BY_THOUGHT
        if was not in ("true", "false"):
            edits += [TemplateEdit(start, end, new, kind, line, was) for new in ("true", "false")]
    edits += _uncut_edits(source, tags)
    unique: dict[tuple[int, int, str], TemplateEdit] = {}
    for edit in edits:
        unique.setdefault((edit.start, edit.end, edit.new), edit)
    # Where the branches for assistant messages begin and end
    answers: list[tuple[int, int]] = []
    opened: list[int | None] = []
    for tag in tags:
        if tag.keyword in ("elif", "else", "endif") and opened:
            begin = opened.pop()
            if begin is not None:
                answers.append((begin, tag.start))
        if tag.keyword in ("if", "elif", "else"):
            names_it = any(token.kind == "string" and token.text[1:-1] == "assistant" for token in tag.tokens)
            opened.append(tag.end if names_it else None)
    placed = (
        replace(edit, in_answer=any(start <= edit.start < end for start, end in answers))
        for edit in unique.values()
    )
    return sorted(placed, key=lambda edit: (not edit.in_answer, edit.kind, edit.start, -edit.end))


def _uncut_edits(source: str, tags: Sequence[SourceTag]) -> Iterator[TemplateEdit]:
    """Edits that no longer trim or split a text, in all messages or only in answers."""
    loops: list[str] = []
    for tag in tags:
        if tag.keyword == "for" and len(tag.tokens) > 1:
            loops.append(tag.tokens[1].text)
        elif tag.keyword == "endfor" and loops:
            loops.pop()
        if tag.keyword not in ("", "if", "elif", "set", "for"):
            continue
        for begin, cut, end in _find_cut_chains(tag.tokens):
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


def _find_cut_chains(tokens: Sequence[Token]) -> Iterator[tuple[int, int, int]]:
    """For each chain of cutting filters or methods: start of the text, start of the chain, end; longest first."""
    levels = bracket_depths(tokens)
    for i, token in enumerate(tokens):
        if token.text not in _CUTTING or not i or tokens[i - 1].text not in (".", "|"):
            continue
        # The first token of the expression that is cut
        begin = i - 2
        while begin >= 0:
            text, previous = tokens[begin].text, tokens[begin - 1] if begin else None
            if levels[begin] > levels[i - 1] or text in ("]", ")"):
                begin -= 1
            elif previous is not None and levels[begin] == levels[i - 1] and previous.text in (".", "|"):
                begin -= 2
            elif (
                previous is not None
                and text in ("[", "(")
                and (previous.kind == "name" or previous.text in ("]", ")"))
            ):
                begin -= 1
            else:
                break
        if begin < 0:
            continue
        # The last token of the cut, and of each cut that follows it at once
        ends: list[int] = []
        end, following = i, "."
        while following in (".", "|") and tokens[end].text in _CUTTING:
            if end + 1 < len(tokens) and tokens[end + 1].text == "(":
                end = _find_closing_bracket(levels, end + 1)
            while end + 1 < len(tokens) and tokens[end + 1].text == "[":
                end = _find_closing_bracket(levels, end + 1)
            ends.append(end)
            following = tokens[end + 1].text if end + 2 < len(tokens) else ""
            end += 2
        for end in reversed(ends):
            yield tokens[begin].start, tokens[i - 1].start, tokens[end].end


def _find_closing_bracket(levels: Sequence[int], opening: int) -> int:
    """The index of the bracket that closes the one at `opening`."""
    return next(i for i in range(opening + 1, len(levels)) if levels[i] == levels[opening])
