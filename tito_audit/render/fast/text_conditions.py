"""What a template looks for in the texts of messages before it decides what to write, and where it looks.

Most templates only pass texts on, trim them, and check whether they are empty or hold a few markers such as
`</think>`. They look at the first message and the last one, at the next and the one before, and at the last one
of a role, but not at how many there are. Then two conversations whose messages have the same keys, the same
kinds of values, the same markers and the same neighbours are written the same way, whatever else their texts
say.

And which generation prompts are the same after any messages: those that a template writes in a single place, at
its very end, and builds only from other variables. This module imports jinja2 and is itself imported late.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes

from tito_audit.render.fast.static_check import constant_value, dotted_name

_TEXT_READERS = frozenset(
    ("int", "float", "abs", "lower", "upper", "title", "capitalize", "find", "rfind", "count")
)
"""Filters and methods whose result depends on more of a text than its markers."""
_TEXT_TESTS = frozenset(("lt", "le", "gt", "ge", "<", "<=", ">", ">=", "odd", "even", "divisibleby"))
_ENDS = frozenset(("first", "last", "reverse"))
_COMBINING = (nodes.Add, nodes.Concat, nodes.Mod, nodes.Sub, nodes.Div, nodes.FloorDiv)
_Found = tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]
_LOGIC = (nodes.Compare, nodes.Test, nodes.Not)


def find_text_conditions(tree: nodes.Template) -> _Found | None:
    """What a template that is safe for minijinja looks for; None if its output may depend on something else."""
    try:
        _MessageCounts(tree).check()
        return _ExpressionReader(tree).read()
    except (UnknownDependency, RecursionError):
        return None


class _ExpressionReader:
    """Reads every expression of a template."""

    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        self._values = TemplateNames(tree)
        self._whole: set[str] = set()
        self._inside: set[str] = set()
        self._sizes: set[int] = set()
        self._measured: set[int] = set()
        """Lengths that are only compared with numbers."""

    def read(self) -> _Found:
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
            if isinstance(test, nodes.Filter) and is_length(test):  # true or false
                self._add_length(test, 0)
        for loop in tree.find_all(nodes.For):
            if self._values.is_list(loop.iter):
                continue
            # A loop, perhaps over the characters of a text, does not count its rounds.
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
            elif node.name in _TEXT_READERS or (
                node.name in ("first", "last", "reverse") and not self._values.is_list(node.node)
            ):
                raise UnknownDependency
            elif node.name == "replace":
                self._add_markers(node.args[:1])
            elif node.name == "trim":
                _check_strips_whitespace(node.args)
            elif node.name not in ("join", "default", "d", "tojson"):
                values = {value for value in map(constant_value, node.args) if isinstance(value, str)}
                if values & (_TEXT_TESTS | _TEXT_READERS | {"in", "length"}):
                    raise UnknownDependency
                self._whole |= values
        for call in tree.find_all(nodes.Call):
            self._read_call(call)
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

    # What is looked at

    def _read_call(self, node: nodes.Call) -> None:
        if not isinstance(node.node, nodes.Getattr):
            return
        if node.node.attr in _TEXT_READERS:
            raise UnknownDependency
        if node.node.attr in ("split", "startswith", "endswith", "replace"):
            self._add_markers(node.args[:1])
        if node.node.attr in ("strip", "lstrip", "rstrip"):
            _check_strips_whitespace(node.args)

    def _add_markers(self, arguments: list[nodes.Expr]) -> None:
        texts = [constant_value(argument) for argument in arguments]
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise UnknownDependency
        self._inside.update(text for text in texts if isinstance(text, str))

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
        elif op in ("eq", "ne") and all(map(_is_role, (left, right))):
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
        """Raise unless a value comes from the messages, whole or cut at markers."""
        for part in (node, *node.find_all(nodes.Node)):
            joined = isinstance(part, nodes.Filter) and part.name in ("join", "tojson", "length", "count")
            if joined or (isinstance(part, _COMBINING) and not self._values.is_count(part)):
                raise UnknownDependency


def _check_strips_whitespace(arguments: list[nodes.Expr]) -> None:
    """Raise unless what is stripped from a text is white space."""
    if not all(str(constant_value(argument) or "?").isspace() for argument in arguments):
        raise UnknownDependency


def _is_constant(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const | nodes.List | nodes.Tuple)


def _is_role(node: nodes.Node) -> bool:
    named = isinstance(node, nodes.Getattr) and node.attr == "role"
    return named or (isinstance(node, nodes.Getitem) and constant_value(node.arg) == "role")


_LIST_ATTRIBUTES = frozenset(("tool_calls",))
"""Attributes of messages that are lists or absent."""
_LIST_FILTERS = frozenset(("list", "reverse", "select", "reject", "selectattr", "rejectattr"))
"""Filters that make a list of a list."""
_ANYTHING = nodes.Getattr(nodes.Name("?", "load"), "?", "load")


class UnknownDependency(Exception):
    """What the template writes may depend on more than can be known."""


class TemplateNames:
    """The names of a template, and which of them are lists, messages and numbers."""

    def __init__(self, tree: nodes.Template) -> None:
        self._assigned_values = _assignments(tree)
        self._lists = self._names_of_lists("messages", "tools", "documents")
        self._other_lists = self._names_of_lists("tools", "documents")
        loops: dict[str, list[bool]] = {}
        for loop in tree.find_all(nodes.For):
            for target in target_names(loop.target):
                loops.setdefault(target, []).append(self.is_list(loop.iter))
        self.elements = {
            name for name, all_lists in loops.items() if all(all_lists)
        } - self._assigned_values.keys()
        """Names that only ever hold elements of lists."""

    def _names_of_lists(self, *lists: str) -> set[str]:
        """The names that only ever hold these lists or parts of them."""
        names_left = {*lists, *self._assigned_values}
        while wrong := {
            name
            for name in names_left
            if not all(_is_list(value, names_left) for value in self._assigned_values.get(name, ()))
        }:
            names_left -= wrong
        return names_left

    def is_list(self, node: nodes.Node | None) -> bool:
        """Whether a value is the messages, the tools, the calls in a message, or some of these."""
        return _is_list(node, self._lists)

    def is_independent_of_messages(self, node: nodes.Node | None) -> bool:
        """Whether a list is independent of how many messages there are."""
        return _is_list(node, self._other_lists)

    def is_constant_name(self, node: nodes.Node) -> bool:
        """Whether a name is only set to constants."""
        values = self._assigned_values.get(dotted_name(node) or "")
        return bool(values) and all(isinstance(value, nodes.Const) or is_negative(value) for value in values or ())

    def is_count(self, node: nodes.Node | None, within: frozenset[str] = frozenset()) -> bool:
        """Whether a value is a number or boolean that depends only on places and lengths of lists."""
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


def _assignments(tree: nodes.Template) -> dict[str, list[nodes.Node]]:
    """The values assigned to each name and each attribute of a namespace."""
    assigned: dict[str, list[nodes.Node]] = {}

    def put(target: nodes.Node, value: nodes.Node) -> None:
        for name in target_names(target):
            assigned.setdefault(name, []).append(value)

    for node in tree.find_all(nodes.Assign):
        put(node.target, node.node if dotted_name(node.target) else _ANYTHING)
        if isinstance(node.node, nodes.Call) and getattr(node.node.node, "name", "") == "namespace":
            for pair in node.node.kwargs:
                assigned.setdefault(f"{dotted_name(node.target)}.{pair.key}", []).append(pair.value)
    for block in tree.find_all(nodes.AssignBlock):
        put(block.target, _ANYTHING)
    for target in (name for macro in tree.find_all(nodes.Macro) for name in macro.args):
        put(target, _ANYTHING)
    for scope in tree.find_all(nodes.With):
        for named in scope.targets:
            put(named, _ANYTHING)
    return assigned


def target_names(target: nodes.Node) -> Iterator[str]:
    """The names in the target of an assignment."""
    if isinstance(target, nodes.Tuple):
        for item in target.items:
            yield from target_names(item)
    else:
        yield dotted_name(target) or "?"


def is_length(node: nodes.Node | None) -> bool:
    """Whether an expression is the length of something."""
    return isinstance(node, nodes.Filter) and node.name in ("length", "count")


def is_negative(node: nodes.Node) -> bool:
    """Whether an expression is a negative constant."""
    return isinstance(node, nodes.Neg) and isinstance(constant_value(node.node), int)


_FROM_END = frozenset(("loop.length", "loop.revindex", "loop.revindex0"))
_NEAR_OFFSETS = frozenset((0, 1, None))


class _MessageCounts:
    """Checks every number in a template that depends on how many messages there are."""

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
                # The first, the second, the last message, one next to another, or all from there.
                place_ = item.arg
                parts = (place_.start, place_.stop, place_.step) if isinstance(place_, nodes.Slice) else (place_,)
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
        # A number of messages goes nowhere else.
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
        """A number of messages may be compared with a place, with nothing or with 0, but with no other
        constant."""
        number = constant_value(other)
        if not isinstance(number, int) or isinstance(number, bool) or not self._contains_count(node):
            return
        if number != 0 or not is_length(node):
            raise UnknownDependency

    def _check_output(self, node: nodes.Node) -> None:
        """Raise if an expression that is written holds a number of messages; conditions may hold one."""
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
        """Whether a value is made from a number of messages."""
        return self._is_message_count(node) or any(map(self._contains_count, node.iter_child_nodes()))

    def _is_message_count(self, node: nodes.Node) -> bool:
        """Whether a value is a number that depends on how many messages there are."""
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
    """Whether a value is made from the place of an element."""
    return any((dotted_name(part) or "").startswith("loop.") for part in (node, *node.find_all(nodes.Getattr)))


_GENERATION_PROMPT_FLAG = "add_generation_prompt"
_DETERMINISTIC_NODES = (
    *(
        nodes.If,
        nodes.Output,
        nodes.TemplateData,
        nodes.Const,
        nodes.Name,
        nodes.Test,
        nodes.Compare,
        nodes.Operand,
    ),
    *(nodes.And, nodes.Or, nodes.Not, nodes.Add, nodes.Concat, nodes.CondExpr),
)
"""Nodes that always write the same if their names have the same values."""
_DETERMINISTIC_TESTS = frozenset(("defined", "undefined", "none", "true", "false", "string", "boolean"))


def find_generation_prompt(tree: nodes.Template) -> tuple[nodes.Template, tuple[str, ...]] | None:
    """The part that writes the generation prompt, and the variables it depends on; None if messages may matter
    too.

    That part comes last and writes the same after any messages.
    """
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, nodes.If) or last.elif_ or last.else_:
        return None
    if not isinstance(last.test, nodes.Name) or last.test.name != _GENERATION_PROMPT_FLAG:
        return None
    names = list(tree.find_all(nodes.Name))
    if sum(name.name == _GENERATION_PROMPT_FLAG for name in names) != 1:
        return None
    # Names that the template sets or loops over may differ between conversations.
    changing = {name.name for name in names if name.ctx != "load"} | {"messages", "loop"}
    changing |= {macro.name for macro in tree.find_all(nodes.Macro)}
    parts = [part for node in last.body for part in (node, *node.find_all(nodes.Node))]
    if not all(
        part.name not in changing
        if isinstance(part, nodes.Name)
        else part.name in _DETERMINISTIC_TESTS
        if isinstance(part, nodes.Test)
        else isinstance(part, _DETERMINISTIC_NODES)
        for part in parts
    ):
        return None
    opener = nodes.Template(last.body, lineno=1)
    if tree.environment is not None:
        opener.set_environment(tree.environment)
    return opener, tuple(sorted({part.name for part in parts if isinstance(part, nodes.Name)}))
