"""The possible changes of a module, one operator or constant at a time."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

__all__ = ["Mutant", "functions_of", "mutants_of", "mutated"]

ROOT = Path(__file__).resolve().parents[1]
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
}


@dataclass(frozen=True)
class Mutant:
    """One change of one line."""

    file: str
    """From the root of the checkout."""
    function: str
    """The outermost function that holds it, as `__qualname__`."""
    line: int
    node: int
    """The number of the changed node, in the order of the walk."""
    change: str
    """A description of the change."""


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Every possible change in the functions of a module."""
    return [
        Mutant(file, function, line, number, change)
        for number, (function, line, change, _) in enumerate(_changeable(ast.parse(text)))
    ]


def mutated(text: str, mutant: Mutant) -> str:
    """The module with the change made."""
    tree = ast.parse(text)
    (*_, apply) = list(_changeable(tree))[mutant.node]
    apply()
    return ast.unparse(tree)


def _changeable(tree: ast.Module) -> Iterator[tuple[str, int, str, Callable[[], None]]]:
    """Function, line, description and change of each node that can be changed."""
    for name, function in functions_of(tree.body, ""):
        for statement in function.body:
            for node in ast.walk(statement):
                for change, apply in _changes(node):
                    yield name, getattr(node, "lineno", function.lineno), change, apply


def functions_of(body: Sequence[ast.stmt], within: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The outermost functions of a module and of its classes."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef):
            yield within + statement.name, statement
        elif isinstance(statement, ast.ClassDef):
            yield from functions_of(statement.body, f"{within}{statement.name}.")


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[], None]]]:
    """The possible changes of a node itself, each with a description."""
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            if type(operator) in SWAPPED:
                new = SWAPPED[type(operator)]()
                yield _words(operator, new), partial(node.ops.__setitem__, index, new)
    elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in SWAPPED:
        new = SWAPPED[type(node.op)]()
        yield _words(node.op, new), partial(setattr, node, "op", new)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not x -> x", partial(setattr, node, "operand", ast.UnaryOp(ast.Not(), node.operand))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield f"{node.value} -> {value}", partial(setattr, node, "value", value)
    elif isinstance(node, ast.If | ast.IfExp):
        yield "if x -> if not x", partial(setattr, node, "test", ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Return) and not (node.value is None or _is_none(node.value)):
        yield "return x -> return None", partial(setattr, node, "value", ast.Constant(None))


def _words(old: ast.AST, new: ast.AST) -> str:
    return f"{type(old).__name__} -> {type(new).__name__}"


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None
