"""Rules, formats, repairs and reports: an index and a page each, from their docstrings."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from pages.cases import example_of
from pages.words import Pages, command_block, fenced, table, toctree
from tito_audit.cli.explain import GUIDES
from tito_audit.cli.repair import REPORTS as REPAIR_REPORTS
from tito_audit.convert.makers import makers_of
from tito_audit.format import Format
from tito_audit.formats import all_formats
from tito_audit.levels.facts import level_of_format
from tito_audit.repair import Repair
from tito_audit.repairs import all_repairs
from tito_audit.report import Report
from tito_audit.reports import all_reports
from tito_audit.rule import Rule
from tito_audit.rules import FAMILIES, all_rules

__all__ = ["formats", "repairs", "reports", "rules"]

_SAMPLE = "fixtures/formats/nemo_gym.jsonl -t fixtures/tokenizers/toy_bpe --select SEQ,TOK"
"""The log whose reports are shown, and what is looked for in it."""
_SAMPLE_LINES = 24
_SAMPLE_WIDTH = 160


def rules(intro: str) -> Pages:
    """The rules by family, and a page for each."""
    pages = {f"rules/{rule.code}.md": _rule(rule) for rule in all_rules()}
    parts = [intro]
    for family, about in FAMILIES.items():
        mine = [rule for rule in all_rules() if rule.code.startswith(family)]
        rows = [(f"[{rule.code}]({rule.code}.md)", rule.severity.word, rule.title) for rule in mine]
        parts += [f"## {family}: {about}\n", table(("code", "severity", "finds"), rows)]
    # The side bar has no room for whole titles.
    parts.append(toctree(f"{rule.code} {rule.name} <{rule.code}>" for rule in all_rules()))
    return {**pages, "rules/index.md": "\n".join(parts)}


def _rule(rule: Rule) -> str:
    needs = [str(need.name).lower().replace("|", " or ").replace("_", " ") for need in rule.needs if need]
    claims = [f"[`{one.name}`](/repairs/{one.name}.md)" for one in all_repairs() if one.claims(rule.code)]
    facts = [
        ("Name", f"`{rule.name}`, of the family {rule.code[:3]}: {FAMILIES[rule.code[:3]]}"),
        ("Severity", f"up to {rule.severity.word}" if rule.severity else rule.severity.word),
        ("Needs", ", ".join(needs) or "nothing but the row"),
        ("Repairs", ", ".join(claims) or "none"),
    ]
    guides = [f"[{title}](/{page}.md)" for page, (title, codes) in GUIDES.items() if rule.code in codes]
    if guides:
        facts.append(("Read also", ", ".join(guides)))
    parts = [f"# {rule.code}: {rule.title}\n", *_facts(facts), _with_repairs(_without_title(rule.doc))]
    return "\n".join([*parts, *_repaired(rule)])


def _repaired(rule: Rule) -> list[str]:
    """What a repair makes of the example; nothing where none cures it."""
    example = example_of(rule)
    if not example.command:
        return []
    return ["## The example, repaired\n", command_block(example.command), fenced(example.after)]


def formats(intro: str) -> Pages:
    """The formats in the order in which they are tried, and a page for each."""
    rows = [
        (f"[{one.name}]({one.name}.md)", str(level_of_format(one.name).holds), one.title, one.signature.text)
        for one in all_formats()
    ]
    first, *more = re.split(r"^(?=## )", intro, flags=re.MULTILINE)
    index = "\n".join([first, table(("format", "level", "written by", "recognized by"), rows), "".join(more)])
    index += "\n" + toctree(sorted(one.name for one in all_formats()))
    return {**{f"formats/{one.name}.md": _format(one) for one in all_formats()}, "formats/index.md": index}


def _format(one: Format) -> str:
    holds = level_of_format(one.name).holds
    facts = [("Written by", one.title), ("Recognized by", one.signature.text)]
    facts.append(("Can hold", f"[{holds}](/validate.md), {holds.words}"))
    if makers := makers_of(one):
        facts.append(("Made by", ", ".join(f"`tito-audit convert --to {maker.name}`" for maker in makers)))
    origin = inspect.cleandoc(importlib.import_module(f"tito_audit.formats.{one.name}").__doc__ or "")
    parts = [f"# {one.name}\n", *_facts(facts), "## What can be audited\n", one.shows + "\n"]
    parts += ["## How it is read\n", origin + "\n"]
    return "\n".join(parts)


def repairs(intro: str) -> Pages:
    """The repairs in the order in which they run, and a page for each."""
    ordered = sorted(all_repairs(), key=lambda one: one.precedence)
    rows = [
        (f"[{one.name}]({one.name}.md)", str(one.safety), ", ".join(one.cures) or "what you ask for", one.title)
        for one in ordered
    ]
    index = "\n".join([intro, table(("repair", "safety", "cures", "does"), rows)])
    index += "\n" + toctree(one.name for one in ordered)
    return {**{f"repairs/{one.name}.md": _repair(one) for one in ordered}, "repairs/index.md": index}


def _repair(one: Repair) -> str:
    cured = [rule for rule in all_rules() if one.claims(rule.code)]
    facts = [
        ("Safety", str(one.safety)),
        ("Cures", ", ".join(one.cures) or "nothing by itself; it runs when asked"),
    ]
    if cured:
        facts.append(("Rules", ", ".join(rule.code for rule in cured)))
    parts = [f"# {one.name}\n", f"{one.title}.\n", *_facts(facts), _without_title(one.doc)]
    parts.append(command_block(f"tito-audit repair LOG -o OUT --with {one.name} -t DIR"))
    return "\n".join(parts)


def reports(intro: str, root: Path) -> Pages:
    """The reports and a page for each, with the beginning of its golden text."""
    rows = [(f"[{one.name}]({one.name}.md)", one.title) for one in all_reports()]
    index = "\n".join([intro, "## All of them\n", table(("report", "writes"), rows)])
    others = " and ".join(f"`{name}`" for name in REPAIR_REPORTS)
    index += f"\n`tito-audit repair` writes {others} of its own.\n"
    index += "\nThe keys of `json` and `jsonl` are on the page [](/schema.md).\n\n"
    index += toctree(one.name for one in all_reports())
    samples = _samples(root)
    pages = {f"reports/{one.name}.md": _report(one, samples[one.name]) for one in all_reports()}
    return {**pages, "reports/index.md": index}


def _samples(root: Path) -> dict[str, str]:
    """What each report says of one of the example logs, out of one pass."""
    with tempfile.TemporaryDirectory() as folder:
        files = {one.name: Path(folder, one.name) for one in all_reports()}
        wanted = [f"--report={name}={path}" for name, path in files.items()]
        command = [sys.executable, "-m", "tito_audit", "scan", *shlex.split(_SAMPLE), *wanted, "--no-config", "-q"]
        environment = os.environ | {"COLUMNS": "88", "PYTHONPATH": str(root)}
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        if done.returncode != 1:
            raise RuntimeError(
                f"the example log should fail its scan, and it ended with {done.returncode}:\n{done.stderr}"
            )
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}


def _report(one: Report, sample: str) -> str:
    about = inspect.cleandoc(importlib.import_module(f"tito_audit.reports.{one.name}").__doc__ or "")
    parts = [f"# {one.name}\n", f"{one.title[0].upper()}{one.title[1:]}.\n"]
    parts.append(command_block(f"tito-audit scan LOG -t DIR --report {one.name}{_place(one)}"))
    parts.append(about + "\n")
    if one.suffix != "html":
        parts += ["## How it begins\n", command_block(f"tito-audit scan {_SAMPLE} -f {one.name}")]
        parts.append(fenced(_beginning(sample)))
    return "\n".join(parts)


def _place(one: Report) -> str:
    """Where it is usually written: what is plain text is read where it is printed."""
    return "" if one.suffix == "txt" else f"=audit.{one.suffix}"


def _beginning(text: str) -> str:
    """The first lines of a sample, each as far as a page is wide."""
    lines = text.splitlines()
    kept = [line if len(line) <= _SAMPLE_WIDTH else line[:_SAMPLE_WIDTH] + " …" for line in lines[:_SAMPLE_LINES]]
    return "\n".join(kept + (["…"] if len(lines) > _SAMPLE_LINES else []))


def _facts(facts: list[tuple[str, str]]) -> list[str]:
    return [*(f":{name}: {said}" for name, said in facts), ""]


def _with_repairs(doc: str) -> str:
    """A manual with the names of repairs as links to theirs."""
    names = "|".join(one.name for one in all_repairs())
    return re.sub(rf"(?<![`\w])`({names})`(?!`)", r"[`\1`](/repairs/\1.md)", doc)


def _without_title(doc: str) -> str:
    """A manual from its second line on."""
    return doc.partition("\n")[2].strip() + "\n"
