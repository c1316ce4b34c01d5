"""Executors: run work in this process, or in processes forked from it, which share what is loaded.

Not `concurrent.futures`: when a process is killed, it names neither the task nor the signal.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeAlias, TypeVar

from tito_audit.errors import SetupError, TitoAuditError
from tito_audit.settings.model import Settings
from tito_audit.signals import DeferredSignals
from tito_audit.summary import Summary

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Tag = TypeVar("Tag")
Task = TypeVar("Task")
Answer = TypeVar("Answer")

Tasks: TypeAlias = Iterable[tuple[Tag, Task | None]]
"""Tags, each with its task; None for a tag without a task."""
Answered: TypeAlias = Generator[tuple[Tag, Answer | None], None, None]
"""The tags in order, each with the answer to its task; None for a tag without a task."""

_TASKS_AHEAD = 2
"""How many tasks a process may hold: the current one and the next."""
_LIGHT_TASK = 16 * 1024
"""Pickled bytes that always fit into a pipe. A larger task goes only to an idle process: a busy one may be waiting
for its answer to be taken, and sending would wait for it."""
_SMALL_LOGS = 3 << 20
"""Bytes of logs that one process gets through before others have started."""


class Executor(Protocol):
    """Runs work on tasks.

    Work, tasks and answers are pickled; nothing else is shared. Work pickles as its constructor's arguments, and
    may keep what it has loaded from one task to the next.
    """

    @property
    def jobs(self) -> int:
        """How many tasks run at once."""

    @property
    def here(self) -> bool:
        """Whether work runs in this process, on the tasks themselves rather than on copies."""

    def map(self, work: Callable[[Task], Answer], tasks: Tasks[Tag, Task]) -> Answered[Tag, Answer]:
        """Each tag with the answer to its task, in order.

        Only a few tasks are taken ahead, so neither tasks nor answers pile up. What `work` raises is raised here,
        in its turn. However the generator ends, nothing is left running.
        """


class InProcess:
    """Runs work in this process, each task when its answer is wanted."""

    jobs = 1
    here = True

    def map(self, work: Callable[[Task], Answer], tasks: Tasks[Tag, Task]) -> Answered[Tag, Answer]:
        for tag, task in tasks:
            yield tag, None if task is None else work(task)


def map_in_order(
    executor: Executor, work: Callable[[Task], Answer], tasks: Tasks[Tag, Task]
) -> Answered[Tag, Answer]:
    """What `executor.map` yields; an error of `tasks` is raised after the answers to the tasks before it."""

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
    """An executor with `jobs` processes; if the system cannot fork, this process, with a notice in the summary."""
    if jobs > 1 and can_fork():
        return ForkedProcesses(jobs)
    if jobs > 1:
        summary.notices.append("This system cannot fork processes safely: one process did all the work.")
    return InProcess()


def all_cores(settings: Settings) -> Settings:
    """The settings with one process per core, unless they name a number or another engine."""
    if settings.engine != "local" or settings.jobs is not None:
        return settings
    return replace(settings, jobs=usable_cores() if can_fork() else 1)


def is_small(files: Sequence[Path]) -> bool:
    """Whether the files are so small that starting processes would not pay off."""
    return all(file.is_file() for file in files) and sum(file.stat().st_size for file in files) <= _SMALL_LOGS


def can_fork() -> bool:
    """Whether this system can fork processes safely; on macOS, system libraries break in the children."""
    return hasattr(os, "fork") and sys.platform != "darwin"


def usable_cores() -> int:
    """How many cores this process may use, by its CPU affinity and the CPU quota of its container."""
    cores = len(_cores()) or os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


@dataclass(frozen=True, slots=True)
class ForkedProcesses:
    """Runs work in forked processes, which share everything loaded by then; only tasks and answers are pickled."""

    jobs: int
    here: bool = field(default=False, init=False)

    def map(self, work: Callable[[Task], Answer], tasks: Tasks[Tag, Task]) -> Answered[Tag, Answer]:
        """As `Executor.map` says; SetupError if a process is killed from outside."""
        pool: _Pool[Tag, Task, Answer] = _Pool(work, self.jobs)
        try:
            yield from pool.run(tasks)
        finally:
            pool.close()


@dataclass(slots=True)
class FailedTask:
    """The answer to a task that raised an error."""

    error: BaseException


@dataclass(slots=True)
class _Worker:
    pid: int
    tasks: Connection[Any, Any]
    answers: Connection[Any, Any]
    unanswered: deque[int] = field(default_factory=deque)
    """The numbers of its tasks without an answer."""


class _Pool(Generic[Tag, Task, Answer]):
    """The forked processes, and the tasks and answers in flight."""

    def __init__(self, work: Callable[[Task], Answer], jobs: int) -> None:
        self._work = work
        self._workers: list[_Worker] = []
        self._dismissed: list[_Worker] = []
        """Processes with nothing left to do, which end by themselves."""
        self._order: deque[tuple[int, Tag]] = deque()
        """Numbered tags that were taken but not yet yielded."""
        self._done: dict[int, Any] = {}
        self._next: tuple[int, bytes] | None = None
        """A task waiting for a free process."""
        self._taken = 0
        self._ended = False
        """Whether all tasks were taken."""
        self._most = 3 * jobs + 1
        try:
            # A thread pool starts a thread per usable core, in every process: pinning keeps them from competing.
            cores = _cores()
            for number in range(jobs):
                self._fork(cores[number::jobs] if jobs <= len(cores) else [])
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            raise SetupError(
                f"--jobs {jobs}: so many processes cannot be started ({error.strerror or error}).\n"
                "Pass a smaller number, or --jobs 1."
            ) from error

    def run(self, tasks: Iterable[tuple[Tag, Task | None]]) -> Iterator[tuple[Tag, Answer | None]]:
        """The tags with their answers, in order."""
        from multiprocessing.connection import wait

        source = iter(tasks)
        while True:
            self._send_tasks(source)
            if not self._order:
                return
            number, tag = self._order[0]
            if number not in self._done:
                ready = wait([worker.answers for worker in self._workers])
                for worker in [worker for worker in self._workers if worker.answers in ready]:
                    try:
                        data = worker.answers.recv_bytes()
                    except (EOFError, OSError):
                        self._raise_lost(worker)
                    self._done[worker.unanswered.popleft()] = pickle.loads(data)
                continue
            self._order.popleft()
            answer = self._done.pop(number)
            if isinstance(answer, FailedTask):
                raise answer.error
            yield tag, answer

    def close(self) -> None:
        """Kill the processes, which hold nothing that must be kept."""
        workers = (*self._dismissed, *self._workers)
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
            worker.tasks.close()
            worker.answers.close()
        for worker in workers:
            _wait_for(worker)
        self._dismissed.clear()
        self._workers.clear()

    def _send_tasks(self, source: Iterator[tuple[Tag, Task | None]]) -> None:
        """Send tasks to processes while there are tasks, room for answers, and free processes."""
        while self._next is not None or (len(self._order) < self._most and not self._ended):
            if self._next is None:
                for tag, task in islice(source, 1):
                    self._order.append((self._taken, tag))
                    if task is None:
                        self._done[self._taken] = None
                    else:
                        self._next = (self._taken, pickle.dumps(task, pickle.HIGHEST_PROTOCOL))
                    self._taken += 1
                    break
                else:
                    self._ended = True
                continue
            number, data = self._next
            room = _TASKS_AHEAD if len(data) <= _LIGHT_TASK else 1
            worker = min(self._workers, key=lambda worker: len(worker.unanswered))
            if len(worker.unanswered) >= room:
                return
            worker.unanswered.append(number)
            self._next = None
            try:
                worker.tasks.send_bytes(data)
            except OSError:
                self._raise_lost(worker)
        # Let idle processes end once there are no more tasks: freeing their memory takes time.
        for worker in [worker for worker in self._workers if self._ended and not worker.unanswered]:
            worker.tasks.close()
            self._workers.remove(worker)
            self._dismissed.append(worker)

    def _raise_lost(self, worker: _Worker) -> NoReturn:
        """Raise SetupError for a process that died, with what it was working on."""
        tags = dict(self._order)
        where = next((str(tags[number]) for number in worker.unanswered if number in tags), "")
        status = _wait_for(worker)
        self._workers.remove(worker)
        how = "ended"
        if status < 0:
            with suppress(ValueError):
                how = f"was killed by {signal.Signals(-status).name}"
        raise SetupError(
            f"{where + ': ' if where else ''}the process working on this {how}.\n"
            "It most likely ran out of memory; nothing after this place was read.\n"
            "Run with fewer --jobs, or with --jobs 1."
        )

    def _fork(self, cores: Sequence[int]) -> None:
        """Fork one more process, pinned to these cores if there are any."""
        from multiprocessing.connection import Pipe

        (take, give), (collect, answer) = Pipe(duplex=False), Pipe(duplex=False)
        # Hold signals back until the child handles them and the parent knows the child.
        with DeferredSignals() as signals:
            with warnings.catch_warnings():
                # Python warns of threads; the child uses nothing that the parent's threads may hold.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if not pid:
                ours = [give, collect, *(end for other in self._workers for end in (other.tasks, other.answers))]
                _work_until_closed(self._work, take, answer, ours, cores, signals)
            self._workers.append(_Worker(pid, give, collect))
            take.close()
            answer.close()


def _work_until_closed(
    work: Callable[[Any], Any],
    tasks: Connection[Any, Any],
    answers: Connection[Any, Any],
    others: Iterable[Connection[Any, Any]],
    cores: Sequence[int],
    signals: DeferredSignals,
) -> NoReturn:
    """The main loop of a forked process, which exits here and never returns to its parent's code."""
    code = 1
    try:
        for end in others:  # a pipe ends only once every process has closed its other end
            end.close()
        signals.restore_in_child()
        gc.freeze()  # keeps the parent's objects shared, and its files open
        gc.set_threshold(250_000)  # the results of a chunk are many objects and no garbage
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        if cores:
            os.sched_setaffinity(0, cores)
        while True:
            task = pickle.loads(tasks.recv_bytes())
            answers.send_bytes(answer_task(work, task))
    except (EOFError, BrokenPipeError):
        code = 0  # the parent is gone
    finally:
        os._exit(code)


def answer_task(work: Callable[[Any], Any], task: Any) -> bytes:
    """The pickled answer to a task; a FailedTask if the work raises."""
    try:
        return pickle.dumps(work(task), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:
        return pickle.dumps(FailedTask(picklable_error(error)), pickle.HIGHEST_PROTOCOL)


def picklable_error(error: BaseException) -> BaseException:
    """The error with its traceback as a note; a RuntimeError with the traceback if it cannot be pickled."""
    if isinstance(error, MemoryError):
        return SetupError("One of the processes ran out of memory.\nRun with fewer --jobs, or with --jobs 1.")
    lines = "".join(traceback.format_exception(error))
    if not isinstance(error, TitoAuditError):
        error.add_note(lines)
    try:
        pickle.loads(pickle.dumps(error, pickle.HIGHEST_PROTOCOL))
    except Exception:
        return RuntimeError(lines)
    return error


def _wait_for(worker: _Worker) -> int:
    """Wait for a process to end; its exit code, or the negative number of the signal that killed it."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
    except ChildProcessError:
        return 0


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
