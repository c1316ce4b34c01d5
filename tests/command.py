"""The command as tests call it, and logs as they write them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from typer.testing import CliRunner

from tito_audit.cli import app

__all__ = ["run", "written"]


def run(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command, run in this process."""
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def written(path: Path, rows: Iterable[object]) -> Path:
    """The path, once the rows are written there as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
