"""Static analysis: by what in the texts of messages a template decides what to write.

Most templates only copy texts, trim them, and test whether they are empty or hold a few markers such as
`</think>`. They look at the first message and the last, at the next and the previous one, and at the last one of a
role, but not at how many there are. Then conversations are written alike if their messages have the same keys,
kinds of values, markers and neighbours, whatever else their texts say.

It also finds generation prompts that are the same after any messages: those that a template writes in one place,
at its very end, and builds only from other variables. This module imports jinja2, so it is imported late.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes

from tito_audit.render.fast.static_check import constant_value, dotted_name, is_namespace_call

_TEXT_READERS = {"int", "float", "abs", "lower", "upper", "title", "capitalize", "find", "rfind", "count"}
"""Filters and methods whose result depends on more of a text than its markers."""
_TEXT_TESTS = frozenset(("lt", "le", "gt", "ge", "<", "<=", ">", ">=", "odd", "even", "divisibleby"))
_ENDS = frozenset(("first", "last", "reverse"))
_COMBINING = (nodes.Add, nodes.Concat, nodes.Mod, nodes.Sub, nodes.Div, nodes.FloorDiv)
_Conditions = tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]
"""`facts.TextConditions`, whose module imports this one."""
_LOGIC = (nodes.Compare, nodes.Test, nodes.Not)


def find_text_conditions(tree: nodes.Template) -> _Conditions | None:
    """What a template that is safe for minijinja tests texts for; None if texts may matter in another way."""
    try:
        _MessageCounts(tree).check()
        return _ExpressionReader(tree).read()
    except (UnknownDependency, RecursionError):
        return None


class _ExpressionReader:
    """Collects what the expressions of a template test texts for."""

    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        self._values = TemplateNames(tree)
        self._whole: set[str] = set()
        self._inside: set[str] = set()
        self._sizes: set[int] = set()
        self._measured: set[int] = set()
        """Ids of the `length` filters that are compared with a number or tested for truth."""

    def read(self) -> _Conditions:
        """The texts compared whole, the markers searched for, and the lengths; UnknownDependency if unclear."""
        tree = self._tree
        for compare in tree.find_all(nodes.Compare):
            left: nodes.Expr = compare.expr
            for operand in compare.ops:
                self._read_comparison(left, operand.op, operand.expr)
                left = operand.expr
        tests: list[nodes.Node] = [node.test for node in tree.find_all(nodes.If)]
        tests += [node.test for node in tree.find_all(nodes.CondExpr)]
        tests += [node.node for node in tree.find_all(nodes.Not)]
        for test in tests:
            if isinstance(test, nodes.Filter) and is_length(test):  # its truth
                self._add_length(test, 0)
        for loop in tree.find_all(nodes.For):
            if self._values.is_list(loop.iter):
                continue
            # A loop over anything else, perhaps the characters of a text, must not count.
            for part in loop.find_all((nodes.Getattr, nodes.Assign)):
                name = dotted_name(part) if isinstance(part, nodes.Getattr) else None
                counted = name is not None and name.startswith("loop.") and name not in ("loop.first", "loop.last")
                if counted or (
                    isinstance(part, nodes.Assign) and isinstance(part.node, _COMBINING[:1] + _COMBINING[2:])
                ):
                    raise UnknownDependency
        for node in tree.find_all(nodes.Filter):
            if node.name in ("length", "count"):
                if id(node) not in self._measured and not self._values.is_list(node.node):
                    raise UnknownDependency
            elif node.name in _TEXT_READERS or (node.name in _ENDS and not self._values.is_list(node.node)):
                raise UnknownDependency
            elif node.name in ("replace", "trim"):
                self._read_operation(node.name, node.args)
            elif node.name not in ("join", "default", "d", "tojson"):
                values = {value for value in map(constant_value, node.args) if isinstance(value, str)}
                if values & (_TEXT_TESTS | _TEXT_READERS | {"in", "length"}):
                    raise UnknownDependency
                self._whole |= values
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Getattr):
                self._read_operation(call.node.attr, call.args)
        for test_node in tree.find_all(nodes.Test):
            if test_node.name in _TEXT_TESTS and not self._values.is_count(test_node.node):
                raise UnknownDependency
            for argument in test_node.args:
                if test_node.name == "in" and not isinstance(argument, nodes.List | nodes.Tuple):
                    raise UnknownDependency
                self._add_constants(argument)
        for item in tree.find_all(nodes.Getitem):
            if isinstance(item.arg, nodes.Slice) and not self._values.is_list(item.node):
                raise UnknownDependency
        return tuple(sorted(self._whole)), tuple(sorted(self._inside)), tuple(sorted(self._sizes))

    def _read_operation(self, name: str, arguments: list[nodes.Expr]) -> None:
        """Read a filter or method: it may search for a marker and strip white space, but not read a whole text."""
        if name in _TEXT_READERS:
            raise UnknownDependency
        if name in ("split", "startswith", "endswith", "replace"):
            marker = constant_value(arguments[0]) if arguments else None
            if not isinstance(marker, str) or not marker:
                raise UnknownDependency
            self._inside.add(marker)
        elif name in ("trim", "strip", "lstrip", "rstrip"):
            stripped = [str(constant_value(argument) or "?") for argument in arguments]
            if not all(map(str.isspace, stripped)):
                raise UnknownDependency

    def _read_comparison(self, left: nodes.Expr, op: str, right: nodes.Expr) -> None:
        if op in ("in", "notin"):
            if isinstance(right, nodes.List | nodes.Tuple):
                self._check_from_messages(left)
                for item in right.items:
                    self._add_constants(item)
            elif not (isinstance(right, nodes.Name) and right.name in self._values.elements):
                self._check_from_messages(right)
                if not isinstance(constant_value(left), str) or not constant_value(left):
                    raise UnknownDependency
                self._inside.add(str(constant_value(left)))
            return
        if _is_constant(left):
            left, right = right, left
        measured = isinstance(left, nodes.Filter) and is_length(left) and not self._values.is_list(left.node)
        if isinstance(left, nodes.Filter) and measured and isinstance(constant_value(right), int):
            self._add_length(left, constant_value(right))
        elif op in ("eq", "ne") and _is_constant(right):
            if not self._values.is_count(left):
                self._check_from_messages(left)
                self._add_constants(right)
        elif op in ("eq", "ne") and all(
            (isinstance(side, nodes.Getattr) and side.attr == "role")
            or (isinstance(side, nodes.Getitem) and constant_value(side.arg) == "role")
            for side in (left, right)
        ):
            pass
        elif not all(self._values.is_count(side) or isinstance(side, _LOGIC) for side in (left, right)):
            raise UnknownDependency

    def _add_length(self, node: nodes.Filter, size: object) -> None:
        if node.node is not None and not self._values.is_list(node.node):
            self._check_from_messages(node.node)
        self._measured.add(id(node))
        self._sizes.add(int(size))  # type: ignore[call-overload]

    def _add_constants(self, node: nodes.Expr) -> None:
        if isinstance(node, nodes.List | nodes.Tuple):
            for item in node.items:
                self._add_constants(item)
            return
        value = constant_value(node)
        if not isinstance(node, nodes.Const) or not isinstance(value, str | int | None):
            raise UnknownDependency
        if isinstance(value, str):
            self._whole.add(value)
        elif value is not None:
            self._sizes.add(int(value))

    def _check_from_messages(self, node: nodes.Expr) -> None:
        """Raise UnknownDependency unless a value comes from the messages, whole or cut at markers."""
        for part in (node, *node.find_all(nodes.Node)):
            joined = isinstance(part, nodes.Filter) and part.name in ("join", "tojson", "length", "count")
            if joined or (isinstance(part, _COMBINING) and not self._values.is_count(part)):
                raise UnknownDependency


def _is_constant(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const | nodes.List | nodes.Tuple)


_LIST_ATTRIBUTES = frozenset(("tool_calls",))
"""Attributes of messages that are lists, if they are there."""
_LIST_FILTERS = frozenset(("list", "reverse", "select", "reject", "selectattr", "rejectattr"))
"""Filters that return a list for a list."""
_ANYTHING = nodes.Getattr(nodes.Name("?", "load"), "?", "load")


class UnknownDependency(Exception):
    """The template may depend on something that cannot be determined."""


class TemplateNames:
    """The names of a template, and which of them hold lists, list items and counts."""

    def __init__(self, tree: nodes.Template) -> None:
        self._assigned_values: dict[str, list[nodes.Node]] = {}
        """The values assigned to each name and each attribute of a namespace."""
        assignments: list[tuple[str, nodes.Node]] = []
        for node in tree.find_all(nodes.Assign):
            value = node.node if dotted_name(node.target) else _ANYTHING
            assignments += [(name, value) for name in target_names(node.target)]
            if is_namespace_call(node.node):
                space = dotted_name(node.target)
                assignments += [(f"{space}.{pair.key}", pair.value) for pair in node.node.kwargs]
        targets: list[nodes.Node] = [block.target for block in tree.find_all(nodes.AssignBlock)]
        targets += [parameter for macro in tree.find_all(nodes.Macro) for parameter in macro.args]
        targets += [target for scope in tree.find_all(nodes.With) for target in scope.targets]
        assignments += [(name, _ANYTHING) for target in targets for name in target_names(target)]
        for name, value in assignments:
            self._assigned_values.setdefault(name, []).append(value)
        self._lists = self._names_of_lists("messages", "tools", "documents")
        self._other_lists = self._names_of_lists("tools", "documents")
        loops: dict[str, list[bool]] = {}
        for loop in tree.find_all(nodes.For):
            for target in target_names(loop.target):
                loops.setdefault(target, []).append(self.is_list(loop.iter))
        self.elements = {
            name for name, all_lists in loops.items() if all(all_lists)
        } - self._assigned_values.keys()
        """Names that only ever hold items of lists."""

    def _names_of_lists(self, *lists: str) -> set[str]:
        """These names, and those that only ever hold these lists or parts of them."""
        names_left = {*lists, *self._assigned_values}
        while wrong := {
            name
            for name in names_left
            if not all(_is_list(value, names_left) for value in self._assigned_values.get(name, ()))
        }:
            names_left -= wrong
        return names_left

    def is_list(self, node: nodes.Node | None) -> bool:
        """Whether a value is the messages, the tools, the calls of a message, or a part of such a list."""
        return _is_list(node, self._lists)

    def is_independent_of_messages(self, node: nodes.Node | None) -> bool:
        """Whether a value is a list whose length does not depend on the messages."""
        return _is_list(node, self._other_lists)

    def is_constant_name(self, node: nodes.Node) -> bool:
        """Whether a name is only ever set to constants."""
        values = self._assigned_values.get(dotted_name(node) or "")
        return bool(values) and all(isinstance(value, nodes.Const) or is_negative(value) for value in values or ())

    def is_count(self, node: nodes.Node | None, within: frozenset[str] = frozenset()) -> bool:
        """Whether a value is a number or boolean that depends only on loop positions and lengths of lists."""
        if isinstance(node, nodes.Const):
            return isinstance(node.value, int)
        if isinstance(node, nodes.Add | nodes.Sub | nodes.Mod | nodes.FloorDiv):
            return self.is_count(node.left, within) and self.is_count(node.right, within)
        if isinstance(node, nodes.Filter):
            return is_length(node) and self.is_list(node.node)
        name = dotted_name(node) if node is not None else None
        if node is None or name is None:
            return node is not None and is_negative(node)
        if name.startswith("loop."):
            return name not in ("loop.previtem", "loop.nextitem") and "loop" not in self._assigned_values
        if name in within:
            return True
        values = self._assigned_values.get(name)
        return bool(values) and all(self.is_count(value, within | {name}) for value in values or ())


def _is_list(node: nodes.Node | None, lists: set[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in lists
    if isinstance(node, nodes.Filter):
        return node.name in _LIST_FILTERS and _is_list(node.node, lists)
    if isinstance(node, nodes.Getattr):
        return node.attr in _LIST_ATTRIBUTES
    if isinstance(node, nodes.Getitem):
        return (
            _is_list(node.node, lists)
            if isinstance(node.arg, nodes.Slice)
            else constant_value(node.arg) in _LIST_ATTRIBUTES
        )
    return False


def target_names(target: nodes.Node) -> Iterator[str]:
    """The names that an assignment to this target sets."""
    if isinstance(target, nodes.Tuple):
        for item in target.items:
            yield from target_names(item)
    else:
        yield dotted_name(target) or "?"


def is_length(node: nodes.Node | None) -> bool:
    """Whether an expression is `… | length`."""
    return isinstance(node, nodes.Filter) and node.name in ("length", "count")


def is_negative(node: nodes.Node) -> bool:
    """Whether an expression is a negative number."""
    return isinstance(node, nodes.Neg) and isinstance(constant_value(node.node), int)


_FROM_END = frozenset(("loop.length", "loop.revindex", "loop.revindex0"))
_NEAR_OFFSETS = frozenset((0, 1, None))


class _MessageCounts:
    """Checks what a template does with numbers that depend on how many messages there are."""

    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        self._values = TemplateNames(tree)

    def check(self) -> None:
        """Raise Unknown if a template may decide by a number of messages or write one."""
        for compare in self._tree.find_all(nodes.Compare):
            left: nodes.Node = compare.expr
            for operand in compare.ops:
                self._check_comparison(left, operand.expr)
                self._check_comparison(operand.expr, left)
                left = operand.expr
        for kind in (nodes.Add, nodes.Sub):
            for sum_ in self._tree.find_all(kind):
                if self._contains_count(sum_) or _contains_loop_index(sum_):
                    _check_offsets(_NEAR_OFFSETS, sum_.left, sum_.right)
        for output in self._tree.find_all(nodes.Output):
            for part in output.nodes:
                self._check_output(part)
        for item in self._tree.find_all(nodes.Getitem):
            if self._values.is_list(item.node):
                # The first, second or last message, a neighbour, or a slice that starts or ends there
                where = item.arg
                parts = (where.start, where.stop, where.step) if isinstance(where, nodes.Slice) else (where,)
                _check_offsets(frozenset((0, 1, -1, None)), *(part for part in parts if part is not None))
        for loop in self._tree.find_all(nodes.For):
            if loop.test is not None and any(
                (dotted_name(node) in ("loop.previtem", "loop.nextitem")) for node in loop.find_all(nodes.Getattr)
            ):
                raise UnknownDependency
            index = loop.iter.arg if isinstance(loop.iter, nodes.Getitem) else None
            is_stepped = isinstance(index, nodes.Slice) and index.step is not None
            if not is_stepped and not (isinstance(loop.iter, nodes.Filter) and loop.iter.name == "reverse"):
                continue
            for compare in loop.find_all(nodes.Compare):
                sides = [compare.expr, *(operand.expr for operand in compare.ops)]
                if any(map(_contains_loop_index, sides)) and not all(
                    constant_value(side) in _NEAR_OFFSETS for side in sides
                ):
                    raise UnknownDependency
        # Anywhere else a number of messages is refused.
        for node in self._tree.find_all(
            (nodes.Mod, nodes.Div, nodes.FloorDiv, nodes.List, nodes.Tuple, nodes.Dict)
        ):
            self._refuse_counts(node)
        for call in self._tree.find_all(nodes.Call):
            name = getattr(call.node, "name", "")
            if name != "namespace":
                self._refuse_counts(*call.args, *(pair.value for pair in call.kwargs))
            if name == "range" and not all(isinstance(arg, nodes.Const) or is_negative(arg) for arg in call.args):
                raise UnknownDependency
        for filter_ in self._tree.find_all(nodes.Filter):
            self._refuse_counts(*filter_.args, *(pair.value for pair in filter_.kwargs))
        for test in self._tree.find_all(nodes.Test):
            self._refuse_counts(*test.args, *([test.node] if test.args or test.name in ("odd", "even") else []))

    def _check_comparison(self, node: nodes.Node, other: nodes.Node) -> None:
        """Raise UnknownDependency if a number of messages is compared with a constant; a length may be with 0."""
        number = constant_value(other)
        if not isinstance(number, int) or isinstance(number, bool) or not self._contains_count(node):
            return
        if number != 0 or not is_length(node):
            raise UnknownDependency

    def _check_output(self, node: nodes.Node) -> None:
        """Raise UnknownDependency if written output holds a number of messages; its conditions may."""
        if isinstance(node, nodes.Compare | nodes.Test):
            return
        if self._is_message_count(node):
            raise UnknownDependency
        for child in node.iter_child_nodes():
            self._check_output(child)

    def _refuse_counts(self, *parts: nodes.Node) -> None:
        if any(map(self._contains_count, parts)):
            raise UnknownDependency

    def _contains_count(self, node: nodes.Node) -> bool:
        """Whether an expression contains a number of messages."""
        return self._is_message_count(node) or any(map(self._contains_count, node.iter_child_nodes()))

    def _is_message_count(self, node: nodes.Node) -> bool:
        """Whether an expression is a number that depends on how many messages there are."""
        if isinstance(node, nodes.Filter):
            return is_length(node) and not self._values.is_independent_of_messages(node.node)
        name = dotted_name(node)
        if name is None or (name.startswith("loop.") and name not in _FROM_END):
            return False
        return name in _FROM_END or (self._values.is_count(node) and not self._values.is_constant_name(node))


def _check_offsets(allowed: frozenset[int | None], *parts: nodes.Node) -> None:
    for part in parts:
        inner = constant_value(part.node if isinstance(part, nodes.Neg) else part)
        if isinstance(inner, int) and (-inner if isinstance(part, nodes.Neg) else inner) not in allowed:
            raise UnknownDependency


def _contains_loop_index(node: nodes.Node) -> bool:
    """Whether an expression contains a loop position."""
    return any((dotted_name(part) or "").startswith("loop.") for part in (node, *node.find_all(nodes.Getattr)))


_GENERATION_PROMPT_FLAG = "add_generation_prompt"
_DETERMINISTIC_NODES = (
    *(nodes.If, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.Test, nodes.Compare),
    *(nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Add, nodes.Concat, nodes.CondExpr),
)
"""Nodes that write the same whenever their names have the same values."""
_DETERMINISTIC_TESTS = frozenset(("defined", "undefined", "none", "true", "false", "string", "boolean"))


def find_generation_prompt(tree: nodes.Template) -> tuple[nodes.Template, tuple[str, ...]] | None:
    """The part that writes the generation prompt, and the variables it depends on; None if messages may matter.

    That part is the last statement, the only one that reads `add_generation_prompt`.
    """
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, nodes.If) or last.elif_ or last.else_:
        return None
    if not isinstance(last.test, nodes.Name) or last.test.name != _GENERATION_PROMPT_FLAG:
        return None
    names = list(tree.find_all(nodes.Name))
    if sum(name.name == _GENERATION_PROMPT_FLAG for name in names) != 1:
        return None
    # What the template sets or loops over may differ between conversations.
    changing = {name.name for name in names if name.ctx != "load"} | {"messages", "loop"}
    changing |= {macro.name for macro in tree.find_all(nodes.Macro)}
    parts = [part for node in last.body for part in (node, *node.find_all(nodes.Node))]
    if not all(isinstance(part, _DETERMINISTIC_NODES) for part in parts):
        return None
    if any(part.name in changing for part in parts if isinstance(part, nodes.Name)):
        return None
    if any(part.name not in _DETERMINISTIC_TESTS for part in parts if isinstance(part, nodes.Test)):
        return None
    opener = nodes.Template(last.body, lineno=1)
    if tree.environment is not None:
        opener.set_environment(tree.environment)
    return opener, tuple(sorted({part.name for part in parts if isinstance(part, nodes.Name)}))
