"""`python -m tools.audit`: asks databases of advisories about the installed packages; exits 1 for a known hole.

Exits 0 with one line where none can be asked, as without a network: SECURITY.md has what was known at its date.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

__all__ = ["main", "said_of"]

_TOOL = "pip-audit>=2.7,<3"
_SERVICES = ("pypi", "osv")
_SECONDS = 240


def main() -> int:
    """Install pip-audit into a folder of its own, and run it on the versions that are installed here."""
    with tempfile.TemporaryDirectory() as aside:
        wanted, python = Path(aside) / "installed.txt", Path(aside) / "venv" / "bin" / "python"
        wanted.write_text("\n".join(_installed()), encoding="utf-8")
        _run([sys.executable, "-m", "venv", str(python.parents[1])])
        pip = ("-m", "pip", "-qq", "--disable-pip-version-check", "install", "--retries", "1", "--timeout", "20")
        if _run([str(python), *pip, _TOOL]) is None:
            print(
                "Nothing was audited: pip-audit cannot be installed. SECURITY.md has what was known at its date."
            )
            return 0
        words = ("-m", "pip_audit", "--disable-pip", "--no-deps", "--progress-spinner", "off", "--format", "json")
        for service in _SERVICES:
            found = _run([str(python), *words, "--vulnerability-service", service, "-r", str(wanted)])
            lines, code = said_of(found or "", service)
            if code is not None:
                break
    print("\n".join(lines))
    return code or 0


def said_of(found: str, service: str) -> tuple[list[str], int | None]:
    """What pip-audit found, in lines, and the exit code; None if the service knew none of the packages."""
    try:
        packages: Sequence[Mapping[str, Any]] = json.loads(found)["dependencies"]
    except (ValueError, LookupError, TypeError):
        packages = []
    known = [one for one in packages if "skip_reason" not in one]
    if not known:
        return [
            f"Nothing was audited: {service} cannot be asked. SECURITY.md has what was known at its date."
        ], None
    lines = [
        f"{one['name']} {one['version']}: {hole['id']}, fixed in {', '.join(hole['fix_versions']) or 'no version'}"
        for one in known
        for hole in one["vulns"]
    ]
    skipped = sorted(one["name"] for one in packages if "skip_reason" in one)
    code = int(bool(lines))
    lines.append(f"{len(known):,} packages were audited by {service}: {len(lines):,} known holes.")
    if skipped:
        lines.append(f"{len(skipped):,} were not: {', '.join(skipped)}")
    return lines, code


def _installed() -> list[str]:
    """The installed packages and their versions, but the project itself."""
    found = {one.metadata["Name"]: one.version for one in distributions()}
    return sorted(f"{name}=={said.partition('+')[0]}" for name, said in found.items() if name != "tito-audit")


def _run(words: Sequence[str]) -> str | None:
    """What a program printed; None if it failed without printing anything, or took too long."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    return None if done.returncode and not done.stdout else done.stdout


if __name__ == "__main__":
    sys.exit(main())
