"""A parser: what a model sampled, read as reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import Any, Protocol

from tito_audit.record.message import ToolSpec


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One tool call as it was sampled."""

    name: str
    arguments: str
    """The JSON text exactly as sampled; rewritten only where the syntax is not JSON (pythonic)."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """An answer as a client gets it. What does not parse stays in `content`, unchanged."""

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ParsedCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What one more piece of an answer adds."""

    content: str = ""
    reasoning: str = ""
    call: int | None = None
    """The tool call, counted from 0, that `name` and `arguments` belong to."""
    name: str | None = None
    """Only in the first delta of a call."""
    arguments: str = ""


class ParserRun(Protocol):
    """Parses one answer. However the text is cut into pieces, the deltas add up to the same `Parsed`."""

    def feed(self, text: str) -> Sequence[Delta]:
        """What the next piece of text adds; text that may still become something else is held back."""
        ...

    def close(self) -> Sequence[Delta]:
        """What was still held back when the answer ended."""
        ...


class Reads(Flag):
    """What a parser takes out of an answer."""

    REASONING = auto()
    TOOLS = auto()


@dataclass(frozen=True, slots=True)
class ParseOptions:
    """What a parser may know about the call."""

    tools: Sequence[ToolSpec] = ()
    """Tools of the request; without tools no call is parsed."""
    prompt_end: str = ""
    """The end of the prompt as text: a generation prompt may have opened the reasoning."""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallForm:
    """How the templates of a family write one call, for a grammar that forces calls."""

    begin: str
    """The text before the arguments, with NAME for the name of the function."""
    end: str
    separator: str | None
    """The text between two calls; None: there is one call only."""
    content: str = "json_schema"
    """The form of the arguments, as structural tags of xgrammar name it."""


@dataclass(frozen=True, slots=True)
class Parser:
    """One family's syntax; each file of `parsers/` defines one.

    Its text is the answer decoded with special tokens shown, without the stop token that ended it. Parsing never
    changes what is stored.
    """

    name: str
    """As in `--tool-parser NAME`, `--reasoning-parser NAME`; vLLM's names where it has the same."""
    title: str
    reads: Reads
    start: Callable[[ParseOptions], ParserRun]
    aliases: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    """Texts that every chat template of this family contains, to guess the parser for a tokenizer."""
    call_form: CallForm | None = None
    """None: no grammar can force its calls, because control tokens are part of its syntax, for example."""
    reasoning_tags: tuple[str, str] | None = None
    """The texts around reasoning that comes first in an answer."""
