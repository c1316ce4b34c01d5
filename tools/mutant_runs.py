"""Runs tests on one mutant after another, each in a fork of a process that has loaded the tests."""

from __future__ import annotations

import ast
import builtins
import gc
import importlib
import json
import mmap
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from tools.mutant_changes import Mutant, functions_of, mutated

__all__ = ["Reach", "Work", "worked"]

NOTICED, SURVIVED, TIMED_OUT, BROKEN = 1, 0, 3, 4
WORDS = {BROKEN: "not tried", SURVIVED: "survived", NOTICED: "noticed", TIMED_OUT: "no time left"}
STARTS_PROCESSES = re.compile(r"subprocess|Popen|os\.exec|become\(")


@dataclass
class Reach:
    """What a run of all tests without a mutant shows, one file for each process."""

    seconds: dict[str, float] = field(default_factory=dict)
    """CPU seconds of each test that passed."""
    calls: dict[str, list[str]] = field(default_factory=dict)
    """The tests, without their parameters, that call a function; functions as `FILE::NAME`."""

    def add(self, other: Mapping[str, Any]) -> None:
        """Add the result of another process."""
        self.seconds |= other["seconds"]
        for function, tests in other["calls"].items():
            self.calls[function] = sorted({*self.calls.get(function, ()), *tests})


class Runner:
    """A pytest plugin that runs mutants instead of tests."""

    def __init__(self, work: Work) -> None:
        self.work, self.root = work, work.root
        self.failed = ""
        self.reach = Reach()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the first test that failed."""
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_runtestloop(self, session: Any) -> bool:
        """Run every mutant; what is printed goes straight to the process's own stdout."""
        with os.fdopen(os.dup(1), "w", buffering=1) as out:
            if self.work.known is None:
                code, said = self._forked(session, partial(self._reaching, session), 3600)
                if code != SURVIVED:
                    print(f"what tests call is not known: {code} {said}", file=out)
                self.work.met()
            for path in self.work.reaches():
                self.reach.add(json.loads(path.read_text(encoding="utf-8")))
            for mutant in self.work.mutants:
                word, by = self._tried(session, mutant)
                self.work.ended(mutant, word, by, out)
        return True

    def _tried(self, session: Any, mutant: Mutant) -> tuple[str, str]:
        """The outcome of a mutant, and the test that noticed it."""
        path = self.root / mutant.file
        original = path.read_text(encoding="utf-8")
        changed = mutated(original, mutant)
        path.write_text(changed, encoding="utf-8")
        module = compile(changed, str(path), "exec")
        code, by = self._forked(session, partial(self._noticing, session, mutant, module), self.work.seconds)
        path.write_text(original, encoding="utf-8")
        return WORDS.get(code, f"noticed: ended by {code}"), by

    def _forked(self, session: Any, job: Callable[[], tuple[int, str]], seconds: float) -> tuple[int, str]:
        """The result of a job in a fork; past its time it and all its processes are killed."""
        capture = session.config.pluginmanager.getplugin("capturemanager")
        with tempfile.TemporaryFile() as said:
            child = os.fork()
            if child == 0:
                os.setsid()
                capture.suspend_global_capture()
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, 1)
                os.dup2(null, 2)
                gc.unfreeze()  # what the tests set aside is not among `gc.get_objects()`
                try:
                    code, text = job()
                except BaseException:
                    code, text = BROKEN, traceback.format_exc()
                os.write(said.fileno(), text.encode())
                os._exit(code)
            code = _waited(child, 5 * seconds + 60)
            said.seek(0)
            return code, said.read().decode()

    def _reaching(self, session: Any) -> tuple[int, str]:
        """Run this process's share of the tests, and record what each calls."""
        functions = sorted({(one.file, one.function) for one in self.work.every})
        called = mmap.mmap(-1, len(functions))  # shared with the processes that tests fork
        builtins.__dict__["_called"] = partial(_mark, called)
        for file in {file for file, _ in functions}:
            importlib.import_module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
            path = self.root / file
            tree = ast.parse(path.read_text(encoding="utf-8"))
            names = {name: number for number, (where, name) in enumerate(functions) if where == file}
            _marked(tree, names)
            module = compile(ast.fix_missing_locations(tree), str(path), "exec")
            for name in names:
                _replace(name, str(path), module)
        seconds: dict[str, float] = {}
        calls: dict[str, set[str]] = defaultdict(set)
        for item, after in _paired(self.work.share(session.items)):
            called[:] = bytes(len(functions))
            began, self.failed = _spent(), ""
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if not self.failed:
                seconds[item.nodeid] = _spent() - began
                for number in (number for number, one in enumerate(called[:]) if one):
                    calls["::".join(functions[number])].add(_test(item))
        found = {"seconds": seconds, "calls": {name: sorted(tests) for name, tests in calls.items()}}
        self.work.mine().write_text(json.dumps(found), encoding="utf-8")
        return SURVIVED, ""

    def _noticing(self, session: Any, mutant: Mutant, module: CodeType) -> tuple[int, str]:
        """Run tests of a mutant until one fails."""
        _replace(mutant.function, str(self.root / mutant.file), module)
        began, self.failed = _spent(), ""
        for item, after in _paired(_ranked(session.items, mutant, self.root, self.reach)):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if self.failed:
                return NOTICED, self.failed
            if _spent() - began > self.work.seconds:
                return TIMED_OUT, ""
        return SURVIVED, ""


@dataclass
class Work:
    """The work of one process, and the folder where processes meet."""

    root: Path
    aside: Path
    number: int
    jobs: int
    every: Sequence[Mutant]
    seconds: float
    known: Path | None
    """What an earlier run showed about the tests."""
    paths: Sequence[str] = ("tests",)

    def share(self, items: Sequence[Any]) -> Sequence[Any]:
        """The tests of this process, in one piece."""
        return items[len(items) * self.number // self.jobs : len(items) * (self.number + 1) // self.jobs]

    @property
    def mutants(self) -> Sequence[Mutant]:
        """The mutants of this process."""
        return self.every[self.number :: self.jobs]

    def mine(self, number: int | None = None) -> Path:
        """The file in which a process records what its tests call."""
        return self.aside / f"reach-{self.number if number is None else number}.json"

    def met(self) -> None:
        """Wait until every process has recorded what its tests call."""
        while not all((self.aside / f"reached-{number}").exists() for number in range(self.jobs)):
            (self.aside / f"reached-{self.number}").touch()
            time.sleep(0.1)

    def reaches(self) -> list[Path]:
        """The files that record what tests call."""
        return [self.known] if self.known is not None else [self.mine(number) for number in range(self.jobs)]

    def ended(self, mutant: Mutant, word: str, by: str, out: Any) -> None:
        """Print and record the outcome of a mutant."""
        print(f"{word}\t{mutant.file}:{mutant.line}\t{mutant.change}\t{by}", file=out)
        with (self.aside / f"ended-{self.number}").open("a", encoding="utf-8") as file:
            file.write(json.dumps([word, asdict(mutant)]) + "\n")


def _paired(items: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(items, [*items[1:], None], strict=False)


def _test(item: Any) -> str:
    return str(item.nodeid).partition("[")[0]


def _spent() -> float:
    """CPU seconds of this process and of those that it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _mark(called: mmap.mmap, number: int) -> None:
    called[number] = 1


def _marked(tree: ast.Module, names: Mapping[str, int]) -> None:
    """Make each function record its calls."""
    for name, function in functions_of(tree.body, ""):
        if name in names:
            said = ast.parse(f"__import__('builtins')._called({names[name]})").body
            function.body[int(ast.get_docstring(function) is not None) : 0] = said


def _waited(child: int, seconds: float) -> int:
    """The exit code of a child; past its time it and all its processes are killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _replace(function: str, file: str, code: CodeType) -> None:
    """Give every function with this code the new code."""
    for name in function.split("."):
        code = next(one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == name)
    for one in gc.get_objects():
        if isinstance(one, FunctionType) and one.__code__.co_filename == file:
            same = one.__code__.co_qualname == function
            if same and len(one.__code__.co_freevars) == len(code.co_freevars):
                one.__code__ = code


def _ranked(items: Sequence[Any], mutant: Mutant, root: Path, reach: Reach) -> list[Any]:
    """Tests that call the mutated function, near and quick files first; then the other tests of these files, which
    may look at what a fixture of the file computed once; then files that start processes."""
    callers = set(reach.calls.get(f"{mutant.file}::{mutant.function}", ()))
    passed = {test.partition("[")[0] for test in reach.seconds}
    calling: dict[str, list[Any]] = defaultdict(list)
    others: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if _test(item) in passed:
            (calling if _test(item) in callers else others)[item.nodeid.split("::")[0]].append(item)
    module = mutant.file.removesuffix(".py").replace("/", ".")

    def cost(file: str) -> float:
        text = (root / file).read_text(encoding="utf-8")
        near = module in text or module.split(".")[-1].strip("_") in file
        seconds = [reach.seconds.get(item.nodeid, 0.1) for item in calling[file]]
        return sum(seconds) * (1.0 if near else 3.0)

    nearest = sorted(calling, key=cost)
    starting = [file for file in others if STARTS_PROCESSES.search((root / file).read_text(encoding="utf-8"))]
    last = [*nearest, *(file for file in starting if file not in calling)]
    return [item for file in nearest for item in calling[file]] + [item for file in last for item in others[file]]


def worked(work: Work) -> int:
    """Run the mutants of a process in its copy."""
    os.chdir(work.root)
    sys.path.insert(0, str(work.root))
    import pytest

    words = [
        "-p",
        "no:terminal",
        "-p",
        "no:cacheprovider",
        "--assert",
        "plain",
        "--basetemp",
        str(work.root.parent / "tmp"),
    ]
    return int(pytest.main([*words, *work.paths], plugins=[Runner(work)]))
