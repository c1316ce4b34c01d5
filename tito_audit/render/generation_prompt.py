"""Which generation prompts are the same after any messages.

This can be seen in a template that writes one in a single place, at its very end, and builds it only from
variables other than the messages. This module imports jinja2 and is itself imported late.
"""

from __future__ import annotations

from jinja2 import nodes

_ASKED = "add_generation_prompt"
_PARTS = (
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
_TESTS = frozenset(("defined", "undefined", "none", "true", "false", "string", "boolean"))


def opener_of(tree: nodes.Template) -> tuple[nodes.Template, tuple[str, ...]] | None:
    """The part that writes the generation prompt, and the variables it depends on; None if messages may matter
    too.

    That part comes last and writes the same after any messages.
    """
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, nodes.If) or last.elif_ or last.else_:
        return None
    if not isinstance(last.test, nodes.Name) or last.test.name != _ASKED:
        return None
    names = list(tree.find_all(nodes.Name))
    if sum(name.name == _ASKED for name in names) != 1:
        return None
    # Names that the template sets or loops over may differ between conversations.
    changing = {name.name for name in names if name.ctx != "load"} | {"messages", "loop"}
    changing |= {macro.name for macro in tree.find_all(nodes.Macro)}
    parts = [part for node in last.body for part in (node, *node.find_all(nodes.Node))]
    if not all(_is_fixed(part, changing) for part in parts):
        return None
    opener = nodes.Template(last.body, lineno=1)
    if tree.environment is not None:
        opener.set_environment(tree.environment)
    return opener, tuple(sorted({part.name for part in parts if isinstance(part, nodes.Name)}))


def _is_fixed(part: nodes.Node, changing: set[str]) -> bool:
    if isinstance(part, nodes.Name):
        return part.name not in changing
    if isinstance(part, nodes.Test):
        return part.name in _TESTS
    return isinstance(part, _PARTS)
