"""Checkers of files of others, which are commands of Python packages."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from click.testing import CliRunner

__all__ = ["checked"]


def checked(*words: str) -> tuple[int, str]:
    """Exit code of a checker, and what it says; its tests are skipped where it is not installed."""
    pytest.importorskip(words[0], reason=f"{words[0].replace('_', '-')} is in the extra dev")
    if words[0] == "check_jsonschema":
        done = CliRunner().invoke(importlib.import_module(words[0]).main, words[1:])
        return done.exit_code, done.output
    started = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    return started.returncode, started.stdout + started.stderr
