"""The Jinja environment that chat templates expect, with resource limits.

It has what transformers provides: trimmed blocks, `{% break %}` and `{% continue %}`, `{% generation %}`, `tojson`
without HTML escapes, `raise_exception`, `strftime_now`. Chat templates come from strangers: besides running in
Jinja's own immutable sandbox, everything that makes a value much larger than its inputs asks the Budget first.
This module imports jinja2 and is itself imported late.
"""

from __future__ import annotations

from collections.abc import Callable
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

from tito_audit.render.costs import FILTER_COSTS, binary_cost, call_cost
from tito_audit.render.globals import raise_exception, strftime_now, to_json
from tito_audit.render.limits import Budget

_OF_DICTS = frozenset(dir(dict))
"""Attributes of every dict, whatever it holds."""
_OF_TEXTS = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}
_OF_LOOPS = frozenset(("depth", "first", "index", "index0", "last", "length", "revindex", "revindex0"))
"""Harmless attributes of texts and of `loop`; Jinja wraps those that format."""


class _GenerationTag(Extension):
    """`{% generation %}` … `{% endgeneration %}`: writes its content, in its own scope."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Macro) -> str:
        return str(caller())


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
        self.filters["tojson"] = to_json
        for name, function in self.filters.items():
            cost = FILTER_COSTS.get(name)
            self.filters[name] = self._measured(function) if cost is None else self._guarded(function, cost)
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]

    def _guarded(self, function: Callable[..., Any], cost: Callable[..., int]) -> Callable[..., Any]:
        """The filter, asking the budget before it runs."""

        def guarded(*args: Any, **kwargs: Any) -> Any:
            leading = 1 if hasattr(function, "jinja_pass_arg") else 0
            args = tuple(_held(arg) for arg in args)
            self.budget.spend(cost(*args[leading:], **kwargs))
            return self.made(function(*args, **kwargs))

        vars(guarded).update(vars(function))
        return guarded

    def _measured(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter; the budget is asked for its result, which is not much larger than what it is given."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            return self.made(function(*args, **kwargs))

        vars(measured).update(getattr(function, "__dict__", {}))
        return measured

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
        if getattr(__obj, "__name__", "") == "join":
            args = tuple(_held(arg) for arg in args)
        __self.budget.hold(args)
        if kwargs:
            __self.budget.hold(kwargs)
        __self.budget.spend(call_cost(__obj, args, kwargs))
        return __self.made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The result of an operator, within the budget."""
        self.budget.spend(binary_cost(operator, left, right))
        return self.budget.hold(self.binop_table[operator](left, right))

    def hold(self, value: Any) -> Any:
        """A list, tuple or dict that the template wrote, within the budget."""
        return self.budget.hold(value)

    def made(self, value: Any) -> Any:
        """What a filter or a call returned, within the budget."""
        if type(value) is str or type(value) is Markup:
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


def _held(value: Any) -> Any:
    """A generator's items as a list, which can be measured before use; other values unchanged."""
    return list(value) if isinstance(value, GeneratorType) else value


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
