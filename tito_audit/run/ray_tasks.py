"""Work as tasks of a Ray cluster, tried again when a worker or a machine is lost."""

from __future__ import annotations

import pickle
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from tito_audit.errors import SetupError
from tito_audit.run.ray_cluster import joined_cluster
from tito_audit.run.ray_worker import Work
from tito_audit.run.workers import Failed
from tito_audit.version import VERSION

__all__ = ["RayTasks", "ray_tasks"]

Tag = TypeVar("Tag")
Task = TypeVar("Task")
Answer = TypeVar("Answer")

_RETRIES = 3
"""How often a task is tried again whose worker or machine was lost."""
_SECONDS = 0.1
"""About how long a call takes: short tasks share one, as each call costs about a millisecond."""
_TOGETHER, _BYTES = 32, 1 << 20
"""The most tasks of a call, and how many of their bytes are enough."""
_AHEAD = 2
"""Calls in flight per task that may run at once: the current one, and the next."""
_LOOKS = 10.0
"""Seconds between two looks at how large the cluster is."""


@contextmanager
def ray_tasks(address: str | None, jobs: int | None) -> Iterator[RayTasks]:
    """An executor on a cluster (`joined_cluster`) that runs `jobs` tasks at once; None: one for each CPU."""
    with joined_cluster(address) as ray:
        made = RayTasks(ray, jobs)
        if not made.cpus() and jobs is None:
            raise SetupError(
                "--engine ray: the cluster has no CPUs for tasks.\n"
                "Add nodes to it or, if it adds them when there is work, pass --jobs N."
            )
        yield made


@dataclass(slots=True)
class RayTasks:
    """Runs work in worker processes of a cluster, which load it once each, and shares nothing with them."""

    ray: Any
    """The module, connected."""
    most: int | None
    """How many tasks run at once; None: one for each CPU of the cluster, which may grow."""
    here: bool = field(default=False, init=False)
    _cpus: int = field(default=0, init=False)
    _looked: float = field(default=-_LOOKS, init=False)

    @property
    def jobs(self) -> int:
        """How many tasks run at once."""
        return self.most or max(self.cpus(), 1)

    def cpus(self) -> int:
        """How many CPUs the cluster has, as of the last seconds."""
        now = time.monotonic()
        if now - self._looked >= _LOOKS:
            self._looked, self._cpus = now, int(self.ray.cluster_resources().get("CPU", 0))
        return self._cpus

    def map(
        self, work: Callable[[Task], Answer], tasks: Iterable[tuple[Tag, Task | None]]
    ) -> Generator[tuple[Tag, Answer | None], None, None]:
        """Each tag with what `work` returned for its task, in the order of the tasks; None for a tag without one.

        What `work` raises is raised here in its turn; SetupError when a worker cannot load the work, or is lost
        again and again. What is still in flight is cancelled when this generator ends, however it ends.
        """
        flight: _Flight[Tag, Task, Answer] = _Flight(self, work)
        try:
            yield from flight.run(tasks)
        finally:
            flight.close()


@dataclass(slots=True)
class _Call:
    """Tasks that are sent together."""

    tasks: list[bytes] = field(default_factory=list)
    tags: list[object] = field(default_factory=list)
    size: int = 0
    reference: Any = None
    """To its answers, once it is sent."""
    done: bool = False
    answers: list[bytes] | None = None

    def where(self) -> str:
        """What its first task is about."""
        return str(self.tags[0])


class _Flight(Generic[Tag, Task, Answer]):
    """The calls in flight and the answers that wait for their turn."""

    def __init__(self, executor: RayTasks, work: Callable[[Task], Answer]) -> None:
        self._executor = executor
        self._ray = executor.ray
        packed = self._ray.put(pickle.dumps(work, pickle.HIGHEST_PROTOCOL))
        self._work: Work = (uuid.uuid4().hex, [packed], str(Path.cwd()))
        self._send = _remote(self._ray)
        self._order: deque[tuple[Tag, _Call | None, int]] = deque()
        """Tags that were taken but not yet yielded, each with its call and its number there."""
        self._filling = _Call()
        """The call that gets the next task."""
        self._running: dict[Any, _Call] = {}
        """Calls by reference, those that are done left out."""
        self._waiting = 0
        """Calls that were sent and are not yet yielded."""
        self._together = 1
        self._ended = False

    def run(self, tasks: Iterable[tuple[Tag, Task | None]]) -> Iterator[tuple[Tag, Answer | None]]:
        """Tags with their answers, in order."""
        source = iter(tasks)
        while True:
            self._hand_out(source)
            if not self._order:
                return
            tag, call, number = self._order[0]
            if call is not None and not call.done:
                self._wait()
                continue
            self._order.popleft()
            yield tag, None if call is None else self._answer(call, number)

    def close(self) -> None:
        """Cancel what is in flight."""
        for reference in self._running:
            with suppress(Exception):
                self._ray.cancel(reference, force=True)
        self._running.clear()
        self._order.clear()

    def _hand_out(self, source: Iterator[tuple[Tag, Task | None]]) -> None:
        """Send tasks while there are tasks, room for calls, and not too many answers that wait."""
        executor = self._executor
        room = executor.most or executor.jobs * _AHEAD
        while not self._ended and len(self._running) < room and self._waiting < 3 * executor.jobs + 1:
            self._take(source)
            filling = self._filling
            full = len(filling.tasks) >= self._together or filling.size >= _BYTES
            if full or (self._ended and filling.tasks):
                self._start(filling)

    def _take(self, source: Iterator[tuple[Tag, Task | None]]) -> None:
        """Take another tag, and put its task, if it has one, into the next call."""
        for tag, task in source:
            call = None if task is None else self._filling
            self._order.append((tag, call, 0 if call is None else len(call.tasks)))
            if call is not None:
                data = pickle.dumps(task, pickle.HIGHEST_PROTOCOL)
                call.tasks.append(data)
                call.tags.append(tag)
                call.size += len(data)
            return
        self._ended = True

    def _start(self, call: _Call) -> None:
        call.reference = self._send.remote(VERSION, self._work, call.tasks)
        call.tasks = []
        self._running[call.reference] = call
        self._waiting += 1
        self._filling = _Call()

    def _wait(self) -> None:
        """Wait for at least one call."""
        done, _ = self._ray.wait(list(self._running), num_returns=1)
        for reference in done:
            self._running.pop(reference).done = True

    def _answer(self, call: _Call, number: int) -> Answer:
        if call.answers is None:
            call.answers = self._answers(call)
        found = pickle.loads(call.answers[number])
        if isinstance(found, Failed):
            raise found.error
        answer: Answer = found
        return answer

    def _answers(self, call: _Call) -> list[bytes]:
        try:
            seconds, answers, problem = self._ray.get(call.reference)
        except self._ray.exceptions.RayError as error:
            _lost(call, error)
        call.reference = None
        self._waiting -= 1
        if problem:
            raise SetupError(problem)
        each = seconds / len(answers)
        self._together = max(1, min(_TOGETHER, int(_SECONDS / each) if each else _TOGETHER))
        found: list[bytes] = answers
        return found


def _lost(call: _Call, error: Exception) -> NoReturn:
    """Raise SetupError for a call whose worker was lost as often as it was tried."""
    said = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if type(error).__name__ == "LocalRayletDiedError":
        raise SetupError(
            f"{call.where()}: Ray has stopped on the machine of this run ({said})\n"
            "Nothing after this place was read. Start Ray again, then this run; with --resume it goes on."
        ) from error
    raise SetupError(
        f"{call.where()}: Ray lost what worked on this, {_RETRIES + 1} times ({type(error).__name__}: {said}).\n"
        "It most likely ran out of memory; nothing after this place was read.\n"
        "Run with fewer --jobs, or on nodes with more memory."
    ) from error


def _remote(ray: Any) -> Any:
    """The function that worker processes run. It is sent as code, so that it also says which version they have."""

    def tito_audit_chunks(version: str, work: Any, tasks: list[bytes]) -> tuple[float, list[bytes], str]:
        """Seconds, answers, and why there are none."""
        import ray

        node = f"Ray node {ray.util.get_node_ip_address()}"
        try:
            from tito_audit.version import VERSION as found
        except ImportError as error:
            how = "Install it there, or name it in the runtime_env of the job (docs/ray.md)."
            return 0.0, [], f"{node}: tito-audit cannot be imported ({error}).\n{how}"
        if found != version:
            how = "Install the same version on all nodes."
            return 0.0, [], f"{node}: it has tito-audit {found}, and this run is of {version}.\n{how}"
        from tito_audit.run.ray_worker import NotLoaded, answers

        try:
            return (*answers(work, tasks), "")
        except NotLoaded as error:
            return 0.0, [], f"{node}: {error}"

    return ray.remote(num_cpus=1, max_retries=_RETRIES)(tito_audit_chunks)
