"""How large a template's values can get, for an engine without a budget.

A weight says how many of the longest available texts a value may hold: 0 is a number, 1 a text. A text built up
message by message holds all of them; it gets a fixed weight, too large for anything to be built from two such
texts. This module imports jinja2 and is itself imported late.
"""

from __future__ import annotations

from collections.abc import Set

from jinja2 import nodes

GATHERED = 20
"""The weight of a text that is built up message by message."""
WRITTEN = 4
"""The weight of what a macro or a `{% set %}` block writes."""
_MOST = 256
_NUMBERS = {"abs", "count", "float", "int", "length"}
_WRITING = {"tojson", "join", "string"}
"""Filters that write a list as a text, longer than its items."""
_COUNTERS = [f"loop.{name}" for name in ("index", "index0", "revindex", "revindex0", "length", "first", "last")]


class Unproven(Exception):
    """The template does something not known to be harmless."""


class Weights:
    """The weights of a template's names, computed from its assignments."""

    def __init__(self, macros: Set[str]) -> None:
        self._macros = macros
        self._weights: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        self._set: list[tuple[str, nodes.Node, int]] = []

    @property
    def names(self) -> set[str]:
        """All names that are assigned."""
        return {name for name, _, _ in self._set}

    def put(self, name: str, value: nodes.Node, times: int = 1) -> None:
        """Record that a name is assigned a value, or one `times` as heavy."""
        self._set.append((name, value, times))

    def settle(self, given: Set[str]) -> None:
        """Compute all weights; `given` are the parameters of macros.

        Attributes of namespaces and parameters of macros may be read by a later iteration or call, so their
        weights are computed until none gets heavier. Other names end with their scope, so each of their
        assignments counts once, in order.
        """
        scoped = {name for name in self.names if "." not in name} - given
        for _ in range(_MOST):
            changed = False
            self._weights |= dict.fromkeys(scoped, 1)
            for name, value, times in self._set:
                weight = self.weigh(value) * times
                if weight > self._weights.get(name, -1):
                    self._weights[name] = weight
                    changed |= name not in scoped
            if not changed:
                return
        raise Unproven

    def weigh(self, node: nodes.Node) -> int:
        """The weight of an expression; Unproven if it is more than a value may have."""
        weight = self._weight(node)
        if weight > _MOST:
            raise Unproven
        return weight

    def _weight(self, node: nodes.Node) -> int:
        if isinstance(node, nodes.Const | nodes.TemplateData):
            return int(not isinstance(getattr(node, "value", ""), int | float))
        if isinstance(node, nodes.Name | nodes.Getattr) or place(node) in self._weights:
            return self._named(node)
        if isinstance(node, nodes.Getitem):
            return self.weigh(node.node)
        if isinstance(node, nodes.Compare | nodes.Test | nodes.Not | nodes.Sub | nodes.Div | nodes.FloorDiv):
            return self._inside(node) and 0
        if isinstance(node, nodes.CondExpr):
            return max(self.weigh(part) for part in (node.expr1, node.expr2) if part is not None)
        if isinstance(node, nodes.And | nodes.Or):
            return max(self.weigh(node.left), self.weigh(node.right))
        if isinstance(node, nodes.Filter):
            return self._filtered(node)
        if isinstance(node, nodes.Call):
            return self._called(node)
        if isinstance(node, nodes.Concat):  # a text, even if made of numbers
            return sum(max(self.weigh(part), 1) for part in node.nodes)
        return self._inside(node) + isinstance(node, nodes.List | nodes.Tuple | nodes.Dict)

    def _inside(self, node: nodes.Node) -> int:
        return sum(self.weigh(child) for child in node.iter_child_nodes())

    def _named(self, node: nodes.Node) -> int:
        name = place(node)
        if name is not None and name in self._weights:
            return self._weights[name]
        if not isinstance(node, nodes.Name) and any(name == known for known, _, _ in self._set):
            return 0  # an attribute of a namespace whose weight is not known yet
        return 1 if isinstance(node, nodes.Name) else self.weigh(node.node)  # type: ignore[attr-defined]

    def _filtered(self, node: nodes.Filter) -> int:
        base = self.weigh(node.node) if node.node is not None else 1
        others = max([0, *(self.weigh(argument) for argument in _arguments(node))])
        if node.name in _NUMBERS:
            return 0
        if node.name == "replace":
            return max(base, 1) * _times(node.args)
        return max(base * (2 if node.name in _WRITING else 1), others, 1)

    def _called(self, node: nodes.Call) -> int:
        inside = sum(self.weigh(argument) for argument in _arguments(node))
        if isinstance(node.node, nodes.Getattr):
            base = max(self.weigh(node.node.node), 1)
            times = _times(node.args) if node.node.attr == "replace" else 1
            return base * times + (2 * inside if node.node.attr in ("get", "join") else 0)
        name = getattr(node.node, "name", "")
        return inside if name in ("dict", "namespace") else WRITTEN if name in self._macros else 1


def _arguments(node: nodes.Call | nodes.Filter) -> list[nodes.Expr]:
    return [*node.args, *(pair.value for pair in node.kwargs)]


def _times(arguments: list[nodes.Expr]) -> int:
    """How many times longer such a replacement can make a text."""
    old, new = (constant(argument) or "" for argument in (*arguments[:2], *[nodes.Const("")] * 2)[:2])
    return 1 + len(str(new)) // max(len(str(old)), 1)


def constant(node: nodes.Node) -> object:
    """The value of a constant; None for any other expression."""
    return node.value if isinstance(node, nodes.Const) else None


def place(node: nodes.Node) -> str | None:
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
