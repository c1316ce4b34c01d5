"""A chat template as transformers renders it, by jinja2 alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Chat = Sequence[Mapping[str, Any]]
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
"""Special tokens where a template comes without a tokenizer."""
NOON = datetime(2031, 7, 5, 12)


class Refusal(Exception):
    """The template raised: by itself, or because it cannot handle what it got."""


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012 - Jinja reads a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


def environment() -> ImmutableSandboxedEnvironment:
    """The environment of transformers."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    sandbox.filters["tojson"] = tojson
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = NOON.strftime
    return sandbox


class Template:
    """A template, compiled once."""

    def __init__(self, source: str, tokens: Mapping[str, str] = TOKENS) -> None:
        self.source = source
        self.tokens = dict(tokens)
        self._compiled = environment().from_string(source)

    def text(
        self,
        messages: Chat,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        opened: bool = False,
        **arguments: Any,
    ) -> str:
        """What it writes; `opened`: with the generation prompt. Refusal if it raises."""
        variables = {**self.tokens, **arguments, "documents": None, "add_generation_prompt": opened}
        try:
            return self._compiled.render(
                messages=deepcopy(list(messages)), tools=deepcopy(list(tools)) if tools else None, **variables
            )
        except Exception as error:
            raise Refusal(f"{type(error).__name__}: {error}") from error

    @contextmanager
    def at(self, moment: datetime) -> Iterator[None]:
        """With `strftime_now` at that moment."""
        clock = self._compiled.environment.globals
        # A compiled template has a copy of the globals, chained to those of its environment.
        before = clock["strftime_now"]
        self._compiled.globals["strftime_now"] = moment.strftime
        try:
            yield
        finally:
            self._compiled.globals["strftime_now"] = before
