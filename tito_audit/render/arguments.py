"""The arguments that a chat template reads, the values that it tells apart, and whether it reads the clock.

The template is parsed, not run. This module imports jinja2, so it is imported late.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jinja2 import meta, nodes

from tito_audit.render.fast.static_check import is_namespace_call

_STANDARD_VARIABLES = frozenset(
    ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "strftime_now"]
)
"""What every template gets; these are not arguments."""
_TRUTH_TESTS = {"true": True, "false": False, "none": None}
_PASS_THROUGH_FILTERS = {"join", "reject", "select", "default", "d", "trim", "upper", "lower", "string"}
_PASS_THROUGH_FILTERS |= {"capitalize", "title", "safe", "int"}
"""Filters whose output includes their input."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a chat template, such as `enable_thinking`."""

    name: str
    values: tuple[object, ...] = ()
    """The values that the template tells apart, including its own defaults, in the order of the template."""
    written: bool = False
    """Whether its value is written into the prompt."""
    default: object = None
    """The constant that replaces it if it is not passed; None if there is none."""
    clock_format: str | None = None
    """The format of the date that replaces it if it is not passed; None if no date does."""


@dataclass(frozen=True, slots=True)
class TemplateArguments:
    """What a chat template reads besides messages, tools and special tokens."""

    arguments: tuple[Argument, ...] = ()
    reads_clock: bool = False
    """Whether it calls `strftime_now`."""
    clock_formats: tuple[str, ...] = ()
    """The formats that it passes to `strftime_now`, as far as they are constants."""

    def named(self, name: str) -> Argument | None:
        """The argument of this name; None if the template does not read it."""
        return next((argument for argument in self.arguments if argument.name == name), None)


def find_arguments(tree: nodes.Template) -> TemplateArguments:
    """The arguments that a parsed template reads."""
    unset = _UnsetVariables()
    unset.walk(tree.body, frozenset())
    undeclared = meta.find_undeclared_variables(tree)
    ordered = [
        name
        for name in unset.names
        if name in undeclared and (name not in _STANDARD_VARIABLES and not name.endswith("_token"))
    ]
    reader = _ArgumentReader(tree, set(ordered))
    formats = [_clock_format(call) for call in _clock_calls(tree)]
    distinct = tuple(dict.fromkeys(text for text in formats if text is not None))
    return TemplateArguments(tuple(map(reader.argument, ordered)), bool(formats), distinct)


class _UnsetVariables:
    """Finds variables that are read before the template can have set them."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        """In the order of the template."""

    def walk(self, body: Sequence[nodes.Node], bound: frozenset[str]) -> frozenset[str]:
        """The variables that are bound after these nodes, given those `bound` before."""
        for node in body:
            bound = self._visit(node, bound)
        return bound

    def _visit(self, node: nodes.Node, bound: frozenset[str]) -> frozenset[str]:
        if isinstance(node, nodes.Name):
            if node.ctx == "load" and node.name not in bound:
                self.names.setdefault(node.name)
            return bound | {node.name} if node.ctx == "store" else bound
        if isinstance(node, nodes.Assign):
            return self.walk([node.node, node.target], bound)
        if isinstance(node, nodes.Macro | nodes.CallBlock | nodes.For | nodes.With):
            # These have a scope of their own.
            if isinstance(node, nodes.For):
                self._visit(node.iter, bound)
                inner = self._visit(node.target, bound) | {"loop"}
                self.walk([*([node.test] if node.test is not None else []), *node.body], inner)
                self.walk(node.else_, bound)
            elif isinstance(node, nodes.With):
                self.walk(node.values, bound)
                self.walk(node.body, self.walk(node.targets, bound))
            else:
                self.walk(node.defaults, bound)
                called = [node.call] if isinstance(node, nodes.CallBlock) else []
                own = {arg.name for arg in node.args} | {"caller", "varargs", "kwargs"}
                self.walk([*called, *node.body], bound | own)
            return bound | {node.name} if isinstance(node, nodes.Macro) else bound
        return self.walk(list(node.iter_child_nodes()), bound)


def _clock_calls(tree: nodes.Node) -> Iterator[nodes.Call]:
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == "strftime_now":
            yield call


def _clock_format(call: nodes.Call) -> str | None:
    first = call.args[0] if call.args else None
    return first.value if isinstance(first, nodes.Const) and isinstance(first.value, str) else None


@dataclass(slots=True)
class _ArgumentUses:
    """What a template does with one argument."""

    compared: list[object] = field(default_factory=list)
    contained: list[object] = field(default_factory=list)
    """What it searches for inside the value."""
    defaults: list[object] = field(default_factory=list)
    truth: bool = False
    """Whether it tests the truth of the value."""
    defined: bool = False
    written: bool = False
    clock_format: str | None = None


class _ArgumentReader:
    """Follows the values of arguments through assignments to comparisons and output."""

    def __init__(self, tree: nodes.Template, names: set[str]) -> None:
        self._names = names
        self._uses = {name: _ArgumentUses() for name in names}
        self._collections: dict[str, list[object]] = {}
        """The constants of each variable that is set to a list or dict of constants."""
        # Each variable with each expression assigned to it; parameters of macros with their arguments
        assignments: list[tuple[str, nodes.Node]] = []
        macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        for node in tree.find_all((nodes.Assign, nodes.Call, nodes.With)):
            if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
                name, value = node.target.name, node.node
                assignments.append((name, value))
                if is_namespace_call(value):
                    assignments += [(f"{name}.{pair.key}", pair.value) for pair in value.kwargs]
                constants = [] if isinstance(value, nodes.Const) else _constants_in(value)
                if constants:
                    self._collections[name] = constants
            elif isinstance(node, nodes.Assign) and isinstance(node.target, nodes.NSRef):
                assignments.append((f"{node.target.name}.{node.target.attr}", node.node))
            elif isinstance(node, nodes.With):
                pairs = zip(node.targets, node.values, strict=True)
                assignments += [(target.name, value) for target, value in pairs if isinstance(target, nodes.Name)]
            elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name in macros:
                parameters = [arg.name for arg in macros[node.node.name].args]
                assignments += zip(parameters, node.args, strict=False)
                assignments += [(pair.key, pair.value) for pair in node.kwargs]
        self._sources_by_variable: dict[str, frozenset[str]] = {}
        """The arguments whose values a variable holds, by its name; in namespaces `ns.name`."""
        # Follow assignments until no more variables are found
        before = None
        while before != self._sources_by_variable:
            before = dict(self._sources_by_variable)
            for name, value in assignments:
                sources = self._sources(value) | self._sources_by_variable.get(name, frozenset())
                if sources:
                    self._sources_by_variable[name] = sources
        for part in tree.find_all(nodes.Node):
            self._read_node(part)

    def argument(self, name: str) -> Argument:
        """What is known about one argument."""
        seen = self._uses[name]
        values = [*seen.compared, *([text] for text in seen.contained), *seen.defaults]
        if len(seen.contained) > 1:
            values.append(seen.contained)
        tested = seen.truth or seen.defined or any(isinstance(value, bool) for value in values)
        texts = any(isinstance(value, str) for value in values)
        if tested and not seen.written and not texts and not seen.contained:
            values += [True, False]
        default = seen.defaults[0] if seen.defaults else None
        # Distinct values; 1 and True differ.
        distinct: dict[str, object] = {}
        for value in values:
            distinct.setdefault(f"{type(value).__name__} {value!r}", value)
        return Argument(name, tuple(distinct.values()), seen.written, default, seen.clock_format)

    # Where values go

    def _sources(self, node: nodes.Node | None) -> frozenset[str]:
        """The arguments whose values an expression may have or include."""
        if isinstance(node, nodes.Name):
            own = frozenset((node.name,)) if node.name in self._names else frozenset()
            return own | self._sources_by_variable.get(node.name, frozenset())
        if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
            return self._sources_by_variable.get(f"{node.node.name}.{node.attr}", frozenset())
        parts: list[nodes.Node | None] = []
        if isinstance(node, nodes.Filter):
            parts = [node.node, *(node.args if node.name in ("default", "d") else ())]
            if node.name not in _PASS_THROUGH_FILTERS:
                parts = []
        elif isinstance(node, nodes.CondExpr):
            parts = [node.expr1, node.expr2]
        elif isinstance(node, nodes.BinExpr):
            parts = [node.left, node.right]
        elif isinstance(node, nodes.Concat):
            parts = list(node.nodes)
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
            parts = [node.node.node, *node.args]
        return frozenset().union(*(self._sources(part) for part in parts))

    # What happens to them

    def _uses_of(self, *values: nodes.Node | None) -> Iterator[_ArgumentUses]:
        for value in values:
            for name in sorted(self._sources(value)):
                yield self._uses[name]

    def _read_condition(self, test: nodes.Node | None) -> None:
        if isinstance(test, nodes.And | nodes.Or):
            self._read_condition(test.left)
            self._read_condition(test.right)
        elif isinstance(test, nodes.Not):
            self._read_condition(test.node)
        elif test is not None:
            for seen in self._uses_of(test):
                seen.truth = True

    def _read_node(self, node: nodes.Node) -> None:
        """Record the uses that a node itself makes of arguments, not those of the nodes in it."""
        if isinstance(node, nodes.Test):
            for seen in self._uses_of(node.node):
                if node.name in _TRUTH_TESTS:
                    seen.compared.append(_TRUTH_TESTS[node.name])
                elif node.name in ("defined", "undefined", "boolean"):
                    seen.defined = True
                elif node.name in ("equalto", "eq", "==", "ne", "in") and node.args:
                    seen.compared += self._constants(node.args[0])
        elif isinstance(node, nodes.Compare):
            for operand in node.ops:
                sides = [(node.expr, operand.expr)]
                if operand.op in ("in", "notin"):
                    for seen in self._uses_of(operand.expr):
                        seen.contained += self._constants(node.expr)
                else:
                    sides.append((operand.expr, node.expr))
                for side, other in sides:
                    constants = self._constants(other)
                    if operand.op in ("lt", "lteq", "gt", "gteq"):  # by size: also one more and one less
                        numbers = [c for c in constants if isinstance(c, int) and not isinstance(c, bool)]
                        constants = [near for number in numbers for near in (number, number + 1, number - 1)]
                    for seen in self._uses_of(side):
                        seen.compared += constants
        elif isinstance(node, nodes.Filter) and node.name in ("default", "d"):
            self._read_default(node.node, node.args[0] if node.args else None)
        elif isinstance(node, nodes.Filter) and node.name in ("select", "reject"):
            for seen in self._uses_of(node.node):
                seen.contained += self._constants(node.args[1]) if len(node.args) > 1 else []
        elif isinstance(node, nodes.Or):
            self._read_default(node.left, node.right)
        elif isinstance(node, nodes.For) and isinstance(node.target, nodes.Name):
            for seen in self._uses_of(node.iter):
                # Constants that the loop compares its variable with
                seen.contained += [
                    constant
                    for part in node.body
                    for test in part.find_all(nodes.Compare)
                    if isinstance(test.expr, nodes.Name) and test.expr.name == node.target.name
                    for operand in test.ops
                    for constant in self._constants(operand.expr)
                ]
        elif isinstance(node, nodes.Output):
            for seen in self._uses_of(*node.nodes):
                seen.written = True
        elif isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
            # A constant or a date may replace an argument: `{% set date = '26 Jul 2024' %}`
            if node.target.name in self._names:
                seen = self._uses[node.target.name]
                if isinstance(node.node, nodes.Const):
                    seen.defaults.append(node.node.value)
                call = next(_clock_calls(node), None)
                seen.clock_format = seen.clock_format or (_clock_format(call) if call is not None else None)
        elif isinstance(node, nodes.Getitem):
            for seen in self._uses_of(node.arg):
                seen.compared += self._constants(node.node)
        elif isinstance(node, nodes.If | nodes.CondExpr):
            self._read_condition(node.test)

    def _read_default(self, value: nodes.Node | None, default: nodes.Node | None) -> None:
        if isinstance(default, nodes.Const):
            for seen in self._uses_of(value):
                seen.defaults.append(default.value)

    def _constants(self, node: nodes.Node | None) -> list[object]:
        """The constants of an expression: itself, the items of a list or the keys of a dict."""
        if isinstance(node, nodes.Name):
            return self._collections.get(node.name, [])
        return _constants_in(node)


def _constants_in(node: nodes.Node | None) -> list[object]:
    if isinstance(node, nodes.Const):  # lists of constants may have become constants
        return list(node.value) if isinstance(node.value, list | tuple | dict) else [node.value]
    items: list[nodes.Expr] = []
    if isinstance(node, nodes.List | nodes.Tuple):
        items = node.items
    elif isinstance(node, nodes.Dict):
        items = [pair.key for pair in node.items]
    return [item.value for item in items if isinstance(item, nodes.Const)]
