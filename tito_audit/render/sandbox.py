"""The Jinja environment that chat templates expect, with resource limits.

It provides what transformers does: trimmed blocks, `{% break %}` and `{% continue %}`, `{% generation %}`,
`tojson` without HTML escapes, `raise_exception`, `strftime_now`. Chat templates come from strangers, so it is
Jinja's immutable sandbox, and everything that may make a value much larger than its inputs asks the Budget first.
This module imports jinja2, so it is imported late.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import GeneratorType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from markupsafe import Markup

from tito_audit.render.globals import GENERATION, raise_exception, strftime_now, to_json
from tito_audit.render.limits import Budget, LimitReached, length, measure

_DICT_ATTRIBUTES = frozenset(dir(dict))
"""Attributes that every dict has."""
_TEXT_METHODS = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}
_LOOP_ATTRIBUTES = frozenset(("depth", "first", "index", "index0", "last", "length", "revindex", "revindex0"))
"""Harmless attributes of texts and of `loop`; Jinja must wrap `format` and `format_map`."""
_PADDING = frozenset(("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes", "indent", "batch", "slice"))
"""Filters and methods that pad to a width."""
_ESCAPING = frozenset(("e", "escape", "forceescape", "urlencode", "urlize"))
"""Filters that make a text up to six times longer."""
_TEXTS = frozenset((str, bytes, Markup))
_WIDE_FIELD = re.compile(r"\d{7}")
_NESTED_FIELD = re.compile(r"\*|\{[^{}]*\{")
_MAX_BITS = 100_000


class _GenerationTag(Extension):
    """`{% generation %}` … `{% endgeneration %}`: writes its content in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Macro) -> str:
        text = str(caller())
        return f"{GENERATION[0]}{text}{GENERATION[1]}" if self.environment.marks_generation else text  # type: ignore[attr-defined]


class _Generator(CodeGenerator):
    """Compiles `a ~ b`, lists, dicts and tuples to calls of the environment, which check the budget."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self.write("environment.check_container(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("environment.check_container(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        self.write("environment.check_container(")
        super().visit_Tuple(node, frame)
        self.write(")")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """An environment for one template; each rendering gets a new `budget`."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, budget: Budget) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        self.budget = budget
        self.marks_generation = False
        """Whether to put what `{% generation %}` writes between the marks of `GENERATION`."""
        self.filters["tojson"] = to_json
        self.filters = {name: self._limit_filter(name, function) for name, function in self.filters.items()}
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]

    def _limit_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that checks the budget before and after."""
        leading = 1 if hasattr(function, "jinja_pass_arg") else 0

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if name in _GROWING:
                args = tuple(map(self._list_generator, args))
                self.budget.spend(_estimate_size(name, args[leading], (*args[leading + 1 :], *kwargs.values())))
            return self.check_result(function(*args, **kwargs))

        vars(guarded).update(getattr(function, "__dict__", {}))
        return guarded

    def _list_generator(self, value: Any) -> Any:
        """A generator as a list, which can be measured before use; any other value unchanged."""
        return self.budget.check_container(list(value)) if isinstance(value, GeneratorType) else value

    def getattr(self, obj: Any, attribute: str) -> Any | Undefined:
        """What Jinja's sandbox returns for `obj.attribute`, with shortcuts for frequent cases."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if (kind is str and attribute in _TEXT_METHODS) or (kind is LoopContext and attribute in _LOOP_ATTRIBUTES):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method for a template, within the budget."""
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if name == "join":
            args = tuple(map(__self._list_generator, args))
        __self.budget.check_container(args)
        if kwargs:
            __self.budget.check_container(kwargs)
        if name in _GROWING and isinstance(owner, str | bytes | int):
            __self.budget.spend(_estimate_size(name, owner, (*args, *kwargs.values())))
        return __self.check_result(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The result of an operator, within the budget."""
        if operator == "+":
            self.budget.spend(length(left) + length(right))
        elif operator == "%":
            if isinstance(left, str | bytes):
                self.budget.spend(_estimate_size("format", left, right if isinstance(right, tuple) else (right,)))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * right
            if bits > _MAX_BITS and abs(left) > 1:
                raise LimitReached(f"the template makes a number of {bits:,} bits")
        elif operator == "*":
            self.budget.spend(max(length(left) * _positive_int(right), length(right) * _positive_int(left)))
        return self.budget.check_container(self.binop_table[operator](left, right))

    def check_container(self, value: Any) -> Any:
        """A list, tuple or dict literal; LimitReached if it is too large."""
        return self.budget.check_container(value)

    def check_result(self, value: Any) -> Any:
        """What a filter or a call returned; LimitReached if it is too large."""
        if type(value) in _TEXTS:
            self.budget.spend(len(value))
            return value
        return self.budget.check_container(value)

    def join_texts(self, parts: tuple[Any, ...]) -> str:
        """`a ~ b ~ c` as one text."""
        texts = [str(part) for part in parts]
        self.budget.spend(sum(map(len, texts)))
        return "".join(texts)

    def concat(self, pieces: Any) -> str:
        """The output of a macro, a `{% set %}` block or a call block as one text."""
        pieces = list(pieces)
        self.budget.spend(sum(map(len, pieces)))
        return "".join(pieces)


_GROWING = _PADDING | _ESCAPING | {"format", "format_map", "join", "replace", "tojson", "translate", "wordwrap"}
"""Filters and methods that can make a value much larger than what they are given."""


def _estimate_size(name: str, value: Any, arguments: Sequence[Any]) -> int:
    """An upper bound of the characters or elements that a filter or method makes of a value."""
    size, widest = length(value), max(map(_positive_int, arguments), default=0)
    if name in _ESCAPING:
        return 6 * _text_length(value)
    if name == "tojson":
        size, deep = measure(value)
        return size * (1 + deep * max(widest, *(len(text) for text in arguments if isinstance(text, str)), 0) // 4)
    if name == "join":  # the items, or what is put between them
        other = arguments[0] if arguments else ""
        other = other if length(other) else str(other)
        return _text_length(value) + _text_length(other) + size * length(other)
    longest = max(map(_text_length, arguments), default=0)
    if name in _PADDING:
        lines = sum(map(value.count, "\n\t")) if isinstance(value, str) else size
        return size + (2 + lines) * max(widest, longest)
    if name == "replace":
        text: Any = value if isinstance(value, str | bytes) else str(value)
        old, new = (*arguments, "", "")[:2]
        return len(text) + (text.count(old) if isinstance(old, type(text)) else len(text)) * length(new)
    if name in ("translate", "wordwrap"):
        return _text_length(value) * (1 + longest)
    pattern = str(value)
    if _WIDE_FIELD.search(pattern):
        raise LimitReached("the template formats a value with a width past 1,000,000")
    longest = max(longest, widest if _NESTED_FIELD.search(pattern) else 0, 32)
    return len(pattern) + (pattern.count("%") + pattern.count("{")) * longest


def _positive_int(value: object) -> int:
    return max(value, 0) if type(value) is int else 0


def _text_length(value: object) -> int:
    """Characters of a text, or that it takes to write anything else."""
    return len(value) if isinstance(value, str | bytes) else measure(value)[0]


class _Dict:
    """`dict` for templates: makes dicts, but is no class with attributes to explore."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """`namespace` for templates: holds no names that start with an underscore."""

    # Positional only, so a template may have an attribute called `self`.
    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:  # its attributes may be namespaces too, without end
        return "<Namespace>"


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace takes no attribute that starts with an underscore: {name!r}"
        )
