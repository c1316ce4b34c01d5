"""Files that a run reads are never written: not by any of their names."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tito_audit.cli._outs import is_url
from tito_audit.errors import SetupError, StorageError

_STDOUT = "/dev/fd/1"


def key_of(path: str | Path) -> str:
    """The same text for all names of a place; see `place_key`."""
    from tito_audit.storage import place_key

    return place_key(path)


def files_of(logs: Sequence[str]) -> frozenset[str]:
    """The keys of the logs, and of the files in folders and globs."""
    from tito_audit.storage import find_logs

    return frozenset({*map(key_of, logs), *map(key_of, find_logs(logs))})


def read_as(name: str) -> frozenset[str]:
    """The keys of the files of an input; none if it is missing, which its reader will report."""
    with suppress(StorageError, OSError):
        return files_of([name])
    return frozenset()


def refuse_inputs(outputs: Mapping[str, str | None], logs: Sequence[str], inputs: Sequence[str] = ()) -> None:
    """SetupError if one of the files to be written, by flag, is one of the logs or `inputs` under any name.

    Stdout is one of them if it is a file that holds something, as after `>>`. Remote files are not looked at.
    """
    keys = {flag: key_of(path) for flag, path in outputs.items() if path is not None and _is_file(path)}
    if _is_file(_STDOUT, least=1):
        keys["stdout"] = key_of(_STDOUT)
    if not keys:
        return
    read = [one for one in logs if not is_url(one)]
    for names, what in ((read, "one of the logs, and a log is never overwritten"), (inputs, "read by this run")):
        sources: frozenset[str] = frozenset().union(*map(read_as, names))
        for flag, key in keys.items():
            if key in sources:
                raise SetupError(f"{flag}: {outputs.get(flag) or 'it'} is {what}; name another file.")


def _is_file(path: str, *, least: int = 0) -> bool:
    """Whether there is a regular file of so many bytes."""
    try:
        status = os.stat(path)  # noqa: PTH116  a path that is no path has no file
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size >= least
