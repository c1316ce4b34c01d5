"""`tito-audit list`: the plugins; with `-f markdown`, the tables of the docs."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Optional, TypeAlias

import typer

from tito_audit.cli._command import command
from tito_audit.cli._tables import Rows, markdown_table, print_table

_SCHEMA_VERSION = 1


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
        print(markdown_table(*_TABLES[kind]()))
    else:
        _print_kind(kind)


def _print_kind(kind: Kind) -> None:
    head, rows = _TABLES[kind]()
    # The last column of formats is prose for the docs, too wide for a terminal.
    wide = 3 if kind is Kind.FORMATS else len(head)
    print_table(head[:wide], [row[:wide] for row in rows])
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
        _print_object("kinds", [{"kind": one.value, "count": count} for one, count in counts.items()])
        return
    head = ("kind", "count", "what they are", "to list them")
    rows = [(one.value, f"{count}", _WHAT[one], f"tito-audit list {one}") for one, count in counts.items()]
    if shape == "markdown":
        print(markdown_table(head, rows))
    else:
        print_table(head, rows)


def _print_object(name: str, entries: list[dict[str, Any]]) -> None:
    from tito_audit.report_objects import as_json

    print(as_json({"schema_version": _SCHEMA_VERSION, name: entries}))


_Table: TypeAlias = tuple[tuple[str, ...], Rows]


def _formats() -> _Table:
    from tito_audit.formats import all_formats

    head = ("format", "written by", "recognized by", "can be audited")
    return head, [(one.name, one.title, one.signature.text, one.shows) for one in all_formats()]


def _rules() -> _Table:
    from tito_audit.rules import all_rules

    return ("code", "severity", "finds"), [(one.code, one.severity.word, one.title) for one in all_rules()]


def _repairs() -> _Table:
    from tito_audit.repairs import all_repairs

    head = ("repair", "safety", "cures", "does")
    return head, [
        (one.name, str(one.safety), ", ".join(one.cures) or "what you ask for", one.title) for one in all_repairs()
    ]


def _reports() -> _Table:
    from tito_audit.reports import all_reports

    return ("report", "writes"), [(one.name, one.title) for one in all_reports()]


def _providers() -> _Table:
    from tito_audit.providers import all_providers

    return ("provider", "samples and scores with"), [
        (f"{one.name}={one.where}", one.title) for one in all_providers()
    ]


def _parsers() -> _Table:
    from tito_audit.parsers import all_parsers

    return ("parser", "reads", "syntax", "other names"), [
        (one.name, _reads(one), one.title, ", ".join(one.aliases)) for one in all_parsers()
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
    from tito_audit.formats import all_formats

    return [
        {"name": one.name, "written_by": one.title, "told_by": one.signature.text, "can_be_audited": one.shows}
        for one in all_formats()
    ]


def _rule_objects() -> list[dict[str, Any]]:
    from tito_audit.rules import all_rules

    return [
        {"code": one.code, "name": one.name, "severity": one.severity.word, "title": one.title}
        for one in all_rules()
    ]


def _repair_objects() -> list[dict[str, Any]]:
    from tito_audit.repairs import all_repairs

    return [
        {"name": one.name, "safety": str(one.safety), "cures": list(one.cures), "title": one.title}
        for one in all_repairs()
    ]


def _report_objects() -> list[dict[str, Any]]:
    from tito_audit.reports import all_reports

    return [{"name": one.name, "title": one.title} for one in all_reports()]


def _provider_objects() -> list[dict[str, Any]]:
    from tito_audit.providers import all_providers

    return [{"name": one.name, "where": one.where, "title": one.title} for one in all_providers()]


def _parser_objects() -> list[dict[str, Any]]:
    from tito_audit.parsers import all_parsers

    return [
        {"name": one.name, "reads": _reads(one), "syntax": one.title, "aliases": list(one.aliases)}
        for one in all_parsers()
    ]


_OBJECTS: dict[Kind, Callable[[], list[dict[str, Any]]]] = {
    Kind.FORMATS: _format_objects,
    Kind.RULES: _rule_objects,
    Kind.REPAIRS: _repair_objects,
    Kind.REPORTS: _report_objects,
    Kind.PROVIDERS: _provider_objects,
    Kind.PARSERS: _parser_objects,
}
