"""The habits that make a house grow, counted: `python -m tools.habits [CHECKOUT]`.

All counts come from the source alone. A room is a folder of the package; the modules at its root are one room.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

__all__ = ["PRONOUNS", "House", "Module"]

PACKAGE = "tito_audit"
ROOT_ROOM = "(root)"
PRONOUNS = frozenset(
    ["one", "found", "said", "told", "mine", "held", "known", "given", "made", "kept", "asked", "taken"]
)
"""Names that say nothing of what they hold."""
_SHORT = 4
"""A function whose body has fewer lines is shorter than its call and its name explain."""
_SHOWN = 15

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A module of the package."""

    name: str
    room: str
    text: str

    @property
    def is_command(self) -> bool:
        """Whether it is a command, of which each has a file."""
        return self.room == "cli" and not self.name.rpartition(".")[2].startswith("_")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @cached_property
    def code_lines(self) -> int:
        """Lines without blank ones, comments and docstrings."""
        lines = self.text.splitlines()
        code = {
            number for number, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")
        }
        for node in self.nodes:
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return len(code)

    @cached_property
    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, Function)]

    @cached_property
    def classes(self) -> list[str]:
        return [node.name for node in self.nodes if isinstance(node, ast.ClassDef)]

    @cached_property
    def uses(self) -> Counter[str]:
        """How often each name is read, as a name, an attribute, or in an import from elsewhere."""
        read: Counter[str] = Counter()
        for node in self.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                read[node.id] += 1
            elif isinstance(node, ast.Attribute):
                read[node.attr] += 1
            elif isinstance(node, ast.ImportFrom):
                read.update(alias.name for alias in node.names)
        return read

    @cached_property
    def private_functions_used_once(self) -> list[Function]:
        """Functions and methods with a private name that one place calls."""
        return [
            function
            for function in self.functions
            if function.name.startswith("_") and not function.name.endswith("__") and self.uses[function.name] == 1
        ]

    @cached_property
    def numbers_used_once(self) -> list[str]:
        """Constants of a bare number that one place reads."""
        names = []
        for node in self.tree.body:
            if not isinstance(node, ast.Assign) or not all(
                isinstance(target, ast.Name) for target in node.targets
            ):
                continue
            bare = isinstance(node.value, ast.Constant) and isinstance(node.value.value, int | float)
            names += [target.id for target in node.targets if bare and self.uses[target.id] == 1]  # type: ignore[attr-defined]
        return names

    @cached_property
    def bound_names(self) -> list[str]:
        """Every name that it binds: variables, parameters and functions, once for each place."""
        names = [function.name.lstrip("_") for function in self.functions]
        for node in self.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.append(node.id)
            elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
                names.append(node.arg)
        return names

    @cached_property
    def pronouns(self) -> list[str]:
        return [name for name in self.bound_names if name in PRONOUNS]


@dataclass(frozen=True)
class House:
    """The package of a checkout."""

    modules: Sequence[Module]

    @classmethod
    def of(cls, checkout: Path) -> House:
        """The modules of a checkout's package."""
        package, modules = checkout / PACKAGE, []
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package).with_suffix("").parts
            name = ".".join((PACKAGE, *parts)).removesuffix(".__init__")
            room = parts[0] if len(parts) > 1 else ROOT_ROOM
            modules.append(Module(name, room, path.read_text(encoding="utf-8")))
        return cls(modules)

    @cached_property
    def lines(self) -> Counter[str]:
        """Lines of each room."""
        rooms: Counter[str] = Counter()
        for module in self.modules:
            rooms[module.room] += module.lines
        return rooms

    @cached_property
    def code_lines(self) -> int:
        return sum(module.code_lines for module in self.modules)

    @cached_property
    def private_functions_used_once(self) -> list[str]:
        return [f"{m.name}.{f.name}" for m in self.modules for f in m.private_functions_used_once]

    @cached_property
    def short_private_functions_used_once(self) -> list[str]:
        """Those whose body, without its docstring, has fewer than four lines."""
        short = []
        for module in self.modules:
            for function in module.private_functions_used_once:
                body = function.body[1:] if ast.get_docstring(function) else function.body
                if body and (body[-1].end_lineno or 0) - body[0].lineno + 1 < _SHORT:
                    short.append(f"{module.name}.{function.name}")
        return short

    @cached_property
    def numbers_used_once(self) -> list[str]:
        return [f"{module.name}.{name}" for module in self.modules for name in module.numbers_used_once]

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        """For each module, those that import it or names from it."""
        importers: dict[str, set[str]] = defaultdict(set)
        names = {module.name for module in self.modules}
        for module in self.modules:
            for imported in _imported(module, names):
                importers[imported].add(module.name)
        return importers

    @cached_property
    def modules_with_one_importer_in_their_room(self) -> list[str]:
        rooms = {module.name: module.room for module in self.modules}
        return [
            module.name
            for module in self.modules
            if module.room != ROOT_ROOM
            and not module.is_command
            and len(importers := self.importers[module.name]) == 1
            and {rooms[name] for name in importers} == {module.room}
        ]

    @cached_property
    def class_names_that_stand_twice(self) -> dict[str, int]:
        counts = Counter(chain.from_iterable(module.classes for module in self.modules))
        return {name: count for name, count in sorted(counts.items()) if count > 1}

    @cached_property
    def pronouns(self) -> Counter[str]:
        return Counter(chain.from_iterable(module.pronouns for module in self.modules))

    @cached_property
    def pronoun_share(self) -> float:
        """The share of bound names that are pronouns."""
        return self.pronouns.total() / max(sum(len(module.bound_names) for module in self.modules), 1)

    def table(self) -> Iterator[str]:
        """All counts, a line each."""
        per_thousand = 1000 / max(self.code_lines, 1)
        files = Counter(module.room for module in self.modules)
        yield f"{sum(self.lines.values()):,} lines ({self.code_lines:,} of code) in {len(self.modules)} modules"
        yield from (
            f"  {room:12}{lines:7,} lines {files[room]:4} modules" for room, lines in self.lines.most_common()
        )
        once, short = self.private_functions_used_once, self.short_private_functions_used_once
        yield (
            f"private functions used once: {len(once)}, {len(once) * per_thousand:.1f} in 1,000 lines of code, "
            f"{len(short)} of them under {_SHORT} lines"
        )
        numbers = self.numbers_used_once
        yield f"constants of a bare number used once: {len(numbers)}, {len(numbers) * per_thousand:.1f} in 1,000"
        alone = self.modules_with_one_importer_in_their_room
        yield f"modules with one importer, in their room: {len(alone)}"
        twice = self.class_names_that_stand_twice
        yield f"class names that stand twice: {len(twice)}: {', '.join(list(twice)[:_SHOWN])}"
        words = ", ".join(f"{name} {count}" for name, count in self.pronouns.most_common())
        yield f"pronouns among bound names: {self.pronouns.total()}, {self.pronoun_share:.1%}: {words}"


def _imported(module: Module, names: set[str]) -> Iterator[str]:
    """Every module of the package that it imports, or takes a name from."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in names:
                    yield inner
                elif node.module in names:
                    yield node.module


if __name__ == "__main__":
    checkout = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    print("\n".join(House.of(checkout).table()))
