"""Executors: run work in this process or in others, under one contract."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from tito_audit.errors import SetupError
from tito_audit.run.workers import ForkedProcesses, can_fork, usable_cores
from tito_audit.settings.model import Settings
from tito_audit.summary import Summary

Tag = TypeVar("Tag")
Task = TypeVar("Task")
Answer = TypeVar("Answer")

_SMALL = 3 << 20
"""How many bytes of logs one process gets through before others would have started."""


class Executor(Protocol):
    """Runs work on tasks.

    Work, tasks and answers can be pickled; nothing else is shared. Work pickles as the arguments it was made from,
    and may keep what it has loaded from one task to the next.
    """

    @property
    def jobs(self) -> int:
        """How many tasks run at once."""

    @property
    def here(self) -> bool:
        """Whether work runs in this process, on the tasks themselves rather than copies."""

    def map(
        self, work: Callable[[Task], Answer], tasks: Iterable[tuple[Tag, Task | None]]
    ) -> Generator[tuple[Tag, Answer | None], None, None]:
        """Each tag with what `work` returned for its task, in the order of the tasks; None for a tag without one.

        Tasks are taken only a few ahead, so neither they nor answers pile up. What `work` raises is raised in its
        turn. However the generator ends, nothing is left running.
        """


class InProcess:
    """Runs work in this process, each task when its answer is needed."""

    jobs = 1
    here = True

    def map(
        self, work: Callable[[Task], Answer], tasks: Iterable[tuple[Tag, Task | None]]
    ) -> Generator[tuple[Tag, Answer | None], None, None]:
        """Each tag with what `work` returned for its task."""
        for tag, task in tasks:
            yield tag, None if task is None else work(task)


def mapped(
    executor: Executor, work: Callable[[Task], Answer], tasks: Iterable[tuple[Tag, Task | None]]
) -> Generator[tuple[Tag, Answer | None], None, None]:
    """What `executor.map` yields; an error in `tasks` is raised after the answers to the tasks before it."""

    def until_error() -> Generator[tuple[Tag | Exception, Task | None], None, None]:
        try:
            yield from tasks
        except Exception as error:
            yield error, None

    with closing(executor.map(work, until_error())) as answers:
        for tag, answer in answers:
            if isinstance(tag, Exception):
                raise tag
            yield tag, answer


def executor_for(jobs: int, summary: Summary) -> Executor:
    """An executor for `jobs` processes; if the system cannot fork, this process, and the summary says so."""
    if jobs > 1 and can_fork():
        return ForkedProcesses(jobs)
    if jobs > 1:
        summary.notices.append("This system cannot fork processes safely: one process did all the work.")
    return InProcess()


@contextmanager
def engine_of(settings: Settings) -> Iterator[Executor | None]:
    """The executor of the engine that the settings name, for the block; None for the processes of this machine."""
    if settings.engine == "local":
        if settings.address is not None:
            raise SetupError(f"--address {settings.address}: this is for --engine ray; pass that too.")
        yield None
        return
    from tito_audit.run.ray_tasks import ray_tasks  # Ray takes seconds to import

    with ray_tasks(settings.address, settings.jobs) as executor:
        yield executor


def all_cores(settings: Settings) -> Settings:
    """The settings with a process for each core, unless they say how many, or another engine does the work."""
    if settings.engine != "local" or settings.jobs is not None:
        return settings
    return replace(settings, jobs=usable_cores() if can_fork() else 1)


def is_small(files: Sequence[Path]) -> bool:
    """Whether one process gets through the files before others would have started."""
    return all(file.is_file() for file in files) and sum(file.stat().st_size for file in files) <= _SMALL
