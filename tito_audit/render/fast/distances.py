"""Whether what a template writes depends on how many messages there are, or on how far apart they are.

Most templates look at the first message and the last one, at the next and the one before, and at the last message
of a role. What such a template writes for a message depends on that message, its neighbours, and which messages
come before and after it, but not on how many there are. This module imports jinja2 and is itself imported late.
"""

from __future__ import annotations

from jinja2 import nodes

from tito_audit.render.fast.growth_bounds import constant, place
from tito_audit.render.fast.value_kinds import Unknown, Values, is_length, is_negative

_FROM_END = frozenset(("loop.length", "loop.revindex", "loop.revindex0"))
_PARITY = frozenset(("odd", "even"))
_NEAR = frozenset((0, 1, None))
_ENDS = frozenset((0, 1, -1, None))


def check_distances(tree: nodes.Template) -> None:
    """Raise Unknown if a template may decide by a number of messages or write one."""
    _Distances(tree).check()


class _Distances:
    """Checks every number in a template that depends on how many messages there are."""

    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        self._values = Values(tree)

    def check(self) -> None:
        for compare in self._tree.find_all(nodes.Compare):
            left: nodes.Node = compare.expr
            for operand in compare.ops:
                self._compared(left, operand.expr)
                self._compared(operand.expr, left)
                left = operand.expr
        for kind in (nodes.Add, nodes.Sub):
            for sum_ in self._tree.find_all(kind):
                if self._is_far(sum_) or _is_place(sum_):
                    _among(_NEAR, sum_.left, sum_.right)
        for output in self._tree.find_all(nodes.Output):
            for part in output.nodes:
                self._written(part)
        for item in self._tree.find_all(nodes.Getitem):
            if self._values.is_list(item.node):
                self._taken(item.arg)
        for loop in self._tree.find_all(nodes.For):
            self._loop(loop)
        self._no_others()

    def _compared(self, one: nodes.Node, other: nodes.Node) -> None:
        """A number of messages may be compared with a place, with nothing or with 0, but with no other
        constant."""
        number = constant(other)
        if not isinstance(number, int) or isinstance(number, bool) or not self._is_far(one):
            return
        if number != 0 or not is_length(one):
            raise Unknown

    def _written(self, node: nodes.Node) -> None:
        """Raise if an expression that is written holds a number of messages; conditions may hold one."""
        if isinstance(node, nodes.Compare | nodes.Test):
            return
        if self._is_end(node):
            raise Unknown
        for child in node.iter_child_nodes():
            self._written(child)

    def _taken(self, place_: nodes.Node) -> None:
        """The first, the second, the last message, one next to another, or all from there."""
        parts = (place_.start, place_.stop, place_.step) if isinstance(place_, nodes.Slice) else (place_,)
        _among(_ENDS, *(part for part in parts if part is not None))

    def _loop(self, loop: nodes.For) -> None:
        if loop.test is not None and any(_is_neighbour(node) for node in loop.find_all(nodes.Getattr)):
            raise Unknown
        if not _is_reversed(loop.iter):
            return
        for compare in loop.find_all(nodes.Compare):
            sides = [compare.expr, *(operand.expr for operand in compare.ops)]
            if any(map(_is_place, sides)) and not all(constant(side) in _NEAR for side in sides):
                raise Unknown

    def _no_others(self) -> None:
        """Raise if a number of messages goes anywhere else."""
        for kind in (nodes.Mod, nodes.Div, nodes.FloorDiv, nodes.List, nodes.Tuple, nodes.Dict):
            for node in self._tree.find_all(kind):
                self._none(node)
        for call in self._tree.find_all(nodes.Call):
            name = getattr(call.node, "name", "")
            if name != "namespace":
                self._none(*call.args, *(pair.value for pair in call.kwargs))
            if name == "range" and not all(map(_is_constant, call.args)):
                raise Unknown
        for filter_ in self._tree.find_all(nodes.Filter):
            self._none(*filter_.args, *(pair.value for pair in filter_.kwargs))
        for test in self._tree.find_all(nodes.Test):
            self._none(*test.args, *([test.node] if test.args or test.name in _PARITY else []))

    def _none(self, *parts: nodes.Node) -> None:
        if any(map(self._is_far, parts)):
            raise Unknown

    def _is_far(self, node: nodes.Node) -> bool:
        """Whether a value is made from a number of messages."""
        return self._is_end(node) or any(map(self._is_far, node.iter_child_nodes()))

    def _is_end(self, node: nodes.Node) -> bool:
        """Whether a value is a number that depends on how many messages there are."""
        if isinstance(node, nodes.Filter):
            return is_length(node) and not self._values.is_given(node.node)
        name = place(node)
        if name is None or (name.startswith("loop.") and name not in _FROM_END):
            return False
        return name in _FROM_END or (self._values.counts(node) and not self._values.is_fixed(node))


def _among(allowed: frozenset[int | None], *parts: nodes.Node) -> None:
    for part in parts:
        inner = constant(part.node if isinstance(part, nodes.Neg) else part)
        if isinstance(inner, int) and (-inner if isinstance(part, nodes.Neg) else inner) not in allowed:
            raise Unknown


def _is_place(node: nodes.Node) -> bool:
    """Whether a value is made from the place of an element."""
    return any((place(one) or "").startswith("loop.") for one in (node, *node.find_all(nodes.Getattr)))


def _is_neighbour(node: nodes.Getattr) -> bool:
    return place(node) in ("loop.previtem", "loop.nextitem")


def _is_reversed(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Filter):
        return node.name == "reverse"
    part = node.arg if isinstance(node, nodes.Getitem) else None
    return isinstance(part, nodes.Slice) and part.step is not None


def _is_constant(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) or is_negative(node)
