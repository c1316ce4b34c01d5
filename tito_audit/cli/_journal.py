"""`--journal` and `--resume`: where a run records what it has finished."""

from __future__ import annotations

import sys
from pathlib import Path

from tito_audit.errors import SetupError
from tito_audit.storage.journal import SUFFIX
from tito_audit.storage.remote import is_url


def journal_place(journal: str | None, beside: str | None, *, resume: bool, way: str) -> Path | None:
    """The journal of a run: the one that is named, or with `resume` one beside what the run writes; None: none.

    SetupError if there is nothing on disk that it could be beside (`way` says how to name something), or if an
    earlier run would be continued without being asked to.
    """
    if journal is None and not resume:
        return None
    if is_url(journal or ""):
        raise SetupError(f"--journal {journal}: a journal is kept on disk.\nName a file on disk.")
    if journal is None and beside is not None and is_url(beside):
        raise SetupError(
            f"--resume: a journal is kept on disk, not beside {beside}.\nName it with --journal FILE."
        )
    if journal is None and beside is None:
        raise SetupError(f"--resume: no journal is named.\nName it with --journal FILE, or {way}.")
    place = Path(journal if journal is not None else f"{beside}{SUFFIX}")
    if not resume and place.exists():
        raise SetupError(
            f"{place}: this holds what an earlier run finished.\nPass --resume to continue it, or delete the file."
        )
    return place


def say_resumed(resumed: int, of: int, place: Path | None, *, silent: bool) -> None:
    """Say on stderr how much an earlier run had finished."""
    if resumed and not silent:
        sys.stderr.write(f"{resumed:,} of {of:,} logs were finished before: {place}\n")
