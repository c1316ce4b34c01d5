"""Work in another process, which imports nothing of the tests but this."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

__all__ = ["Elsewhere"]


class Elsewhere:
    """Work in a process that shares nothing with this one: it was not forked, and gets pickles alone."""

    jobs = 1
    here = False

    def map(self, work: Any, tasks: Iterable[tuple[Any, Any]]) -> Generator[tuple[Any, Any], None, None]:
        packed = pickle.dumps(work)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            for tag, task in tasks:
                answer = None if task is None else pool.submit(worked, packed, pickle.dumps(task)).result()
                yield tag, None if answer is None else pickle.loads(answer)


MADE: dict[bytes, Any] = {}


def worked(packed: bytes, task: bytes) -> bytes:
    """What work says of a task, all of it packed; the work is made once."""
    if packed not in MADE:
        MADE[packed] = pickle.loads(packed)
    return pickle.dumps(MADE[packed](pickle.loads(task)))
