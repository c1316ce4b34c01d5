"""Shell completion: names of plugins, read from their file names, so that Tab imports none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module

from tito_audit.registry import module_names


def _one_of(names: Callable[[], Iterable[str]], *, listed: bool = False) -> Callable[[str], list[str]]:
    """What completes a name; or the last one of a comma-separated list, without names that it already has."""

    def completed(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if listed else ("", "", incomplete)
        there = before.split(",")
        return [before + comma + name for name in names() if name.startswith(last) and name not in there]

    return completed


def _families_and_rules() -> list[str]:
    """The families, then the codes of rules, from their file names."""
    codes = [name.partition("_")[0].upper() for name in module_names("tito_audit.rules")]
    return [*sorted({code[:3] for code in codes}), *codes]


formats = _one_of(lambda: ("auto", *module_names("tito_audit.formats")))
reports = _one_of(lambda: module_names("tito_audit.reports"))
"""None after `NAME=`, where a file follows."""
parsers = _one_of(lambda: ("auto", "none", "server", *module_names("tito_audit.parsers")))
repairs = _one_of(lambda: module_names("tito_audit.repairs"), listed=True)
codes = _one_of(_families_and_rules, listed=True)
manuals = _one_of(lambda: (*_families_and_rules(), *module_names("tito_audit.repairs")))
repair_reports = _one_of(lambda: import_module("tito_audit.cli.repair").REPORTS)
rescore_reports = _one_of(lambda: import_module("tito_audit.cli.rescore").REPORTS)
forms = _one_of(lambda: import_module("tito_audit.convert.makers").all_makers())
"""Forms for `--to`."""
sampled_roles = _one_of(lambda: import_module("tito_audit.record.speakers").SAMPLED_ROLES, listed=True)
"""Known roles for `--sampled-role`; it takes any other as well."""
