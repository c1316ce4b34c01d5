"""Executors: work in this process, or in processes forked from it, which share what was loaded before.

`concurrent.futures` was tried: where a process is killed, it tells neither its task nor the signal.
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
"""What each task is about, and the task; None for a tag without one."""
Answered: TypeAlias = Generator[tuple[Tag, Answer | None], None, None]
"""Each tag with what the work returned for its task, in the order of the tasks; None for a tag without one."""

_AHEAD = 2
"""How many tasks a process may hold: the current one, and the next."""
_LIGHT = 16 * 1024
"""How many pickled bytes of a task always fit into a pipe. A larger task is sent only to an idle process: a busy
process may itself be waiting for us to take its answer."""
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

    def map(self, work: Callable[[Task], Answer], tasks: Tasks[Tag, Task]) -> Answered[Tag, Answer]:
        """Each tag with the answer to its task.

        Tasks are taken only a few ahead, so neither they nor answers pile up. What `work` raises is raised in its
        turn. However the generator ends, nothing is left running.
        """


class InProcess:
    """Runs work in this process, each task when its answer is needed."""

    jobs = 1
    here = True

    def map(self, work: Callable[[Task], Answer], tasks: Tasks[Tag, Task]) -> Answered[Tag, Answer]:
        for tag, task in tasks:
            yield tag, None if task is None else work(task)


def mapped(executor: Executor, work: Callable[[Task], Answer], tasks: Tasks[Tag, Task]) -> Answered[Tag, Answer]:
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


def all_cores(settings: Settings) -> Settings:
    """The settings with a process for each core, unless they say how many, or another engine does the work."""
    if settings.engine != "local" or settings.jobs is not None:
        return settings
    return replace(settings, jobs=usable_cores() if can_fork() else 1)


def is_small(files: Sequence[Path]) -> bool:
    """Whether one process gets through the files before others would have started."""
    return all(file.is_file() for file in files) and sum(file.stat().st_size for file in files) <= _SMALL


def can_fork() -> bool:
    """Whether this system can fork processes safely. On macOS, system libraries break in the children."""
    return hasattr(os, "fork") and sys.platform != "darwin"


def usable_cores() -> int:
    """How many cores this process may use: those it is pinned to, up to the CPU quota of its container."""
    cores = len(_cores()) or os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


@dataclass(frozen=True, slots=True)
class ForkedProcesses:
    """Runs work in processes that `map` forks from this one, which share everything loaded by then.

    Only tasks and answers are pickled, and only a few per process are in flight at a time.
    """

    jobs: int
    here: bool = field(default=False, init=False)

    def map(self, work: Callable[[Task], Answer], tasks: Tasks[Tag, Task]) -> Answered[Tag, Answer]:
        """Each tag with the answer to its task.

        What `work` raises is raised here in its turn; SetupError when a process is killed from outside. The
        processes end when this generator does, however it ends.
        """
        crew: _Crew[Tag, Task, Answer] = _Crew(work, self.jobs)
        try:
            yield from crew.run(tasks)
        finally:
            crew.close()


@dataclass(slots=True)
class Failed:
    """The answer to a task that raised an error."""

    error: BaseException


@dataclass(slots=True)
class _Worker:
    pid: int
    tasks: Connection[Any, Any]
    answers: Connection[Any, Any]
    unanswered: deque[int] = field(default_factory=deque)
    """The numbers of its tasks without an answer."""


class _Crew(Generic[Tag, Task, Answer]):
    """The processes, and the tasks and answers in flight."""

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
        """Tags with their answers, in order."""
        source = iter(tasks)
        while True:
            self._hand_out(source)
            if not self._order:
                return
            number, tag = self._order[0]
            if number not in self._done:
                self._collect()
                continue
            self._order.popleft()
            answer = self._done.pop(number)
            if isinstance(answer, Failed):
                raise answer.error
            yield tag, answer

    def close(self) -> None:
        """Kill the processes; they hold nothing that must be kept."""
        workers = (*self._dismissed, *self._workers)
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
            worker.tasks.close()
            worker.answers.close()
        for worker in workers:
            _status(worker)
        self._dismissed.clear()
        self._workers.clear()

    def _hand_out(self, source: Iterator[tuple[Tag, Task | None]]) -> None:
        """Send tasks to processes while there are tasks and free processes."""
        while True:
            if self._next is None and not self._take(source):
                # Idle processes end once there are no more tasks: freeing their memory takes time.
                for worker in [worker for worker in self._workers if self._ended and not worker.unanswered]:
                    worker.tasks.close()
                    self._workers.remove(worker)
                    self._dismissed.append(worker)
                return
            if self._next is None:
                continue
            number, data = self._next
            room = _AHEAD if len(data) <= _LIGHT else 1
            worker = min(self._workers, key=lambda worker: len(worker.unanswered))
            if len(worker.unanswered) >= room:
                return
            worker.unanswered.append(number)
            self._next = None
            try:
                worker.tasks.send_bytes(data)
            except OSError:
                self._lost(worker)

    def _take(self, source: Iterator[tuple[Tag, Task | None]]) -> bool:
        """Whether another tag was taken; its task, if it has one, is the next to send."""
        if len(self._order) >= self._most:
            return False
        for tag, task in source:
            self._order.append((self._taken, tag))
            if task is None:
                self._done[self._taken] = None
            else:
                self._next = (self._taken, pickle.dumps(task, pickle.HIGHEST_PROTOCOL))
            self._taken += 1
            return True
        self._ended = True
        return False

    def _collect(self) -> None:
        from multiprocessing.connection import wait

        ready = wait([worker.answers for worker in self._workers])
        for worker in self._workers:
            if worker.answers in ready:
                try:
                    data = worker.answers.recv_bytes()
                except (EOFError, OSError):
                    self._lost(worker)
                self._done[worker.unanswered.popleft()] = pickle.loads(data)

    def _lost(self, worker: _Worker) -> NoReturn:
        """Raise SetupError for a process that died, naming what it was working on."""
        tags = dict(self._order)
        where = next((str(tags[number]) for number in worker.unanswered if number in tags), "")
        status = _status(worker)
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
        from multiprocessing.connection import Pipe

        (take, give), (collect, answer) = Pipe(duplex=False), Pipe(duplex=False)
        # No signal may reach the child before it knows what to do with it, nor us before we know the child.
        with DeferredSignals() as signals:
            with warnings.catch_warnings():
                # The child has none of our threads, and uses nothing that they hold.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if not pid:
                ours = [
                    give,
                    collect,
                    *(end for worker in self._workers for end in (worker.tasks, worker.answers)),
                ]
                _serve(self._work, take, answer, ours, cores, signals)
            self._workers.append(_Worker(pid, give, collect))
            take.close()
            answer.close()


def _serve(
    work: Callable[[Any], Any],
    tasks: Connection[Any, Any],
    answers: Connection[Any, Any],
    others: Iterable[Connection[Any, Any]],
    cores: Sequence[int],
    signals: DeferredSignals,
) -> NoReturn:
    """The main loop of a forked process; it exits here and never returns to its parent's code."""
    code = 1
    try:
        for end in others:  # a pipe reports its end only once every process has closed the other end
            end.close()
        signals.restore_in_child()
        gc.freeze()  # keeps the parent's objects shared, and its files open
        gc.set_threshold(250_000)  # as the program does; the results of a whole chunk are no garbage
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        if cores:
            os.sched_setaffinity(0, cores)
        while True:
            task = pickle.loads(tasks.recv_bytes())
            answers.send_bytes(answered(work, task))
    except (EOFError, BrokenPipeError):
        code = 0  # the parent is gone
    finally:
        os._exit(code)


def answered(work: Callable[[Any], Any], task: Any) -> bytes:
    """The pickled answer to a task; Failed if the work raised an error."""
    try:
        return pickle.dumps(work(task), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:
        return pickle.dumps(Failed(sendable(error)), pickle.HIGHEST_PROTOCOL)


def sendable(error: BaseException) -> BaseException:
    """The error with its traceback as a note, ready for another process; RuntimeError if it cannot be pickled."""
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


def _status(worker: _Worker) -> int:
    """The exit code of the process, once it has ended; the negative number of the signal that killed it."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
    except ChildProcessError:
        return 0


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
