"""Shell completion: names of plugins, read from their file names, so that Tab imports none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

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


@_one_of
def repair_reports() -> Iterable[str]:
    """Names for `--report` of `repair`."""
    from tito_audit.cli.repair import REPORTS

    return REPORTS


@_one_of
def rescore_reports() -> Iterable[str]:
    """Names for `--report` of `rescore`."""
    from tito_audit.cli.rescore import REPORTS

    return REPORTS


@_one_of
def forms() -> Iterable[str]:
    """Forms for `--to`."""
    from tito_audit.convert.rows import all_makers

    return all_makers()


@partial(_one_of, listed=True)
def sampled_roles() -> Iterable[str]:
    """Known roles for `--sampled-role`; it takes any other as well."""
    from tito_audit.record.speakers import SAMPLED_ROLES

    return SAMPLED_ROLES
