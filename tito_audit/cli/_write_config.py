"""Writes what `identify` found into a configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tito_audit.errors import SetupError
from tito_audit.identify import Explanation
from tito_audit.settings.file import merged_config, read_config
from tito_audit.settings.model import NO_TOOLS
from tito_audit.settings.options import KEYS
from tito_audit.storage.atomic import new_file
from tito_audit.terminal.words import listed

_DECIDED = ("tokenizer", "chat-template", "template-name", "template-args", "tool-arguments", "clock")
"""The keys that an explanation sets, or else removes."""

_PATHS = ("tokenizer", "chat-template")


def write_found(path: Path, explanation: Explanation, *, force: bool) -> str:
    """Write an explanation as keys of a configuration file; returns what was done in a sentence.

    SetupError if the file sets one of them to something else and `force` is not given.
    """
    target = path.absolute()
    if target.is_dir():
        raise SetupError(f"{path}: this is a folder, so nothing was written; name a file in it.")
    keys = {name: _as_value(name, value, target.parent) for name, value in explanation.config().items()}
    unset = [name for name in _DECIDED if name not in keys]
    if not explanation.without_tools and _holds(target, "tools", NO_TOOLS):
        unset.append("tools")
    existed = target.exists()
    merged = merged_config(target, keys, unset, force=force)
    if merged.same:
        return f"{path} already has these settings."
    with new_file(target, overwrite=existed) as out:
        out.write(merged.text.encode())
    done = (("added", merged.added), ("changed", merged.changed))
    return f"{path}: {'; '.join(f'{verb} {listed(list(names))}' for verb, names in done if names)}."


def _as_value(name: str, value: Any, folder: Path) -> Any:
    """A value as a file in the folder writes it: paths relative to the folder where that is shorter."""
    if name not in _PATHS or not Path(value).exists():
        return value
    return KEYS[name].kind.shown(str(Path(value).absolute()), folder)


def _holds(path: Path, name: str, value: object) -> bool:
    """Whether a configuration file gives a key this value."""
    return path.exists() and read_config(path).values.get(name) == value
