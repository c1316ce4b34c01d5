"""The kinds of values that a chat template's expressions have, as far as its assignments show.

This module imports jinja2 and is itself imported late.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes

from tito_audit.render.fast.growth_bounds import constant, place

_IN_LISTS = frozenset(("tool_calls",))
"""Attributes of messages that are lists or absent."""
_KEEPING = frozenset(("list", "reverse", "select", "reject", "selectattr", "rejectattr"))
"""Filters that make a list of a list."""
_ANYTHING = nodes.Getattr(nodes.Name("?", "load"), "?", "load")


class Unknown(Exception):
    """What the template writes may depend on more than can be known."""


class Values:
    """The names of a template, and which of them are lists, messages and numbers."""

    def __init__(self, tree: nodes.Template) -> None:
        self._set = _assignments(tree)
        self._lists = self._all_from("messages", "tools", "documents")
        self._given = self._all_from("tools", "documents")
        loops: dict[str, list[bool]] = {}
        for loop in tree.find_all(nodes.For):
            for target in names(loop.target):
                loops.setdefault(target, []).append(self.is_list(loop.iter))
        self.elements = {name for name, said in loops.items() if all(said)} - self._set.keys()
        """Names that only ever hold elements of lists."""

    def _all_from(self, *given: str) -> set[str]:
        """The names that only ever hold these lists or parts of them."""
        found = {*given, *self._set}
        while wrong := {name for name in found if not self._all_in(name, found)}:
            found -= wrong
        return found

    def _all_in(self, name: str, lists: set[str]) -> bool:
        return all(_is_list(value, lists) for value in self._set.get(name, ()))

    def is_list(self, node: nodes.Node | None) -> bool:
        """Whether a value is the messages, the tools, the calls in a message, or some of these."""
        return _is_list(node, self._lists)

    def is_given(self, node: nodes.Node | None) -> bool:
        """Whether a list is independent of how many messages there are."""
        return _is_list(node, self._given)

    def is_fixed(self, node: nodes.Node) -> bool:
        """Whether a name is only set to constants."""
        values = self._set.get(place(node) or "")
        return bool(values) and all(isinstance(value, nodes.Const) or is_negative(value) for value in values or ())

    def counts(self, node: nodes.Node | None, within: frozenset[str] = frozenset()) -> bool:
        """Whether a value is a number or boolean that depends only on places and lengths of lists."""
        if isinstance(node, nodes.Const):
            return isinstance(node.value, int)
        if isinstance(node, nodes.Add | nodes.Sub | nodes.Mod | nodes.FloorDiv):
            return self.counts(node.left, within) and self.counts(node.right, within)
        if isinstance(node, nodes.Filter):
            return is_length(node) and self.is_list(node.node)
        name = place(node) if node is not None else None
        if node is None or name is None:
            return node is not None and is_negative(node)
        if name.startswith("loop."):
            return name not in ("loop.previtem", "loop.nextitem") and "loop" not in self._set
        if name in within:
            return True
        values = self._set.get(name)
        return bool(values) and all(self.counts(value, within | {name}) for value in values or ())


def _is_list(node: nodes.Node | None, lists: set[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in lists
    if isinstance(node, nodes.Filter):
        return node.name in _KEEPING and _is_list(node.node, lists)
    if isinstance(node, nodes.Getattr):
        return node.attr in _IN_LISTS
    if isinstance(node, nodes.Getitem):
        return _is_list(node.node, lists) if isinstance(node.arg, nodes.Slice) else constant(node.arg) in _IN_LISTS
    return False


def _assignments(tree: nodes.Template) -> dict[str, list[nodes.Node]]:
    """The values assigned to each name and each attribute of a namespace."""
    found: dict[str, list[nodes.Node]] = {}

    def put(target: nodes.Node, value: nodes.Node) -> None:
        for name in names(target):
            found.setdefault(name, []).append(value)

    for node in tree.find_all(nodes.Assign):
        put(node.target, node.node if place(node.target) else _ANYTHING)
        if isinstance(node.node, nodes.Call) and getattr(node.node.node, "name", "") == "namespace":
            for pair in node.node.kwargs:
                found.setdefault(f"{place(node.target)}.{pair.key}", []).append(pair.value)
    for block in tree.find_all(nodes.AssignBlock):
        put(block.target, _ANYTHING)
    for target in (name for macro in tree.find_all(nodes.Macro) for name in macro.args):
        put(target, _ANYTHING)
    for scope in tree.find_all(nodes.With):
        for named in scope.targets:
            put(named, _ANYTHING)
    return found


def names(target: nodes.Node) -> Iterator[str]:
    """The names in the target of an assignment."""
    if isinstance(target, nodes.Tuple):
        for item in target.items:
            yield from names(item)
    else:
        yield place(target) or "?"


def is_length(node: nodes.Node | None) -> bool:
    """Whether an expression is the length of something."""
    return isinstance(node, nodes.Filter) and node.name in ("length", "count")


def is_negative(node: nodes.Node) -> bool:
    """Whether an expression is a negative constant."""
    return isinstance(node, nodes.Neg) and isinstance(constant(node.node), int)
