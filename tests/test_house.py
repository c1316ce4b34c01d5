"""The house: what imports what, where things are documented, and that nothing was forgotten."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import tito_audit
from tests.ready import program
from tito_audit.formats import all_formats
from tito_audit.repairs import all_repairs
from tito_audit.reports import all_reports
from tito_audit.rules import FAMILIES, all_rules
from tools.habits import House
from tools.house import FLOW, picture

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tito_audit"
MODULES = sorted(PACKAGE.rglob("*.py"))

LAYERS = (
    ("__init__", "__main__"),
    ("cli",),
    ("convert", "gate", "integrations", "ray", "rescore", "serve", "inspect", "agents", "conformance"),
    ("run",),
    ("tables", "levels"),
    ("identify",),
    ("sessions",),
    ("join",),
    ("storage", "formats", "rules", "repairs", "reports", "providers", "parsers"),
    ("report_objects",),
    ("viewer", "terminal"),
    ("format", "rule", "repair", "report", "provider", "parser", "registry"),
    ("sft",),
    ("evidence",),
    ("ways",),
    ("templates",),
    ("render",),
    ("tokens",),
    ("chains",),
    ("align",),
    ("record", "settings", "summary"),
    ("unknown",),
    ("errors", "signals", "version", "rows"),
    ("voice",),
)
"""From the top down: a module imports only from lines below its own, and from its own room."""
LAYER_OF = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
WITHIN_LAYER = {("summary", "record")}
"""Pairs of one layer that may import each other in this direction."""
PLUGIN_FOLDERS = ("formats", "rules", "repairs", "reports", "providers", "parsers")
HEADINGS = ("## What it finds", "## Why it matters", "## Example", "## Repair")
REPAIR_HEADINGS = ("## What it does", "## When it is safe", "## What it costs", "## Example")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imports(path: Path) -> list[str]:
    """Every module of the package that a file imports, wherever in it the import stands."""
    return list(_imports(house().modules[MODULES.index(path)].nodes))


def _imports(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("tito_audit"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tito_audit"):
            assert node.level == 0
            for alias in node.names:
                submodule = PACKAGE.joinpath(*str(node.module).split(".")[1:], alias.name)
                is_module = submodule.is_dir() or submodule.with_suffix(".py").exists()
                yield f"{node.module}.{alias.name}" if is_module else str(node.module)


def test_a_module_imports_only_from_the_layers_below_its_own() -> None:
    without = {room_of(path) for path in MODULES} - LAYER_OF.keys()
    assert not without, f"{without} have no layer: add them to LAYERS and to CONTRIBUTING.md"
    assert [message for path in MODULES for message in imports_from_above(path)] == []


def imports_from_above(path: Path) -> Iterator[str]:
    """Every import of a file that is not from below its layer."""
    room = room_of(path)
    for module in imports(path):
        parts = module.split(".")
        other = parts[1] if len(parts) > 1 else "__init__"
        if other == room or (room, other) in WITHIN_LAYER or (room == "cli" and module == "tito_audit"):
            continue
        if LAYER_OF[other] <= LAYER_OF[room]:
            yield f"{name_of(path)} imports {module}, which is not below it"


@pytest.mark.parametrize("folder", PLUGIN_FOLDERS)
def test_plugin_files_do_not_import_each_other(folder: str) -> None:
    for path in (PACKAGE / folder).glob("[a-z]*.py"):
        for module in imports(path):
            parts = module.split(".")
            if parts[1:2] == [folder]:
                assert len(parts) > 2, f"{name_of(path)} imports its folder"
                assert parts[2].startswith("_"), f"{name_of(path)} imports its sibling {module}"


def test_no_module_imports_the_private_module_of_another_room() -> None:
    strangers = [
        f"{name_of(path)} imports {module}"
        for path in MODULES
        for module in imports(path)
        if any(part.startswith("_") and not part.startswith("__") for part in module.split(".")[2:])
        and module.split(".")[1] != room_of(path)
    ]
    assert not strangers, strangers


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {
        name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in MODULES
    }
    order = TopologicalSorter(
        {name: set(imports(path)) & modules.keys() - {name} for name, path in modules.items()}
    )
    order.prepare()  # CycleError names the circle


PICTURE = re.compile(r"(?<=<!-- python -m tools.house -->\n```text\n)(.*?)(?=\n```)", re.DOTALL)


def test_the_picture_of_the_house_shows_every_room_as_it_is() -> None:
    shown = {name for names in FLOW.values() for name in names}
    assert {room_of(path) for path in MODULES} - {"__init__", "__main__", "version"} == shown
    guide = ROOT / "CONTRIBUTING.md"
    text, drawn = guide.read_text(encoding="utf-8"), "\n".join(picture())
    if os.environ.get("UPDATE_GOLDENS"):
        guide.write_text(PICTURE.sub(lambda _: drawn, text), encoding="utf-8")
        return
    assert PICTURE.findall(text) == [drawn], "UPDATE_GOLDENS=1 pytest tests/test_house.py draws it again"


BUDGETS = {
    "(root)": 2_464,
    "agents": 631,
    "align": 1_159,
    "chains": 1_286,
    "cli": 5_261,
    "conformance": 1_199,
    "convert": 1_996,
    "evidence": 6_345,
    "formats": 12_015,
    "gate": 810,
    "identify": 722,
    "inspect": 2_477,
    "integrations": 685,
    "join": 3_235,
    "levels": 563,
    "parsers": 1_325,
    "providers": 1_863,
    "record": 3_270,
    "render": 4_133,
    "repairs": 1_680,
    "reports": 2_479,
    "rescore": 2_312,
    "rules": 6_287,
    "run": 6_676,
    "serve": 2_626,
    "sessions": 2_979,
    "settings": 2_106,
    "sft": 413,
    "storage": 8_789,
    "tables": 444,
    "templates": 2_504,
    "terminal": 2_171,
    "tokens": 3_928,
    "viewer": 1_026,
    "ways": 1_988,
}
"""Lines that each room may have: a full room takes a feature against a deletion in the same change."""
MOST = {
    "private functions used once, in 1,000 lines of code": 6.0,
    "of these, with fewer than four lines": 5,
    "constants of a bare number used once": 105,
    "modules with one importer, in their own room": 14,
    "class names that stand twice": 0,
    "pronouns among the names": 15,
}
"""What `python -m tools.habits` counts at most. A change may lower these, never raise them."""


@cache
def house() -> House:
    return House.of(ROOT)


@pytest.mark.parametrize("room", sorted(BUDGETS.keys() | house().lines.keys()))
def test_a_room_keeps_to_its_budget(room: str) -> None:
    lines, most = house().lines[room], BUDGETS.get(room, 0)
    assert lines <= most, f"{room} has {lines:,} lines of {most:,}: delete something, or move something out"


def test_no_habit_grows() -> None:
    counted = house()
    counts = {
        "private functions used once, in 1,000 lines of code": round(
            1000 * len(counted.private_functions_used_once) / counted.code_lines, 1
        ),
        "of these, with fewer than four lines": len(counted.short_private_functions_used_once),
        "constants of a bare number used once": len(counted.numbers_used_once),
        "modules with one importer, in their own room": len(counted.modules_with_one_importer_in_their_room),
        "class names that stand twice": len(counted.class_names_that_stand_twice),
        "pronouns among the names": counted.pronouns.total(),
    }
    assert {what: count for what, count in counts.items() if count > MOST[what]} == {}, (
        f"the most are {MOST}; `python -m tools.habits` shows the counts"
    )


def test_every_file_of_the_package_is_shipped() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["tito_audit"]
    shipped = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    ours = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert len(ours) > 10
    assert ours == shipped


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_a_rule_has_its_manual_and_its_cases(rule: object) -> None:
    code, doc = rule.code, rule.doc  # type: ignore[attr-defined]
    assert code[:3] in FAMILIES
    headings = [line for line in doc.splitlines() if line.startswith("## ")]
    assert headings == list(HEADINGS)
    assert doc.splitlines()[0].endswith("."), "the first line is a sentence: it is the rule's title"
    assert (ROOT / "fixtures" / "rules" / f"{code}.toml").is_file(), f"fixtures/rules/{code}.toml is missing"
    module = f"{code.lower()}_{rule.name.replace('-', '_')}.py"  # type: ignore[attr-defined]
    assert (PACKAGE / "rules" / module).is_file(), f"{code} belongs into rules/{module}"


@pytest.mark.parametrize("repair", all_repairs(), ids=lambda repair: repair.name)
def test_a_repair_has_its_manual_and_its_cases(repair: object) -> None:
    name, doc = repair.name, repair.doc  # type: ignore[attr-defined]
    assert [line for line in doc.splitlines() if line.startswith("## ")] == list(REPAIR_HEADINGS)
    assert doc.splitlines()[0].endswith("."), "the first line is a sentence: it is the repair's title"
    assert (ROOT / "fixtures" / "repairs" / f"{name}.toml").is_file(), f"fixtures/repairs/{name}.toml is missing"
    assert (PACKAGE / "repairs" / f"{name}.py").is_file(), f"{name} belongs into repairs/{name}.py"


@pytest.mark.parametrize("format", all_formats(), ids=lambda format: format.name)
def test_a_format_has_its_example_log(format: object) -> None:
    name = format.name  # type: ignore[attr-defined]
    logs = list((ROOT / "fixtures" / "formats").glob(f"{name}.*"))
    assert logs, f"fixtures/formats/{name}.jsonl is missing"


@pytest.mark.parametrize("report", all_reports(), ids=lambda report: report.name)
def test_a_report_has_its_golden(report: object) -> None:
    name = report.name  # type: ignore[attr-defined]
    assert (ROOT / "fixtures" / "reports" / f"{name}.txt").is_file(), f"run UPDATE_GOLDENS=1 pytest ({name})"


TABLES = re.compile(r"<!-- tito-audit (list \w+ --markdown) -->\n(.*?)\n<!-- end -->", re.DOTALL)


@pytest.mark.parametrize("kind", ["formats", "rules", "repairs"])
def test_the_tables_of_the_docs_are_fresh(kind: str) -> None:
    command = f"list {kind} --markdown"
    page = ROOT / "docs" / f"_{kind}.md"
    text = page.read_text(encoding="utf-8")
    tables = dict(TABLES.findall(text))
    assert list(tables) == [command], f"docs/_{kind}.md has one block <!-- tito-audit {command} --> … <!-- end -->"
    printed = subprocess.run(
        [*program(), *command.split()],
        capture_output=True,
        encoding="utf-8",
        check=True,
        env={"PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(ROOT)},
    ).stdout
    if os.environ.get("UPDATE_GOLDENS"):
        fresh = text.replace(f"{command} -->\n{tables[command]}\n", f"{command} -->\n{printed.strip()}\n")
        page.write_text(fresh, encoding="utf-8")
        return
    assert tables[command].strip() == printed.strip(), (
        f"docs/_{kind}.md is stale; UPDATE_GOLDENS=1 pytest tests/test_house.py renews its table"
    )


SAMPLE = re.compile(r"```console\n\$ tito-audit ((?:scan|show|repair) fixtures[^\n]*)\n(.*?)\n```", re.DOTALL)


def test_the_sample_of_the_readme_is_what_a_process_of_its_own_prints(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    samples = SAMPLE.findall(text)
    assert samples, "README.md shows what a command prints"
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    for command, shown in samples:
        printed = subprocess.run(
            [*program(), *command.split()],
            capture_output=True,
            encoding="utf-8",
            cwd=tmp_path,
            env={
                "PYTHONIOENCODING": "utf-8",
                "PYTHONPATH": str(ROOT),
                "COLUMNS": "100",
                "TITO_AUDIT_CACHE": "off",
            },
        ).stdout.strip()
        # A line `…` stands for lines that are left out.
        parts = shown.split("\n…\n")
        assert printed.startswith(f"{parts[0]}\n"), "README.md is stale; tests/test_docs.py renews its sample"
        assert printed.endswith(f"\n{parts[-1]}"), "README.md is stale; tests/test_docs.py renews its sample"
        assert all(part in printed for part in parts)


def test_the_public_names_are_what_the_package_exposes() -> None:
    names = [name for name in tito_audit.__all__ if name != "__version__"]
    assert dir(tito_audit) == sorted(tito_audit.__all__)
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert typed == set(names), "the names for type checkers differ from the names at run time"
    for name in names:
        assert getattr(tito_audit, name).__doc__, name
    with pytest.raises(AttributeError, match="no_such_name"):
        tito_audit.no_such_name  # noqa: B018


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, tito_audit; print([m for m in ('numpy', 'rich', 'typer') if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_the_version_is_stated_once_in_effect() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in settings["project"]["dynamic"]
    module, _, name = settings["tool"]["setuptools"]["dynamic"]["version"]["attr"].rpartition(".")
    assert getattr(importlib.import_module(module), name) == tito_audit.__version__
    assert f"## {tito_audit.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def tracked_files() -> list[Path]:
    """Files of the repository: what git lists, or all text files where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("git lists no files here, so there is nothing to look through")
    return [ROOT / name for name in listed.splitlines() if (ROOT / name).is_file()]


def test_no_file_names_a_path_of_a_machine() -> None:
    home = re.compile(rb"(?<![\w.])/(?:home|Users|work|root|mnt)/\w")
    for path in tracked_files():
        data = path.read_bytes()
        if b"\0" in data[:8000]:
            continue
        match = home.search(data)
        where = data[: match.start()].count(b"\n") + 1 if match else 0
        assert not match, f"{name_of(path)}:{where} names a path of somebody's machine"
