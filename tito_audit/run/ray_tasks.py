"""An executor on a Ray cluster, which tries tasks again when a worker or a machine is lost."""

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

from tito_audit.errors import SetupError, TitoAuditError
from tito_audit.run.workers import Answered, FailedTask, Tasks, answer_task
from tito_audit.signals import exit_by_signal
from tito_audit.storage.atomic import sigterm_raises
from tito_audit.version import VERSION

__all__ = ["RayTasks", "Work", "WorkNotLoaded", "connect_to_cluster", "ray_tasks", "run_tasks"]

Tag = TypeVar("Tag")
Task = TypeVar("Task")
Answer = TypeVar("Answer")

_RETRIES = 3
"""How often a task is tried again if its worker or machine is lost."""
_CALL_SECONDS = 0.1
"""How long a call should take: short tasks share a call, as each call costs about a millisecond."""
_MOST_TASKS, _CALL_BYTES = 32, 1 << 20
"""The most tasks of a call; from so many bytes on, a call is sent with the tasks that it has."""
_CPU_COUNT_SECONDS = 10.0
"""How long the number of the cluster's CPUs is cached."""
Work: TypeAlias = tuple[str, list[Any], str]
"""Work as it is sent to worker processes: a key; a reference to its pickle, in a list, where Ray does not resolve
it; and the working folder of the run, to which paths are relative."""

_works: dict[str, Callable[[Any], Any]] = {}
_RAY_ENVIRONMENT = {
    # No logs of a scheduler on stderr.
    "GRPC_VERBOSITY": "NONE",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # No usage statistics, and no folder copied to workers unasked.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # By default a task that takes all memory is tried for ever.
    "RAY_task_oom_retries": str(_RETRIES),
}
"""The environment in which Ray connects, where the user has set nothing else."""
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The start of an HTTP/2 connection; the gRPC server of a Ray cluster answers with a SETTINGS frame, type 4."""


@contextmanager
def ray_tasks(address: str | None, jobs: int | None) -> Iterator[RayTasks]:
    """An executor on a cluster (see `connect_to_cluster`) that runs `jobs` tasks at once; None: one per CPU."""
    with connect_to_cluster(address) as ray:
        executor = RayTasks(ray, jobs)
        if not executor.cpus() and jobs is None:
            raise SetupError(
                "--engine ray: the cluster has no CPUs for tasks.\n"
                "Add nodes to it or, if it adds them when there is work, pass --jobs N."
            )
        yield executor


@dataclass(slots=True)
class RayTasks:
    """Runs work in the worker processes of a cluster, each of which loads it once."""

    ray: Any
    """The module `ray`, connected."""
    most: int | None
    """How many tasks run at once; None: one per CPU of the cluster, which may grow."""
    here: bool = field(default=False, init=False)
    _cpus: int = field(default=0, init=False)
    _looked: float = field(default=-_CPU_COUNT_SECONDS, init=False)

    @property
    def jobs(self) -> int:
        """How many tasks run at once."""
        return self.most or max(self.cpus(), 1)

    def cpus(self) -> int:
        """How many CPUs the cluster has, cached for some seconds."""
        now = time.monotonic()
        if now - self._looked >= _CPU_COUNT_SECONDS:
            self._looked, self._cpus = now, int(self.ray.cluster_resources().get("CPU", 0))
        return self._cpus

    def map(self, work: Callable[[Task], Answer], tasks: Tasks[Tag, Task]) -> Answered[Tag, Answer]:
        """As `Executor.map` says; SetupError if a worker cannot load the work or is lost each time."""
        flight: _CallsInFlight[Tag, Task, Answer] = _CallsInFlight(self, work)
        try:
            yield from flight.run(tasks)
        finally:
            flight.close()


@dataclass(slots=True)
class _RayCall:
    """Tasks that are sent in one call."""

    tasks: list[bytes] = field(default_factory=list)
    tags: list[object] = field(default_factory=list)
    size: int = 0
    reference: Any = None
    """Ray's reference to the answers, once the call is sent."""
    done: bool = False
    answers: Sequence[bytes] = ()

    def where(self) -> str:
        """What the first task is about, for errors."""
        return str(self.tags[0])


class _CallsInFlight(Generic[Tag, Task, Answer]):
    """The calls in flight, and the answers that wait for their turn."""

    def __init__(self, executor: RayTasks, work: Callable[[Task], Answer]) -> None:
        self._executor = executor
        self._ray = executor.ray
        packed = self._ray.put(pickle.dumps(work, pickle.HIGHEST_PROTOCOL))
        self._work: Work = (uuid.uuid4().hex, [packed], str(Path.cwd()))
        self._send = _remote_function(self._ray)
        self._order: deque[tuple[Tag, _RayCall | None, int]] = deque()
        """Tags that were taken but not yet yielded, each with its call and the number of its task there."""
        self._filling = _RayCall()
        """The call that the next task is added to."""
        self._running: dict[Any, _RayCall] = {}
        """By reference: the calls that are not done."""
        self._waiting = 0
        """How many calls were sent whose answers were not fetched."""
        self._tasks_per_call = 1
        self._ended = False

    def run(self, tasks: Iterable[tuple[Tag, Task | None]]) -> Iterator[tuple[Tag, Answer | None]]:
        """The tags with their answers, in order."""
        source = iter(tasks)
        while True:
            self._send_tasks(source)
            if not self._order:
                return
            tag, call, number = self._order[0]
            if call is not None and not call.done:
                done, _ = self._ray.wait(list(self._running), num_returns=1)
                for reference in done:
                    self._running.pop(reference).done = True
                continue
            self._order.popleft()
            answer: Answer | FailedTask | None = None
            if call is not None and not call.answers:
                try:
                    seconds, call.answers, problem = self._ray.get(call.reference)
                except self._ray.exceptions.RayError as error:
                    _raise_lost(call, error)
                call.reference = None
                self._waiting -= 1
                if problem:
                    raise SetupError(problem)
                # Short tasks share the next calls.
                each = seconds / len(call.answers)
                self._tasks_per_call = max(1, min(_MOST_TASKS, int(_CALL_SECONDS / each) if each else _MOST_TASKS))
            if call is not None:
                answer = pickle.loads(call.answers[number])
            if isinstance(answer, FailedTask):
                raise answer.error
            yield tag, answer

    def close(self) -> None:
        """Cancel the calls in flight."""
        for reference in self._running:
            with suppress(Exception):
                self._ray.cancel(reference, force=True)
        self._running.clear()
        self._order.clear()

    def _send_tasks(self, source: Iterator[tuple[Tag, Task | None]]) -> None:
        """Send tasks while there are tasks, room for calls, and few answers that wait."""
        executor = self._executor
        room = executor.most or executor.jobs * 2  # without a limit, a current call and the next for each CPU
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
            full = len(filling.tasks) >= self._tasks_per_call or filling.size >= _CALL_BYTES
            if full or (self._ended and filling.tasks):
                filling.reference = self._send.remote(VERSION, self._work, filling.tasks)
                filling.tasks = []
                self._running[filling.reference] = filling
                self._waiting += 1
                self._filling = _RayCall()


def _raise_lost(call: _RayCall, error: Exception) -> NoReturn:
    """Raise SetupError for a call whose worker was lost each time it was tried."""
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


def _remote_function(ray: Any) -> Any:
    """The remote function of worker processes. Ray sends it as code, so it also runs where another version, or no
    tito-audit, is installed, and says so."""

    def tito_audit_chunks(version: str, work: Any, tasks: list[bytes]) -> tuple[float, list[bytes], str]:
        """The seconds that the tasks took, their answers, and the problem if there are none."""
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
        from tito_audit.run.ray_tasks import WorkNotLoaded, run_tasks

        try:
            return (*run_tasks(work, tasks), "")
        except WorkNotLoaded as error:
            return 0.0, [], f"{node}: {error}"

    return ray.remote(num_cpus=1, max_retries=_RETRIES)(tito_audit_chunks)


class WorkNotLoaded(Exception):
    """The work cannot be loaded on this machine."""


def run_tasks(work: Work, tasks: Sequence[bytes]) -> tuple[float, list[bytes]]:
    """Run tasks in a worker process: the seconds that they took, and the pickled answer to each.

    WorkNotLoaded if the work cannot be loaded.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    key, packed, folder = work
    with chdir(folder if Path(folder).is_dir() else Path.cwd()):
        if key not in _works:
            import ray

            try:
                loaded = pickle.loads(ray.get(packed[0]))
            except (TitoAuditError, OSError) as error:
                raise WorkNotLoaded(str(error)) from error
            # Two, since a scan runs one work while it plans the tasks of another.
            while len(_works) >= 2:
                del _works[next(iter(_works))]
            _works[key] = loaded
        doing = _works[key]
        started = time.perf_counter()
        packed_answers = [answer_task(doing, pickle.loads(task)) for task in tasks]
        return time.perf_counter() - started, packed_answers


@contextmanager
def connect_to_cluster(address: str | None) -> Iterator[Any]:
    """The module `ray`, connected to a cluster for the block; SetupError if it cannot be connected.

    `address` is `HOST:PORT` of a cluster, `auto` for the one on this machine, or `local` for a new one. None:
    RAY_ADDRESS, else the one on this machine, else a new one. A connection that the program already has is used
    and kept. A cluster started here ends with the block.
    """
    with ExitStack() as stack:
        for name in _RAY_ENVIRONMENT.keys() - os.environ.keys():
            os.environ[name] = _RAY_ENVIRONMENT[name]
            stack.callback(os.environ.pop, name, None)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import ray
        except ImportError as error:
            raise SetupError(
                f"--engine ray: Ray cannot be imported ({error}).\nInstall it with: pip install 'tito-audit[ray]'"
            ) from None
        if not ray.is_initialized():
            where = _address_of_cluster(address)
            stack.enter_context(_exit_on_sigterm())
            how: dict[str, Any] = {"address": where}
            if where == "local":
                # The path of a socket may have about a hundred characters, so the folder's has to be short.
                short = "/tmp" if Path("/tmp").is_dir() else None
                folder = tempfile.mkdtemp(prefix="tito-ray-", dir=short)
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                how |= {"include_dashboard": False, "_temp_dir": folder}
            stack.callback(ray.shutdown)
            # Ray prints to stdout, where reports go, when it loses a worker; log_to_driver does not help.
            module: Any = ray._private.worker
            stack.callback(setattr, module, "print_to_stdstream", getattr(module, "print_to_stdstream", None))
            module.print_to_stdstream = lambda *words, **how: None
            # ray.init replaces the handler of SIGTERM, which is restored below.
            main = threading.current_thread() is threading.main_thread()
            handler = signal.getsignal(signal.SIGTERM) if main else None
            where = (
                "a cluster on this machine" if how["address"] == "local" else f"the cluster at {how['address']}"
            )
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **how)
            except Exception as error:  # Ray also raises plain ones, as for nodes that are too slow
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
def _exit_on_sigterm() -> Iterator[None]:
    """Keep the exit code of a process that SIGTERM ends in the block; Ray would exit with 1 while it waits."""
    with sigterm_raises():
        try:
            yield
        except SystemExit:
            if signal.getsignal(signal.SIGTERM) is exit_by_signal:
                exit_by_signal(signal.SIGTERM, None)
            raise


def _address_of_cluster(address: str | None) -> str:
    """The address of a cluster that answers, or `local` for a new one; SetupError if the wanted one does not."""
    wanted = address or os.environ.get("RAY_ADDRESS") or None
    if wanted == "local":
        return wanted
    if wanted in (None, "auto"):
        with suppress(OSError, UnicodeDecodeError):  # Ray notes the cluster last started on this machine
            noted = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
            running = noted.read_text(encoding="utf-8").strip()
            if running and _why_unreachable(running) is None:
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
    if (refused := _why_unreachable(wanted)) is not None:
        raise SetupError(
            f"--address {wanted}: no Ray cluster answers there ({refused}).\n"
            "Pass HOST:PORT as `ray start` prints it (the port is 6379 unless it was set)."
        )
    return wanted


def _why_unreachable(address: str) -> str | None:
    """Why no cluster answers at an address; None if one seems to. Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return "not HOST:PORT"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=5.0) as line:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return None
            line.sendall(_HTTP2_PREFACE)
            answer = line.recv(4)
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    return None if len(answer) == 4 and answer[3] == 4 else "what listens there is not Ray"
