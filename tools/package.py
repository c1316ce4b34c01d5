"""Builds the wheel and the sdist, and proves that they work: `python -m tools.package FOLDER [TAG]`.

Nothing may warn, the wheel holds the package alone, the sdist every file of the repository, and a package index
would take both. The wheel is then installed into a fresh environment and scans logs from outside the checkout.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["Package", "build", "installed", "mistagged", "problems"]

ROOT = Path(__file__).resolve().parents[1]
FORMATS = ROOT / "fixtures" / "formats"
TOY = ROOT / "fixtures" / "tokenizers" / "toy_bpe"
WARNING = re.compile(r"^.*(?:warning|deprecat).*$", re.IGNORECASE | re.MULTILINE)
NOTHING_LEFT_OUT = "no previously-included files matching"
"""A harmless warning of setuptools in a clean checkout: an exclude pattern of MANIFEST.in matches nothing."""
SCANS = {"tito_sample.jsonl": 0, "nemo_gym.jsonl": 1}
"""Example logs, and the exit code of a scan."""


class Package:
    """The two files that a package index takes."""

    def __init__(self, folder: Path) -> None:
        """The newest wheel and sdist of a folder."""
        (self.wheel,) = folder.glob("*.whl")
        (self.sdist,) = folder.glob("*.tar.gz")

    def wheel_files(self) -> list[str]:
        """Names of the files in the wheel."""
        return zipfile.ZipFile(self.wheel).namelist()

    def sdist_files(self) -> list[str]:
        """Names of the files in the sdist, without its folder."""
        with tarfile.open(self.sdist) as archive:
            return [one.name.partition("/")[2] for one in archive if one.isfile()]


def main(arguments: Sequence[str]) -> int:
    """Build into the folder and prove it; 1 if something is wrong."""
    folder = Path(arguments[0]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    package, said = build(folder)
    found = [*said, *problems(package), *(line for tag in arguments[1:] for line in mistagged(tag, package))]
    if not found:
        with tempfile.TemporaryDirectory() as place:
            found = list(_scans(installed(package.wheel, Path(place)), Path(place)))
    print("\n".join(found) or f"{_named(package.wheel)}\n{_named(package.sdist)}")
    return bool(found)


def build(folder: Path) -> tuple[Package, list[str]]:
    """Wheel and sdist, by `python -m build`, and what that warned of. Older ones in the folder are removed."""
    for old in [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]:
        old.unlink()
    # Without compiled files setuptools warns that it is not to compile any.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder.anchor)
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}\nThe package cannot be built.")
    warned = WARNING.findall(done.stdout + done.stderr)
    return Package(folder), [line for line in warned if NOTHING_LEFT_OUT not in line]


def problems(package: Package) -> Iterator[str]:
    """What a package index, or a user, would find wrong with the files."""
    for name in package.wheel_files():
        if not re.match(r"tito_audit(/|-[\d.]+\w*\.dist-info/)", name) or name.endswith(".pyc"):
            yield f"{package.wheel.name} holds {name}, which is not part of the package"
    if "tito_audit/py.typed" not in package.wheel_files():
        yield f"{package.wheel.name} has no py.typed"
    for name in sorted(_tracked() - set(package.sdist_files())):
        yield f"{package.sdist.name} lacks {name}: add it to MANIFEST.in"
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict"]
    done = subprocess.run([*command, package.wheel, package.sdist], capture_output=True, text=True)
    if done.returncode:
        yield done.stdout + done.stderr


def mistagged(tag: str, package: Package) -> Iterator[str]:
    """Why a tag is not that of this version, ready to be published."""
    version = package.wheel.name.split("-")[1]
    if tag != f"v{version}":
        yield f"The tag {tag} is not v{version}, the version in tito_audit/version.py."
    newest = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0]
    if not re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", newest):
        yield f"The newest heading of CHANGELOG.md is {newest!r}, not {version} with its date."


def _tracked() -> set[str]:
    """The files of the repository; none outside of one, as in an unpacked sdist."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    here = (ROOT / ".git").exists()
    done = subprocess.run(command, capture_output=True, text=True, check=True) if here else None
    return {name for name in done.stdout.split("\0") if name} if done else set()


def installed(wheel: Path, folder: Path, extra: str = "", *others: str) -> Path:
    """The Python of a fresh environment with the wheel and only its dependencies, or those of an extra."""
    place = folder / "environment"
    venv.create(place, symlinks=os.name == "posix")
    python = place / "bin" / "python"
    what = f"tito-audit{f'[{extra}]' if extra else ''} @ {wheel.as_uri()}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "-q",
        "--disable-pip-version-check",
    ]
    done = subprocess.run([*command, what, *others], capture_output=True, text=True, env=_outside())
    if done.returncode:
        raise SystemExit(f"{done.stderr}\nThe package cannot be installed.")
    return python


def _outside() -> dict[str, str]:
    """An environment in which no module comes from the checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def _scans(python: Path, place: Path) -> Iterator[str]:
    """What is wrong with the installed command, run outside the checkout."""
    command = str(python.parent / "tito-audit")
    for log, code in SCANS.items():
        scan = [command, "scan", str(FORMATS / log), "-t", str(TOY), "--report", f"html={place / log}.html"]
        done = subprocess.run(scan, capture_output=True, text=True, cwd=place, env=_outside())
        if done.returncode != code:
            yield f"{' '.join(scan)}\nends with {done.returncode}, not {code}:\n{done.stdout}{done.stderr}"


def _named(file: Path) -> str:
    return f"{file.stat().st_size / 1e6:5.1f} MB  {file}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
