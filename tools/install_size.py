"""The size of an installation, as docs/install.md shows it: `python -m tools.install_size FILE [TORCH]`.

Each extra is installed into a fresh environment, with compiled modules as pip leaves them. TORCH is the build to
measure with (`torch==2.13.0+cpu`): the plain one brings gigabytes of CUDA on Linux.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from importlib.metadata import Distribution, distributions
from pathlib import Path

from tools.package import build, installed

__all__ = ["measured", "sizes"]

EXTRAS = ("transformers", "serve", "s3", "gs", "az", "remote", "ray", "torch", "hf")
TORCH = ("torch", "hf")


def main(arguments: Sequence[str]) -> int:
    """Write the sizes to the file."""
    text = json.dumps(measured(arguments[1:]), indent=1, sort_keys=True)
    Path(arguments[0]).write_text(f"{text}\n", encoding="utf-8")
    return 0


def measured(torch: Sequence[str]) -> dict[str, object]:
    """Bytes of the package and its dependencies, by distribution, and what each extra adds."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        wheel = build(folder)[0].wheel
        core = sizes(installed(wheel, folder / "core"))
        adds = {}
        for extra in EXTRAS:
            others = torch if extra in TORCH else ()
            whole = sizes(installed(wheel, folder / extra, extra, *others))
            adds[extra] = sum(whole.values()) - sum(core.values())
    where = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return {"on": f"{date.today()}, {where}", "torch": " ".join(torch), "core": core, "extras": adds}


def sizes(python: Path) -> dict[str, int]:
    """Bytes on disk of each distribution of an environment, by its name."""
    (packages,) = (python.parents[1] / "lib").glob("python*/site-packages")
    return {one.metadata["Name"]: _size(one) for one in distributions(path=[str(packages)])}


def _size(one: Distribution) -> int:
    files = [Path(str(one.locate_file(file))) for file in one.files or ()]
    return sum(file.stat().st_size for file in files if file.is_file())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
