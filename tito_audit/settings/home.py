"""user_path: names that begin with `~`."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(name: str | Path) -> Path:
    """The path for a name: as it is if there is such a file, else with `~` as a user's folder, if there is one."""
    text = str(name)
    if not text.startswith("~") or os.path.lexists(text):
        return Path(name)
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises for an unknown user
