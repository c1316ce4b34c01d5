"""What a framework writes and what it reads, by a Python of its own that has it.

`install.sh` beside this file makes these Pythons, in `.cache/frameworks`; the environment variable
TITO_AUDIT_FRAMEWORKS names another folder of them. Where there is none the test that asks is skipped.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRITERS = {"verifiers_0_3": "verifiers"}
"""Frameworks whose writer has another name."""


def asked(framework: str, *arguments: object) -> str:
    """What the framework's writer prints; its warnings go elsewhere."""
    kept = Path(os.environ.get("TITO_AUDIT_FRAMEWORKS", ROOT / ".cache" / "frameworks"))
    python = kept / framework / "bin" / "python"
    if not python.exists():
        absent = kept / f"{framework}.absent"
        why = absent.read_text().strip() if absent.exists() else "run tests/frameworks/install.sh"
        pytest.skip(f"no Python with the framework {framework}: {why}")
    script = ROOT / "tests" / "frameworks" / f"{WRITERS.get(framework, framework)}_writer.py"
    # By itself (-I): not told by the tests' environment what to import, or to compile it anew each time.
    command = [str(python), "-I", str(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def written(framework: str, folder: Path) -> Path:
    """The folder, with the logs in it that the framework writes."""
    return Path(shutil.copytree(_first(framework), folder, dirs_exist_ok=True))


@cache
def _first(framework: str) -> Path:
    """Its logs, written once; they are gone when the tests are."""
    folder = Path(tempfile.mkdtemp(prefix="tito-audit-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    asked(framework, folder)
    return folder
