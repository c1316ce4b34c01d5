"""Executors: what runs the work of a run, in this process or in others, with one contract for all."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from tito_audit.run.workers import ForkedProcesses, can_fork
from tito_audit.summary import Summary

__all__ = ["Executor", "InProcess", "executor_for", "is_small"]

Tag = TypeVar("Tag")
Task = TypeVar("Task")
Answer = TypeVar("Answer")

_ALONE = 1 << 20
"""Bytes of logs that one process is done with before others would have started."""


class Executor(Protocol):
    """Runs work on tasks, somewhere.

    Work, tasks and answers can be pickled, and nothing else is shared: work carries what it needs as what that is
    made of, and may keep what it loaded from one task to the next.
    """

    @property
    def jobs(self) -> int:
        """Tasks that are worked on at once."""

    @property
    def here(self) -> bool:
        """Whether tasks are given to the work as they are, in this process, and not as copies."""

    def map(
        self, work: Callable[[Task], Answer], tasks: Iterable[tuple[Tag, Task | None]]
    ) -> Generator[tuple[Tag, Answer | None], None, None]:
        """Each tag with what `work` returned for its task, in the order of the tasks; None for a tag without one.

        Tasks are taken a few ahead, so that neither they nor answers pile up. What `work` raises is raised in its
        turn. However the generator ends, nothing is left running.
        """


class InProcess:
    """Work in this process, a task when its answer is wanted."""

    jobs = 1
    here = True

    def map(
        self, work: Callable[[Task], Answer], tasks: Iterable[tuple[Tag, Task | None]]
    ) -> Generator[tuple[Tag, Answer | None], None, None]:
        """Each tag with what `work` returned for its task."""
        for tag, task in tasks:
            yield tag, None if task is None else work(task)


def executor_for(jobs: int, summary: Summary) -> Executor:
    """What runs so many jobs here; the summary is told where that is one process all the same."""
    if jobs > 1 and can_fork():
        return ForkedProcesses(jobs)
    if jobs > 1:
        summary.notices.append("This system forks no processes that could be used here: one did all the work.")
    return InProcess()


def is_small(files: Sequence[Path]) -> bool:
    """Whether one process is done with the files before others would have started."""
    return all(file.is_file() for file in files) and sum(file.stat().st_size for file in files) <= _ALONE
