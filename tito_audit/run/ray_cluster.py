"""A Ray cluster for a run: one that is there, or one started for it on this machine."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tito_audit.errors import SetupError
from tito_audit.signals import exit_by_signal
from tito_audit.storage.atomic import sigterm_raises

__all__ = ["joined_cluster"]

_SECONDS = 5.0
"""How long an address has to answer."""
_RETRIES = "3"
_QUIET = {
    # A report on stderr is no place for the log of a scheduler.
    "GRPC_VERBOSITY": "NONE",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Nothing is sent anywhere, and no folder is copied to workers unasked.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # A task that takes all memory would be tried for ever.
    "RAY_task_oom_retries": _RETRIES,
}
"""What Ray is told while a run connects, unless the environment says otherwise."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How an HTTP/2 client begins; a gRPC server, as each Ray cluster has, answers with a frame of settings."""
_SETTINGS_FRAME = 4


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
            found = _found(address)
            stack.enter_context(_terminated())
            how: dict[str, Any] = {"address": found}
            if found == "local":
                folder = tempfile.mkdtemp(prefix="tito-ray-", dir=_short_folder())
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                how |= {"include_dashboard": False, "_temp_dir": folder}
            stack.callback(ray.shutdown)
            stack.enter_context(_silence(ray))
            _connect(ray, how)
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


def _connect(ray: Any, how: Mapping[str, Any]) -> None:
    """Connect; Ray prints nothing, and signals mean what they meant before."""
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None
    where = "a cluster on this machine" if how["address"] == "local" else f"the cluster at {how['address']}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **how)
    except Exception as error:  # of any type: Ray raises plain ones, as for nodes that are too slow
        said = " ".join(str(error).split())
        raise SetupError(
            f"--engine ray: {where} cannot be used ({said}).\n"
            "Check the cluster with `ray status`, or run here with --engine local."
        ) from error
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _silence(ray: Any) -> Iterator[None]:
    """Keeps off stdout, where reports go, what Ray prints there when it loses a worker, whatever it was told."""
    module = ray._private.worker
    printing = getattr(module, "print_to_stdstream", None)
    module.print_to_stdstream = lambda *said, **how: None
    try:
        yield
    finally:
        module.print_to_stdstream = printing


def _found(address: str | None) -> str:
    """The address to connect to, which answers; `local` for a new cluster."""
    asked = address or os.environ.get("RAY_ADDRESS") or None
    if asked == "local":
        return asked
    if asked in (None, "auto"):
        running = _running()
        if running is not None and _refused(running) is None:
            return running
        if asked is None:
            return "local"
        raise SetupError(
            "--address auto: no Ray cluster runs on this machine.\n"
            "Pass --address HOST:PORT, start one with `ray start --head`, or leave --address out."
        )
    assert asked is not None
    if asked.startswith("ray://"):
        raise SetupError(
            f"--address {asked}: clients outside of the cluster (ray://) are not served.\n"
            "Run this on a node of the cluster, with `ray job submit -- tito-audit ... --engine ray`."
        )
    refused = _refused(asked)
    if refused is not None:
        raise SetupError(
            f"--address {asked}: no Ray cluster answers there ({refused}).\n"
            "Pass HOST:PORT as `ray start` prints it (the port is 6379 unless it was set)."
        )
    return asked


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
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS) as line:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return None
            line.sendall(_GREETING)
            answer = line.recv(4)
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    return None if len(answer) == 4 and answer[3] == _SETTINGS_FRAME else "what listens there is not Ray"


def _short_folder() -> str:
    """A folder for sockets, whose paths may have about a hundred characters."""
    return "/tmp" if Path("/tmp").is_dir() else tempfile.gettempdir()


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
