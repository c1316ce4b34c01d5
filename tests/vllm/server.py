"""A real vLLM server with a tiny model of random weights: one a test run, whoever asks, and gone with the last.

Every process of a run holds a shared lock on `users`. A keeper process of its own starts the server and kills its
process group once it can lock `users` alone: also after a test run that was killed, as its locks go with it.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.tiny_model import build_tiny_model

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".cache" / "vllm"
PYTHON = HOME / "bin" / "python"
CONTEXT = 4096
START_SECONDS = 400
SAME_ENGINE = 1e-4
"""How far logprobs of one float32 server may differ when other requests share its batches; measured alone: 0."""
OTHER_ENGINE = 2e-4
"""How far vLLM and transformers may differ, both in float32; measured over 6,106 tokens: at most 2.7e-05, on
average 3.0e-06. With the weights in bfloat16 on one side: at most 0.61, on average 0.057."""
_FLAGS = (
    *("--served-model-name", "tiny", "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"),
    "--enable-scale-out",  # the tokens endpoint, render and derender
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
    # A grammar holds reasoning too: how a model of random weights comes to think and to call tools.
    *("--structured-outputs-config", '{"enable_in_reasoning": true}'),
)
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A running server."""

    url: str
    model: Path
    """The folder of the weights that it serves, with their tokenizer."""
    log: Path
    name: str = "tiny"


def missing() -> str | None:
    """Why no server can be started here; None if one can."""
    if os.environ.get("TITO_AUDIT_VLLM") == "off":
        return "TITO_AUDIT_VLLM=off"
    if PYTHON.exists():
        return None
    absent = HOME.with_name("vllm.absent")
    return absent.read_text().strip() if absent.exists() else "none in .cache/vllm; make vllm installs it"


@contextmanager
def running(folder: Path) -> Iterator[VllmServer]:
    """The server of a test run, which shares `folder`; started if nobody has yet.

    RuntimeError with the end of its log if it does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "users").open("w") as users:
        with (folder / "start").open("w") as start:
            fcntl.flock(start, fcntl.LOCK_EX)
            fcntl.flock(users, fcntl.LOCK_SH)  # waits for a keeper that is stopping its server
            server = _running_server(folder) or _started(folder)
        yield server


def _running_server(folder: Path) -> VllmServer | None:
    """The server that another process of this run has started."""
    state = _state(folder)
    return _server(folder, state) if state is not None else None


def _state(folder: Path) -> dict[str, int | str] | None:
    with suppress(FileNotFoundError):
        return json.loads((folder / "state").read_text())
    return None


def _server(folder: Path, state: dict[str, int | str]) -> VllmServer:
    if "failed" in state:
        raise RuntimeError(f"vLLM did not start: {state['failed']}\n{tail(folder / 'log')}")
    return VllmServer(f"http://127.0.0.1:{state['port']}", folder / "model", folder / "log")


def _started(folder: Path) -> VllmServer:
    """A server once it answers; its keeper runs on."""
    if not (folder / "model").exists():
        build_tiny_model(folder / "building").rename(folder / "model")
    _start_keeper(folder)
    until = time.monotonic() + START_SECONDS + 10
    while time.monotonic() < until:
        if (state := _state(folder)) is not None:
            return _server(folder, state)
        time.sleep(0.1)
    raise RuntimeError(f"vLLM's keeper said nothing\n{(folder / 'keeper').read_text()}")


def _start_keeper(folder: Path) -> None:
    """A process that is nobody's child, as it outlives whoever happens to start it."""
    keeper = [sys.executable, "-m", "tests.vllm.server", str(folder)]
    with (folder / "keeper").open("w") as log:
        subprocess.run(
            ["sh", "-c", '"$@" &', "sh", *keeper],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            check=True,
        )


def tail(log: Path, lines: int = 40) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""


def keep(folder: Path) -> None:
    """Start the server, say in `state` where it is or why it is not, and kill it when the last user has gone."""
    port = _free_port()
    server = _launched(folder, port)
    with (folder / "users").open("w") as users:
        try:
            failed = _wait(server, port)
            _write_state(folder, {"failed": failed} if failed else {"port": port})
            fcntl.flock(users, fcntl.LOCK_EX)
            (folder / "state").unlink(missing_ok=True)
        finally:
            _kill(server)


def _launched(folder: Path, port: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **_ENVIRONMENT}
    for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONWARNINGS"):
        environment.pop(name, None)
    module = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [*module, "--model", str(folder / "model"), "--port", str(port), *_FLAGS],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(server: subprocess.Popen[bytes], port: int) -> str | None:
    """None once the server answers; else why it does not."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if server.poll() is not None:
            return f"it ended with exit code {server.returncode}"
        with suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return None
        time.sleep(0.2)
    return f"it did not answer within {START_SECONDS} s"


def _write_state(folder: Path, state: dict[str, int | str]) -> None:
    (folder / "state.new").write_text(json.dumps(state))
    (folder / "state.new").rename(folder / "state")


def _kill(server: subprocess.Popen[bytes]) -> None:
    """All processes of the server: it starts several, in one group."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def _free_port() -> int:
    """A port outside the range that the system gives to clients, so that none of those takes it meanwhile."""
    ports = random.SystemRandom().sample(range(18000, 28000), 50)
    for port in ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port")


def keep_log(server: VllmServer) -> Path:
    """A copy of the server's log that stays after the run: `build/vllm-server.log`."""
    copy = ROOT / "build" / "vllm-server.log"
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(server.log, copy)
    return copy


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
