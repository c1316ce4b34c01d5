"""Shell completion of plugin names, read from file names, so that Tab imports no plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module

from tito_audit.registry import module_names


def _completer(names: Callable[[], Iterable[str]], *, listed: bool = False) -> Callable[[str], list[str]]:
    """A completion function for a name, or (`listed`) for the last name of a comma-separated list; names already
    in that list are not offered again."""

    def completed(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if listed else ("", "", incomplete)
        there = before.split(",")
        return [before + comma + name for name in names() if name.startswith(last) and name not in there]

    return completed


def _families_and_rules() -> list[str]:
    """The rule families, then the rule codes."""
    codes = [name.partition("_")[0].upper() for name in module_names("tito_audit.rules")]
    return [*sorted({code[:3] for code in codes}), *codes]


formats = _completer(lambda: ("auto", *module_names("tito_audit.formats")))
reports = _completer(lambda: module_names("tito_audit.reports"))
parsers = _completer(lambda: ("auto", "none", "server", *module_names("tito_audit.parsers")))
repairs = _completer(lambda: module_names("tito_audit.repairs"), listed=True)
codes = _completer(_families_and_rules, listed=True)
manuals = _completer(lambda: (*_families_and_rules(), *module_names("tito_audit.repairs")))
repair_reports = _completer(lambda: import_module("tito_audit.cli.repair").REPORTS)
rescore_reports = _completer(lambda: import_module("tito_audit.cli.rescore").REPORTS)
forms = _completer(lambda: import_module("tito_audit.convert.makers").all_makers())
sampled_roles = _completer(lambda: import_module("tito_audit.record.speakers").SAMPLED_ROLES, listed=True)
"""The known roles; `--sampled-role` also takes any other."""
