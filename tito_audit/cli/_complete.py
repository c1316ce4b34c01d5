"""What the shell completes: names of plugins, told from the files of their folders, so that Tab imports none."""

from __future__ import annotations

from collections.abc import Iterable

from tito_audit.registry import module_names

__all__ = ["codes", "formats", "forms", "manuals", "repair_reports", "repairs", "reports", "sampled_roles"]


def formats(incomplete: str) -> list[str]:
    """Names that `--format` takes."""
    return _starting(("auto", *module_names("tito_audit.formats")), incomplete)


def reports(incomplete: str) -> list[str]:
    """Names that `--report` takes; none behind `NAME=`, where a file follows."""
    return _starting(module_names("tito_audit.reports"), incomplete)


def repair_reports(incomplete: str) -> list[str]:
    """Names that `--report` of `repair` takes."""
    from tito_audit.cli._compare import REPORTS

    return _starting(REPORTS, incomplete)


def repairs(incomplete: str) -> list[str]:
    """Names that `--with` takes, behind those that stand already."""
    return _listed(module_names("tito_audit.repairs"), incomplete)


def codes(incomplete: str) -> list[str]:
    """Codes of rules and their families, behind those that stand already."""
    rules = _rules()
    families = sorted({code[:3] for code in rules})
    return _listed((*families, *rules), incomplete)


def manuals(incomplete: str) -> list[str]:
    """What `explain` has a manual of."""
    return _starting((*_rules(), *module_names("tito_audit.repairs")), incomplete)


def forms(incomplete: str) -> list[str]:
    """Forms that `--to` makes."""
    from tito_audit.convert.rows import all_makers

    return _starting(all_makers(), incomplete)


def sampled_roles(incomplete: str) -> list[str]:
    """Roles that `--sampled-role` takes, behind those that stand already; any other can be named as well."""
    from tito_audit.record.speakers import SAMPLED_ROLES

    return _listed(SAMPLED_ROLES, incomplete)


def _rules() -> list[str]:
    """The codes; a rule's file is called by its code and its name."""
    return [name.partition("_")[0].upper() for name in module_names("tito_audit.rules")]


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _listed(names: Iterable[str], incomplete: str) -> list[str]:
    """Comma lists: what stands before the last comma, and each name that may follow and does not stand there."""
    before, comma, last = incomplete.rpartition(",")
    there = before.split(",")
    return [before + comma + name for name in _starting(names, last) if name not in there]
