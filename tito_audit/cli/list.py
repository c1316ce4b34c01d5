"""`tito-audit list`: lists the plugins; with `-f markdown`, as the tables of the docs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from tito_audit.cli._options import Options
from tito_audit.cli._outputs import print_object
from tito_audit.levels.facts import level_of_format
from tito_audit.parser import Reads
from tito_audit.registry import module_names
from tito_audit.report_objects import pick


def _format_row(format: Any) -> tuple[str, ...]:
    level = str(level_of_format(format.name).holds)
    return format.name, level, format.title, format.signature.text, format.shows


def _reads_words(parser: Any) -> str:
    """What a parser reads: tools, reasoning or both."""
    words = {Reads.TOOLS: "tools", Reads.REASONING: "reasoning", Reads.TOOLS | Reads.REASONING: "both"}
    return words[parser.reads]


class _Listing(NamedTuple):
    """How the plugins of one kind are listed."""

    what: str
    plugins: Callable[[], Sequence[Any]]
    """Imports and returns all of them."""
    heads: tuple[str, ...]
    row: Callable[[Any], tuple[str, ...]]
    as_object: Callable[[Any], dict[str, Any]]


_LISTINGS = {
    "formats": _Listing(
        "logs that can be read",
        lambda: import_module("tito_audit.formats").all_formats(),
        ("format", "level", "written by", "recognized by", "can be audited"),
        _format_row,
        lambda format: dict(
            zip(("name", "level", "written_by", "told_by", "can_be_audited"), _format_row(format), strict=True)
        ),
    ),
    "rules": _Listing(
        "what a scan looks for",
        lambda: import_module("tito_audit.rules").all_rules(),
        ("code", "severity", "finds"),
        lambda rule: (rule.code, rule.severity.word, rule.title),
        lambda rule: {**pick(rule, "code name"), "severity": rule.severity.word, "title": rule.title},
    ),
    "repairs": _Listing(
        "what can be fixed",
        lambda: import_module("tito_audit.repairs").all_repairs(),
        ("repair", "safety", "cures", "does"),
        lambda each: (each.name, str(each.safety), ", ".join(each.cures) or "what you ask for", each.title),
        lambda each: pick(each, "name safety cures title"),
    ),
    "reports": _Listing(
        "how a scan reports",
        lambda: import_module("tito_audit.reports").all_reports(),
        ("report", "writes"),
        lambda report: (report.name, report.title),
        lambda report: pick(report, "name title"),
    ),
    "providers": _Listing(
        "models that sample and score",
        lambda: import_module("tito_audit.providers").all_providers(),
        ("provider", "samples and scores with"),
        lambda provider: (f"{provider.name}={provider.where}", provider.title),
        lambda provider: pick(provider, "name where title"),
    ),
    "parsers": _Listing(
        "syntaxes of tool calls and reasoning",
        lambda: import_module("tito_audit.parsers").all_parsers(),
        ("parser", "reads", "syntax", "other names"),
        lambda each: (each.name, _reads_words(each), each.title, ", ".join(each.aliases)),
        lambda each: {
            "name": each.name,
            "reads": _reads_words(each),
            "syntax": each.title,
            "aliases": each.aliases,
        },
    ),
}


def list_plugins(options: Options, kind: str | None) -> None:
    """List the formats, rules, repairs, reports, providers or parsers."""
    shape = "markdown" if options.markdown else options.shape
    if kind is None:
        counts = {kind: len(module_names(f"tito_audit.{kind}")) for kind in _LISTINGS}
        if shape == "json":
            _print_plugins("kinds", [{"kind": kind, "count": count} for kind, count in counts.items()])
            return
        kinds = [(each, f"{n}", _LISTINGS[each].what, f"tito-audit list {each}") for each, n in counts.items()]
        _print_table(("kind", "count", "what they are", "to list them"), kinds, shape)
        return
    listing = _LISTINGS[kind]
    plugins = listing.plugins()
    if shape == "json":
        _print_plugins(kind, [listing.as_object(plugin) for plugin in plugins])
        return
    rows = [listing.row(plugin) for plugin in plugins]
    if kind == "formats" and shape == "text":
        # The last column is prose, too wide for a terminal.
        _print_table(listing.heads[:-1], [row[:-1] for row in rows], shape)
        print(
            "\nFormats are tried in this order, row by row; the first whose keys are present and valid "
            "is used.\ntito-audit inspect LOG shows the format of a log, why it was chosen, and which others "
            "come close."
        )
    else:
        _print_table(listing.heads, rows, shape)


def _print_table(heads: Sequence[str], rows: Sequence[tuple[str, ...]], shape: str) -> None:
    if shape == "text":
        from tito_audit.terminal.page import print_names

        print_names(heads, rows)
        return
    for line in (heads, ["---"] * len(heads), *rows):
        print("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |")


def _print_plugins(name: str, entries: list[dict[str, Any]]) -> None:
    print_object({"schema_version": 1, name: entries})
