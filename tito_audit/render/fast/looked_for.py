"""What a template looks for in the texts of messages before it decides what to write.

Most templates only pass texts on, trim them, and check whether they are empty or hold a few markers such as
`</think>`. Then two conversations whose messages have the same keys, the same kinds of values and the same markers
are written the same way, whatever else their texts say. This module imports jinja2 and is itself imported late.
"""

from __future__ import annotations

from jinja2 import nodes

from tito_audit.render.fast.distances import check_distances
from tito_audit.render.fast.growth_bounds import constant, place
from tito_audit.render.fast.value_kinds import Unknown, Values, is_length

_READING = frozenset(("int", "float", "abs", "lower", "upper", "title", "capitalize", "find", "rfind", "count"))
"""Filters and methods whose result depends on more of a text than its markers."""
_TEXT_TESTS = frozenset(("lt", "le", "gt", "ge", "<", "<=", ">", ">=", "odd", "even", "divisibleby"))
_SEARCHES = frozenset(("split", "startswith", "endswith", "replace"))
_ENDS = frozenset(("first", "last", "reverse"))
_STRIPS = frozenset(("strip", "lstrip", "rstrip"))
_BLENDED = (nodes.Add, nodes.Concat, nodes.Mod, nodes.Sub, nodes.Div, nodes.FloorDiv)
_Found = tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]
_LOGIC = (nodes.Compare, nodes.Test, nodes.Not)


def looked_for(tree: nodes.Template) -> _Found | None:
    """What a template that is safe for minijinja looks for; None if its output may depend on something else."""
    try:
        check_distances(tree)
        return _Search(tree).found()
    except (Unknown, RecursionError):
        return None


class _Search:
    """Reads every expression of a template."""

    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        self._values = Values(tree)
        self._whole: set[str] = set()
        self._inside: set[str] = set()
        self._sizes: set[int] = set()
        self._measured: set[int] = set()
        """Lengths that are only compared with numbers."""

    def found(self) -> _Found:
        tree = self._tree
        for compare in tree.find_all(nodes.Compare):
            self._compare(compare)
        tests: list[nodes.Node] = [node.test for node in tree.find_all(nodes.If)]
        tests += [node.test for node in tree.find_all(nodes.CondExpr)]
        tests += [node.node for node in tree.find_all(nodes.Not)]
        for test in tests:
            if isinstance(test, nodes.Filter) and is_length(test):  # true or false
                self._measure(test, 0)
        for loop in tree.find_all(nodes.For):
            if not self._values.is_list(loop.iter):
                _no_counting(loop)
        for node in tree.find_all(nodes.Filter):
            self._filter(node)
        for call in tree.find_all(nodes.Call):
            self._call(call)
        for asked in tree.find_all(nodes.Test):
            self._test(asked)
        for item in tree.find_all(nodes.Getitem):
            if isinstance(item.arg, nodes.Slice) and not self._values.is_list(item.node):
                raise Unknown
        return tuple(sorted(self._whole)), tuple(sorted(self._inside)), tuple(sorted(self._sizes))

    # What is looked at

    def _filter(self, node: nodes.Filter) -> None:
        if node.name in ("length", "count"):
            if id(node) not in self._measured and not self._values.is_list(node.node):
                raise Unknown
        elif node.name in _READING or (
            node.name in ("first", "last", "reverse") and not self._values.is_list(node.node)
        ):
            raise Unknown
        elif node.name == "replace":
            self._look_inside(node.args[:1])
        elif node.name == "trim":
            _only_blanks(node.args)
        elif node.name not in ("join", "default", "d", "tojson"):
            values = {value for value in map(constant, node.args) if isinstance(value, str)}
            if values & (_TEXT_TESTS | _READING | {"in", "length"}):
                raise Unknown
            self._whole |= values

    def _call(self, node: nodes.Call) -> None:
        if not isinstance(node.node, nodes.Getattr):
            return
        if node.node.attr in _READING:
            raise Unknown
        if node.node.attr in _SEARCHES:
            self._look_inside(node.args[:1])
        if node.node.attr in _STRIPS:
            _only_blanks(node.args)

    def _look_inside(self, arguments: list[nodes.Expr]) -> None:
        texts = [constant(argument) for argument in arguments]
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise Unknown
        self._inside.update(text for text in texts if isinstance(text, str))

    def _test(self, node: nodes.Test) -> None:
        if node.name in _TEXT_TESTS and not self._values.counts(node.node):
            raise Unknown
        for argument in node.args:
            if node.name == "in" and not isinstance(argument, nodes.List | nodes.Tuple):
                raise Unknown
            self._is_one_of(argument)

    def _compare(self, node: nodes.Compare) -> None:
        left: nodes.Expr = node.expr
        for operand in node.ops:
            self._pair(left, operand.op, operand.expr)
            left = operand.expr

    def _pair(self, left: nodes.Expr, op: str, right: nodes.Expr) -> None:
        if op in ("in", "notin"):
            self._member(left, right)
            return
        if _is_constant(left):
            left, right = right, left
        measured = isinstance(left, nodes.Filter) and is_length(left) and not self._values.is_list(left.node)
        if isinstance(left, nodes.Filter) and measured and isinstance(constant(right), int):
            self._measure(left, constant(right))
        elif op in ("eq", "ne") and _is_constant(right):
            if not self._values.counts(left):
                self._is_plain(left)
                self._is_one_of(right)
        elif op in ("eq", "ne") and all(map(_is_role, (left, right))):
            pass
        elif not all(self._values.counts(side) or isinstance(side, _LOGIC) for side in (left, right)):
            raise Unknown

    def _member(self, left: nodes.Expr, right: nodes.Expr) -> None:
        if isinstance(right, nodes.List | nodes.Tuple):
            self._is_plain(left)
            for item in right.items:
                self._is_one_of(item)
        elif not (isinstance(right, nodes.Name) and right.name in self._values.elements):
            self._is_plain(right)
            if not isinstance(constant(left), str) or not constant(left):
                raise Unknown
            self._inside.add(str(constant(left)))

    def _measure(self, node: nodes.Filter, size: object) -> None:
        if node.node is not None and not self._values.is_list(node.node):
            self._is_plain(node.node)
        self._measured.add(id(node))
        self._sizes.add(int(size))  # type: ignore[call-overload]

    def _is_one_of(self, node: nodes.Expr) -> None:
        """Record a constant that a value is compared with."""
        if isinstance(node, nodes.List | nodes.Tuple):
            for item in node.items:
                self._is_one_of(item)
            return
        value = constant(node)
        if not isinstance(node, nodes.Const) or not isinstance(value, str | int | None):
            raise Unknown
        if isinstance(value, str):
            self._whole.add(value)
        elif value is not None:
            self._sizes.add(int(value))

    def _is_plain(self, node: nodes.Expr) -> None:
        """Raise unless a value comes from the messages, whole or cut at markers."""
        for part in (node, *node.find_all(nodes.Node)):
            joined = isinstance(part, nodes.Filter) and part.name in ("join", "tojson", "length", "count")
            if joined or (isinstance(part, _BLENDED) and not self._values.counts(part)):
                raise Unknown


def _only_blanks(arguments: list[nodes.Expr]) -> None:
    """Raise unless what is stripped from a text is white space."""
    if not all(str(constant(argument) or "?").isspace() for argument in arguments):
        raise Unknown


def _no_counting(loop: nodes.For) -> None:
    """Raise if a loop, perhaps over the characters of a text, counts its rounds."""
    for node in loop.find_all((nodes.Getattr, nodes.Assign)):
        name = place(node) if isinstance(node, nodes.Getattr) else None
        counted = name is not None and name.startswith("loop.") and name not in ("loop.first", "loop.last")
        if counted or (isinstance(node, nodes.Assign) and isinstance(node.node, _BLENDED[:1] + _BLENDED[2:])):
            raise Unknown


def _is_constant(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const | nodes.List | nodes.Tuple)


def _is_role(node: nodes.Node) -> bool:
    named = isinstance(node, nodes.Getattr) and node.attr == "role"
    return named or (isinstance(node, nodes.Getitem) and constant(node.arg) == "role")
