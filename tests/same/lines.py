"""The figures of a checkout's structure, read from its source alone.

A room is a folder of the package; modules at its root are one room. An import counts for the module that it names:
`from a import b` is of `a.b` where that is a module, else of `a`.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median, quantiles

__all__ = ["Module", "circles", "figures", "modules"]

PACKAGE = "tito_audit"
ROOT = "(root)"
_MOST = 400
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Import:
    """One name that a module imports."""

    module: str
    """The module that is named."""
    name: str
    """What is taken from it; nothing where the module itself is."""
    top: bool
    """Whether it runs when the module is imported."""


@dataclass(frozen=True)
class Module:
    """A module of the package."""

    name: str
    room: str
    tree: ast.Module
    lines: int
    is_package: bool

    @cached_property
    def functions(self) -> list[int]:
        """Lines of each function and method, decorators aside."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return [
            (node.end_lineno or 0) - node.lineno + 1 for node in ast.walk(self.tree) if isinstance(node, kinds)
        ]

    @cached_property
    def defined(self) -> set[str]:
        """Names that its top level defines: functions, classes and values."""
        names: set[str] = set()
        for node in self.tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Assign):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
        return {name for name in names if not name.startswith("__")}

    def imports(self, names: set[str]) -> Iterator[Import]:
        """What it imports of the package."""
        top = set(map(id, _running(self.tree.body)))
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name in names:
                        yield Import(alias.name, "", id(node) in top)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                for alias in node.names:
                    inner = f"{base}.{alias.name}"
                    if inner in names:
                        yield Import(inner, "", id(node) in top)
                    elif base in names:
                        yield Import(base, alias.name, id(node) in top)

    def _base(self, node: ast.ImportFrom) -> str:
        """The module that a `from` names, relative ones too."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        above = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*above, *([node.module] if node.module else [])])


def _running(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import: not those for type checkers alone, nor those in functions."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(node.test):
                yield from _running(node.body)
            yield from _running(node.orelse)
        elif isinstance(node, (ast.Try, ast.With, ast.ClassDef)):
            yield from _running(node.body)
            for handler in getattr(node, "handlers", ()):
                yield from _running(handler.body)
            yield from _running(getattr(node, "orelse", ()))


def modules(checkout: Path) -> list[Module]:
    """All modules of a checkout's package."""
    package, sources = checkout / PACKAGE, []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        text, is_package = path.read_text(encoding="utf-8"), parts[-1] == "__init__"
        name = ".".join([PACKAGE, *(parts[:-1] if is_package else parts)])
        room = parts[0] if len(parts) > 1 else ROOT
        sources.append(Module(name, room, ast.parse(text), len(text.splitlines()), is_package))
    return sources


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of more than one module that all reach each other, the largest first (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on: set[str] = set()
    groups: list[list[str]] = []
    for start in sorted(edges):
        if start in index:
            continue
        work = [(start, iter(sorted(edges[start])))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on.add(start)
        while work:
            here, rest = work[-1]
            there = next(rest, None)
            if there is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[here])
                if low[here] == index[here]:
                    at = stack.index(here)
                    groups.append(sorted(stack[at:]))
                    on.difference_update(stack[at:])
                    del stack[at:]
            elif there not in index:
                index[there] = low[there] = len(index)
                stack.append(there)
                on.add(there)
                work.append((there, iter(sorted(edges.get(there, ())))))
            elif there in on:
                low[here] = min(low[here], index[there])
    return sorted((group for group in groups if len(group) > 1), key=lambda group: (-len(group), group))


def figures(checkout: Path) -> Iterator[str]:
    """All figures, a line each."""
    sources = modules(checkout)
    yield from _sizes(sources)
    yield from _functions(sources)
    names = {module.name for module in sources}
    yield from _private(sources, names)
    for what, top_only in (("at any level", False), ("at top level only", True)):
        edges = {
            module.name: {use.module for use in module.imports(names) if use.top or not top_only} - {module.name}
            for module in sources
        }
        groups = circles(edges)
        yield f"import circles, {what}: {len(groups)}, of {[len(group) for group in groups]} modules"
        yield from (f"  {', '.join(_short(name) for name in group[:_SHOWN])}" for group in groups[:_SHOWN])
    yield from _names(sources)


def _short(name: str) -> str:
    return name.removeprefix(f"{PACKAGE}.")


def _sizes(sources: list[Module]) -> Iterator[str]:
    rooms: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for module in sources:
        rooms[module.room] += module.lines
        files[module.room] += 1
    yield f"{rooms.total()} lines in {files.total()} modules"
    yield from (f"  {room:16}{lines:7} lines{files[room]:5} modules" for room, lines in rooms.most_common())
    long = sorted((module for module in sources if module.lines > _MOST), key=lambda module: -module.lines)
    yield f"modules of more than {_MOST} lines: {len(long)}"
    yield from (f"  {_short(module.name)} {module.lines}" for module in long)


def _functions(sources: list[Module]) -> Iterator[str]:
    lengths = [lines for module in sources for lines in module.functions]
    if len(lengths) > 1:
        p90 = quantiles(lengths, n=10, method="inclusive")[-1]
        yield f"{len(lengths)} functions: median {median(lengths):g}, 90th {p90:g}, longest {max(lengths)} lines"


def _private(sources: list[Module], names: set[str]) -> Iterator[str]:
    """Imports of another room's private module or private name."""
    rooms = {module.name: module.room for module in sources}
    crossed: Counter[tuple[str, str]] = Counter()
    kinds: Counter[str] = Counter()
    for module in sources:
        for imported in module.imports(names):
            path = imported.module.split(".")[1:]
            hidden = [part for part in path if part.startswith("_")]
            if rooms[imported.module] != module.room and (hidden or imported.name.startswith("_")):
                crossed[module.room, rooms[imported.module]] += 1
                kinds["module" if hidden else "name"] += 1
    yield (
        f"imports of another room's private parts: {crossed.total()} names "
        f"({kinds['module']} out of private modules, {kinds['name']} private names out of others)"
    )
    yield from (f"  {room} -> {other}: {count}" for (room, other), count in crossed.most_common(_SHOWN))


def _names(sources: list[Module]) -> Iterator[str]:
    rooms: dict[str, set[str]] = defaultdict(set)
    for module in sources:
        for name in module.defined:
            rooms[name].add(module.room)
    shared = {name: where for name, where in rooms.items() if len(where) > 1}
    for what, names in (
        ("public", [name for name in shared if not name.startswith("_")]),
        ("private", [name for name in shared if name.startswith("_")]),
    ):
        names.sort(key=lambda name: (-len(shared[name]), name))
        yield f"{what} names defined in more than one room: {len(names)}"
        if names:
            yield "  " + ", ".join(f"{name} ({len(shared[name])})" for name in names[: 3 * _SHOWN])
