"""The whole suite in two processes, which take half the time on two cores; exits 1 when either half fails."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
MIDDLE = "test_n"
"""Files from this name on are the second half; both take about as long."""


def main(arguments: list[str]) -> int:
    """Run both halves at once; what the first prints comes when the second is done."""
    files = sorted(path.relative_to(HERE.parent) for path in HERE.rglob("test_*.py"))
    halves = [[str(path) for path in files if (path.name < MIDDLE) is first] for first in (True, False)]
    commands = [[sys.executable, "-m", "pytest", *arguments, *half] for half in halves]
    with tempfile.TemporaryFile() as said:
        first = subprocess.Popen(commands[0], cwd=HERE.parent, stdout=said, stderr=subprocess.STDOUT)
        try:
            codes = [subprocess.run(commands[1], cwd=HERE.parent, check=False).returncode, first.wait()]
        finally:
            first.kill()
            first.wait()
        said.seek(0)
        sys.stdout.write(said.read().decode("utf-8", "replace"))
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
