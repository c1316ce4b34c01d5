"""`tito-audit list`: the plugins; with `-f markdown`, the tables of the docs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Annotated, Any, Optional, TypeAlias

import typer

from tito_audit.cli._command import command

Rows: TypeAlias = Sequence[tuple[str, ...]]


class Kind(StrEnum):
    """What can be listed."""

    FORMATS = "formats"
    RULES = "rules"
    REPAIRS = "repairs"
    REPORTS = "reports"
    PROVIDERS = "providers"
    PARSERS = "parsers"


_WHAT = {
    Kind.FORMATS: "logs that can be read",
    Kind.RULES: "what a scan looks for",
    Kind.REPAIRS: "what can be fixed",
    Kind.REPORTS: "how a scan reports",
    Kind.PROVIDERS: "models that sample and score",
    Kind.PARSERS: "syntaxes of tool calls and reasoning",
}


@command("list")
def list_plugins(
    shape: str,
    markdown: bool,
    kind: Annotated[
        Optional[Kind],  # noqa: UP045 - read by Typer
        typer.Argument(
            metavar="[KIND]",
            help="formats, rules, repairs, reports, providers or parsers; without one, how many there are.",
        ),
    ] = None,
) -> None:
    """List the formats, rules, repairs, reports, providers or parsers."""
    shape = "markdown" if markdown else shape
    if kind is None:
        _print_kinds(shape)
    elif shape == "json":
        _print_object(kind.value, _OBJECTS[kind]())
    elif shape == "markdown":
        _print_markdown(*_TABLES[kind]())
    else:
        _print_kind(kind)


def _print_kind(kind: Kind) -> None:
    from tito_audit.terminal.page import print_names

    head, rows = _TABLES[kind]()
    # The last column of formats is prose for the docs, too wide for a terminal.
    wide = 3 if kind is Kind.FORMATS else len(head)
    print_names(head[:wide], [row[:wide] for row in rows])
    if kind is Kind.FORMATS:
        print(
            "\nFormats are tried in this order, row by row; the first whose keys are present and valid "
            "is used.\ntito-audit inspect LOG shows the format of a log, why it was chosen, and which others "
            "come close."
        )


def _print_kinds(shape: str) -> None:
    """What can be listed, and how many there are of each."""
    from tito_audit.registry import module_names

    counts = {kind: len(module_names(f"tito_audit.{kind.value}")) for kind in Kind}
    if shape == "json":
        _print_object("kinds", [{"kind": kind.value, "count": count} for kind, count in counts.items()])
        return
    head = ("kind", "count", "what they are", "to list them")
    rows = [(kind.value, f"{count}", _WHAT[kind], f"tito-audit list {kind}") for kind, count in counts.items()]
    if shape == "markdown":
        _print_markdown(head, rows)
    else:
        from tito_audit.terminal.page import print_names

        print_names(head, rows)


def _print_markdown(head: Sequence[str], rows: Rows) -> None:
    lines = [head, ["---"] * len(head), *rows]
    for line in lines:
        print("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |")


def _print_object(name: str, entries: list[dict[str, Any]]) -> None:
    from tito_audit.report_objects import as_json

    print(as_json({"schema_version": 1, name: entries}))


_Table: TypeAlias = tuple[tuple[str, ...], Rows]


def _formats() -> _Table:
    from tito_audit.formats import all_formats

    head = ("format", "written by", "recognized by", "can be audited")
    return head, [(format.name, format.title, format.signature.text, format.shows) for format in all_formats()]


def _rules() -> _Table:
    from tito_audit.rules import all_rules

    return ("code", "severity", "finds"), [(rule.code, rule.severity.word, rule.title) for rule in all_rules()]


def _repairs() -> _Table:
    from tito_audit.repairs import all_repairs

    head = ("repair", "safety", "cures", "does")
    return head, [
        (repair.name, str(repair.safety), ", ".join(repair.cures) or "what you ask for", repair.title)
        for repair in all_repairs()
    ]


def _reports() -> _Table:
    from tito_audit.reports import all_reports

    return ("report", "writes"), [(report.name, report.title) for report in all_reports()]


def _providers() -> _Table:
    from tito_audit.providers import all_providers

    return ("provider", "samples and scores with"), [
        (f"{provider.name}={provider.where}", provider.title) for provider in all_providers()
    ]


def _parsers() -> _Table:
    from tito_audit.parsers import all_parsers

    return ("parser", "reads", "syntax", "other names"), [
        (parser.name, _reads(parser), parser.title, ", ".join(parser.aliases)) for parser in all_parsers()
    ]


def _reads(parser: Any) -> str:
    """What a parser reads: tools, reasoning or both."""
    from tito_audit.parser import Reads

    words = {Reads.TOOLS: "tools", Reads.REASONING: "reasoning", Reads.TOOLS | Reads.REASONING: "both"}
    return words[parser.reads]


_TABLES: dict[Kind, Callable[[], _Table]] = {
    Kind.FORMATS: _formats,
    Kind.RULES: _rules,
    Kind.REPAIRS: _repairs,
    Kind.REPORTS: _reports,
    Kind.PROVIDERS: _providers,
    Kind.PARSERS: _parsers,
}


def _format_objects() -> list[dict[str, Any]]:
    return [
        {"name": name, "written_by": writer, "told_by": keys, "can_be_audited": shows}
        for name, writer, keys, shows in _formats()[1]
    ]


def _rule_objects() -> list[dict[str, Any]]:
    from tito_audit.rules import all_rules

    return [
        {"code": rule.code, "name": rule.name, "severity": rule.severity.word, "title": rule.title}
        for rule in all_rules()
    ]


def _repair_objects() -> list[dict[str, Any]]:
    from tito_audit.repairs import all_repairs
    from tito_audit.report_objects import fields

    return [fields(repair, "name safety cures title") for repair in all_repairs()]


def _report_objects() -> list[dict[str, Any]]:
    from tito_audit.report_objects import fields
    from tito_audit.reports import all_reports

    return [fields(report, "name title") for report in all_reports()]


def _provider_objects() -> list[dict[str, Any]]:
    from tito_audit.providers import all_providers
    from tito_audit.report_objects import fields

    return [fields(provider, "name where title") for provider in all_providers()]


def _parser_objects() -> list[dict[str, Any]]:
    from tito_audit.parsers import all_parsers

    return [
        {"name": parser.name, "reads": _reads(parser), "syntax": parser.title, "aliases": parser.aliases}
        for parser in all_parsers()
    ]


_OBJECTS: dict[Kind, Callable[[], list[dict[str, Any]]]] = {
    Kind.FORMATS: _format_objects,
    Kind.RULES: _rule_objects,
    Kind.REPAIRS: _repair_objects,
    Kind.REPORTS: _report_objects,
    Kind.PROVIDERS: _provider_objects,
    Kind.PARSERS: _parser_objects,
}
