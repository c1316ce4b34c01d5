"""Shell completion: names of plugins, read from their file names, so that Tab imports none of them."""

from __future__ import annotations

from collections.abc import Iterable

from tito_audit.registry import module_names


def formats(incomplete: str) -> list[str]:
    """Names for `--format`."""
    return _starting(("auto", *module_names("tito_audit.formats")), incomplete)


def reports(incomplete: str) -> list[str]:
    """Names for `--report`; none after `NAME=`, where a file follows."""
    return _starting(module_names("tito_audit.reports"), incomplete)


def repair_reports(incomplete: str) -> list[str]:
    """Names for `--report` of `repair`."""
    from tito_audit.cli._repaired import REPORTS

    return _starting(REPORTS, incomplete)


def rescore_reports(incomplete: str) -> list[str]:
    """Names for `--report` of `rescore`."""
    from tito_audit.cli._rescored import REPORTS

    return _starting(REPORTS, incomplete)


def parsers(incomplete: str) -> list[str]:
    """Names for `--tool-parser` and `--reasoning-parser`."""
    return _starting(("auto", "none", "server", *module_names("tito_audit.parsers")), incomplete)


def repairs(incomplete: str) -> list[str]:
    """Names for `--with`, after those already typed."""
    return _listed(module_names("tito_audit.repairs"), incomplete)


def codes(incomplete: str) -> list[str]:
    """Codes of rules and their families, after those already typed."""
    return _listed(_families_and_rules(), incomplete)


def manuals(incomplete: str) -> list[str]:
    """Families, codes and repairs that `explain` takes."""
    return _starting((*_families_and_rules(), *module_names("tito_audit.repairs")), incomplete)


def forms(incomplete: str) -> list[str]:
    """Forms for `--to`."""
    from tito_audit.convert.rows import all_makers

    return _starting(all_makers(), incomplete)


def sampled_roles(incomplete: str) -> list[str]:
    """Known roles for `--sampled-role`, after those already typed; it takes any other as well."""
    from tito_audit.record.speakers import SAMPLED_ROLES

    return _listed(SAMPLED_ROLES, incomplete)


def _families_and_rules() -> list[str]:
    """The families, then the codes of rules, from their file names."""
    codes = [name.partition("_")[0].upper() for name in module_names("tito_audit.rules")]
    return [*sorted({code[:3] for code in codes}), *codes]


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _listed(names: Iterable[str], incomplete: str) -> list[str]:
    """Completions of the last entry of a comma-separated list, without entries that the list already has."""
    before, comma, last = incomplete.rpartition(",")
    there = before.split(",")
    return [before + comma + name for name in _starting(names, last) if name not in there]
