"""A process that is connected to a Ray cluster of its own, and what tests ask of it."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

__all__ = ["Driver", "driver", "processes"]

_LONG = 300.0
"""Seconds; whatever is waited for is there long before."""


@dataclass(frozen=True)
class Driver:
    """Calls functions of this module in the other process."""

    pool: ProcessPoolExecutor
    address: str

    def __call__(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return self.pool.submit(function, *arguments, **named).result(timeout=500)


@contextmanager
def driver(nodes: int, cpus: int) -> Iterator[Driver]:
    """A process with a cluster of so many nodes of so many CPUs each; nothing of it is left after the block."""
    folder = tempfile.mkdtemp(prefix="tr-", dir="/tmp")  # paths of sockets have about a hundred characters
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            yield Driver(pool, pool.submit(started, folder, nodes, cpus).result(timeout=300))
        finally:
            pool.submit(ended).result(timeout=100)
            shutil.rmtree(folder, ignore_errors=True)
    left = wait_for(lambda: not processes(folder), 20)
    assert left, processes(folder)


def processes(words: str, variable: str = "") -> dict[int, str]:
    """The processes whose command line has some words, and whose environment has `variable`."""
    lines = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (folder / "environ").read_bytes() if variable else b""
        except OSError:
            continue
        if words in line and variable.encode() in environment and int(folder.name) != os.getpid():
            lines[int(folder.name)] = line
    return lines


def wait_for(what: Callable[[], Any], seconds: float) -> Any:
    end = time.monotonic() + seconds
    while not (result := what()) and time.monotonic() < end:
        time.sleep(0.05)
    return result


# In the other process

_running: dict[str, Any] = {}


def started(folder: str, nodes: int, cpus: int) -> str:
    """The address of a cluster that is started."""
    os.environ |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    Path(folder, "ray").mkdir()
    from ray.cluster_utils import Cluster

    options = {"num_cpus": cpus, "include_log_monitor": False, "object_store_memory": 100 << 20}
    head = {**options, "include_dashboard": False, "no_monitor": True}
    # A node has half a minute to start, whatever else the machine is doing.
    for tries in (2, 1, 0):
        try:
            cluster = Cluster(initialize_head=True, head_node_args=head)
            break
        except Exception:
            for process in processes(folder):
                os.kill(process, signal.SIGKILL)
            if not tries:
                raise
    others = [cluster.add_node(**options, wait=False) for _ in range(nodes - 1)]
    cluster.wait_for_nodes()
    _running.update(cluster=cluster, others=others, open=ExitStack())
    return str(cluster.address)


def ended() -> None:
    if _running:
        _running["open"].close()
        _running["cluster"].shutdown()


def stay_connected() -> None:
    """Connect once for all that follows."""
    from tito_audit.run.ray_tasks import connect_to_cluster

    _running["open"].enter_context(connect_to_cluster(_running["cluster"].address))


def command(*words: str) -> tuple[int, str, str]:
    """What the command says."""
    from tests.command import run

    return run(*words)


def reports(words: Sequence[str], *hows: Sequence[str]) -> list[tuple[int, Any, str]]:
    """The exit code, the JSON report without its times, and what else was said, for each way to run a command."""
    results = []
    for how in hows:
        code, out, err = command(*words, "-q", "-f", "json", *how)
        report = json.loads(out)
        for part in (report, *report.values()):
            if isinstance(part, dict):
                part.pop("seconds", None)
        results.append((code, report, err))
    return results


def scanned(logs: Any, chunk: int | None, settings: dict[str, Any], *, large: bool = False) -> Any:
    """Bare results and summary of a scan; with `large`, the first pass over calls runs as for large logs."""
    from unittest.mock import patch

    if large:
        with (
            patch("tito_audit.run.log_groups.is_small", lambda files: False),
            patch("tito_audit.join._call_rows.BATCH_BYTES", 2_000),
        ):
            return scanned(logs, chunk, settings)
    from tests.command import scanned as scanned_here

    return scanned_here(logs, chunk=chunk, **settings)


@dataclass(frozen=True)
class Doomed:
    """Work that loses the first process that does it, in the middle of a task."""

    work: Callable[[Any], Any]
    noted: Path
    """Says that a process was lost."""

    def __call__(self, task: Any) -> Any:
        try:
            self.noted.touch(exist_ok=False)
        except FileExistsError:
            return self.work(task)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


@dataclass(frozen=True)
class Held:
    """Work that begins on a node and never ends there; other nodes go on once that node is gone."""

    work: Callable[[Any], Any]
    folder: Path
    """Where a file `begun` says that the node has work, and a file `gone` that it is no more."""
    node: str

    def __call__(self, task: Any) -> Any:
        import ray

        if ray.get_runtime_context().get_node_id() == self.node:
            (self.folder / "begun").touch()
            time.sleep(_LONG)
        assert wait_for((self.folder / "gone").exists, _LONG)
        return self.work(task)


@contextmanager
def sent(make: Callable[..., Any], *how: Any) -> Iterator[None]:
    """In the block, what is made of the work of a run goes to the workers in its place."""
    from unittest.mock import patch

    from tito_audit.run.ray_tasks import RayTasks

    send = RayTasks.map
    with patch.object(RayTasks, "map", lambda tasks, work, items: send(tasks, make(work, *how), items)):
        yield


def scanned_by_a_lost_worker(logs: Any, noted: Path, settings: dict[str, Any]) -> Any:
    """What a scan finds whose first task kills the process that works on it."""
    with sent(Doomed, noted):
        return scanned(logs, 400, settings)


def scanned_by_a_lost_node(logs: Any, folder: Path, settings: dict[str, Any]) -> Any:
    """What a scan finds that loses a node, which is not the first, while it works on a task."""
    node = _running["others"].pop()

    def kill() -> None:
        if wait_for((folder / "begun").exists, _LONG):
            _running["cluster"].remove_node(node, allow_graceful=False)
            (folder / "gone").touch()

    killing = threading.Thread(target=kill)
    killing.start()
    with sent(Held, folder, node.node_id):
        result = scanned(logs, 400, settings)
    killing.join()
    return result


def refusal(run: Callable[[], object]) -> str:
    """What is said of a run that is refused."""
    from tito_audit import SetupError

    try:
        run()
    except SetupError as error:
        return str(error)
    return ""


def with_version(version: str, logs: Any, settings: dict[str, Any]) -> str:
    """What a run of another version is told."""
    from unittest.mock import patch

    with patch("tito_audit.run.ray_tasks.VERSION", version):
        return refusal(lambda: scanned(logs, None, settings))


def of_open_file(path: str, settings: dict[str, Any]) -> str:
    """What is said of a log that only this process can open, by a number that no worker has a file for."""
    with Path(path).open("rb") as file:
        number = fcntl.fcntl(file, fcntl.F_DUPFD, 512)
    try:
        return refusal(lambda: scanned(f"/proc/self/fd/{number}", None, settings))
    finally:
        os.close(number)


def of_lost_tokenizer(log: str, path: Path, tokenizer: str) -> str:
    """What is said of a tokenizer that is gone once this process has loaded it."""
    from tito_audit import Settings, scan_rollouts
    from tito_audit.run.auditor import Loader

    shutil.copytree(tokenizer, path)
    settings = Settings(tokenizer=str(path), engine="ray")
    scan = scan_rollouts(log, settings)
    scan.loader = Loader()
    scan.loader.load_auditor(settings)
    shutil.rmtree(path)
    return refusal(lambda: list(scan))


def printed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """What a function returns, and what is printed meanwhile and in the seconds after."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(out):
        result = function(*arguments)
        time.sleep(2)
    return result, out.getvalue()


def dataset_audited(log: str, settings: Any, id_column: str, batch: int) -> list[dict[str, Any]]:
    """The findings in a Parquet file as a dataset."""
    from tito_audit.ray import audit

    quiet()
    findings = audit(pieces(log), settings, id_column=id_column, batch_size=batch, workers=1)
    rows: list[dict[str, Any]] = findings.take_all()
    return rows


def dataset_repaired(log: str, settings: Any, batch: int) -> list[dict[str, Any]]:
    """A Parquet file repaired as a dataset."""
    import ray.data

    from tito_audit.ray import RepairBatches

    quiet()
    options = {"batch_format": "pyarrow", "batch_size": batch, "fn_constructor_args": (settings,)}
    pool = ray.data.ActorPoolStrategy(size=1)
    rows: list[dict[str, Any]] = pieces(log).map_batches(RepairBatches, compute=pool, **options).take_all()
    return rows


def executed(code: str) -> str:
    """What code prints."""
    quiet()
    with redirect_stdout(StringIO()) as out:
        exec(code, {"__name__": "example"})
    return out.getvalue()


def pieces(log: str) -> Any:
    """A Parquet file as a dataset of four blocks."""
    import ray.data
    from pyarrow import parquet

    table = parquet.read_table(log)
    size = -(-len(table) // 4)
    return ray.data.from_arrow([table.slice(start, size) for start in range(0, len(table), size)])


def quiet() -> None:
    """Ray Data prints no progress."""
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
