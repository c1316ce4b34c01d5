"""What runs in a worker process of Ray: work that is loaded once, and answers to its tasks."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any, TypeAlias

from tito_audit.errors import TitoAuditError
from tito_audit.run.workers import answered

__all__ = ["NotLoaded", "Work", "answers"]

Work: TypeAlias = tuple[str, list[Any], str]
"""Work as it is sent to worker processes: a key; in a list, which Ray leaves as it is, a reference to its pickle;
and the working folder of the run, to which its paths are relative."""

_MOST_HELD = 2
"""How many works a process holds: a scan runs one while it plans the tasks of another."""
_held: dict[str, Callable[[Any], Any]] = {}


class NotLoaded(Exception):
    """Work cannot be loaded on this machine."""


def answers(work: Work, tasks: Sequence[bytes]) -> tuple[float, list[bytes]]:
    """The seconds that the tasks took, and the pickled answer to each; NotLoaded if the work cannot be loaded."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    key, packed, folder = work
    with chdir(folder if Path(folder).is_dir() else Path.cwd()):
        doing = _loaded(key, packed[0])
        started = time.perf_counter()
        found = [answered(doing, pickle.loads(task)) for task in tasks]
        return time.perf_counter() - started, found


def _loaded(key: str, packed: Any) -> Callable[[Any], Any]:
    if key not in _held:
        import ray

        try:
            made = pickle.loads(ray.get(packed))
        except (TitoAuditError, OSError) as error:
            raise NotLoaded(str(error)) from error
        while len(_held) >= _MOST_HELD:
            del _held[next(iter(_held))]
        _held[key] = made
    return _held[key]
