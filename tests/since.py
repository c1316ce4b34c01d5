"""The test files to run whole for a change: `python -m tests.since COMMIT` prints them, one a line.

A test file is chosen if it changed since the commit, or a helper in `tests` that it imports, or a module that one
of these imports, or another file that one of them names. A module that no test imports is tested through those
that import it. What all tests share chooses them all.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path

__all__ = ["changed_since", "chosen"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "tito_audit"
ALL = {"pyproject.toml", "tests/conftest.py", "tests/tiers.py"}
"""What every test depends on."""
IMPORT = re.compile(r"^ *(?:from ([\w.]+) import (\([^)]*\)|[^\n]+)|import ([^\n]+))", re.MULTILINE)
"""A statement of imports: where names come from, these names, or modules."""
STARTED = re.compile(r"""-m["', ]+tito_audit\b|\btito-audit["' ]""")
"""How a file says that it starts a process of the command."""


def main(arguments: list[str]) -> int:
    """Print the test files; 2 where git does not know the commit."""
    try:
        changed = changed_since(arguments[0])
    except subprocess.CalledProcessError as error:
        print(f"git does not say what changed since {arguments[0]}: {error.stderr.strip()}", file=sys.stderr)
        return 2
    print("\n".join(chosen(changed)))
    return 0


def changed_since(commit: str, root: Path = ROOT) -> list[str]:
    """The files that differ from where this branch left the commit, and those that git does not know yet."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, encoding="utf-8", check=True)
        return done.stdout.splitlines()

    (base,) = git("merge-base", commit, "HEAD")
    return [*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")]


def chosen(changed: Collection[str], root: Path = ROOT) -> list[str]:
    """The test files that these changes, paths from the root, are tested by."""
    needs = {file: _needs(file, root) for file in sorted((root / "tests").glob("test_*.py"))}
    if not ALL.isdisjoint(changed):
        return [f"tests/{file.name}" for file in needs]
    tested = {path for paths, _ in needs.values() for path in paths}
    touched = _through_importers(set(changed), tested, root)
    others = [path for path in changed if not path.endswith(".py")]
    return [
        f"tests/{file.name}"
        for file, (paths, texts) in needs.items()
        if not touched.isdisjoint(paths) or any(_is_named(path, text) for path in others for text in texts)
    ]


@cache
def _needs(file: Path, root: Path) -> tuple[set[str], list[str]]:
    """The files that a test file depends on, and what it and its helpers say."""
    files = _with_helpers(file, root)
    texts = [_text(path) for path in files]
    modules = {module for path in files for module in _imports(path, root)}
    if any(STARTED.search(text) for text in texts):
        modules.add(f"{PACKAGE}.cli")
    names = {_name(path, root) for path in files}
    return names.union(*(_files(module, root) for module in modules)), texts


def _with_helpers(file: Path, root: Path) -> list[Path]:
    """A test file, and the files of `tests` that it imports, and that these import."""
    files = [file]
    for path in files:
        for name in sorted(_imports(path, root)):
            base = (root / "tests").joinpath(*name.removeprefix("tests.").split("."))
            for candidate in (base.with_suffix(".py"), base / "__init__.py"):
                if candidate.is_file() and candidate not in files:
                    files.append(candidate)
    return files


def _through_importers(changed: set[str], tested: set[str], root: Path) -> set[str]:
    """The changes, and for modules that no test imports those that import them."""
    importers = _importers(root)
    pending, affected = list(changed), set(changed)
    while pending:
        path = pending.pop()
        if path not in tested:
            new = importers.get(path, set()) - affected
            pending += new
            affected |= new
    return affected


@cache
def _importers(root: Path) -> dict[str, set[str]]:
    """Which modules of the package import a file of it."""
    importers: dict[str, set[str]] = {}
    for path in (root / PACKAGE).rglob("*.py"):
        for module in _imports(path, root):
            for imported in _files(module, root):
                importers.setdefault(imported, set()).add(_name(path, root))
    return importers


def _is_named(path: str, text: str) -> bool:
    """Whether a text speaks of a file by its name, or of the folder that it lies in."""
    where = Path(path)
    words = {where.name, where.parent.name} - {""}
    return any(re.search(rf"""["'/]{re.escape(word)}["'/]""", text) for word in words)


@cache
def _files(module: str, root: Path) -> tuple[str, ...]:
    """The files that a module of the package is: itself, or all of its folder; and what its folders begin with."""
    if module.split(".")[0] != PACKAGE:
        return ()
    path = root.joinpath(*module.split("."))
    begun = [folder / "__init__.py" for folder in (path, *path.parents) if folder.is_relative_to(root / PACKAGE)]
    files = path.rglob("*.py") if path.is_dir() and module != PACKAGE else [path.with_suffix(".py")]
    return tuple(_name(file, root) for file in (*begun, *files))


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _imports(path: Path, root: Path) -> frozenset[str]:
    """The modules that a file imports; a public name of the package is the module that it comes from."""
    targets = set()
    for module, names, modules in IMPORT.findall(_text(path)):
        imported = {
            word.split()[0]
            for word in re.sub(r"#.*", "", names or modules).strip("()\n ").split(",")
            if word.split()
        }
        if module:
            imported = {f"{module}.{name}" for name in imported}
            targets |= {_public(root).get(name, name) for name in imported} | {module}
        else:
            targets |= imported
    return frozenset(targets)


@cache
def _public(root: Path) -> dict[str, str]:
    """Where the public names of the package come from."""
    imported = ast.walk(ast.parse(_text(root / PACKAGE / "__init__.py")))
    nodes = [node for node in imported if isinstance(node, ast.ImportFrom)]
    return {
        f"{PACKAGE}.{alias.asname}": str(node.module) for node in nodes for alias in node.names if alias.asname
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
