"""How many faults the tests notice: one operator or constant of the package is changed at a time, and tests run.

    python -m tools.mutants --count 100 --rooms run,formats,rules,repairs,align --seed 1

Prints each mutant and the test that noticed it, or that none did, and the counts. It works on copies of the
checkout. Tests are collected once; each mutant runs in a fork, which writes the changed module (for tests that
start processes) and replaces the code of the changed function in memory. Test files that import the mutated module
come first, then those that import its room, then the others, until one fails or the mutant's seconds are up.
"""

from __future__ import annotations

import argparse
import ast
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

__all__ = ["Mutant", "mutants_of"]

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
NOTICED, SURVIVED, TIMED_OUT = 1, 0, 3


@dataclass(frozen=True)
class Mutant:
    """One change of one line."""

    file: str
    """From the root of the checkout."""
    function: str
    """The outermost function that holds it, as `__qualname__`."""
    line: int
    node: int
    """Which of the changeable nodes of the file, in the order of the walk."""
    change: str
    """What is changed, for people."""


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Every change that can be made within the functions of a module."""
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
    """Function, line, words and the change itself of each node that can be changed."""
    for name, function in _functions(tree.body, ""):
        for statement in function.body:
            for node in ast.walk(statement):
                for change, apply in _changes(node):
                    yield name, getattr(node, "lineno", function.lineno), change, apply


def _functions(body: Sequence[ast.stmt], within: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The outermost functions of a module and of its classes."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef):
            yield within + statement.name, statement
        elif isinstance(statement, ast.ClassDef):
            yield from _functions(statement.body, f"{within}{statement.name}.")


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[], None]]]:
    """What can be changed in a node itself: words for people, and the change."""
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


class Runner:
    """A pytest plugin: runs the mutants in place of the tests."""

    def __init__(self, root: Path, mutants: Sequence[Mutant], seconds: float) -> None:
        self.root, self.mutants, self.seconds = root, mutants, seconds
        self.failed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the first test that failed."""
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_runtestloop(self, session: Any) -> bool:
        """Run every mutant; what is printed goes straight to the process's own stdout."""
        out = os.fdopen(os.dup(1), "w", buffering=1)
        capture = session.config.pluginmanager.getplugin("capturemanager")
        for mutant in self.mutants:
            path = self.root / mutant.file
            original = path.read_text(encoding="utf-8")
            changed = mutated(original, mutant)
            path.write_text(changed, encoding="utf-8")
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                capture.suspend_global_capture()
                os._exit(self._child(session, mutant, compile(changed, str(path), "exec"), writing))
            os.close(writing)
            with os.fdopen(reading) as said:
                by = said.read()
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            path.write_text(original, encoding="utf-8")
            word = {SURVIVED: "survived", NOTICED: "noticed", TIMED_OUT: "no time left"}.get(
                code, f"crashed {code}"
            )
            print(f"{word}\t{mutant.file}:{mutant.line}\t{mutant.change}\t{by}", file=out)
        return True

    def _child(self, session: Any, mutant: Mutant, module: CodeType, writing: int) -> int:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        _replace(mutant, str(self.root / mutant.file), module)
        began, items = time.process_time(), _ranked(session.items, mutant, self.root)
        code = SURVIVED
        for item, after in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if self.failed:
                code = NOTICED
                break
            if time.process_time() - began > self.seconds:
                code = TIMED_OUT
                break
        os.write(writing, self.failed.encode())
        return code


def _replace(mutant: Mutant, file: str, code: CodeType) -> None:
    """Give every function made of the mutated one's code the new code."""
    for name in mutant.function.split("."):
        code = next(one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == name)
    for one in gc.get_objects():
        if isinstance(one, FunctionType) and one.__code__.co_filename == file:
            same = one.__code__.co_qualname == mutant.function
            if same and len(one.__code__.co_freevars) == len(code.co_freevars):
                one.__code__ = code


def _ranked(items: Sequence[Any], mutant: Mutant, root: Path) -> list[Any]:
    """The tests, those closest to the mutated module first."""
    module = mutant.file.removesuffix(".py").replace("/", ".")
    room = ".".join(module.split(".")[:2])
    stem = module.split(".")[-1].strip("_")

    def rank(file: str) -> int:
        text = (root / file).read_text(encoding="utf-8")
        return 0 if module in text else 1 if stem in file else 2 if room in text else 3

    ranks = {file: rank(file) for file in {item.nodeid.split("::")[0] for item in items}}
    return sorted(items, key=lambda item: ranks[item.nodeid.split("::")[0]])


def _copied(to: Path) -> Path:
    """A copy of the checkout's files, with what lies beside it where tests look for it."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name)
    if (ROOT.parent / "shared").exists():
        (to.parent / "shared").symlink_to((ROOT.parent / "shared").resolve())
    return to


def _work(root: Path, mutants: Sequence[Mutant], seconds: float) -> int:
    os.chdir(root)
    sys.path.insert(0, str(root))
    import pytest

    return int(pytest.main(["-q", "-p", "no:cacheprovider", "tests"], plugins=[Runner(root, mutants, seconds)]))


def main() -> int:
    """Choose the mutants, share them out to processes with a copy each, print what became of them."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--rooms", default="run,formats,rules,repairs,align")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120, help="CPU seconds of tests for each mutant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args()
    files = [
        path for room in chosen.rooms.split(",") for path in sorted((ROOT / "tito_audit" / room).rglob("*.py"))
    ]
    every = [
        one for path in files for one in mutants_of(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    ]
    picked = random.Random(chosen.seed).sample(every, min(chosen.count, len(every)))
    print(f"{len(picked)} of {len(every)} mutants of {chosen.rooms}, seed {chosen.seed}", flush=True)
    with tempfile.TemporaryDirectory() as aside:
        children = []
        for number in range(chosen.jobs):
            copy = _copied(Path(aside) / str(number) / "checkout")
            child = os.fork()
            if child == 0:
                os._exit(_work(copy, picked[number :: chosen.jobs], chosen.seconds))
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
