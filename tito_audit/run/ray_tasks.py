"""Work as tasks of a Ray cluster, tried again when a worker or a machine is lost.

First the tasks in flight, then what runs in a worker process, then the cluster: one that is there, or a new one.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import socket
import tempfile
import threading
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

from tito_audit.errors import SetupError, TitoAuditError
from tito_audit.run.workers import Answered, Failed, Tasks, answered
from tito_audit.signals import exit_by_signal
from tito_audit.storage.atomic import sigterm_raises
from tito_audit.version import VERSION

__all__ = ["NotLoaded", "RayTasks", "Work", "answers", "joined_cluster", "ray_tasks"]

Tag = TypeVar("Tag")
Task = TypeVar("Task")
Answer = TypeVar("Answer")

_RETRIES = 3
"""How often a task is tried again whose worker or machine was lost."""
_SECONDS = 0.1
"""About how long a call takes: short tasks share one, as each call costs about a millisecond."""
_TOGETHER, _BYTES = 32, 1 << 20
"""The most tasks of a call, and how many of their bytes are enough."""
_LOOKS = 10.0
"""Seconds between two looks at how large the cluster is."""
Work: TypeAlias = tuple[str, list[Any], str]
"""Work as it is sent to worker processes: a key; in a list, which Ray leaves as it is, a reference to its pickle;
and the working folder of the run, to which its paths are relative."""

_works: dict[str, Callable[[Any], Any]] = {}
_QUIET = {
    # A report on stderr is no place for the log of a scheduler.
    "GRPC_VERBOSITY": "NONE",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Nothing is sent anywhere, and no folder is copied to workers unasked.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # A task that takes all memory would be tried for ever.
    "RAY_task_oom_retries": str(_RETRIES),
}
"""What Ray is told while a run connects, unless the environment says otherwise."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How an HTTP/2 client begins; a gRPC server, as each Ray cluster has, answers with settings, frame 4."""


@contextmanager
def ray_tasks(address: str | None, jobs: int | None) -> Iterator[RayTasks]:
    """An executor on a cluster (`joined_cluster`) that runs `jobs` tasks at once; None: one for each CPU."""
    with joined_cluster(address) as ray:
        executor = RayTasks(ray, jobs)
        if not executor.cpus() and jobs is None:
            raise SetupError(
                "--engine ray: the cluster has no CPUs for tasks.\n"
                "Add nodes to it or, if it adds them when there is work, pass --jobs N."
            )
        yield executor


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

    def map(self, work: Callable[[Task], Answer], tasks: Tasks[Tag, Task]) -> Answered[Tag, Answer]:
        """Each tag with the answer to its task.

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
                done, _ = self._ray.wait(list(self._running), num_returns=1)
                for reference in done:
                    self._running.pop(reference).done = True
                continue
            self._order.popleft()
            answer: Answer | Failed | None = None
            if call is not None:
                call.answers = call.answers or self._answers(call)
                answer = pickle.loads(call.answers[number])
            if isinstance(answer, Failed):
                raise answer.error
            yield tag, answer

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
        # The current one, and the next.
        room = executor.most or executor.jobs * 2
        while not self._ended and len(self._running) < room and self._waiting < 3 * executor.jobs + 1:
            filling = self._filling
            for tag, task in islice(source, 1):
                self._order.append((tag, None if task is None else filling, len(filling.tasks)))
                if task is not None:
                    filling.tasks.append(pickle.dumps(task, pickle.HIGHEST_PROTOCOL))
                    filling.tags.append(tag)
                    filling.size += len(filling.tasks[-1])
                break
            else:
                self._ended = True
            full = len(filling.tasks) >= self._together or filling.size >= _BYTES
            if full or (self._ended and filling.tasks):
                filling.reference = self._send.remote(VERSION, self._work, filling.tasks)
                filling.tasks = []
                self._running[filling.reference] = filling
                self._waiting += 1
                self._filling = _Call()

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
        packed: list[bytes] = answers
        return packed


def _lost(call: _Call, error: Exception) -> NoReturn:
    """Raise SetupError for a call whose worker was lost as often as it was tried."""
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if type(error).__name__ == "LocalRayletDiedError":
        raise SetupError(
            f"{call.where()}: Ray has stopped on the machine of this run ({reason})\n"
            "Nothing after this place was read. Start Ray again, then this run; with --resume it goes on."
        ) from error
    raise SetupError(
        f"{call.where()}: Ray lost what worked on this, {_RETRIES + 1} times ({type(error).__name__}: {reason}).\n"
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
            from tito_audit.version import VERSION as installed
        except ImportError as error:
            how = "Install it there, or name it in the runtime_env of the job (docs/ray.md)."
            return 0.0, [], f"{node}: tito-audit cannot be imported ({error}).\n{how}"
        if installed != version:
            how = "Install the same version on all nodes."
            return 0.0, [], f"{node}: it has tito-audit {installed}, and this run is of {version}.\n{how}"
        from tito_audit.run.ray_tasks import NotLoaded, answers

        try:
            return (*answers(work, tasks), "")
        except NotLoaded as error:
            return 0.0, [], f"{node}: {error}"

    return ray.remote(num_cpus=1, max_retries=_RETRIES)(tito_audit_chunks)


class NotLoaded(Exception):
    """Work cannot be loaded on this machine."""


def answers(work: Work, tasks: Sequence[bytes]) -> tuple[float, list[bytes]]:
    """The seconds that the tasks took, and the pickled answer to each; NotLoaded if the work cannot be loaded."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    key, packed, folder = work
    with chdir(folder if Path(folder).is_dir() else Path.cwd()):
        if key not in _works:
            import ray

            try:
                loaded = pickle.loads(ray.get(packed[0]))
            except (TitoAuditError, OSError) as error:
                raise NotLoaded(str(error)) from error
            # A scan runs one work while it plans the tasks of another.
            while len(_works) >= 2:
                del _works[next(iter(_works))]
            _works[key] = loaded
        doing = _works[key]
        started = time.perf_counter()
        packed_answers = [answered(doing, pickle.loads(task)) for task in tasks]
        return time.perf_counter() - started, packed_answers


@contextmanager
def joined_cluster(address: str | None) -> Iterator[Any]:
    """The module `ray`, connected to a cluster; SetupError if that cannot be.

    `address` is `HOST:PORT` of a cluster; `auto`, the one that runs on this machine; `local`, a new one; None:
    RAY_ADDRESS, else the one that runs on this machine, else a new one. A program that is connected stays so, to
    the cluster that it has. A cluster that was started here ends with the block.
    """
    with ExitStack() as stack:
        stack.enter_context(_environment(_QUIET))
        ray = _imported()
        if not ray.is_initialized():
            where = _answering(address)
            stack.enter_context(_terminated())
            how: dict[str, Any] = {"address": where}
            if where == "local":
                # Paths of sockets may have about a hundred characters.
                short = "/tmp" if Path("/tmp").is_dir() else None
                folder = tempfile.mkdtemp(prefix="tito-ray-", dir=short)
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                how |= {"include_dashboard": False, "_temp_dir": folder}
            stack.callback(ray.shutdown)
            stack.enter_context(_silence(ray))
            # Signals mean afterwards what they meant before.
            main = threading.current_thread() is threading.main_thread()
            handler = signal.getsignal(signal.SIGTERM) if main else None
            where = (
                "a cluster on this machine" if how["address"] == "local" else f"the cluster at {how['address']}"
            )
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **how)
            except Exception as error:  # of any type: Ray raises plain ones, as for nodes that are too slow
                reason = " ".join(str(error).split())
                raise SetupError(
                    f"--engine ray: {where} cannot be used ({reason}).\n"
                    "Check the cluster with `ray status`, or run here with --engine local."
                ) from error
            finally:
                if handler is not None:
                    signal.signal(signal.SIGTERM, handler)
        yield ray


@contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM ends the block with an exit code of its own, which Ray replaces by 1 where it waits."""
    with sigterm_raises():
        try:
            yield
        except SystemExit:
            if signal.getsignal(signal.SIGTERM) is exit_by_signal:
                exit_by_signal(signal.SIGTERM, None)
            raise


def _imported() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import ray
    except ImportError as error:
        raise SetupError(
            f"--engine ray: Ray cannot be imported ({error}).\nInstall it with: pip install 'tito-audit[ray]'"
        ) from None
    return ray


@contextmanager
def _silence(ray: Any) -> Iterator[None]:
    """Keeps off stdout, where reports go, what Ray prints there when it loses a worker, whatever it was told."""
    module = ray._private.worker
    printing = getattr(module, "print_to_stdstream", None)
    module.print_to_stdstream = lambda *words, **how: None
    try:
        yield
    finally:
        module.print_to_stdstream = printing


def _answering(address: str | None) -> str:
    """The address to connect to, which answers; `local` for a new cluster."""
    wanted = address or os.environ.get("RAY_ADDRESS") or None
    if wanted == "local":
        return wanted
    if wanted in (None, "auto"):
        running = _running()
        if running is not None and _refused(running) is None:
            return running
        if wanted is None:
            return "local"
        raise SetupError(
            "--address auto: no Ray cluster runs on this machine.\n"
            "Pass --address HOST:PORT, start one with `ray start --head`, or leave --address out."
        )
    assert wanted is not None
    if wanted.startswith("ray://"):
        raise SetupError(
            f"--address {wanted}: clients outside of the cluster (ray://) are not served.\n"
            "Run this on a node of the cluster, with `ray job submit -- tito-audit ... --engine ray`."
        )
    if (refused := _refused(wanted)) is not None:
        raise SetupError(
            f"--address {wanted}: no Ray cluster answers there ({refused}).\n"
            "Pass HOST:PORT as `ray start` prints it (the port is 6379 unless it was set)."
        )
    return wanted


def _running() -> str | None:
    """The address of the cluster that was last started on this machine, as Ray notes it; None without one."""
    with suppress(OSError, UnicodeDecodeError):
        noted = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
        return noted.read_text(encoding="utf-8").strip() or None
    return None


def _refused(address: str) -> str | None:
    """Why no cluster answers at an address; None if one seems to. Ray itself would ask for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return "not HOST:PORT"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=5.0) as line:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return None
            line.sendall(_GREETING)
            answer = line.recv(4)
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    return None if len(answer) == 4 and answer[3] == 4 else "what listens there is not Ray"


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets those of the variables that are not set, for the block."""
    ours = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
