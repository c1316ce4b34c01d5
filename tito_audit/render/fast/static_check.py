"""Static proof that a template is safe in minijinja: its names are harmless and its values stay small.

minijinja counts instructions, but not how large a value gets, and it calls any method of the values it gets. So
every name in a template must be known to be harmless and to mean the same in both engines, and every value must
stay within a small multiple of what the messages hold. All other templates are left to the reference environment.

A weight bounds how many of the longest available texts a value may hold: 0 is a number, 1 a text. A text built up
message by message holds all of them; its fixed weight is too large for anything to be built from two such texts.
Output is counted as it is written and needs no proof. This module imports jinja2, so it is imported late.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import TypeGuard

from jinja2 import nodes

_MAX_ARGUMENT_LENGTH = 100
_NAMES = """
filters abs capitalize count d default dictsort first float int items join last length list lower map reject
filters rejectattr replace reverse safe select selectattr string title tojson trim upper
mapped length lower string tojson trim upper
tests boolean defined divisibleby eq equalto even false float ge gt in integer iterable le lt mapping ne none
tests number odd sequence string true undefined == != < > <= >=
methods capitalize count endswith find get items join keys lower lstrip replace rfind rstrip split startswith
methods strip title upper values
functions dict namespace raise_exception range strftime_now
of_dicts clear copy fromkeys get items keys pop popitem setdefault update values
changing append clear extend insert pop popitem remove reverse setdefault sort update
forbidden self cycler joiner lipsum varargs kwargs caller
"""


def _parse_names(kind: str) -> frozenset[str]:
    lines = (line.split() for line in _NAMES.splitlines())
    return frozenset(name for line in lines if line[:1] == [kind] for name in line[1:])


_FILTERS, _MAPPED, _TESTS = _parse_names("filters"), _parse_names("mapped"), _parse_names("tests")
_METHODS, _FUNCTIONS, _FORBIDDEN = _parse_names("methods"), _parse_names("functions"), _parse_names("forbidden")
_DICT_METHODS, _MUTATING_METHODS = _parse_names("of_dicts"), _parse_names("changing")
_UNPROVEN = (nodes.Mul, nodes.Pow, nodes.ExtensionAttribute, nodes.EnvironmentAttribute, nodes.NSRef)
_STATEMENTS = (nodes.Output, nodes.For, nodes.If, nodes.Assign, nodes.AssignBlock, nodes.Macro, nodes.With)


def is_proven_safe(tree: nodes.Template) -> bool:
    """Whether minijinja may run this template."""
    try:
        _Checker(tree).check()
    except Unproven:
        return False
    return True


def longest_constant(tree: nodes.Template) -> int:
    """The length of the longest text in the template itself."""
    data = (len(node.data) for node in tree.find_all(nodes.TemplateData))
    texts = (len(node.value) for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
    return max([1, *data, *texts])


def joins_values(tree: nodes.Template) -> bool:
    """Whether the template joins values into texts before it writes them."""
    return any(tree.find_all(nodes.Concat))


class _Checker:
    """Checks every name in a template and collects its assignments."""

    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        self._macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        self._weights = Weights(set(self._macros))
        spaces = [
            assign
            for assign in tree.find_all(nodes.Assign)
            if isinstance(assign.target, nodes.Name) and is_namespace_call(assign.node)
        ]
        self._namespaces = {dotted_name(assign.target) for assign in spaces}
        self._namespace_calls = {id(assign.node) for assign in spaces}
        self._depths: dict[str, int] = {}

    def check(self) -> None:
        """Raise Unproven if the template is not proven safe."""
        self._check_statements(self._tree.body, loops=0)
        if self._weights.names & {*self._macros, *_FUNCTIONS, "loop"} or _FUNCTIONS & {*self._macros}:
            raise Unproven
        self._weights.compute({argument.name for macro in self._macros.values() for argument in macro.args})
        for output in self._tree.find_all(nodes.Output):
            for node in output.nodes:
                self._weights.weigh(node)

    # Statements

    def _check_statements(self, body: list[nodes.Node], loops: int) -> None:
        for node in body:
            if isinstance(node, nodes.CallBlock):  # only that of {% generation %}
                if not isinstance(node.call.node, nodes.ExtensionAttribute):
                    raise Unproven
                self._check_statements(node.body, loops)
                continue
            if not isinstance(node, (*_STATEMENTS, nodes.Break, nodes.Continue, nodes.TemplateData)):
                raise Unproven
            if isinstance(node, nodes.For):
                if node.recursive:
                    raise Unproven
                self._check_expression(node.iter)
                if node.test is not None:
                    self._check_expression(node.test)
                self._bind(node.target, node.iter)
                counted = isinstance(node.iter, nodes.Call)
                self._check_statements([*node.body, *node.else_], loops + (2 if counted else 1))
            elif isinstance(node, nodes.If):
                self._check_statements([*node.body, *node.elif_, *node.else_], loops)
                self._check_expression(node.test)
            elif isinstance(node, nodes.Assign):
                self._check_assignment(node, loops)
            elif isinstance(node, nodes.Output):
                for part in node.nodes:
                    self._check_expression(part)
            elif isinstance(node, nodes.AssignBlock):
                if node.filter is not None:
                    raise Unproven
                self._bind(node.target, nodes.Const(""), WRITTEN)
                self._check_statements(node.body, loops)
            elif isinstance(node, nodes.Macro):
                for argument in node.args:
                    self._weights.add(argument.name, nodes.Const(""))
                for default in node.defaults:
                    self._check_expression(default)
                    for argument in node.args:
                        self._weights.add(argument.name, default)
                self._check_statements(node.body, loops=9)
            elif isinstance(node, nodes.With):
                for target, value in zip(node.targets, node.values, strict=True):
                    self._check_expression(value)
                    self._bind(target, value)
                self._check_statements(node.body, loops)

    def _check_assignment(self, node: nodes.Assign, loops: int) -> None:
        self._check_expression(node.node)
        name, parts = dotted_name(node.target), list(_summands(node.node))
        own = [part for part in parts if dotted_name(part) == name]
        # What `x = x + …` adds to x; None for any other assignment
        added = [part for part in parts if part is not own[0]] if len(own) == 1 and len(parts) > 1 else None
        numbers = [part for part in added or () if isinstance(part, nodes.Const) and isinstance(part.value, int)]
        if added is not None and name is not None and len(numbers) < len(added):
            # Added to once a message, it is as long as all messages together.
            if loops - self._depths.get(name.partition(".")[0], 0) > 1:
                raise Unproven
            for part in added:
                self._weights.add(name, part, GATHERED)
            return
        if isinstance(node.node, nodes.Call) and id(node.node) in self._namespace_calls:
            self._depths[str(name)] = min(loops, self._depths.get(str(name), loops))
            for pair in node.node.kwargs:
                self._weights.add(f"{name}.{pair.key}", pair.value)
        self._bind(node.target, node.node)

    def _bind(self, target: nodes.Node, value: nodes.Node, times: int = 1) -> None:
        """Record that this value is assigned to a name, or to each name of a tuple."""
        if isinstance(target, nodes.Tuple):
            for item in target.items:
                self._bind(item, value, times)
            return
        name = dotted_name(target)
        if name is None:
            raise Unproven
        self._weights.add(name, value, times)

    # Expressions

    def _check_expression(self, node: nodes.Node) -> None:
        """Check every name in an expression."""
        parts = [node, *node.find_all(nodes.Node)]
        called = {id(part.node) for part in parts if isinstance(part, nodes.Call)}
        owners = {
            id(part.node)
            for part in parts
            if isinstance(part, nodes.Getattr | nodes.Getitem) and dotted_name(part)
        }
        for part in parts:
            if isinstance(part, _UNPROVEN) or (isinstance(part, nodes.Test) and part.name not in _TESTS):
                raise Unproven
            if isinstance(part, nodes.Filter):
                if part.name not in _FILTERS or part.dyn_args is not None or part.dyn_kwargs is not None:
                    raise Unproven
                if part.name in ("map", "select", "reject") and part.args:
                    allowed = _MAPPED if part.name == "map" else _TESTS
                    if constant_value(part.args[0]) not in allowed:
                        raise Unproven
                if (
                    part.name in ("selectattr", "rejectattr")
                    and len(part.args) > 1
                    and constant_value(part.args[1]) not in _TESTS
                ):
                    raise Unproven
                if part.name in ("join", "replace", "tojson"):
                    self._check_short([*part.args, *(pair.value for pair in part.kwargs)])
            elif isinstance(part, nodes.Call):
                self._check_call(part)
            elif isinstance(part, nodes.Name):
                # Under a second name a namespace could grow unnoticed.
                if part.name in _FORBIDDEN or (part.name in self._namespaces and id(part) not in owners):
                    raise Unproven
            elif isinstance(part, nodes.Getattr) and id(part) not in called:
                if part.attr.startswith("_") or part.attr in _DICT_METHODS:
                    raise Unproven
            elif isinstance(part, nodes.Getitem) and constant_value(part.arg) in _MUTATING_METHODS:
                raise Unproven

    def _check_call(self, node: nodes.Call) -> None:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise Unproven
        if isinstance(node.node, nodes.Getattr):
            if node.node.attr not in _METHODS:
                raise Unproven
            if node.node.attr == "replace":
                self._check_short(node.args)
            if node.node.attr == "join":
                self._check_short([node.node.node])
        elif not isinstance(node.node, nodes.Name) or node.node.name not in {*_FUNCTIONS, *self._macros}:
            raise Unproven
        elif node.node.name == "strftime_now":
            self._check_short(node.args)
        elif node.node.name == "namespace" and id(node) not in self._namespace_calls:
            raise Unproven
        elif node.node.name in self._macros:
            macro = self._macros[node.node.name]
            names = [argument.name for argument in macro.args]
            arguments = [*zip(names, node.args, strict=False), *((pair.key, pair.value) for pair in node.kwargs)]
            for name, value in arguments:
                self._weights.add(name, value)

    def _check_short(self, values: list[nodes.Expr]) -> None:
        """Raise Unproven for anything but short texts and small numbers."""
        for value in values:
            if isinstance(value, nodes.Tuple | nodes.List):
                self._check_short(list(value.items))
                continue
            size = value.value if isinstance(value, nodes.Const) else _MAX_ARGUMENT_LENGTH + 1
            size = len(size) if isinstance(size, str) else size
            if isinstance(size, int) and size > _MAX_ARGUMENT_LENGTH:
                raise Unproven


def _summands(node: nodes.Node) -> Iterator[nodes.Node]:
    if isinstance(node, nodes.Add):
        yield from _summands(node.left)
        yield from _summands(node.right)
    elif isinstance(node, nodes.Concat):
        for part in node.nodes:
            yield from _summands(part)
    else:
        yield node


GATHERED = 20
"""Factor for what is added to a text message by message."""
WRITTEN = 4
"""The weight of what a macro or a `{% set %}` block writes."""
_MAX_WEIGHT = 256
_NUMERIC = {"abs", "count", "float", "int", "length"}
_SERIALIZING = {"tojson", "join", "string"}
"""Filters that make a text longer than the items it is made of."""
_COUNTERS = [f"loop.{name}" for name in ("index", "index0", "revindex", "revindex0", "length", "first", "last")]


class Unproven(Exception):
    """The template does something that is not known to be harmless."""


class Weights:
    """The weights of the names of a template, computed from its assignments."""

    def __init__(self, macros: Set[str]) -> None:
        self._macros = macros
        self._weights: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        self._assigned: list[tuple[str, nodes.Node, int]] = []

    @property
    def names(self) -> set[str]:
        """All names that are assigned."""
        return {name for name, _, _ in self._assigned}

    def add(self, name: str, value: nodes.Node, times: int = 1) -> None:
        """Record that a name is assigned a value, or one that is `times` as heavy."""
        self._assigned.append((name, value, times))

    def compute(self, parameters: Set[str]) -> None:
        """Compute all weights; `parameters` are those of macros.

        Attributes of namespaces and parameters of macros outlive an iteration or call, so their weights are
        computed until none gets heavier. Other names end with their scope, so each assignment counts once, in
        order.
        """
        scoped = {name for name in self.names if "." not in name} - parameters
        for _ in range(_MAX_WEIGHT):
            changed = False
            self._weights |= dict.fromkeys(scoped, 1)
            for name, value, times in self._assigned:
                weight = self.weigh(value) * times
                if weight > self._weights.get(name, -1):
                    self._weights[name] = weight
                    changed |= name not in scoped
            if not changed:
                return
        raise Unproven

    def weigh(self, node: nodes.Node) -> int:
        """The weight of an expression; Unproven if it is too heavy."""
        name = dotted_name(node)
        if isinstance(node, nodes.Const | nodes.TemplateData):
            weight = int(not isinstance(getattr(node, "value", ""), int | float))
        elif name is not None and name in self._weights:
            weight = self._weights[name]
        elif isinstance(node, nodes.Name):
            weight = 1
        elif isinstance(node, nodes.Getattr):
            # An attribute of a namespace may have a weight that is not known yet.
            weight = 0 if name in self.names else self.weigh(node.node)
        elif isinstance(node, nodes.Getitem):
            weight = self.weigh(node.node)
        elif isinstance(node, nodes.Compare | nodes.Test | nodes.Not | nodes.Sub | nodes.Div | nodes.FloorDiv):
            weight = self._weigh_children(node) and 0
        elif isinstance(node, nodes.CondExpr):
            weight = max(self.weigh(part) for part in (node.expr1, node.expr2) if part is not None)
        elif isinstance(node, nodes.And | nodes.Or):
            weight = max(self.weigh(node.left), self.weigh(node.right))
        elif isinstance(node, nodes.Filter):
            base = self.weigh(node.node) if node.node is not None else 1
            others = max([0, *(self.weigh(argument) for argument in _arguments(node))])
            if node.name in _NUMERIC:
                weight = 0
            elif node.name == "replace":
                weight = max(base, 1) * _replacement_growth(node.args)
            else:
                weight = max(base * (2 if node.name in _SERIALIZING else 1), others, 1)
        elif isinstance(node, nodes.Call):
            inside = sum(self.weigh(argument) for argument in _arguments(node))
            if isinstance(node.node, nodes.Getattr):
                base = max(self.weigh(node.node.node), 1)
                times = _replacement_growth(node.args) if node.node.attr == "replace" else 1
                weight = base * times + (2 * inside if node.node.attr in ("get", "join") else 0)
            else:
                called = getattr(node.node, "name", "")
                weight = inside if called in ("dict", "namespace") else WRITTEN if called in self._macros else 1
        elif isinstance(node, nodes.Concat):  # a text, even if made of numbers
            weight = sum(max(self.weigh(part), 1) for part in node.nodes)
        else:
            weight = self._weigh_children(node) + isinstance(node, nodes.List | nodes.Tuple | nodes.Dict)
        if weight > _MAX_WEIGHT:
            raise Unproven
        return weight

    def _weigh_children(self, node: nodes.Node) -> int:
        return sum(self.weigh(child) for child in node.iter_child_nodes())


def _arguments(node: nodes.Call | nodes.Filter) -> list[nodes.Expr]:
    return [*node.args, *(pair.value for pair in node.kwargs)]


def _replacement_growth(arguments: list[nodes.Expr]) -> int:
    """How many times longer `replace` with these arguments can make a text."""
    old, new = (constant_value(argument) or "" for argument in (*arguments[:2], *[nodes.Const("")] * 2)[:2])
    return 1 + len(str(new)) // max(len(str(old)), 1)


def is_namespace_call(node: nodes.Node) -> TypeGuard[nodes.Call]:
    """Whether an expression is `namespace(…)`."""
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == "namespace"


def constant_value(node: nodes.Node) -> object:
    """The value of a constant; None for any other expression."""
    return node.value if isinstance(node, nodes.Const) else None


def dotted_name(node: nodes.Node) -> str | None:
    """The name that an assignment sets or an expression reads: `name`, or `name.attribute`; None for any other."""
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.NSRef):
        return f"{node.name}.{node.attr}"
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        return f"{node.node.name}.{node.attr}"
    if isinstance(node, nodes.Getitem) and isinstance(node.node, nodes.Name) and isinstance(node.arg, nodes.Const):
        return f"{node.node.name}.{node.arg.value}"
    return None
