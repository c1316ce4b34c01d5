"""One checkout at work: its driver, and its command line in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .cases import Case
from .compare import Ran, Step, snapshot

__all__ = ["Side", "SideError"]

_DRIVER = Path(__file__).with_name("driver.py")
_SECONDS = 300
"""How long a command may take."""
_KEPT = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SYSTEMROOT", "TMPDIR")
_ENVIRONMENT = {
    "PYTHONIOENCODING": "utf-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "COLUMNS": "100",
    "LC_ALL": "C.UTF-8",
    "TERM": "dumb",
}
"""Hashes stay seeded by chance: an order that hangs on them is a difference worth knowing."""


class SideError(Exception):
    """A checkout that cannot be run."""


class Side:
    """A checkout, run in a folder `cwd` that another one shares, so that all paths in outputs are equal."""

    def __init__(self, checkout: Path, cwd: Path, inputs: Path, aside: Path) -> None:
        self._cwd, self._inputs, self._aside = cwd, inputs, aside
        aside.mkdir(parents=True, exist_ok=True)
        self._environment = {name: os.environ[name] for name in _KEPT if name in os.environ} | _ENVIRONMENT
        self._environment |= {"PYTHONPATH": str(checkout), "HOME": str(cwd.parent)}
        self._environment |= {"TITO_AUDIT_CACHE": str(aside / "cache")}
        self._driver = subprocess.Popen(
            [sys.executable, "-P", str(_DRIVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=aside,
            env=self._environment,
            text=True,
        )
        package = self._answer().get("package", "")
        if Path(package).resolve() != (checkout / "tito_audit").resolve():
            raise SideError(f"{checkout}: another package was imported, {package!r}")

    def run(self, case: Case) -> Ran:
        """A case, in forks of the driver."""
        return self._ran(case, lambda arguments, env: self._fork(arguments, env))

    def run_alone(self, case: Case) -> Ran:
        """A case, each command in a process of its own: `python -m tito_audit …`."""
        return self._ran(case, lambda arguments, env: self._start(arguments, env))

    def close(self) -> None:
        """End the driver."""
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        self._driver.stdin.close()
        self._driver.wait()
        self._driver.stdout.close()

    def _ran(self, case: Case, run) -> Ran:
        if self._cwd.exists():
            shutil.rmtree(self._cwd)
        self._cwd.mkdir(parents=True)
        (self._cwd / "in").symlink_to(self._inputs)
        for name, text in case.files.items():
            (self._cwd / name).write_text(text, encoding="utf-8")
        steps = []
        for arguments in case.steps:
            code = run(list(arguments), case.env)
            out, err = ((self._aside / name).read_bytes() for name in ("out", "err"))
            steps.append(Step(case.command(arguments), code, out, err))
        return Ran(tuple(steps), snapshot(self._cwd))

    def _fork(self, arguments: list[str], env: dict[str, str]) -> int:
        job = {"arguments": arguments, "cwd": str(self._cwd), "env": env, "seconds": _SECONDS}
        job |= {name: str(self._aside / name) for name in ("out", "err")}
        assert self._driver.stdin is not None
        self._driver.stdin.write(json.dumps(job) + "\n")
        self._driver.stdin.flush()
        return self._answer()["code"]

    def _start(self, arguments: list[str], env: dict[str, str]) -> int:
        command = [sys.executable, "-m", "tito_audit", *arguments]
        with (self._aside / "out").open("wb") as out, (self._aside / "err").open("wb") as err:
            try:
                return subprocess.run(
                    command,
                    cwd=self._cwd,
                    env=self._environment | env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    timeout=_SECONDS,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                return -9

    def _answer(self) -> dict:
        assert self._driver.stdout is not None
        line = self._driver.stdout.readline()
        if not line:
            raise SideError(f"the driver of {self._environment['PYTHONPATH']} ended: {self._driver.wait()}")
        return json.loads(line)
