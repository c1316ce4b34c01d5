"""What a framework writes and what it reads, by a Python of its own that has it.

`install.sh` beside this file makes these Pythons, in `.cache/frameworks`; the environment variable
TITO_AUDIT_FRAMEWORKS names another folder of them. Where there is none the test that asks is skipped.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRITERS = {"verifiers_0_3": "verifiers"}
"""Frameworks whose writer has another name."""
PYTHONS = {"trl_sft": "trl", "trl_suffix": "trl", "verl_suffix": "verl", "peers": "templates"}
"""Writers that another framework's Python runs."""
_SECONDS = 300


def asked(framework: str, *arguments: object) -> str:
    """What the framework's writer prints; its warnings go elsewhere."""
    environments = Path(os.environ.get("TITO_AUDIT_FRAMEWORKS", ROOT / ".cache" / "frameworks"))
    name = PYTHONS.get(framework, framework)
    python = environments / name / "bin" / "python"
    if not python.exists():
        absent = environments / f"{name}.absent"
        why = absent.read_text().strip() if absent.exists() else "run tests/frameworks/install.sh"
        pytest.skip(f"no Python with the framework {framework}: {why}")
    server = _server(framework, python)
    assert server.stdin is not None
    assert server.stdout is not None
    late = threading.Timer(_SECONDS, server.kill)
    late.start()
    try:
        server.stdin.write(json.dumps([str(argument) for argument in arguments]) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
    finally:
        late.cancel()
    assert answer, f"{framework} ended, or took longer than {_SECONDS} s"
    printed, error = json.loads(answer)
    assert error is None, error[-2000:]
    return str(printed)


@cache
def _server(framework: str, python: Path) -> subprocess.Popen[str]:
    """The process that runs the framework's writer."""
    script = ROOT / "tests" / "frameworks" / f"{WRITERS.get(framework, framework)}_writer.py"
    # By itself (-I): not told by the tests' environment what to import, or to compile it anew each time.
    command = [str(python), "-I", str(script.with_name("serve.py")), str(script)]
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, encoding="utf-8")
    atexit.register(server.kill)
    return server


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


def expected_in(folder: Path) -> Any:
    """What a writer says of its logs beside them."""
    return json.loads((folder / "expected.json").read_text())
