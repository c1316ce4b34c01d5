"""Parsers by name, and those that fit a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tito_audit.parser import Parser, Reads
from tito_audit.unknown import unknown

_WORDS = {Reads.TOOLS: ("tool", "--tool-parser"), Reads.REASONING: ("reasoning", "--reasoning-parser")}


@dataclass(frozen=True, slots=True)
class Guess:
    """The parser that fits a chat template, if exactly one does."""

    parser: Parser | None
    line: str
    """For the user: what was chosen, or why nothing was."""


def named(parsers: Sequence[Parser], name: str, reads: Reads) -> Parser:
    """The parser with a name or alias; SetupError with similar names if there is none."""
    names = {key: parser for parser in parsers if reads & parser.reads for key in (parser.name, *parser.aliases)}
    if name in names:
        return names[name]
    word, option = _WORDS[reads]
    raise unknown(f"{word} parser", name, sorted(names), flag=option, listed_by="tito-audit list parsers")


def guessed(parsers: Sequence[Parser], template: str | None, reads: Reads) -> Guess:
    """The only parser whose texts a chat template contains; none if several fit."""
    word, option = _WORDS[reads]
    fitting = [
        parser
        for parser in parsers
        if reads & parser.reads and parser.templates and all(text in (template or "") for text in parser.templates)
    ]
    if len(fitting) == 1:
        return Guess(
            fitting[0], f"{word} parser: {fitting[0].name}, as the chat template suggests ({option} NAME)"
        )
    if not fitting:
        return Guess(None, f"{word} parser: none; the chat template suggests none ({option} NAME)")
    names = " or ".join(parser.name for parser in fitting)
    return Guess(None, f"{word} parser: none; the chat template suggests {names}: choose with {option} NAME")
