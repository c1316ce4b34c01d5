"""The Jinja environment that chat templates expect, with resource limits.

It has what transformers provides: trimmed blocks, `{% break %}` and `{% continue %}`, `{% generation %}`, `tojson`
without HTML escapes, `raise_exception`, `strftime_now`. Chat templates come from strangers: besides running in
Jinja's own immutable sandbox, everything that makes a value much larger than its inputs asks the Budget first.
This module imports jinja2 and is itself imported late.
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
from tito_audit.render.limits import Budget, LimitReached, length, written_size

_OF_DICTS = frozenset(dir(dict))
"""Attributes of every dict, whatever it holds."""
_OF_TEXTS = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}
_OF_LOOPS = frozenset(("depth", "first", "index", "index0", "last", "length", "revindex", "revindex0"))
"""Harmless attributes of texts and of `loop`; Jinja wraps those that format."""
_WIDE = frozenset(("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes", "indent", "batch", "slice"))
"""Filters and methods that fill up to a width."""
_LONGER = frozenset(("e", "escape", "forceescape", "urlencode", "urlize"))
"""Filters that make a text up to six times longer."""
_TEXTS = frozenset((str, bytes, Markup))
_WIDE_FIELD = re.compile(r"\d{7}")
_NESTED_FIELD = re.compile(r"\*|\{[^{}]*\{")
_MOST_BITS = 100_000


class _GenerationTag(Extension):
    """`{% generation %}` … `{% endgeneration %}`: writes its content, in its own scope."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Macro) -> str:
        text = str(caller())
        return f"{GENERATION[0]}{text}{GENERATION[1]}" if self.environment.marks_generation else text  # type: ignore[attr-defined]


class _Generator(CodeGenerator):
    """Compiles `a ~ b` to a call of the environment, which checks the budget."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self.write("environment.hold(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("environment.hold(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        self.write("environment.hold(")
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
        """Whether what `{% generation %}` writes is put between the two marks of `GENERATION`."""
        self.filters["tojson"] = to_json
        self.filters = {name: self._guarded(name, function) for name, function in self.filters.items()}
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter, within the budget."""
        leading = 1 if hasattr(function, "jinja_pass_arg") else 0

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if name in _MAKING:
                args = tuple(map(self._listed, args))
                self.budget.spend(_size_made(name, args[leading], (*args[leading + 1 :], *kwargs.values())))
            return self.within_budget(function(*args, **kwargs))

        vars(guarded).update(getattr(function, "__dict__", {}))
        return guarded

    def _listed(self, value: Any) -> Any:
        """A generator's items as a list, which can be measured before use; other values unchanged."""
        return self.budget.hold(list(value)) if isinstance(value, GeneratorType) else value

    def getattr(self, obj: Any, attribute: str) -> Any | Undefined:
        """What Jinja's sandbox returns for `obj.attribute`, with a shortcut for the most frequent cases."""
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if (kind is str and attribute in _OF_TEXTS) or (kind is LoopContext and attribute in _OF_LOOPS):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call something from a template, within the budget."""
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if name == "join":
            args = tuple(map(__self._listed, args))
        __self.budget.hold(args)
        if kwargs:
            __self.budget.hold(kwargs)
        if name in _MAKING and isinstance(owner, str | bytes | int):
            __self.budget.spend(_size_made(name, owner, (*args, *kwargs.values())))
        return __self.within_budget(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The result of an operator, within the budget."""
        if operator == "+":
            self.budget.spend(length(left) + length(right))
        elif operator == "%":
            if isinstance(left, str | bytes):
                self.budget.spend(_size_made("format", left, right if isinstance(right, tuple) else (right,)))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * right
            if bits > _MOST_BITS and abs(left) > 1:
                raise LimitReached(f"the template makes a number of {bits:,} bits")
        elif operator == "*":
            self.budget.spend(max(length(left) * _number(right), length(right) * _number(left)))
        return self.budget.hold(self.binop_table[operator](left, right))

    def hold(self, value: Any) -> Any:
        """A list, tuple or dict that the template wrote, within the budget."""
        return self.budget.hold(value)

    def within_budget(self, value: Any) -> Any:
        """What a filter or a call returned, within the budget."""
        if type(value) in _TEXTS:
            self.budget.spend(len(value))
            return value
        return self.budget.hold(value)

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


_MAKING = _WIDE | _LONGER | {"format", "format_map", "join", "replace", "tojson", "translate", "wordwrap"}
"""Filters and methods that can make a value much larger than what they are given."""


def _size_made(name: str, value: Any, arguments: Sequence[Any]) -> int:
    """The most characters or elements that a filter or method makes of a value; too high rather than too low."""
    size, widest = length(value), max(map(_number, arguments), default=0)
    if name in _LONGER:
        return 6 * _longest(value)
    if name == "tojson":
        size, deep = written_size(value)
        return size * (1 + deep * max(widest, *(len(text) for text in arguments if isinstance(text, str)), 0) // 4)
    if name == "join":  # the items, or what is put between them
        other = arguments[0] if arguments else ""
        other = other if length(other) else str(other)
        return _longest(value) + _longest(other) + size * length(other)
    longest = max(map(_longest, arguments), default=0)
    if name in _WIDE:
        lines = sum(map(value.count, "\n\t")) if isinstance(value, str) else size
        return size + (2 + lines) * max(widest, longest)
    if name == "replace":
        text: Any = value if isinstance(value, str | bytes) else str(value)
        old, new = (*arguments, "", "")[:2]
        return len(text) + (text.count(old) if isinstance(old, type(text)) else len(text)) * length(new)
    if name in ("translate", "wordwrap"):
        return _longest(value) * (1 + longest)
    pattern = str(value)
    if _WIDE_FIELD.search(pattern):
        raise LimitReached("the template formats a value with a width past 1,000,000")
    longest = max(longest, widest if _NESTED_FIELD.search(pattern) else 0, 32)
    return len(pattern) + (pattern.count("%") + pattern.count("{")) * longest


def _number(value: object) -> int:
    return max(value, 0) if type(value) is int else 0


def _longest(value: object) -> int:
    """Characters of a text; of anything else as many as it takes to write it."""
    return len(value) if isinstance(value, str | bytes) else written_size(value)[0]


class _Dict:
    """`dict` for templates: makes dicts, but is not a class with attributes to walk."""

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
